"""Rules about cores, degrees and batches."""

import re
from collections.abc import Iterator
from dataclasses import replace

from trainium.checkpoint.errors import LayoutError
from trainium.config.rules.facts import Facts, Finding, layout_of
from trainium.model.nxdt_converter import Direction, converter_problem

NXD = "neuronx-distributed, parallel_layers/parallel_state.py"
NXDT_BASE = "neuronx-distributed-training, lightning_modules/model/base.py"
LAYOUT_KEYS = {
    "tp": "parallelism.tensor",
    "pp": "parallelism.pipeline",
    "virtual_pp": "parallelism.virtual_pipeline",
    "kv_replicator": "parallelism.kv_replicator",
    "qkv": "convert.qkv",
}


def world_size(facts: Facts) -> Iterator[Finding]:
    """tp x pp divides the number of cores of all nodes, and a tensor parallel group stays inside a node."""
    parallelism, instance = facts.recipe.parallelism, facts.instance
    tensor, pipeline = parallelism.tensor, parallelism.pipeline
    if instance.cores is None:
        return
    fitting = [degree for degree in range(1, instance.cores + 1) if instance.cores % degree == 0]
    if instance.cores % tensor:
        yield Finding(
            id="tensor-in-node",
            severity="error",
            key="parallelism.tensor",
            value=str(tensor),
            message=f"does not divide the {instance.cores} cores of a {instance.name}",
            fix=f"Use one of {_list(fitting)}, or another instance_type",
            source=NXD,
        )
    elif facts.world % (tensor * pipeline):
        yield Finding(
            id="world-size",
            severity="error",
            key="parallelism.pipeline",
            value=str(pipeline),
            message=(
                f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} does not divide the {facts.world} cores "
                f"of {facts.recipe.resources.nodes} {instance.name}"
            ),
            fix=f"Use resources.nodes={_next_nodes(tensor * pipeline, instance.cores)}, or smaller degrees",
            source=NXD,
        )


def layout(facts: Facts) -> Iterator[Finding]:
    """Heads, vocabulary, feed-forward width and layers can be divided like that (`trainium.checkpoint.layout`)."""
    if facts.assumed is None:
        return
    try:
        layout_of(facts.recipe).check(facts.assumed)
    except LayoutError as error:
        *problems, advice = str(error).split("\n")
        for problem in problems:
            first = re.search(r"\b(tp|pp|virtual_pp|kv_replicator|qkv)=", problem)
            key = LAYOUT_KEYS[first[1]] if first else "parallelism"
            yield Finding(
                id="layout",
                severity="error",
                key=key,
                value=str(_value(facts, key)),
                message=_with_recipe_keys(problem),
                fix=_with_recipe_keys(advice) if problem is problems[-1] else "",
                source="NxD checkpoint converter and NxDT's Llama, measured",
            )


def virtual_pipeline(facts: Facts) -> Iterator[Finding]:
    parallelism = facts.recipe.parallelism
    if parallelism.virtual_pipeline > 1 and parallelism.pipeline == 1:
        yield Finding(
            id="virtual-pipeline",
            severity="error",
            key="parallelism.virtual_pipeline",
            value=str(parallelism.virtual_pipeline),
            message="there are no pipeline stages to interleave",
            fix="Use parallelism.virtual_pipeline=1, or a pipeline of 2 or more",
            source="NxDT configuration overview",
        )


def sequence(facts: Facts) -> Iterator[Finding]:
    """What sequence parallelism and the device's attention kernel ask of the sequence length."""
    training, parallelism, instance = facts.recipe.training, facts.recipe.parallelism, facts.instance
    if parallelism.sequence_parallel and training.seq_length % parallelism.tensor:
        yield Finding(
            id="sequence-parallel",
            severity="error",
            key="training.seq_length",
            value=str(training.seq_length),
            message=f"sequence parallelism splits it over tensor={parallelism.tensor} cores, which do not divide it",
            fix=f"Use {_around(training.seq_length, parallelism.tensor)}, or parallelism.sequence_parallel=false",
            source=NXD,
        )
    multiple = instance.flash_multiple
    if training.flash_attention and multiple and training.seq_length % multiple:
        yield Finding(
            id="flash-attention",
            severity="error",
            key="training.seq_length",
            value=str(training.seq_length),
            message=f"the flash attention kernel needs a multiple of {multiple}",
            fix=f"Use {_around(training.seq_length, multiple)}, or training.flash_attention=false",
            source="neuronx-distributed, kernels/flash_attn.py",
        )


