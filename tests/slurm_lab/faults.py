"""What can go wrong with a Slurm, as functions on a lab of one's own.

A daemon that is down or hangs: `lab.stop`, `lab.kill`, `lab.freeze` and their opposites.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from .lab import SlurmLab, SlurmLabError

MV_LATE = """\
#!/bin/bash
# In place of mv: a filesystem that shows exit.json only {seconds} s after it was renamed. Nothing waits for it.
case "${{@: -1}}" in
*/exit.json) setsid --fork sh -c 'sleep {seconds}; exec {mv} "$@"' mv "$@" </dev/null >/dev/null 2>&1 ;;
*) exec {mv} "$@" ;;
esac
"""


@dataclass(frozen=True)
class EndedJob:
    """A job in slurmctld's own list of ended ones (jobcomp/filetxt); a requeued one is in it once per start."""

    job_id: str
    name: str
    state: str
    exit_code: str
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue, not ended."""

    job_id: str
    name: str
    state: str
    node: str


def ended_jobs(lab: SlurmLab) -> list[EndedJob]:
    """Everything that ended since the lab's start, whoever submitted it and whatever was purged since."""
    file = lab.folder / "log/completed.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [_ended(dict(word.partition("=")[::2] for word in line.split())) for line in lines if line.strip()]


def queued_jobs(lab: SlurmLab) -> list[QueuedJob]:
    """Waiting and running jobs, as slurmctld has them now. Raises SlurmLabError when it does not answer."""
    found = lab.run("squeue", "-h", "-a", "-O", "JobID:|,Name:|,State:|,NodeList:|", check=True)
    rows = (line.split("|")[:4] for line in found.stdout.splitlines() if "|" in line)
    return [QueuedJob(*(field.strip() for field in row)) for row in rows]


def kill_node(lab: SlurmLab, node: str) -> None:
    """The machine is gone: its slurmd, the supervisors of its jobs and all their processes, at once."""
    stepds = [pid for pid in _pids() if _is_stepd(pid) and _log_of(pid) == lab.folder / f"log/slurmd.{node}.log"]
    victims = [pid for stepd in stepds for pid in _below(stepd)]
    lab.kill(f"slurmd.{node}")
    for pid in [*stepds, *victims, *_on_node(lab, node)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # What Slurm finds out by itself after SlurmdTimeout, and a health check at once.
    lab.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed", check=True)


def revive_node(lab: SlurmLab, node: str) -> None:
    lab.start(f"slurmd.{node}")
    lab.run("scontrol", "update", f"nodename={node}", "state=resume")  # refused where it came back by itself


def preempt(lab: SlurmLab, seconds: float) -> None:
    """A job of the high partition takes all nodes of `main` for that long."""
    words = (f"--nodes={len(lab.nodes)}", "--exclusive", "--partition=hi", "--output=/dev/null", "--job-name=preemptor")
    lab.run("sbatch", *words, f"--wrap=sleep {seconds}", check=True)


def requeue(lab: SlurmLab, job_id: str) -> None:
    """An administrator's wish; the job starts again with the same id."""
    lab.run("scontrol", "requeue", job_id, check=True)


def hold(lab: SlurmLab, job_id: str) -> None:
    lab.run("scontrol", "hold", job_id, check=True)


def release(lab: SlurmLab, job_id: str) -> None:
    lab.run("scontrol", "release", job_id, check=True)


def scancel(lab: SlurmLab, job_id: str) -> None:
    """By somebody at a terminal."""
    lab.run("scancel", job_id, check=True)


def close(lab: SlurmLab, partition: str = "main") -> None:
    """Jobs of the partition wait from now on; those that run go on."""
    lab.run("scontrol", "update", f"partitionname={partition}", "state=down", check=True)


def reopen(lab: SlurmLab, partition: str = "main") -> None:
    lab.run("scontrol", "update", f"partitionname={partition}", "state=up", check=True)


@contextlib.contextmanager
def read_only_on_nodes(lab: SlurmLab, folder: Path) -> Iterator[None]:
    """The nodes may not write to a folder that the head node can write to: slurmd cannot open a job's log there."""
    for node in lab.nodes:
        _on(lab, node, "mount", "--bind", str(folder), str(folder))
        _on(lab, node, "mount", "-o", "remount,bind,ro", str(folder))
    try:
        yield
    finally:
        for node in lab.nodes:
            _on(lab, node, "umount", "--lazy", str(folder))


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A filesystem of that size at `folder`, which is made."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Not a byte is left on the filesystem of `folder`."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def late_exit_files(lab: SlurmLab, folder: Path, seconds: float) -> Iterator[None]:
    """On the nodes a job's exit file appears that much later than the job ends. `folder` is made, for the mv."""
    folder.mkdir(parents=True)
    mv, real, late = Path("/bin/mv").resolve(), folder / "mv.real", folder / "mv.late"
    shutil.copy2(mv, real)
    late.write_text(MV_LATE.format(seconds=seconds, mv=real))
    late.chmod(0o755)
    for node in lab.nodes:
        _on(lab, node, "mount", "--bind", str(late), str(mv))
    yield  # the mounts end with the nodes


def boot(lab: SlurmLab, node: str) -> None:
    """The cloud node comes up."""
    lab.start(f"slurmd.{node}")


def asked_to_boot(lab: SlurmLab) -> list[str]:
    """Cloud nodes that Slurm wanted so far, in order; a node as often as it was wanted."""
    file = lab.folder / "to-boot"
    lists = file.read_text().split() if file.exists() else []
    return [node for words in lists for node in lab.run("scontrol", "show", "hostnames", words).stdout.split()]


def wait_for(true: Callable[[], bool], what: str, seconds: float) -> None:
    """Raises SlurmLabError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SlurmLabError(f"not in {seconds:.0f} s: {what}")
        time.sleep(0.05)


def _on(lab: SlurmLab, node: str, *argv: str) -> None:
    """Run a command among the node's mounts; see prepare.commands."""
    command = ["nsenter", f"--target={lab.pid(f'slurmd.{node}')}", "--mount", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmLabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def _ended(fields: dict[str, str]) -> EndedJob:
    times = (_time(fields.get(key, "")) for key in ("SubmitTime", "StartTime", "EndTime"))
    return EndedJob(fields["JobId"], fields["Name"], fields["JobState"], fields.get("ExitCode", ""), *times)


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:  # "Unknown", "None"
        return None


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_stepd(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")
    except OSError:
        return False


def _log_of(pid: int) -> Path | None:
    """The slurmd log that a slurmstepd writes to: the only thing about it that names its node."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = link.readlink()
                if target.name.startswith("slurmd."):
                    return target
    return None


def _below(pid: int) -> list[int]:
    """All descendants of a process."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [found for child in map(int, children) for found in (child, *_below(child))]
    return []


def _on_node(lab: SlurmLab, node: str) -> list[int]:
    """Processes of the node's jobs that have left their parents."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in words and f"SLURM_CONF={lab.conf}".encode() in words:
                found.append(pid)
    return found
