"""Waiting for many jobs on the real Slurm of the tests: this project's watcher against a plain loop over squeue.

All jobs are in the queue before anybody waits, and start when everybody does. They sleep for different times; one in
25 is killed by SIGKILL with its script, as when its node dies, and leaves no exit file.
"""

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm.cluster import SlurmScheduler
from slurm.folder import JobFolder
from slurm.spec import JobSpec
from slurm.submission import ensure_submitted
from tests.slurm_lab.lab import SlurmLab, slurm_lab

ROOT = Path(__file__).parents[2]
SLEEP = (4.0, 16.0)  # seconds
ONE_KILLED_OF = 25
KILLED = "killed"  # file in the folder of such a job: when
LONE = 30
NODES, CPUS = 4, 16  # so many jobs run at a time: two cores start few per second
# Real clusters keep ended jobs in the queue for 300 s; the lab's own times are for short tests of an idle machine.
CONF = "MinJobAge=300\nBatchStartTimeout=120\nSlurmdTimeout=300\n"
# Of the issue: seconds (p99 or most), calls a minute, percent of a core.
TARGETS = {"with exit file": 8.0, "lone": 3.0, "without": 45.0, "calls": 12, "cpu": 3.0}
HEADER = (
    f"{'jobs':>5}{'processes':>11} {'tool':9}{'calls/min':>10}{'calls':>7}"
    f"{'with exit file: p50':>21}{'p99':>7}{'max':>7}{'without: p50':>14}{'max':>7}"
    f"{'CPU % most':>12}{'mean':>7}{'commands':>10}"
)


@dataclass(frozen=True)
class Delays:
    """From the payload's end to the outcome, in seconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Delays | None":
        """None of nothing."""
        if not (ordered := sorted(values)):
            return None
        at = [ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99, 1.0)]
        return cls(*(round(value, 2) for value in at))


@dataclass(frozen=True)
class Watching:
    """calls_per_minute: the most in any 60 seconds. cpu: percent of a core, of the process that used most, of all
    processes in the mean, and of the commands that a process started in the mean."""

    jobs: int
    processes: int
    tool: str
    calls_per_minute: int
    calls: int
    with_exit_file: Delays | None
    without: Delays | None
    cpu_most: float
    cpu_mean: float
    cpu_commands: float

    def line(self) -> str:
        left = f"{self.jobs:5}{self.processes:11} {self.tool:9}{self.calls_per_minute:10}{self.calls:7}"
        middle = f"{_shown(self.with_exit_file, 'p50', 21)}{_shown(self.with_exit_file, 'p99', 7)}"
        middle += f"{_shown(self.with_exit_file, 'max', 7)}{_shown(self.without, 'p50', 14)}"
        middle += _shown(self.without, "max", 7)
        return left + middle + f"{self.cpu_most:12.2f}{self.cpu_mean:7.2f}{self.cpu_commands:10.2f}"

    def missed(self) -> list[str]:
        """Which targets it misses."""
        lone = self.tool == "alone"
        found = {
            "lone" if lone else "with exit file": self.with_exit_file.p99 if self.with_exit_file else 0,
            "without": self.without.max if self.without else 0,
        } | ({} if lone else {"calls": self.calls_per_minute, "cpu": self.cpu_most})
        return [f"{name} {value} (target {TARGETS[name]})" for name, value in found.items() if value > TARGETS[name]]


def run(work: Path, jobs: int, processes: int, tools: Sequence[str]) -> Iterator[Watching]:
    """`jobs` in one process and spread over `processes`, by each tool; and lone jobs by ours. Raises SlurmLabError."""
    with slurm_lab(nodes=NODES, cpus=CPUS, message_timeout=60, extra=CONF) as lab:
        for count in (1, processes):
            for tool in tools:
                yield _measure(lab, work, jobs, count, tool)
        yield _measure(lab, work, min(LONE, jobs), 1, "alone")


def _measure(lab: SlurmLab, work: Path, jobs: int, processes: int, tool: str) -> Watching:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    lab.run("scontrol", "update", "PartitionName=main", "State=DOWN", check=True)
    folders = _submit(lab, work, jobs, doomed=ONE_KILLED_OF if tool != "alone" else 0)
    outs = [work / f"out-{number}.json" for number in range(processes)]
    waiting = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.waiters", tool, lab.conf, work, out, *names],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for number, out in enumerate(outs)
        if (names := [str(folder.path) for folder in folders[number::processes]])
    ]
    try:
        for process in waiting:
            assert process.stdout is not None
            process.stdout.readline()
        lab.run("scontrol", "update", "PartitionName=main", "State=UP", check=True)
        if any(process.wait() for process in waiting):
            raise SystemExit(f"a process that waits for jobs has failed; see {work}")
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    lab.wait_idle()
    return _result(tool, folders, [json.loads(out.read_text()) for out in outs], work / "calls")


def _submit(lab: SlurmLab, work: Path, jobs: int, doomed: int) -> list[JobFolder]:
    scheduler, chance = SlurmScheduler(conf=lab.conf), random.Random(jobs)

    def submit(number: int, seconds: float) -> JobFolder:
        dies = doomed and number % doomed == 0
        folder = JobFolder(work / "jobs" / str(number))
        script = f"sleep {seconds:.2f}" + (f"; date +%s.%N >{KILLED}; kill -9 $SLURM_TASK_PID" if dies else "")
        spec = JobSpec(payload=("bash", "-c", script), environment="project")
        name = f"bench-{number}"
        ensure_submitted(scheduler, spec, folder, name, guard=lambda: None, grace=timedelta(seconds=5))
        return folder

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(submit, range(jobs), [chance.uniform(*SLEEP) for _ in range(jobs)]))


def _result(tool: str, folders: list[JobFolder], outs: list[dict[str, Any]], calls: Path) -> Watching:
    told: dict[str, float] = {}
    for out in outs:
        told |= out["told"]
    ended = {str(folder.path): record.ended.timestamp() for folder in folders if (record := folder.read_exit())}
    killed = {str(file.parent): float(file.read_text()) for f in folders if (file := f.path / KILLED).exists()}
    times = [float(line.split()[0]) for line in calls.read_text().splitlines()]
    process, commands = ([100 * out[key] for out in outs] for key in ("process", "commands"))
    return Watching(
        jobs=len(folders),
        processes=len(outs),
        tool=tool,
        calls_per_minute=max(sum(first <= time < first + 60 for time in times) for first in times),
        calls=len(times),
        with_exit_file=Delays.of(told[folder] - moment for folder, moment in ended.items()),
        without=Delays.of(told[folder] - moment for folder, moment in killed.items()),
        cpu_most=round(max(process), 2),
        cpu_mean=round(sum(process) / len(process), 2),
        cpu_commands=round(sum(commands) / len(commands), 2),
    )


def _shown(delays: Delays | None, which: str, width: int) -> str:
    return f"{getattr(delays, which):{width}.2f}" if delays else f"{'-':>{width}}"