def batch(facts: Facts) -> Iterator[Finding]:
    """The global batch is made of whole micro batches on every replica; NxDT would silently round it down."""
    training, replicas = facts.recipe.training, facts.data_parallel
    unit = training.micro_batch_size * replicas
    if not replicas or facts.world % (facts.recipe.parallelism.tensor * facts.recipe.parallelism.pipeline):
        return  # `world_size` says so; the number of replicas means nothing then
    if training.global_batch_size % unit:
        yield Finding(
            id="batch",
            severity="error",
            key="training.global_batch_size",
            value=str(training.global_batch_size),
            message=(
                f"not a multiple of micro_batch_size {training.micro_batch_size} x {replicas} data parallel replicas "
                f"= {unit}; NxDT would silently train on fewer samples"
            ),
            fix=f"Use {_around(training.global_batch_size, unit)}",
            source=NXDT_BASE,
        )
    elif facts.recipe.parallelism.pipeline > facts.accumulation:
        yield Finding(
            id="pipeline-bubble",
            severity="warning",
            key="training.global_batch_size",
            value=str(training.global_batch_size),
            message=(
                f"only {facts.accumulation} micro batches per step for {facts.recipe.parallelism.pipeline} pipeline "
                "stages: most stages wait"
            ),
            fix="Use a larger global_batch_size or a smaller pipeline",
            source="NxD pipeline schedule",
        )


def upstream_converter(facts: Facts) -> Iterator[Finding]:
    """What the toolchain's converter gets wrong in either direction is known before anything trains."""
    if facts.recipe.convert.engine != "nxdt" or facts.assumed is None:
        return
    arch, layout = facts.assumed, layout_of(facts.recipe).resolve(facts.assumed)
    problems = [converter_problem(layout, arch, direction) for direction in Direction]
    if problem := problems[0] or problems[1]:
        split = replace(layout, qkv="split")  # fits whatever fused fits
        split_works = layout.qkv == "fused" and not any(converter_problem(split, arch, way) for way in Direction)
        yield Finding(
            id="upstream-converter",
            severity="error",
            key="convert.engine",
            value="nxdt",
            message=f"the toolchain's converter cannot do {problem}",
            fix="Use convert.engine=native" + (", or convert.qkv=split" if split_works else ""),
            source="NxD 2.29 converter, measured",
        )


def conversion_shares(facts: Facts) -> Iterator[Finding]:
    """The native converter splits its work by ranks; the toolchain's cannot be split."""
    convert, parallelism = facts.recipe.convert, facts.recipe.parallelism
    ranks = parallelism.tensor * parallelism.pipeline
    problem = None
    if convert.array > 1 and convert.engine != "native":
        problem = ("the toolchain's converter cannot share its work between jobs", "Use 1, or convert.engine=native")
    elif convert.array > ranks:
        problem = (f"there are only {ranks} ranks to be written", f"Use {ranks} or less")
    if problem is not None:
        yield Finding(
            id="convert-array",
            severity="error",
            key="convert.array",
            value=str(convert.array),
            message=problem[0],
            fix=problem[1],
            source="trainium.checkpoint.workspace",
        )


def _value(facts: Facts, key: str) -> object:
    value: object = facts.recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _with_recipe_keys(text: str) -> str:
    return re.sub(r"\b(virtual_pp|tp|pp|kv_replicator|qkv)=", lambda found: f"{LAYOUT_KEYS[found[1]]}=", text)


def _around(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _next_nodes(ranks: int, cores: int) -> int:
    nodes = 1
    while nodes * cores % ranks:
        nodes += 1
    return nodes
