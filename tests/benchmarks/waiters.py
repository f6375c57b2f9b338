"""One process that waits for jobs, as a flow does or as a plain loop does; `tests.benchmarks.watching` starts it.

    python -m tests.benchmarks.waiters watcher|loop|alone SLURM_CONF FOLDER OUT JOB_FOLDER...

OUT: JSON with when each job's end was told, and the CPU time of this process and of its commands.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm import commands
from slurm.cluster import SlurmScheduler
from slurm.folder import JobFolder
from slurm.states import parse_state
from slurm.verdict import JobStatus
from slurm.watcher import Watcher

INTERVAL = 15.0  # seconds, of the plain loop; the watcher's own default too


class Counted:
    """Runs a command and writes down when."""

    def __init__(self, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> commands.Completed:
        os.write(self._log, f"{time.time():.3f} {Path(argv[0]).name}\n".encode())
        return commands.run(argv, env=env, timeout=timeout)


async def watch(conf: str, place: Path, folders: list[JobFolder], *, apart: bool) -> dict[str, float]:
    """`apart`: each job as if it were the only one of its user."""
    scheduler = SlurmScheduler(conf=conf, runner=Counted(place / "calls"))
    told: dict[str, float] = {}
    shown: set[str] = set()
    watcher = Watcher(scheduler, shared=place / "shared")

    async def wait(folder: JobFolder) -> None:
        def show(status: JobStatus) -> None:
            shown.add(status.job_id)
            if len(shown) == len(folders):
                print("ready", flush=True)

        own = Watcher(scheduler, shared=place / f"shared-{folder.path.name}") if apart else watcher
        outcome = await own.wait(folder, show)
        told[str(folder.path)] = time.time()
        assert outcome.succeeded == folder.exit.exists(), outcome

    await asyncio.gather(*map(wait, folders))
    return told


def loop(conf: str, place: Path, folders: list[JobFolder]) -> dict[str, float]:
    """What a script does that waits for its jobs: one squeue for each, once per interval."""
    runner, env = Counted(place / "calls"), commands.clean_environment(os.environ, conf)
    left = {str(folder.path): record.job_id for folder in folders if (record := folder.read_job())}
    told: dict[str, float] = {}
    print("ready", flush=True)
    while left:
        began = time.monotonic()
        for folder, job in list(left.items()):
            answer = runner(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"], env=env, timeout=60)
            if not answer.stdout.strip() or parse_state(answer.stdout).is_final:
                told[folder] = time.time()
                del left[folder]
        time.sleep(max(0.0, INTERVAL - (time.monotonic() - began)))
    return told


def main() -> None:
    how, conf, place, out, *names = sys.argv[1:]
    folders = [JobFolder(name) for name in names]
    began, before = time.monotonic(), _cpu()
    if how == "loop":
        told = loop(conf, Path(place), folders)
    else:
        told = asyncio.run(watch(conf, Path(place), folders, apart=how == "alone"))
    seconds, after = time.monotonic() - began, _cpu()
    process, children = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    Path(out).write_text(json.dumps({"told": told, "process": process, "commands": children}))


def _cpu() -> tuple[float, float]:
    """Seconds of this process and of the commands that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    process, children = (usage.ru_utime + usage.ru_stime for usage in usages)
    return process, children


if __name__ == "__main__":
    main()
