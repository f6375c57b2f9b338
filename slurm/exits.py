"""Looking for exit files: a thousand folders in a hundredth of a second, because only what is new is read."""

import contextlib
import os
from dataclasses import dataclass

from slurm.folder import ExitRecord, JobFolder, StartRecord


@dataclass(frozen=True)
class Found:
    """The records of a job whose exit file is new; `written`: when that was (seconds since 1970), 0 without one."""

    start: StartRecord | None
    end: ExitRecord | None
    written: float


class ExitFile:
    """The exit file of one job, and what identifies the content that was read last."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._read: tuple[int, ...] | None = None

    def look(self) -> Found | None:
        """None when its exit file is the one of the look before, or still missing.

        The folder is listed, not asked for the one name: that makes NFS clients look at the server instead of their
        cache. A file that is not whole yet is read again at the next look.
        """
        identity: tuple[int, ...] | None = None
        written = 0.0
        with contextlib.suppress(OSError):
            if self._folder.exit.name in os.listdir(self._folder.path):  # noqa: PTH208 - names only
                file = self._folder.exit.stat()
                identity, written = (file.st_ino, file.st_mtime_ns, file.st_size), file.st_mtime
        if identity == self._read:
            return None
        end = self._folder.read_exit() if identity else None
        self._read = identity if end else None
        return Found(self._folder.read_start(), end, written)
