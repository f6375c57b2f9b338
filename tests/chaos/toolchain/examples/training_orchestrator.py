"""Started by torchrun, as NxDT's script of this name: a training without torch that starts in a blink.

It has the command line, config, compile cache, checkpoints and log lines of `trainium/rehearsal/`, of which everything
that needs no torch is used. What is trained is arithmetic: every step changes every weight and moment by a rule that
depends on all that came before and on the step's rows. So a wrong checkpoint, a step too many and a step too few all
show, in the losses and in the bits of the final weights.

`CHAOS_STEP_SECONDS` and `CHAOS_SAVE_SECONDS` say how long a step, and how long a save with half its shards, takes.
"""

import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainium.checkpoint.archive_writer import tensors_image
from trainium.checkpoint.formats import Form
from trainium.checkpoint.image import write_image
from trainium.checkpoint.paths import shard_path, tensor_folder
from trainium.checkpoint.shards import open_shard, shard_images
from trainium.checkpoint.weights import Raw, TensorInfo, flat_bytes
from trainium.rehearsal import cache, checkpointing, parallel_compile
from trainium.rehearsal.compose import compose
from trainium.rehearsal.devices import this_instance
from trainium.rehearsal.environment import apply_environment
from trainium.rehearsal.lines import ProgressBar, nemo, nxd, say
from trainium.rehearsal.settings import Experiment, Settings, read_settings

Floats = NDArray[np.float32]
Kinds = dict[str, dict[str, Floats]]  # "master" and "exp_avg" by tensor
MASTER, MOMENT = "master", "exp_avg"
WHERE = "trainer/checkpoint.py"


@dataclass
class State:
    """All that goes on: the steps done, and every rank's weights and moments."""

    step: int
    ranks: dict[tuple[int, int], Kinds]


def main() -> None:
    """Trial run (`NEURON_EXTRACT_GRAPHS_ONLY=1`) or training."""
    config = compose(sys.argv[1:], Path(sys.argv[0]).absolute().parent)
    apply_environment(config)
    settings = read_settings(config, this_instance())
    if settings.num_nodes != 1:
        raise RuntimeError("the light toolchain trains on one node")
    rows = settings.data.train_file.read_bytes().splitlines()
    start = checkpointing.find_start(settings.experiment)
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):
        trial_run(settings, rows)
    else:
        train(settings, rows, start)


def trial_run(settings: Settings, rows: Sequence[bytes]) -> None:
    """Go through the steps without computing, and leave the graph to be compiled."""
    module = graph_of(settings)
    new = not module.is_done
    if not module.graph.exists():
        cache.extract(module, "arithmetic")
    bar = ProgressBar(0, batches(settings, rows))
    for _ in range(settings.optimization.max_steps):
        bar.update({})
    bar.close()
    if new:
        parallel_compile.note_graph(module)
    say(f"`Trainer.fit` stopped: `max_steps={settings.optimization.max_steps}` reached.")


