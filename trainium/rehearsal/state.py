"""Loading and saving the training state in NxD's layout (NxD `trainer/checkpoint.py`).

A checkpoint is written in NxD's order: `checkpoint`, `model/`, `optim/`, `user_content.pt`, `done`. The optimizer's
shards hold the fp32 master weights and both moments under `master/`, `exp_avg/` and `exp_avg_sq/`, cut like the
weights, so that a resumed run goes on with the same bits.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.formats import Form
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.merge import merge
from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.placement import rank_targets
from trainium.checkpoint.shards import open_shard, write_shard
from trainium.checkpoint.split import split
from trainium.checkpoint.weights import TensorInfo
from trainium.rehearsal.lines import nemo, nxd
from trainium.rehearsal.world import Group, World

Tensors = Mapping[str, torch.Tensor]
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
_CHECKPOINT_MODULE = "trainer/checkpoint.py"


@dataclass(frozen=True)
class Position:
    """Where a run is: optimizer steps done in all, and done by this optimizer (a fresh one starts at 0)."""

    global_step: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Shards:
    """The sharded form of a model, as one node sees it."""

    architecture: Architecture
    layout: Layout
    world: World
    group: Group

    def load_weights(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """`model/` of every rank, merged. Missing names raise, unexpected ones only warn: as NxDT does it."""
        return self._merge(self._read(checkpoint / "model", self._check))

    def check_weights(self, checkpoint: Path) -> None:
        """Look at names and shapes of this node's shards, and load nothing."""
        for shard in self.world.reads():
            self._check(shard, open_shard(_existing(checkpoint / "model", shard)))

    def load_optimizer(self, checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
        """Master weights and moments, each merged: kind → name → tensor."""
        shards = self._read(checkpoint / "optim", lambda _, tensors: tensors)
        return {
            kind: self._merge({at: _only(kind, tensors) for at, tensors in shards.items()})
            for kind in (MASTER, *MOMENTS)
        }

    def save(
        self,
        checkpoint: Path,
        weights: Tensors,
        optimizer: Mapping[str, Tensors],
        content: Mapping[str, Any],
        form: Form,
    ) -> None:
        """Write a checkpoint: `weights` in the dtype for `model/`, `optimizer` by kind. All nodes call it."""
        first = self.world.node == 0
        if first:
            nxd(f"synced saving of checkpoint {checkpoint.name} began", where=f"{_CHECKPOINT_MODULE}:144")
            if checkpoint.exists():  # left behind by a save that was interrupted
                _remove(checkpoint)
            for part in ("model", "optim"):
                (checkpoint / part).mkdir(parents=True)
            (checkpoint / "checkpoint").write_text("1")
        self.group.barrier()
        for shard in self.world.writes():
            _write(checkpoint / "model", shard, self._split(weights, shard), form)
        for shard in self.world.writes():
            parts = {f"{kind}/{n}": t for kind in optimizer for n, t in self._split(optimizer[kind], shard).items()}
            _write(checkpoint / "optim", shard, parts, form)
        self.group.barrier()
        if first:
            torch.save(dict(content), checkpoint / "user_content.pt")
            nxd(f"synced saving of checkpoint {checkpoint.name} completed", where=f"{_CHECKPOINT_MODULE}:192")
            (checkpoint / "done").write_text("1")
        self.group.barrier()

    def _split(self, state: Tensors, shard: tuple[int, int]) -> dict[str, torch.Tensor]:
        return split(state, self.architecture, self.layout, *shard)

    def _merge(self, shards: Mapping[tuple[int, int], Tensors]) -> dict[str, torch.Tensor]:
        return merge(lambda tp_rank, pp_rank: shards[tp_rank, pp_rank], self.architecture, self.layout)

    def _read(
        self, folder: Path, accept: Callable[[tuple[int, int], Tensors], Tensors]
    ) -> dict[tuple[int, int], Tensors]:
        mine = {shard: accept(shard, open_shard(_existing(folder, shard))) for shard in self.world.reads()}
        return self.group.complete(mine)

    def _check(self, shard: tuple[int, int], tensors: Tensors) -> Tensors:
        """The tensors that the model has a place for."""
        sources = self.architecture.tensor_shapes()
        targets = rank_targets(sources, self.architecture, self.layout, *shard)
        expected = {target.name: target.shape(sources) for target in targets}
        names = [name for name in tensors if ".rotary_emb.inv_freq" not in name]
        if unexpected := [name for name in names if name not in expected]:
            nemo(
                f"Warning: Unexpected keys in state dictionary: {', '.join(unexpected)}",
                level="W",
                where="nlp_overrides:1181",
            )
        if missing := [name for name in expected if name not in tensors]:
            nemo(
                f"Error: Missing keys when loading state dictionary: {', '.join(missing)}",
                level="E",
                where="nlp_overrides:1192",
            )
            raise RuntimeError(f"Missing keys when loading state dictionary: {', '.join(missing)}")
        for name, shape in expected.items():
            if tuple(tensors[name].shape) != shape:
                raise RuntimeError(
                    f"Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for {name}: copying a "
                    f"param with shape {tensors[name].shape} from checkpoint, the shape in current model is "
                    f"torch.Size({list(shape)})."
                )
        return {name: tensors[name] for name in expected}


def load_content(checkpoint: Path) -> dict[str, Any]:
    """`user_content.pt`, or {} for a converter's output, which has none."""
    file = checkpoint / "user_content.pt"
    if not file.exists():
        return {}
    content = torch.load(file, weights_only=True)
    assert isinstance(content, dict)
    return content


def capture(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Master weights and moments by kind and Hugging Face name."""
    kinds: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in (MASTER, *MOMENTS)}
    for name, parameter in model.named_parameters():
        kinds[MASTER][name] = parameter.detach()
        for kind in MOMENTS:
            kinds[kind][name] = optimizer.state[parameter][kind]
    return kinds


def restore(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, kinds: Mapping[str, Tensors], optimizer_steps: int
) -> None:
    """The inverse of `capture`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kinds[MASTER][name])
            moments = {kind: kinds[kind][name].clone() for kind in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(optimizer_steps)), **moments}


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete an older checkpoint, its `done` first, so that a half-deleted one never looks complete."""
    nxd(f"removing previous checkpoint in {[checkpoint.name]}", where=f"{_CHECKPOINT_MODULE}:260")
    (checkpoint / "done").unlink(missing_ok=True)
    nxd(f"done tags in {[checkpoint.name]} cleared", where=f"{_CHECKPOINT_MODULE}:272")
    shutil.rmtree(checkpoint)
    nxd(f"previous checkpoint in {[checkpoint.name]} successfully removed", where=f"{_CHECKPOINT_MODULE}:291")


def _remove(checkpoint: Path) -> None:
    (checkpoint / "done").unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _write(folder: Path, shard: tuple[int, int], tensors: Tensors, form: Form) -> None:
    info = {n: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
    write_shard(shard_path(folder, *shard), info, tensors.values(), form)


def _existing(folder: Path, shard: tuple[int, int]) -> Path:
    path = shard_path(folder, *shard)
    if not path.exists():
        raise FileNotFoundError(f"[Errno 2] No such file or directory: '{path}'")
    return path


def _only(kind: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}
