"""One run of a command: wall time until its output is on the disk, and the memory of all its processes."""

import os
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_EVERY = 0.02  # seconds


@dataclass(frozen=True)
class Sample:
    """seconds: the whole process and the sync after it. Memory in bytes: `anonymous` and `total` of the largest single
    process, `together` anonymous of all processes of the command at one time. total counts mapped pages of files.
    """

    seconds: float
    anonymous: int
    total: int
    together: int


def run(command: Sequence[str | Path], inputs: Iterable[Path], outputs: Iterable[Path], expect: int = 0) -> Sample:
    """Run it with its inputs out of the page cache; what it leaves unsynced is synced on its time."""
    for path in files(inputs):
        forget(path)
    start = time.monotonic()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = _Watch(process.pid)
    watch.start()
    text, _ = process.communicate()
    for path in files(outputs):
        sync(path)
    seconds = time.monotonic() - start
    watch.stop()
    if process.returncode != expect:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{text.decode()}")
    return Sample(seconds, watch.anonymous, watch.total, watch.together)


def files(paths: Iterable[Path]) -> list[Path]:
    """All files in these folders, and these files."""
    return sorted(f for path in paths for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())


def forget(path: Path) -> None:
    """Have nothing of a file in the page cache; dirty pages would stay, so they are written first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """fsync."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class _Watch(threading.Thread):
    """Looks at a process and its descendants every few milliseconds."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.total = self.together = 0
        self._pid, self._over = pid, threading.Event()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_EVERY):
            together = 0
            for pid in _family(self._pid):
                anonymous, total = _memory(pid)
                together += anonymous
                self.anonymous, self.total = max(self.anonymous, anonymous), max(self.total, total)
            self.together = max(self.together, together)


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        try:
            found += map(int, Path(f"/proc/{member}/task/{member}/children").read_text().split())
        except OSError:  # it has just ended
            continue
    return found


def _memory(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return values.get("RssAnon", 0) * 1024, values.get("VmRSS", 0) * 1024
