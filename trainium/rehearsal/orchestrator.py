"""`training_orchestrator.py`: config → settings → trial run (`NEURON_EXTRACT_GRAPHS_ONLY=1`) or training."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from trainium.rehearsal import cache, parallel_compile
from trainium.rehearsal.checkpointing import find_start
from trainium.rehearsal.compose import compose
from trainium.rehearsal.data import Batches, Sample, pack, pad, read_rows, tokenize
from trainium.rehearsal.devices import Use, check_cores, this_instance, using
from trainium.rehearsal.environment import apply_environment
from trainium.rehearsal.faults import faults
from trainium.rehearsal.lines import nemo, nxd
from trainium.rehearsal.network import trace
from trainium.rehearsal.settings import Experiment, Settings, read_settings
from trainium.rehearsal.state import Shards
from trainium.rehearsal.trainer import Progress, Trainer
from trainium.rehearsal.world import Group, World

_STATE_MODULE = "parallel_layers/parallel_state.py"


def main(argv: Sequence[str] | None = None) -> None:
    """The training script. Every failure is an exception, as in the real one: torchrun reports it."""
    torch.set_num_threads(1)  # the same bits every time
    torch.use_deterministic_algorithms(True)
    words = list(sys.argv[1:] if argv is None else argv)
    config = compose(words, Path(sys.argv[0]).absolute().parent)
    apply_environment(config)
    instance = this_instance()
    settings = read_settings(config, instance)
    world = World.from_environment(settings.layout.tp, settings.layout.pp)
    if settings.devices != world.ranks_per_node or settings.num_nodes != world.nodes:
        raise RuntimeError(
            f"trainer.devices={settings.devices} and trainer.num_nodes={settings.num_nodes}, but torchrun started "
            f"{world.ranks_per_node} ranks on each of {world.nodes} nodes"
        )
    check_cores(instance, world.ranks_per_node)
    group = Group(world)
    if world.node == 0:
        _describe(config, settings, world)
    batches = _batches(settings, world.dp)
    shards = Shards(settings.architecture, settings.layout, world, group)
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):
        _trial_run(settings, shards, batches)
    else:
        with using(_use(settings, world, words)):
            _train(settings, shards, batches)
    group.close()


def _train(settings: Settings, shards: Shards, batches: Batches) -> None:
    """Train; graphs that are not in the cache are compiled just in time, as they would be on the device."""
    start = find_start(settings.experiment)
    with _loading(settings.experiment, start):
        trainer = Trainer(settings, shards, batches, faults(), start)
    if len(batches) and shards.world.node == 0:
        missing = [module for _, module in _graphs(settings, shards.world) if not cache.ensure(module)]
        if missing:
            _extract(settings, shards.world)
            for module in missing:
                cache.compile_module(module)
    shards.group.barrier()
    trainer.fit()


def _trial_run(settings: Settings, shards: Shards, batches: Batches) -> None:
    """Look at the checkpoint and the batches, trace the graphs, and go through the steps without computing anything."""
    start = find_start(settings.experiment)
    with _loading(settings.experiment, start):
        if start:
            shards.check_weights(start)
    progress = Progress(batches, shards.world.node == 0, None, 0, 0)
    if not len(batches):
        progress.tell("`Trainer.fit` stopped: No training batches.")
        return
    new = [module for _, module in _graphs(settings, shards.world) if not module.is_done]
    _extract(settings, shards.world)
    for step in range(settings.optimization.max_steps):
        progress.begin_batch(step)
        for unit in batches.micro_batch_indices(step):
            batches.tensors(unit, settings.data.encoder_seq_length)
        if step % settings.log_every_n_steps == 0:
            progress.log(step, 0.0, 0.0, 2.64e-38, None)  # nothing is computed: the values mean nothing
        progress.end_batch()
    progress.close()
    # Nobody compiles before every node has looked at the cache: both then count the same graphs.
    shards.group.barrier()
    for module in new:
        parallel_compile.note_graph(module)
    progress.tell(f"`Trainer.fit` stopped: `max_steps={settings.optimization.max_steps}` reached.")


def _use(settings: Settings, world: World, words: Sequence[str]) -> Use:
    """What the monitors show of this process: weights, gradients and two moments in fp32."""
    parameters = sum(torch.Size(shape).numel() for shape in settings.architecture.tensor_shapes().values())
    command = f"training_orchestrator.py {' '.join(words)}"
    return Use(os.getpid(), world.ranks_per_node, 4 * parameters, 16 * parameters, command)


def _graphs(settings: Settings, world: World) -> list[tuple[str, cache.Module]]:
    """The graphs of a training step by name, as the cache knows them."""
    description = {
        "model": dict(settings.model_config),
        "layout": settings.layout,
        "ranks": world.size,
        "micro_batch": settings.data.micro_batch,
        "accumulation": settings.data.global_batch // (settings.data.micro_batch * world.dp),
        "sequence": settings.data.encoder_seq_length,
        "clip": settings.optimization.clip is not None,
        **settings.graph_inputs,
    }
    return [(name, cache.module_for(description | {"graph": name})) for name in ("forward-backward", "optimizer")]


def _extract(settings: Settings, world: World) -> None:
    """Trace the graphs, which fails for shapes that do not fit, and put new ones into the cache."""
    data = settings.data
    operations = trace(settings.model_config, settings.optimization, data.micro_batch, data.encoder_seq_length)
    for name, module in _graphs(settings, world):
        if not module.graph.exists():
            cache.extract(module, operations[name])


def _batches(settings: Settings, dp: int) -> Batches:
    """Tokenized, packed or padded. The validation file is read and tokenized too, as NxDT does."""
    from transformers import AutoTokenizer

    data = settings.data
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer)

    def encode(texts: list[str], longest: int) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, max_length=longest, truncation=True, add_special_tokens=False)[
            "input_ids"
        ]
        return ids

    def records(file: Path) -> list[Sample]:
        rows = read_rows(file)
        if data.choose_samples:
            if data.choose_samples > len(rows):
                raise IndexError(f"Index {data.choose_samples - 1} out of range for dataset of size {len(rows)}.")
            rows = rows[: data.choose_samples]
        found = tokenize(rows, encode, tokenizer.bos_token_id, tokenizer.eos_token_id, data.seq_length)
        return pack(found, data.seq_length, tokenizer.eos_token_id) if data.packing else pad(found, data.seq_length)

    samples = records(data.train_file)
    if data.val_file:
        records(data.val_file)
    return Batches(samples, dp, data.micro_batch, data.global_batch)


@contextmanager
def _loading(experiment: Experiment, checkpoint: Path | None) -> Iterator[None]:
    """NxD's and NxDT's lines around the loading of a checkpoint."""
    if checkpoint:
        nxd(f"loading checkpoint from {checkpoint.name}", where="trainer/checkpoint.py:887")
    yield
    if checkpoint:
        nxd("loading checkpoint done", where="trainer/checkpoint.py:963")
        if experiment.weight_init_only:
            nemo(
                "Weight Init only case, so not loading optim states, optim states would be initialized",
                where="nlp_overrides:568",
            )


def _describe(config: DictConfig, settings: Settings, world: World) -> None:
    nemo("\n\n************** Experiment configuration ***********", where="training:43")
    nemo(f"\n{OmegaConf.to_yaml(config)}", where="training:44")
    nemo(f"Experiments will be logged at {settings.experiment.log_dir}", where="exp_manager:216")
    sizes = {
        "tensor model parallel with size": settings.layout.tp,
        "pipeline model parallel with size": settings.layout.pp,
        "context model parallel with size": 1,
        "data parallel with size": world.dp,
        "world size to": world.size,
    }
    for line, (what, size) in enumerate(sizes.items(), start=592):
        nxd(f"> initializing {what} {size}", where=f"{_STATE_MODULE}:{line}")
    size = settings.layout.kv_replicator
    nxd(f"[rank_0_pp0_tp0_dp0_cp0] > initializing kv group with size {size}", where=f"{_STATE_MODULE}:1390")
