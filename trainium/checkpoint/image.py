"""Output files whose every byte but the tensors' is known before the first tensor is read.

So any number of processes can write their tensors into one file, each at its place and in any order.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol


class Image(Protocol):
    """A file as it will be. offsets: where each tensor's bytes start."""

    @property
    def size(self) -> int: ...

    @property
    def offsets(self) -> Sequence[int]: ...

    def header(self, index: int, crc: int) -> bytes:
        """What lies right before tensor `index`, ending where it starts; crc: CRC-32 of the tensor."""
        ...

    def frame(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """(offset, bytes) of all that is neither a tensor nor its header; crcs: of all tensors."""
        ...


def write_image(
    path: Path, image: Image, tensors: Iterable[memoryview], written: Callable[[int], None] = lambda _: None
) -> None:
    """Write and sync a whole file from one process; `tensors` in order, each asked for when it is its turn."""
    crcs: list[int] = []
    with path.open("wb") as file:
        for offset, tensor in zip(image.offsets, tensors, strict=True):
            crcs.append(zlib.crc32(tensor))
            header = image.header(len(crcs) - 1, crcs[-1])
            pwrite(file.fileno(), header, offset - len(header))
            pwrite(file.fileno(), tensor, offset)
            written(tensor.nbytes)
        for offset, content in image.frame(crcs):
            pwrite(file.fileno(), content, offset)
        os.fsync(file.fileno())


def pwrite(handle: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data`; one call writes 2 GiB at most, and less on a disk that is getting full."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)
