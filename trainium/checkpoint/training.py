"""Checkpoints that training left behind: which there are, and which are complete. No torch needed."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainium.checkpoint.archive import check_whole
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.paths import find_shards
from trainium.checkpoint.shards import check_structure, tensor_files

# The step is exact; consumed_samples can be stale when training was resumed.
_NAME = re.compile(r".*--step=(\d+)-consumed_samples=(\d+(?:\.\d+)?)(?:-\w+)?\.ckpt")
_READERS = 16  # files looked at together: waiting for a file server is all that this costs


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One `*.ckpt` folder. missing: names of what a complete one would have, relative to it."""

    path: Path
    step: int
    consumed_samples: float
    complete: bool
    missing: tuple[str, ...]


def list_checkpoints(folder: Path, shard_count: int | None = None) -> list[TrainingCheckpoint]:
    """The checkpoints of an experiment's `checkpoints/` folder by step; other names are not looked at.

    shard_count: tp × pp of the run; without it the files' own ranks tell how many there should be. A checkpoint is
    complete when its `done` marker is there, every shard is, and every file that a per-tensor shard refers to.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            missing = missing_parts(path, shard_count)
            found.append(TrainingCheckpoint(path, int(match[1]), float(match[2]), not missing, missing))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path.name))


def last_complete(folder: Path, shard_count: int | None = None) -> TrainingCheckpoint | None:
    """The complete checkpoint with the highest step."""
    return next((item for item in reversed(list_checkpoints(folder, shard_count)) if item.complete), None)


def missing_parts(checkpoint: Path, shard_count: int | None = None) -> tuple[str, ...]:
    """What a checkpoint folder lacks to be complete; empty when it is."""
    missing = [] if (checkpoint / "done").is_file() else ["done"]
    try:
        shards = find_shards(checkpoint / "model")
    except CheckpointError:
        return (*missing, "model/")
    missing += [f"model/{name}" for name in shards.missing]
    if shard_count is not None and len(shards.files) != shard_count and not shards.missing:
        missing.append(f"model/: {len(shards.files)} shards where the run has {shard_count}")
    for path in shards.files.values():
        missing += [f"model/{part}" for part in _missing_of_shard(path, checkpoint / "model")]
    return tuple(missing)


def unreadable_parts(checkpoint: Path) -> tuple[str, ...]:
    """What of a complete checkpoint a resume could not read, each with the reason; empty when all is well.

    Looks at the structure of every file (directories, pickles, sizes), at the weights of none: a file that lost its end
    or its place on the disk is found, one whose bytes changed is not. The optimizer's files may hold more than tensors,
    so of those only the directory is read. A training of many ranks has tens of thousands of files, hence the threads.
    """
    weights = find_shards(checkpoint / "model").files.values()
    others = [checkpoint / "user_content.pt", *(p for p in (checkpoint / "optim").rglob("*.pt") if p.is_file())]
    checks = [(path, check_structure) for path in weights]
    checks += [(path, check_whole) for path in others]
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda check: _problem(*check), checks)
        return tuple(f"{path.relative_to(checkpoint)}: {p}" for (path, _), p in zip(checks, problems, strict=True) if p)


def _problem(path: Path, check: Callable[[Path], None]) -> str | None:
    try:
        check(path)
    except CheckpointError as error:
        return str(error)
    return None


def _missing_of_shard(path: Path, folder: Path) -> list[str]:
    try:
        parts = tensor_files(path)
    except CheckpointError as error:
        return [f"{path.relative_to(folder)} ({error})"]
    return [str(part.relative_to(folder)) for part in parts if not part.is_file() or not part.stat().st_size]
