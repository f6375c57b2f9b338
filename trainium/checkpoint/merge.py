"""From the ranks back to whole tensors, with a look at every copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.assembly import Assembly, rows_of
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.placement import HEAD, Placement, Shape, layer_of, placements, rank_targets, refuse_foreign
from trainium.checkpoint.statistics import largest_difference
from trainium.checkpoint.stored_layout import QKV_MARKS, Read, stored_qkv
from trainium.checkpoint.weights import Raw, Weights, as_tensor, in_memory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CopyDifference:
    """Two ranks hold different values of what should be the same numbers (a norm, a replicated key/value head)."""

    tensor: str
    tp_rank: int
    pp_rank: int
    max_difference: float


def merge(read: Callable[[int, int], Mapping[str, Tensor]], arch: Architecture, layout: Layout) -> dict[str, Tensor]:
    """The model with Hugging Face names. `read(tp_rank, pp_rank)` gives a rank's tensors.

    Raises CheckpointError when a rank lacks a tensor, has one of another shape, or copies differ.
    """

    @cache
    def rank(tp_rank: int, pp_rank: int) -> Weights:
        return in_memory(read(tp_rank, pp_rank))

    sources, layout = checkpoint_sources(rank, arch, layout)
    merged = {}
    for name, pieces in placements(sources, arch, layout).items():
        gathered = gather(name, sources[name], pieces, rank)
        refuse_differences(gathered.differences, layout)
        merged[name] = as_tensor(gathered.assembly.whole(), gathered.dtype)
    return merged


def checkpoint_sources(read: Read, arch: Architecture, layout: Layout) -> tuple[dict[str, Shape], Layout]:
    """Names and shapes of the merged model, and the layout with `qkv` as the checkpoint has it.

    Everything that the model must have is looked up in every rank first, so that a wrong layout is an error here and
    not a permuted model. Tensors that the plan does not know are taken over as they are. A checkpoint of a model with
    tied embeddings may lack the output projection, as the reference converter leaves it.
    """
    layout = _stored_layout(read, arch, layout)
    layout.check(arch)
    sources = arch.tensor_shapes()
    if arch.tied and HEAD not in read(0, layout.pp - 1):
        del sources[HEAD]
    extra: dict[str, Shape] = {}
    for tp_rank, pp_rank in layout.ranks:
        shard = read(tp_rank, pp_rank)
        targets = {
            target.name: target.shape(sources) for target in rank_targets(sources, arch, layout, tp_rank, pp_rank)
        }
        _check_rank(shard, targets, f"tp rank {tp_rank}, pp rank {pp_rank}")
        extra |= {name: shard.info[name].shape for name in shard if name not in targets}
    refuse_foreign(extra, arch, "the checkpoint")
    misplaced = [
        name
        for name in extra
        if name in sources or re.search(r"\.(qkv|gate_up)_proj\.", name) or (layer_of(name) or 0) >= arch.layers
    ]
    if misplaced:
        raise CheckpointError(
            f"{misplaced[0]} is in a rank where tp={layout.tp} pp={layout.pp} virtual_pp={layout.virtual_pp} "
            f"qkv={layout.qkv} does not put it: the checkpoint has another layout or another number of layers"
        )
    return {name: (sources | extra)[name] for name in sorted(sources | extra)}, layout


@dataclass(frozen=True)
class Gathered:
    """A whole tensor as views of its pieces, and the copies that are not equal to the first."""

    assembly: Assembly
    dtype: str
    differences: tuple[CopyDifference, ...]


def gather(name: str, shape: Shape, places: Sequence[Placement], read: Read) -> Gathered:
    """One whole tensor from its pieces. Of copies the first counts; each other one is compared bit by bit.

    Raises CheckpointError when a file's bytes are not those that its checksums tell of.
    """
    pieces: dict[int, Raw] = {}
    dtype, differences = "", []
    for place in places:
        rank = read(place.tp_rank, place.pp_rank)
        if place.target not in rank:  # an unknown tensor that only some ranks have
            continue
        rank.check(place.target)
        part, found = rank.raw(place.target), rank.info[place.target].dtype
        dtype = dtype or found
        if found != dtype:
            raise CheckpointError(f"{name} is {found} in tp rank {place.tp_rank} but {dtype} before")
        part = rows_of(part, place.offset, place.cut, shape)
        first = pieces.setdefault(place.cut.start, part)
        if first is not part and not np.array_equal(first, part):
            difference = largest_difference(first, part, dtype)
            differences.append(CopyDifference(name, place.tp_rank, place.pp_rank, difference))
    if not pieces:
        raise CheckpointError(f"{name} is in no rank of the pipeline stage that has its layer")
    dim = places[0].cut.dim
    return Gathered(Assembly(dim, tuple(pieces[start] for start in sorted(pieces))), dtype, tuple(differences))


def refuse_differences(differences: Sequence[CopyDifference], layout: Layout) -> None:
    """Raise CheckpointError when copies of the same numbers differ between ranks."""
    if differences:
        first = differences[0]
        raise CheckpointError(
            f"{first.tensor} differs between ranks that should hold the same numbers: tp rank {first.tp_rank}, pp rank "
            f"{first.pp_rank} is off by up to {first.max_difference:.3g}. Either the checkpoint was not written for "
            f"kv_replicator={layout.kv_replicator} on {layout.instance_family}, or training let the copies drift apart"
        )


def _stored_layout(read: Read, arch: Architecture, layout: Layout) -> Layout:
    stored = stored_qkv(read(0, 0))
    if layout.qkv not in ("auto", stored):
        raise CheckpointError(f"qkv={layout.qkv} was asked for, but the checkpoint is {stored} ({QKV_MARKS[stored]})")
    return replace(layout, qkv=stored)


def _check_rank(shard: Weights, targets: Mapping[str, Shape], where: str) -> None:
    for name, shape in targets.items():
        if name not in shard:
            raise CheckpointError(
                f"{where} lacks {name}: the checkpoint has another layout or another number of layers"
            )
        if shard.info[name].shape != shape:
            raise CheckpointError(
                f"{where}: {name} is {list(shard.info[name].shape)} where this layout and config.json "
                f"make it {list(shape)}"
            )
