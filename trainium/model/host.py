"""What this host offers to a job: threads and memory, Slurm's and the kernel's limits included."""

import os
from pathlib import Path

_PROC_MEMINFO = Path("/proc/meminfo")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")


def thread_count() -> int:
    """OMP_NUM_THREADS where it is set to a number, else the CPUs this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes a process can still take: the kernel's MemAvailable, or a smaller memory limit of one of its cgroups."""
    return min([_mem_available(), *_cgroup_limits()])


def _mem_available() -> int:
    for line in _PROC_MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line: Linux 3.14 or newer is needed")


def _cgroup_limits() -> list[int]:
    """Limits of this process's cgroups and all their parents (v2 `memory.max`, v1 `memory.limit_in_bytes`)."""
    limits = []
    for line in _PROC_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (_CGROUP, "memory.max") if not controllers else (_CGROUP / "memory", "memory.limit_in_bytes")
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            try:
                text = (place / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():
                limits.append(int(text))
    return limits
