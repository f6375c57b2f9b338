"""A scheduler on this machine, without Slurm: the same scripts, files and states, one detached process per job.

Under `root`: `jobs/<id>/{job.json,state.json,cancel}`. Everything starts at once; there is no queue to wait in.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from slurm import local_srun, local_supervisor
from slurm.errors import InvalidJobSpec, SchedulerUnreachable, SubmitRejected, SubmitUncertain
from slurm.folder import JobFolder, write_atomic
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.script import render
from slurm.spec import JobSpec, check_name
from slurm.states import JobState

_HOST = os.uname().nodename
_PYTHON = (sys.executable, "-I", "-S")
_START_TIMEOUT = 30.0
_SKEW = timedelta(seconds=1)


class LocalScheduler:
    """Jobs as processes of this machine that outlive the one that submitted them; see `slurm.scheduler.Scheduler`.

    `kill_wait`: how long a job may take to end after SIGTERM before it is killed. Partition, account and the like mean
    nothing here and are passed over; a dependency or an array, which would change what runs, is refused. `nodes` and
    `ntasks` are honoured as numbers: all tasks run here. Memory is not limited.
    """

    def __init__(self, root: Path | str, *, kill_wait: timedelta = timedelta(seconds=10)) -> None:
        self._jobs = Path(os.path.abspath(root)) / "jobs"  # noqa: PTH100 - the supervisor starts in another folder
        self._kill_wait = kill_wait.total_seconds()

    @property
    def timing(self) -> Timing:
        return Timing(exit_scan=0.1, queue=0.5, early=0.02, accounting=60, confirm=0, lost=3)

    @property
    def identity(self) -> None:
        return None

    def render(self, spec: JobSpec, folder: JobFolder, name: str) -> str:
        for field in ("dependency", "array"):
            if (value := getattr(spec, field)) is not None:
                raise InvalidJobSpec(field, value, "a local cluster has no such thing", "nothing, or use Slurm")
        return render(spec, folder, name, launcher=(*_PYTHON, str(Path(local_srun.__file__).absolute())))

    def submit(self, script: Path, name: str) -> str:
        check_name(name)
        options = read_directives(script)
        self._jobs.mkdir(parents=True, exist_ok=True)
        numbers = [int(m[1]) for p in self._jobs.iterdir() if (m := re.match(r"\.?local-(\d+)-", p.name))]
        job_id = f"local-{max(numbers, default=0) + 1}-{secrets.token_hex(3)}"
        staging = self._jobs / f".{job_id}"
        staging.mkdir()
        job = {
            "id": job_id,
            "name": name,
            "submitted": time.time(),
            "script": str(script.absolute()),
            "log": options["output"].replace("%%", "%"),
            "time_limit": _seconds(options.get("time")),
            "signal": _signal(options.get("signal")),
            "kill_wait": self._kill_wait,
            "environment": _environment(job_id, name, options),
        }
        write_atomic(staging / "job.json", json.dumps(job, indent=2))
        supervisor = str(Path(local_supervisor.__file__).absolute())
        command = [*_PYTHON, supervisor, str(staging), str(self._jobs / job_id)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with (staging / "supervisor.log").open("w") as log:
            try:
                # The supervisor keeps nothing of this process open, is in a session of its own, and lives for as long
                # as the job: it sees none of the caller's tokens either.
                streams |= {"stderr": log, "env": {}, "start_new_session": True, "cwd": "/"}
                code = subprocess.run(command, **streams, timeout=_START_TIMEOUT, check=False).returncode
            except subprocess.TimeoutExpired:
                raise SubmitUncertain(f"the supervisor of {job_id} did not report within {_START_TIMEOUT} s") from None
        if code != 0:
            text = (staging / "supervisor.log").read_text() if staging.exists() else ""
            if staging.exists():
                shutil.rmtree(staging)
                raise SubmitRejected(f"the supervisor of {job_id} did not start: {text.strip()[-500:]}")
            raise SubmitUncertain(f"the supervisor of {job_id} ended without a word")
        return job_id

    def find(self, name: str, since: datetime) -> list[QueueRow]:
        rows = (self._row(path) for path in self._folders())
        return [row for row in rows if row.name == name and row.submitted and row.submitted >= since - _SKEW]

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        folders = self._folders() if job_ids is None else (self._jobs / job_id for job_id in job_ids)
        rows = (self._row(folder) for folder in folders if (folder / "state.json").exists())
        return {row.job_id: row for row in rows if row.state is not JobState.UNKNOWN}

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        return None

    def cancel(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            folder = self._jobs / job_id
            if not (folder / "state.json").exists() or _read(folder / "state.json")["state"] != "RUNNING":
                continue
            (folder / "cancel").touch()
            state = _read(folder / "state.json")
            _check_host(job_id, state)
            if _is_process(state["pid"], state["start"]):
                _kill(state["pid"], signal.SIGTERM)
            else:
                self._end_orphans(state)

    def _end_orphans(self, state: dict[str, Any]) -> None:
        """End a job whose supervisor was killed: SIGTERM to its processes, SIGKILL to those that stay."""
        deadline, number = time.monotonic() + self._kill_wait, signal.SIGTERM
        told: set[int] = set()
        while members := set(_members(state)):
            if time.monotonic() >= deadline:
                number, told = signal.SIGKILL, set()
            for pid in members - told:
                _kill(pid, number)
            told |= members
            time.sleep(0.05)

    def _folders(self) -> Iterator[Path]:
        if self._jobs.is_dir():
            yield from (path for path in self._jobs.iterdir() if not path.name.startswith("."))

    def _row(self, folder: Path) -> QueueRow:
        """The job as squeue would show it; UNKNOWN when nothing of it lives and nobody wrote how it ended."""
        job, state = _read(folder / "job.json"), _read(folder / "state.json")
        known = JobState(state["state"])
        if known is JobState.RUNNING:
            _check_host(folder.name, state)
            if not _is_process(state["pid"], state["start"]):
                state = _read(folder / "state.json")  # it may have ended in the proper way just now
                known = JobState(state["state"])
                if known is JobState.RUNNING and not any(_members(state)):
                    known = JobState.UNKNOWN
        submitted = datetime.fromtimestamp(job["submitted"], UTC)
        return QueueRow(folder.name, known, None, "localhost", job["name"], 0, submitted, state.get("status"))


def read_directives(script: Path) -> dict[str, str]:
    """The `#SBATCH --option=value` lines of a script, as Slurm reads them. Raises SubmitRejected."""
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise SubmitRejected(f"cannot read {script}: {error.strerror}") from error
    if not text.startswith("#!"):
        raise SubmitRejected(f"{script} does not look like a batch script", "its first line must be #!/bin/bash")
    options = {}
    for line in text.splitlines()[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            key, _, value = line.removeprefix("#SBATCH --").partition("=")
            options[key] = "".join(shlex.split(value))
    if "output" not in options:
        raise SubmitRejected(f"{script} has no #SBATCH --output line", "render it with LocalScheduler.render")
    return options


def _environment(job_id: str, name: str, options: dict[str, str]) -> dict[str, str]:
    """What a job sees: nothing of the caller's but who and where it is, and Slurm's variables."""
    nodes = int(options.get("nodes", 1))
    per_node = options.get("ntasks-per-node")
    ntasks = int(options.get("ntasks") or nodes * int(per_node or 1))
    slurm = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_JOB_NAME": name,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_NTASKS": str(ntasks),
        "SLURM_NPROCS": str(ntasks),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURMD_NODENAME": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_RESTART_COUNT": "0",
    }
    if cpus := options.get("cpus-per-task"):
        slurm["SLURM_CPUS_PER_TASK"] = cpus
    kept = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TZ")
    return {key: os.environ[key] for key in kept if key in os.environ} | slurm


def _seconds(limit: str | None) -> float | None:
    if limit is None:
        return None
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def _signal(text: str | None) -> dict[str, int] | None:
    """`B:USR1@60`, of which only the part before the time limit means something here; 60 s is Slurm's default."""
    if text is None:
        return None
    name, _, before = text.rpartition(":")[2].partition("@")
    return {"number": signal.Signals[f"SIG{name.removeprefix('SIG')}"].value, "before": int(before or 60)}


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _check_host(job_id: str, state: dict[str, Any]) -> None:
    if state["host"] != _HOST:
        raise SchedulerUnreachable(f"{job_id} runs on {state['host']}, and this is {_HOST}: ask there")


def _is_process(pid: int, start: int) -> bool:
    """Whether it is still the same process: pids are reused, pairs of pid and start time are not."""
    fields = local_supervisor.stat(pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == start


def _members(state: dict[str, Any]) -> Iterator[int]:
    """The living processes of a job without its supervisor: they are in the session that it made."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only
        fields = local_supervisor.stat(int(entry)) if entry.isdigit() else None
        if fields and fields[0] not in "ZX" and int(fields[3]) == state["pid"] and int(fields[19]) >= state["start"]:
            yield int(entry)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
