"""Tensors made of views, as a stream of contiguous blocks: nothing larger than a block is ever copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainium.checkpoint.placement import Cut, Shape, Target
from trainium.checkpoint.readahead import map_ahead
from trainium.checkpoint.weights import Raw, Weights, as_raw, as_tensor, flat_bytes, torch_dtype

# Half of a core's second-level cache: what was read for the checksum is still there when it is written.
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Assembly:
    """One tensor: `pieces` side by side along `dim` (0 or 1), in order; a single piece where dim is None."""

    dim: int | None
    pieces: tuple[Raw, ...]

    def whole(self) -> Raw:
        """In memory, free to be changed."""
        return self.pieces[0].copy() if self.dim is None else np.concatenate(self.pieces, axis=self.dim)

    def blocks(self, stored: str, wanted: str) -> Iterator[memoryview]:
        """The bytes in row-major order, cast from dtype `stored` to dtype `wanted` where they differ."""
        for block in self._blocks():
            yield flat_bytes(block if stored == wanted else _cast(block, stored, wanted))

    def _blocks(self) -> Iterator[Raw]:
        if self.dim != 1 or len(self.pieces) == 1:
            for piece in self.pieces:
                yield from _contiguous(piece)
            return
        rows, row_bytes = len(self.pieces[0]), sum(piece[0].nbytes for piece in self.pieces if len(piece))
        step = max(1, BLOCK_BYTES // max(row_bytes, 1))
        for row in range(0, rows, step):
            yield np.concatenate([piece[row : row + step] for piece in self.pieces], axis=1)


def read_ahead(view: Raw) -> None:
    """Have the disk begin to read mapped pages that are going to be touched."""
    if view.size:
        map_ahead(*np.lib.array_utils.byte_bounds(view))


def slices(weights: Weights, target: Target) -> Assembly:
    """One tensor of a rank, from the whole model."""
    pieces = []
    for cut in target.cuts:
        weights.check(cut.source)
        pieces.append(slice_of(weights.raw(cut.source), cut))
    return Assembly(None if len(pieces) == 1 else 0, tuple(pieces))


def slice_of(raw: Raw, cut: Cut) -> Raw:
    """A view of what is cut."""
    if cut.dim is None:
        return raw
    return raw[(slice(None),) * cut.dim + (slice(cut.start, cut.stop),)]


def rows_of(raw: Raw, first: int, cut: Cut, source: Shape) -> Raw:
    """The view of a rank's tensor where a cut of `source` lies, from row `first` on."""
    return raw if cut.dim is None else raw[first : first + cut.shape(source)[0]]


def _contiguous(piece: Raw) -> Iterator[Raw]:
    if piece.flags.c_contiguous:
        flat = piece.reshape(-1)
        step = BLOCK_BYTES // piece.itemsize
        for start in range(0, len(flat), step):
            yield flat[start : start + step]
        return
    step = max(1, BLOCK_BYTES // max(piece[0].nbytes, 1)) if len(piece) else 1
    for row in range(0, len(piece), step):
        yield np.ascontiguousarray(piece[row : row + step])


def _cast(block: Raw, stored: str, wanted: str) -> Raw:
    return as_raw(as_tensor(block, stored).to(torch_dtype(wanted)))
