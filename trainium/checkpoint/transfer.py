"""Tensors on their way into output files: written, checksummed, synced, and looked at again by a later attempt."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from trainium.checkpoint.image import Image, pwrite
from trainium.files import sync_file

Note = tuple[Any, ...]  # JSON values

_OPEN_FILES = 64
_FLUSH_BYTES = 1 << 23  # of one file
_AHEAD_BYTES = 1 << 27  # asked of the disk before they are needed


@dataclass(frozen=True)
class Done:
    """A portion that is on the disk: CRC-32 of its tensors in order, and what was found on the way."""

    crcs: tuple[int, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class OutputFile:
    """A file to be made. name: below the output folder."""

    name: str
    image: Image


class Loaded(NamedTuple):
    """A tensor's bytes in row-major order, as blocks, and what was found when it was looked for."""

    blocks: Iterator[memoryview]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Record:
    """One tensor of an output file, of `size` bytes. ahead: have the disk begin to read what `load` will touch."""

    file: OutputFile
    index: int
    size: int
    load: Callable[[], Loaded]
    ahead: Callable[[], None] = lambda: None

    @property
    def offset(self) -> int:
        return self.file.image.offsets[self.index]


@dataclass(frozen=True)
class Portion:
    """What is complete or not at all when a conversion is interrupted. closes: files that have no other tensors."""

    key: str
    records: tuple[Record, ...]
    closes: tuple[OutputFile, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(record.size for record in self.records)

    @property
    def files(self) -> dict[str, OutputFile]:
        return {file.name: file for file in (*(record.file for record in self.records), *self.closes)}


class Transfer:
    """One process's hands, closed at the end. `moved` is told bytes as they are written, or found to be there."""

    def __init__(self, folder: Path, moved: Callable[[int], None]) -> None:
        self._folder, self._moved = folder, moved
        self._open: dict[str, tuple[int, int]] = {}  # name → handle, bytes written since the last flush

    def write(self, portions: Sequence[Portion], done: Mapping[str, Done]) -> dict[str, Done]:
        """Write portions tensor by tensor, so that what they read of one is read while it is in memory.

        Portions in `done` are left alone when they are on the disk as their checksums say.
        """
        found = {p.key: done[p.key] for p in portions if p.key in done and self._is_there(p, done[p.key])}
        todo = [portion for portion in portions if portion.key not in found]
        crcs: dict[str, list[int]] = {portion.key: [] for portion in todo}
        notes: dict[str, list[Note]] = {portion.key: [] for portion in todo}
        for key, record in _looking_ahead(todo):
            loaded = record.load()
            crcs[key].append(self._write(record, loaded.blocks))
            notes[key] += loaded.notes
        for portion in todo:
            self.close_files(portion, crcs[portion.key])
        return found | {key: Done(tuple(crcs[key]), tuple(notes[key])) for key in crcs}

    def close_files(self, portion: Portion, crcs: Sequence[int]) -> None:
        """Write what is not tensors into the files that the portion closes."""
        for file, offset, content in _frames(portion, crcs):
            pwrite(self._handle(file), content, offset)

    def close(self) -> None:
        """Close what is open."""
        for handle, _ in self._open.values():
            os.close(handle)
        self._open.clear()

    def _write(self, record: Record, blocks: Iterator[memoryview]) -> int:
        handle, crc, offset = self._handle(record.file), 0, record.offset
        for block in blocks:
            crc = zlib.crc32(block, crc)
            pwrite(handle, block, offset)
            offset += len(block)
        if offset - record.offset != record.size:
            raise AssertionError(f"{record.file.name}: tensor {record.index} has {offset - record.offset} bytes")
        header = record.file.image.header(record.index, crc)
        pwrite(handle, header, record.offset - len(header))
        self._moved(record.size)
        self._flush(record.file.name, record.size)
        return crc

    def _flush(self, name: str, written: int) -> None:
        """Have the disk begin with what is there now, instead of standing idle until the final sync."""
        handle, since = self._open[name]
        self._open[name] = (handle, since + written)
        if since + written >= _FLUSH_BYTES:
            _write_back(handle)
            self._open[name] = (handle, 0)

    def _handle(self, file: OutputFile) -> int:
        name = file.name
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                oldest, _ = self._open.pop(next(iter(self._open)))
                _write_back(oldest)
                os.close(oldest)
            path = self._folder / name
            path.parent.mkdir(exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._open[name] = (handle, 0)
            if os.fstat(handle).st_size > file.image.size:  # another version of this project began it
                os.ftruncate(handle, file.image.size)
        return self._open[name][0]

    def _is_there(self, portion: Portion, done: Done) -> bool:
        if len(done.crcs) != len(portion.records):
            return False
        seen = 0
        try:
            for record, crc in zip(portion.records, done.crcs, strict=True):
                path, header = self._folder / record.file.name, record.file.image.header(record.index, crc)
                if _crc(path, record.offset, record.size) != crc or not _has(path, record.offset - len(header), header):
                    break
                seen += record.size
                self._moved(record.size)
            else:
                # The frames too: this may be the file of a later attempt than the one that got to the end of it.
                if all(_has(self._folder / file.name, at, part) for file, at, part in _frames(portion, done.crcs)):
                    return True
        except OSError:  # the file is gone
            pass
        self._moved(-seen)
        return False


def _write_back(handle: int) -> None:
    """On Linux this advice starts writing dirty pages to the disk; as it also lets go of those that are there already,
    the memory is left to the input.
    """
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _looking_ahead(portions: Sequence[Portion]) -> Iterator[tuple[str, Record]]:
    """(key, record) of all, tensor by tensor; what comes soon is asked of the disk already."""
    lanes = [[(portion.key, record) for record in portion.records] for portion in portions]
    order = [item for items in zip_longest(*lanes) for item in items if item is not None]
    asked = size = 0
    for at, (_, record) in enumerate(order):
        while asked < len(order) and (asked <= at or size < _AHEAD_BYTES):
            order[asked][1].ahead()
            size += order[asked][1].size
            asked += 1
        size -= record.size
        yield order[at]


def _frames(portion: Portion, crcs: Sequence[int]) -> Iterator[tuple[OutputFile, int, bytes]]:
    """(file, offset, bytes) of what is neither tensor nor header in the files that a portion closes."""
    by_place = {(r.file.name, r.index): crc for r, crc in zip(portion.records, crcs, strict=True)}
    for file in portion.closes:
        for offset, content in file.image.frame([by_place[file.name, i] for i in range(len(file.image.offsets))]):
            yield file, offset, content


def _has(path: Path, offset: int, content: bytes) -> bool:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), len(content), offset) == content


def _crc(path: Path, offset: int, size: int) -> int | None:
    """CRC-32 of a part of a file; None when it is shorter."""
    crc, end = 0, offset + size
    buffer = memoryview(bytearray(1 << 19))
    with path.open("rb", buffering=0) as file:
        while offset < end:
            count = os.preadv(file.fileno(), [buffer[: end - offset]], offset)
            if not count:
                return None
            crc = zlib.crc32(buffer[:count], crc)
            offset += count
    return crc


def sync(folder: Path, portions: Sequence[Portion]) -> None:
    """Bring the files of portions to the disk."""
    for name in {name for portion in portions for name in portion.files}:
        sync_file(folder / name)
