"""From a whole model to one rank: views and concatenations of what `placement` says."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.placement import HEAD, Target, rank_targets, source_shapes


def split(
    state: Mapping[str, Tensor], arch: Architecture, layout: Layout, tp_rank: int, pp_rank: int
) -> dict[str, Tensor]:
    """The tensors of one rank, in the reference's order; views of `state` where one slice is enough.

    state: Hugging Face names, shapes as `Architecture.tensor_shapes`, any extra tensors (replicated). With tied
    embeddings `lm_head.weight` may be missing: it is cut from the embedding.
    """
    layout = layout.resolve(arch)
    layout.check(arch)
    sources = source_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, arch, "the model")
    targets = rank_targets(sources, arch, layout, tp_rank, pp_rank, untie=HEAD not in state)
    return {target.name: cut(state, target) for target in targets}


def cut(state: Mapping[str, Tensor], target: Target) -> Tensor:
    """One tensor of a rank."""
    parts = []
    for piece in target.cuts:
        source = state[piece.source]
        parts.append(source if piece.dim is None else source.narrow(piece.dim, piece.start, piece.stop - piece.start))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
