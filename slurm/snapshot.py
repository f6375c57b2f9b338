"""One file in which all processes of a user share what they saw of a scheduler, on however many machines they run.

The lock is held while the file is read and rewritten, never while the scheduler is asked: a process that hangs or is
stopped in a query holds nobody up. The file is rewritten in place, because a lock makes NFS clients read a file's
content anew but not its name. It is a cache: whatever is wrong with it, a process goes on with what it knows itself.
"""

import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from slurm.pace import Board

logger = logging.getLogger(__name__)

_FORMAT = "trainium scheduler snapshot 1"
_RETRY = 0.01  # seconds; the lock is held for less


def place(runs: Path, identity: str | None) -> Path | None:
    """The folder beside the runs for the scheduler of this identity and this user; None: there is nothing to share."""
    return runs / f".scheduler-{identity}-{os.getuid()}" if identity else None


class Snapshot:
    """The board of all who use `folder` (made with mode 0700), or of this object alone when it is None.

    `patience`: seconds after which a lock counts as broken, because whoever holds it does nothing.
    """

    def __init__(self, folder: Path | None, *, patience: float = 5.0) -> None:
        self.board = Board()
        self._path = folder / "queue" if folder else None
        self._patience = patience
        self._complaint = ""

    def update(self, change: Callable[[Board], Board]) -> Board:
        """Replace the board by what `change` makes of it, alone among all who share it; the new board.

        `change` may be called twice. When the file cannot be used, it is given what this process knew last.
        """
        before = self.board
        try:
            self.board = change(before) if self._path is None else self._shared(self._path, change)
            self._complaint = ""
        except OSError as error:
            self._complain(error)
            self.board = change(before)
        return self.board

    def _shared(self, path: Path, change: Callable[[Board], Board]) -> Board:
        with _locked(path, self._patience) as file:
            found = _parse(_read(file))
            board = change(found or self.board)
            if board != found:
                _write(file, _text(board))
        return board

    def _complain(self, error: OSError) -> None:
        """Once for each kind of trouble, however often the file is used."""
        text = f"{error.strerror or error}"
        if text != self._complaint:
            self._complaint = text
            logger.warning(
                "%s cannot be used (%s): this process asks the scheduler by itself. The filesystem of the runs should "
                "be writable and support locks (NFS, or Lustre mounted with `flock`)", self._path, text
            )  # fmt: skip


@contextmanager
def _locked(path: Path, patience: float) -> Iterator[int]:
    """The file's descriptor. The kernel frees the lock of a process that dies; Slurm's commands do not inherit it."""
    deadline = time.monotonic() + patience
    file = _open(path)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"somebody has held its lock for more than {patience:.0f} s") from None
                time.sleep(_RETRY)
        yield file
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """The file, made when missing. Raises PermissionError when its folder is somebody else's: they could write lies."""
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder, stat.S_ISDIR):
        raise PermissionError(f"{folder} belongs to another user or is open to others")
    if not _is_ours(path, stat.S_ISREG):
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_ours(path: Path, kind: Callable[[int], bool]) -> bool:
    """Nobody else has written there or can; true of a missing file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _read(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _write(file: int, data: bytes) -> None:
    """Not synced: after a power cut there is nobody left who shares it."""
    os.ftruncate(file, 0)
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.seek(0)
        stream.write(data)


def _text(board: Board) -> bytes:
    content = json.dumps(asdict(board)).encode()
    return f"{_FORMAT} {_digest(content)}\n".encode() + content


def _parse(data: bytes) -> Board | None:
    """None unless all of it was written by this version."""
    head, _, content = data.partition(b"\n")
    if head != f"{_FORMAT} {_digest(content)}".encode():
        return None
    fields = json.loads(content)
    return Board(**{**fields, "calls": tuple(fields["calls"])})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
