"""From the ranks back to whole tensors, with a look at every copy."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.plan import HEAD, Placement, Shape, layer_of, placements, rank_targets, refuse_foreign
from trainium.checkpoint.weights import Weights

Read = Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True)
class CopyDifference:
    """Two ranks hold different values of what should be the same numbers (a norm, a replicated key/value head)."""

    tensor: str
    tp_rank: int
    pp_rank: int
    max_difference: float


def merge(read: Read, arch: Architecture, layout: Layout) -> dict[str, Tensor]:
    """The model with Hugging Face names. `read(tp_rank, pp_rank)` gives a rank's tensors.

    Raises CheckpointError when a rank lacks a tensor, has one of another shape, or copies differ.
    """
    sources, layout = checkpoint_sources(read, arch, layout)
    merged = {}
    for name, pieces in placements(sources, arch, layout).items():
        merged[name], differences = gather(name, sources[name], pieces, read)
        refuse_differences(differences, layout)
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
        extra |= {name: _shape(shard, name) for name in shard if name not in targets}
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


def gather(name: str, shape: Shape, pieces: Sequence[Placement], read: Read) -> tuple[Tensor, list[CopyDifference]]:
    """One whole tensor from its pieces. Of copies the first counts; each other one is compared bit by bit."""
    whole: Tensor | None = None
    filled: set[int] = set()
    differences = []
    for piece in pieces:
        rank = read(piece.tp_rank, piece.pp_rank)
        if piece.target not in rank:  # an unknown tensor that only some ranks have
            continue
        part = rank[piece.target]
        if piece.cut.dim is not None:
            part = part.narrow(0, piece.offset, piece.cut.shape(shape)[0])
        if whole is None:
            whole = part.new_empty(shape)
        if part.dtype != whole.dtype:
            raise CheckpointError(f"{name} is {part.dtype} in tp rank {piece.tp_rank} but {whole.dtype} before")
        place = (
            whole
            if piece.cut.dim is None
            else whole.narrow(piece.cut.dim, piece.cut.start, piece.cut.stop - piece.cut.start)
        )
        if piece.cut.start not in filled:
            filled.add(piece.cut.start)
            place.copy_(part)
        elif not same_bits(part, place):
            difference = float((part.double() - place.double()).abs().max())
            differences.append(CopyDifference(name, piece.tp_rank, piece.pp_rank, difference))
    if whole is None:
        raise CheckpointError(f"{name} is in no rank of the pipeline stage that has its layer")
    return whole, differences


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal as bytes: NaN equals itself, 0 and −0 differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.view(integers), second.view(integers))


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
    names = list(read(0, 0))
    marks = {
        "fused": ".qkv_proj.weight_qkv",
        "split": ".qkv_proj.weight_q",
        "coalesced": ".qkv_proj.weight",
        "plain": ".q_proj.weight",
    }
    stored = next((kind for kind, mark in marks.items() if any(name.endswith(mark) for name in names)), None)
    if stored is None:
        raise CheckpointError("tp rank 0, pp rank 0 has no q, k and v projections: this is no Llama of NxD")
    if layout.qkv not in ("auto", stored):
        raise CheckpointError(f"qkv={layout.qkv} was asked for, but the checkpoint is {stored} ({marks[stored]})")
    return replace(layout, qkv=stored)  # type: ignore[arg-type]  # one of the four keys above


def _shape(shard: Mapping[str, Tensor], name: str) -> Shape:
    return shard.info[name].shape if isinstance(shard, Weights) else tuple(shard[name].shape)


def _check_rank(shard: Mapping[str, Tensor], targets: Mapping[str, Shape], where: str) -> None:
    for name, shape in targets.items():
        if name not in shard:
            raise CheckpointError(
                f"{where} lacks {name}: the checkpoint has another layout or another number of layers"
            )
        if _shape(shard, name) != shape:
            raise CheckpointError(
                f"{where}: {name} is {list(_shape(shard, name))} where this layout and config.json "
                f"make it {list(shape)}"
            )
