"""What a folder holds, file by file, with one digest over all of it."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder; `path` is relative, `bytes` its apparent size, `sha256` of its content in hex."""

    path: str
    bytes: int
    sha256: str


def manifest(folder: Path) -> tuple[FileEntry, ...]:
    """Every file below `folder`, sorted by path. Each file is flushed to disk on the way (fsync)."""
    return tuple(
        _entry(path, path.relative_to(folder).as_posix())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    )


def digest(entries: tuple[FileEntry, ...]) -> str:
    """One sha256 over the lines `sha256  path`, as `sha256sum` prints them: equal folders, equal digests."""
    lines = "".join(f"{entry.sha256}  {entry.path}\n" for entry in entries)
    return hashlib.sha256(lines.encode()).hexdigest()


def _entry(path: Path, name: str) -> FileEntry:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileEntry(name, os.fstat(file.fileno()).st_size, sha256)
