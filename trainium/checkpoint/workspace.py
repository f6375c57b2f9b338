"""Where a conversion writes: a folder beside the target that a later attempt goes on in, and that becomes the target.

    .NAME.partial/lock          who is at work here
    .NAME.partial/conversion    digest of what is converted, and how
    .NAME.partial/done-*.jsonl  one line per complete portion: its key and the checksums of its tensors
    .NAME.partial/files/        becomes NAME when everything is complete

A conversion of the same input with the same options finds its complete portions again, whoever made them: an attempt
that was killed, or other nodes that each made a share. Anything else that is found is removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.staging import check_space, refuse_other, remove_leftovers, sync_tree, take_place
from trainium.checkpoint.transfer import Done
from trainium.files import write_atomic

_PATIENCE = 30.0  # seconds that workers of a killed conversion are given to notice and end


@dataclass(frozen=True)
class Share:
    """Part `number` (from 1) of `count` of a conversion that several nodes do together."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise CheckpointError(f"share {self.number}/{self.count} must be I/N with 1 ≤ I ≤ N")

    @classmethod
    def parse(cls, text: str) -> Share:
        """From `I/N`."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None:
            raise CheckpointError(f"share {text!r} must be I/N, such as 1/4")
        return cls(int(match[1]), int(match[2]))

    def of(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of this part: neighbours, which read neighbouring input."""
        size = len(items)
        return items[size * (self.number - 1) // self.count : size * self.number // self.count]


@dataclass(frozen=True)
class Workspace:
    """`folder`: write here. done: complete portions by key."""

    folder: Path
    done: Mapping[str, Done]
    journal: Path

    def record(self, done: Mapping[str, Done]) -> None:
        """Remember portions that are on the disk. A torn line of a killed process is no line."""
        with self.journal.open("a") as file:
            file.writelines(json.dumps({"key": key, **asdict(entry)}) + "\n" for key, entry in done.items())


@contextmanager
def workspace(
    target: Path, ours: re.Pattern[str], conversion: Mapping[str, Any], files: Mapping[str, int], share: Share | None
) -> Iterator[Workspace]:
    """The folder to write in, which takes the target's place when the block ends well; with a share it never does.

    ours: names of files and folders that an earlier output may hold; a target with anything else is not replaced.
    conversion: what decides about every byte of the output. files: name → size of what will be written. Raises
    CheckpointError before anything is written when the target is something else, the disk is too small, or the same
    target is being written elsewhere. When the block does not end well, complete portions are kept, if there are any.
    """
    root = target.parent / f".{target.name}.partial"
    try:
        refuse_other(target, ours)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        with _locked(root, share) as lock:
            space = _opened(root, _fingerprint(conversion), lock, share)
            try:
                check_space(target, sum(size - _allocated(space.folder / name) for name, size in files.items()))
                yield space
                sync_tree(space.folder)
            except BaseException:
                if share is None and not _complete(root):
                    shutil.rmtree(root, ignore_errors=True)
                raise
            if share is None:
                take_place(space.folder, target)
                shutil.rmtree(root, ignore_errors=True)
    except OSError as error:
        kept = f"; what is complete is kept in {root} for another attempt" if _complete(root) else ""
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}{kept}") from error


@dataclass(frozen=True)
class _Lock:
    handle: int
    exclusive: bool


@contextmanager
def _locked(root: Path, share: Share | None) -> Iterator[_Lock]:
    """Alone in the folder or, where others are at work on their shares, as one of them.

    The workers of a process inherit its lock, so that nobody begins while one that lost its parent still writes.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        root.mkdir(exist_ok=True)
        try:
            handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # removed by whoever finished just now
            continue
        try:
            exclusive = _try_lock(handle, fcntl.LOCK_EX)
            if exclusive or (share is not None and _try_lock(handle, fcntl.LOCK_SH)):
                if _is_same(root / "lock", handle):
                    yield _Lock(handle, exclusive)
                    return
            elif time.monotonic() > deadline:
                raise CheckpointError(f"another conversion is at work in {root}; wait for it, or end it")
            else:
                time.sleep(0.1)
        finally:
            os.close(handle)


def _is_same(path: Path, handle: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a filesystem without locks
            raise
    return True


def _opened(root: Path, fingerprint: str, lock: _Lock, share: Share | None) -> Workspace:
    mark, files = root / "conversion", root / "files"
    if not (mark.is_file() and mark.read_text() == fingerprint):
        if not lock.exclusive:
            raise CheckpointError(f"another conversion is at work in {root}: of other input or with other options")
        shutil.rmtree(files, ignore_errors=True)
        for path in root.glob("done-*.jsonl"):
            path.unlink()
        write_atomic(mark, fingerprint)
    files.mkdir(exist_ok=True)
    if share is not None and lock.exclusive:
        fcntl.flock(lock.handle, fcntl.LOCK_SH)
    name = f"done-{share.number}of{share.count}.jsonl" if share else "done-whole.jsonl"
    return Workspace(files, _complete(root), root / name)


def _complete(root: Path) -> dict[str, Done]:
    done: dict[str, Done] = {}
    for path in sorted(root.glob("done-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                notes = tuple(tuple(note) for note in entry["notes"])
                done[str(entry["key"])] = Done(tuple(int(crc) for crc in entry["crcs"]), notes)
            except (ValueError, TypeError, KeyError):  # the torn line of a killed process
                continue
    return done


def _fingerprint(conversion: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(conversion, sort_keys=True, default=str).encode()).hexdigest() + "\n"


def _allocated(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_blocks * 512, status.st_size)
