"""Have the disk begin to read what will be needed, while something else is done.

Linux reads no more for one such hint than the device's readahead or its largest request, so a hint is given for every
piece. Hints that fail are let be. Nothing heavy is imported: reading begins while numpy is still being loaded.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_PIECE = 1 << 18


def read_ahead(path: Path, size: int | None = None) -> int:
    """The first `size` bytes of a file, all of it without; how many that are."""
    with suppress(OSError), path.open("rb", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        end = end if size is None else min(size, end)
        _hint(file.fileno(), 0, end)
        return end
    return 0


def read_first_ahead(paths: Iterable[Path], size: int) -> None:
    """The first `size` bytes of files that are read one after the other."""
    for path in paths:
        if size > 0:
            size -= read_ahead(path, size)


def read_ends_ahead(paths: Iterable[Path], size: int) -> None:
    """Both ends of files, where their structure is."""
    for path in paths:
        with suppress(OSError), path.open("rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            _hint(file.fileno(), 0, min(size, end))
            _hint(file.fileno(), max(0, end - size), end)


def map_ahead(first: int, end: int) -> None:
    """Mapped memory from one address to another."""
    for start in range(first - first % mmap.PAGESIZE, end, _PIECE):
        _madvise(start, min(_PIECE, end - start), mmap.MADV_WILLNEED)


def _libc_madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise = _libc_madvise()


def _hint(handle: int, first: int, end: int) -> None:
    for start in range(first, end, _PIECE):
        os.posix_fadvise(handle, start, min(_PIECE, end - start), os.POSIX_FADV_WILLNEED)