def train(settings: Settings, rows: Sequence[bytes], start: Path | None) -> None:
    """To max_steps, with a checkpoint whenever one is due."""
    options, experiment = settings.optimization, settings.experiment
    state = load(settings, start)
    module = graph_of(settings)
    if not cache.ensure(module):
        cache.extract(module, "arithmetic")
        cache.compile_module(module)
    initial, samples = state.step, checkpointing.consumed_samples_of(start) if start else 0
    known = checkpointing.known_checkpoints(experiment)
    pause = float(os.environ.get("CHAOS_STEP_SECONDS", "0"))
    metrics: dict[str, float | str] = {}
    per_epoch = batches(settings, rows)
    epoch, done = divmod(state.step, per_epoch)
    bar = ProgressBar(epoch, per_epoch, done)
    while state.step < options.max_steps:
        step = state.step
        time.sleep(pause)
        if step % settings.log_every_n_steps == 0:
            consumed = samples + (step + 1 - initial) * settings.data.global_batch
            metrics |= {"reduced_train_loss": loss(state), "lr": options.lr, "global_step": float(step)}
            metrics |= {"consumed_samples": float(consumed), "throughput": 1.0, "throughput_peak": 1.0}
        advance(state, options.lr, batch(settings, rows, step))
        bar.update(metrics)
        if checkpointing.is_due(experiment, state.step):
            bar.close()
            save(settings, state, metrics, known)
        if state.step % per_epoch == 0:
            bar.close()
            bar = ProgressBar(state.step // per_epoch, per_epoch)
    bar.close()
    say(f"`Trainer.fit` stopped: `max_steps={options.max_steps}` reached.")


def graph_of(settings: Settings) -> cache.Module:
    """The one graph of this training, as the cache knows it."""
    description = {"graph": "step", "model": dict(settings.model_config), "layout": settings.layout}
    return cache.module_for(description | dict(settings.graph_inputs))


def batches(settings: Settings, rows: Sequence[bytes]) -> int:
    """Steps of an epoch."""
    return max(1, len(rows) // settings.data.global_batch)


def batch(settings: Settings, rows: Sequence[bytes], step: int) -> int:
    """What the rows of a step say, as a number."""
    size = settings.data.global_batch
    return zlib.crc32(b"\n".join(rows[(step * size + index) % len(rows)] for index in range(size)))


def loss(state: State) -> float:
    """Falls from step to step, and its digits are those of all the weights."""
    crc = 0
    for kinds in state.ranks.values():
        for weight in kinds[MASTER].values():
            crc = zlib.crc32(flat_bytes(weight.view(np.uint32)), crc)
    return 6.0 / (1 + state.step / 8) + crc % 1000 / 1000


def advance(state: State, rate: float, rows: int) -> None:
    """One step: only products and sums of single elements, so the bits are the same every time."""
    push = np.float32(rows / 2**32 - 0.5)
    for kinds in state.ranks.values():
        for name, weight in kinds[MASTER].items():
            gradient = weight * (weight + push) + push * np.float32(0.01)
            moment: Floats = kinds[MOMENT][name] * np.float32(0.9) + gradient * np.float32(0.1)
            moved: Floats = weight - moment * np.float32(rate)
            kinds[MOMENT][name], kinds[MASTER][name] = moment, moved
    state.step += 1


def load(settings: Settings, start: Path | None) -> State:
    """From converted shards (weights alone) or from a checkpoint of this trainer."""
    if start is None:
        raise RuntimeError("the light toolchain starts from a checkpoint: exp_manager.resume_from_checkpoint")
    nxd(f"loading checkpoint from {start.name}", where=f"{WHERE}:887")
    content, step = start / "user_content.pt", 0
    if content.exists():
        step = int(open_shard(content).raw("global_step")[0])
    fresh = settings.experiment.weight_init_only
    ranks = {}
    for rank in ranks_of(settings):
        shard = open_shard(shard_path(start / ("model" if fresh else "optim"), *rank))
        read = {name: as_floats(shard.raw(name), info.dtype) for name, info in shard.info.items()}
        if fresh:
            ranks[rank] = {MASTER: read, MOMENT: {name: np.zeros_like(value) for name, value in read.items()}}
        else:
            ranks[rank] = {kind: _of_kind(kind, read) for kind in (MASTER, MOMENT)}
    nxd("loading checkpoint done", where=f"{WHERE}:963")
    if fresh:
        text = "Weight Init only case, so not loading optim states, optim states would be initialized"
        nemo(text, where="nlp_overrides:568")
    return State(step, ranks)


def save(settings: Settings, state: State, metrics: Mapping[str, float | str], known: list[Path]) -> None:
    """In NxD's order, `done` last; then the superfluous ones go, their `done` first."""
    experiment = settings.experiment
    numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
    name = checkpointing.checkpoint_name(experiment.filename, numbers | {"step": state.step, "epoch": 0})
    path = experiment.checkpoints / name
    nxd(f"synced saving of checkpoint {name} began", where=f"{WHERE}:144")
    remove(path)
    for part in ("model", "optim"):
        (path / part).mkdir(parents=True)
    (path / "checkpoint").write_text("1")
    for rank, kinds in state.ranks.items():
        if experiment.save_bf16:
            halves = {key: _upper_half(value) for key, value in kinds[MASTER].items()}
            write(shard_path(path / "model", *rank), halves, "bfloat16", experiment)
        else:
            write(shard_path(path / "model", *rank), _bits(kinds[MASTER]), "float32", experiment)
        time.sleep(float(os.environ.get("CHAOS_SAVE_SECONDS", "0")) / len(state.ranks))
        both = {f"{kind}/{key}": value for kind in kinds for key, value in kinds[kind].items()}
        write(shard_path(path / "optim", *rank), _bits(both), "float32", experiment)
    content = {"global_step": TensorInfo("int64", (1,))}
    number = flat_bytes(np.array([state.step], np.uint64))
    write_image(path / "user_content.pt", tensors_image("user_content", content), [number])
    nxd(f"synced saving of checkpoint {name} completed", where=f"{WHERE}:192")
    (path / "done").write_text("1")
    known[:] = [other for other in known if other != path] + [path]
    for old in checkpointing.superfluous(experiment, known):
        known.remove(old)
        nxd(f"removing previous checkpoint in {[old.name]}", where=f"{WHERE}:260")
        remove(old)


def write(path: Path, tensors: Mapping[str, Raw], dtype: str, experiment: Experiment) -> None:
    """A rank's shard with this project's own writer."""
    info = {name: TensorInfo(dtype, value.shape) for name, value in tensors.items()}
    form: Form = "per-tensor" if experiment.save_xser else "inline"
    if form == "per-tensor":
        tensor_folder(path).mkdir()
    values: Iterator[Raw] = iter(tensors.values())
    for name, image in shard_images(path.name, info, form).items():
        write_image(path.parent / name, image, (flat_bytes(v) for v in islice(values, len(image.offsets))))


def remove(checkpoint: Path) -> None:
    """`done` first, so that half a checkpoint never looks complete."""
    (checkpoint / "done").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def ranks_of(settings: Settings) -> list[tuple[int, int]]:
    """(tensor rank, pipeline rank) of every shard."""
    return [(tp, pp) for pp in range(settings.layout.pp) for tp in range(settings.layout.tp)]


def as_floats(raw: Raw, dtype: str) -> Floats:
    """The values of stored bits, in memory of their own."""
    bits = raw.astype(np.uint32) << 16 if dtype == "bfloat16" else raw.astype(np.uint32)
    return np.ascontiguousarray(bits).view(np.float32)


def _upper_half(value: Floats) -> Raw:
    half: Raw = (value.view(np.uint32) >> 16).astype(np.uint16)
    return half


def _bits(tensors: Mapping[str, Floats]) -> dict[str, Raw]:
    return {name: np.ascontiguousarray(value).view(np.uint32) for name, value in tensors.items()}


def _of_kind(kind: str, tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    return {name.removeprefix(f"{kind}/"): value for name, value in tensors.items() if name.startswith(f"{kind}/")}


if __name__ == "__main__":
    main()
