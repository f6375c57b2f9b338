"""Reading a log that is still being written, in bounded memory."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainium.logs.redact import redact

BLOCK = 1 << 20
"""Bytes read at a time."""

LONGEST_LINE = 1 << 20
"""A longer line is looked at in pieces of this many bytes."""

OVERLAP = 4096
"""How far two pieces of a long line overlap, so that a message at the cut is seen whole."""

_LAST_WINDOW = 1 << 18
_SHOWN_WIDTH = 2000


class Tail:
    """What was added to a file since the last look.

    A file that became shorter, or another file under the same name, is read from its start again, and `restarts` counts
    it: the reader then drops what it knew. A file that is not there (yet), or whose handle the file server has lost for
    the moment, has nothing new.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.restarts = 0
        self._inode: int | None = None

    def read(self) -> Iterator[bytes]:
        """Blocks of at most `BLOCK` bytes, up to the end the file has when it is reached."""
        try:
            yield from self._read()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise

    def _read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self.offset or (self._inode is not None and status.st_ino != self._inode):
                self.offset = 0
                self.restarts += 1
            self._inode = status.st_ino
            file.seek(self.offset)
            while block := file.read(BLOCK):
                self.offset += len(block)
                yield block


@dataclass(frozen=True)
class Piece:
    """Whole lines, or a part of a very long one whose first `seen` bytes were in the piece before it."""

    data: bytes
    seen: int = 0


class LineBuffer:
    """Cuts a stream of bytes into whole lines, the same ones whatever the sizes in which the bytes come.

    A line ends with a line feed or a carriage return (progress bars rewrite theirs). Never holds more than
    `LONGEST_LINE` + `BLOCK` bytes.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._seen = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        """What became complete with these bytes."""
        for start in range(0, len(data), BLOCK):
            yield from self._feed(data[start : start + BLOCK])

    def _feed(self, block: bytes) -> Iterator[Piece]:
        # Only the line that was already begun can be longer than a block, so only the first one needs to be cut.
        first_end = _line_end(block)
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        line = self.rest + (block[:first_end] if first_end else block)
        while len(line) > LONGEST_LINE:
            yield Piece(line[:LONGEST_LINE], self._seen)
            line, self._seen = line[LONGEST_LINE - OVERLAP :], OVERLAP
        if not first_end:
            self.rest = line
        elif self._seen:
            yield Piece(line, self._seen)
            self.rest, self._seen = block[end:], 0
            if first_end < end:
                yield Piece(block[first_end:end])
        else:
            yield Piece(line + block[first_end:end])
            self.rest = block[end:]

    def close(self) -> Iterator[Piece]:
        """The last line, when it has no end."""
        if len(self.rest) > self._seen:
            yield Piece(self.rest, self._seen)
        self.rest, self._seen = b"", 0


def _line_end(block: bytes) -> int:
    """The position behind the first line end, or 0."""
    ends = [position for position in (block.find(b"\n"), block.find(b"\r")) if position >= 0]
    return min(ends) + 1 if ends else 0


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file as a terminal shows them, redacted.

    Reads at most 256 KiB from the end; of a rewritten line (progress bar) the last state counts; blank lines are left
    out. An empty list when the file is missing.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST_WINDOW))
            data = file.read(_LAST_WINDOW)
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    if size > _LAST_WINDOW:
        # The first line is cut somewhere; a token cut in half would not be recognised, so its first word goes too.
        lines = lines[1:] if len(lines) > 1 else [b"\xe2\x80\xa6 " + data.partition(b" ")[2]]
    shown = [state for line in lines if (state := _shown(line))]
    return [_shortened(redact(line)) for line in shown[-count:]] if count > 0 else []


def decode(data: bytes) -> str:
    """Text for people: invalid UTF-8 replaced, NUL bytes dropped."""
    return data.decode("utf-8", "replace").replace("\0", "")


def _shown(line: bytes) -> str:
    states = [state for state in line.split(b"\r") if state.strip(b"\0 \t")]
    return decode(states[-1]).rstrip() if states else ""


def _shortened(line: str) -> str:
    return line if len(line) <= _SHOWN_WIDTH else line[:_SHOWN_WIDTH] + " …"
