"""One file in which all processes of a user share what they saw of a scheduler, on however many machines they run.

The lock is held while the file is read or rewritten, shared by those who only read, and never while the scheduler is
asked: a process that hangs or is stopped in a query holds nobody up. The file is rewritten in place, because a lock
makes NFS clients read a file's content anew but not its name. It is a cache: whatever is wrong with it, a process goes
on with what it knows itself.
"""

import fcntl
import hashlib
import json
import logging
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from slurm.pace import Board

logger = logging.getLogger(__name__)

_FORMAT = "trainium scheduler snapshot 1"
_RETRY = (0.002, 0.03)  # seconds, at random: fifty processes that wait for one lock must not keep two cores busy


def place(runs: Path, identity: str | None) -> Path | None:
    """The folder beside the runs for the scheduler of this identity and this user; None: there is nothing to share."""
    return runs / f".scheduler-{identity}-{os.getuid()}" if identity else None


class Snapshot:
    """The board of all who use `folder` (made with mode 0700), or of this object alone when it is None.

    `patience`: seconds after which a lock counts as broken, because whoever holds it does nothing.
    """

    def __init__(self, folder: Path | None, *, patience: float = 10.0) -> None:
        self.board = Board()
        self._path = folder / "queue" if folder else None
        self._patience = patience
        self._complaints: set[str] = set()

    def update(self, change: Callable[[Board], Board]) -> Board:
        """Replace the board by what `change` makes of it, alone among all who share it; the new board.

        `change` may be called several times; the last one counts. When the file cannot be used, it is given what this
        process knew last.
        """
        before = self.board
        try:
            self.board = change(before) if self._path is None else self._shared(self._path, change)
        except OSError as error:
            self._complain(error)
            self.board = change(before)
        return self.board

    def _shared(self, path: Path, change: Callable[[Board], Board]) -> Board:
        with _opened(path) as file:
            with _locked(file, fcntl.LOCK_SH, self._patience):
                data = _read(file)
            found = _parse(data, self.board)
            board = change(found or self.board)
            if board == found:
                return board
            with _locked(file, fcntl.LOCK_EX, self._patience):
                found = _parse(_read(file), self.board)
                board = change(found or self.board)
                if board != found:
                    _write(file, _text(board))
        return board

    def _complain(self, error: OSError) -> None:
        """Once for each kind of trouble, however often the file is used."""
        text = f"{error.strerror or error}"
        if text not in self._complaints:
            self._complaints.add(text)
            logger.warning(
                "%s cannot be used (%s): this process asks the scheduler by itself. The filesystem of the runs should "
                "be writable and support locks (NFS, or Lustre mounted with `flock`)", self._path, text
            )  # fmt: skip


@contextmanager
def _locked(file: int, how: int, patience: float) -> Iterator[None]:
    """The kernel frees the lock of a process that dies; Slurm's commands do not inherit it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"it has been locked for more than {patience:.0f} s") from None
            time.sleep(random.uniform(*_RETRY))
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = _open(path)
    try:
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
    """Four lines: what it is, the small things that everybody reads, the rows, the accounts."""
    rows, accounts = board.rows.encode(), board.accounts.encode()
    fields = asdict(replace(board, rows="", accounts="")) | {"digests": [_digest(rows), _digest(accounts)]}
    head = json.dumps(fields).encode()
    return b"\n".join([f"{_FORMAT} {_digest(head)}".encode(), head, rows, accounts])


def _parse(data: bytes, known: Board) -> Board | None:
    """None unless all of it was written by this version. Long texts that are known are not looked at again."""
    lines = data.split(b"\n", 3)
    if len(lines) != 4 or lines[0] != f"{_FORMAT} {_digest(lines[1])}".encode():
        return None
    fields = json.loads(lines[1])
    digests, texts = fields.pop("digests"), (("rows", "taken"), ("accounts", "accounts_taken"))
    for part, digest, (name, taken) in zip(lines[2:], digests, texts, strict=True):
        if fields[taken] and fields[taken] == getattr(known, taken):
            fields[name] = getattr(known, name)
        elif _digest(part) == digest:
            fields[name] = part.decode()
        else:
            return None
    return Board(**{**fields, "calls": tuple(fields["calls"])})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
