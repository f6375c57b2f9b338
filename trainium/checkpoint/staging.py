"""Output folders that are there whole or not at all."""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainium.checkpoint.errors import CheckpointError
from trainium.files import sync_folder
from trainium.text import size


@contextmanager
def staged(target: Path, ours: re.Pattern[str], needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, and is gone otherwise.

    ours: names of files and folders that an earlier output may hold; a target with anything else is not replaced.
    needed_bytes: what will be written. Raises CheckpointError before anything is written when the target is something
    else or the disk is too small.
    """
    try:
        temporary = _prepare(target, ours, needed_bytes)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        sync_tree(temporary)
        take_place(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prepare(target: Path, ours: re.Pattern[str], needed_bytes: int) -> Path:
    refuse_other(target, ours)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    check_space(target, needed_bytes)
    return _folder_beside(target, ".partial")


def check_space(target: Path, needed_bytes: int) -> None:
    """Raise CheckpointError when the disk has not as much free."""
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{target.parent} has {size(free)} free, but {target.name} needs {size(needed_bytes)}. "
            "Free space there or choose an output on a larger disk."
        )


def sync_tree(folder: Path) -> None:
    """Make the names in a folder and in its folders durable."""
    for path in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        sync_folder(path)


def _folder_beside(target: Path, suffix: str) -> Path:
    """A new hidden folder whose name says who is at work."""
    prefix = f".{target.name}.{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=target.parent))


def refuse_other(target: Path, ours: re.Pattern[str]) -> None:
    """Raise CheckpointError when the target is no folder, or one with anything that is not `ours`.

    It is renamed in the end, so it must have a name of its own, and be no mount.
    """
    if target.name in ("", ".."):
        raise CheckpointError(f"the output {str(target)!r} has no name of its own; write the folder's path out")
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link, which cannot be replaced; give {target.resolve()} instead")
    for path in (target, *target.parents):
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} exists and is no folder; choose another output or remove it")
    if os.path.ismount(target):
        raise CheckpointError(f"{target} is a mount, which cannot be replaced; give a folder in it: {target / 'model'}")
    others = sorted(path.name for path in target.iterdir() if not ours.fullmatch(path.name)) if target.exists() else []
    if others:
        raise CheckpointError(
            f"{target} holds something else than an earlier output ({', '.join(others[:3])}); "
            "choose another output or empty it"
        )


def remove_leftovers(target: Path) -> None:
    """Remove what a killed process of this machine left; on another machine it may still be at work."""
    pattern = re.compile(
        rf"\.+{re.escape(target.name)}\.{re.escape(socket.gethostname())}-(\d+)-.*\.(partial|replaced)"
    )
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def take_place(temporary: Path, target: Path) -> None:
    """Rename, with an earlier target out of the way first. At no time is there a target that is not whole."""
    if not target.exists():
        temporary.rename(target)
    else:
        aside = _folder_beside(target, ".replaced")
        target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            aside.rename(target)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(target.parent)
