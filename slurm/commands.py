"""Slurm's command line: running it safely, and reading what it prints. Facts measured on Slurm 22.05."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from slurm.errors import SchedulerUnreachable, SlurmError, SubmitRejected, SubmitUncertain
from slurm.scheduler import AccountingRow, QueueRow
from slurm.states import JobState, parse_state

SEPARATOR = "\x1f"  # no job name, reason or node list can hold it: Slurm itself prints no control characters
QUEUE_FIELDS = ("JobArrayID", "State", "Reason", "NodeList", "RestartCnt", "SubmitTime", "exit_code", "Name")
QUEUE_FORMAT = ",".join(f"{field}:{SEPARATOR}" for field in QUEUE_FIELDS[:-1]) + f",{QUEUE_FIELDS[-1]}:"
ACCOUNTING_FIELDS = "JobID,State,ExitCode,DerivedExitCode,NodeList,Submit,Start,End,JobName"


@dataclass(frozen=True)
class Completed:
    """A finished command; `code` is negative when a signal ended it."""

    code: int
    stdout: str
    stderr: str


class CommandTimeout(Exception):
    """The command did not come back in time and was killed."""


class Runner(Protocol):
    """Runs one command; replaceable in tests. Raises CommandTimeout, and OSError when it cannot be started."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed: ...


def run(argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
    """The real runner: no shell, no terminal, no standard input, and a session of its own.

    A Ctrl-C at the terminal thereby never interrupts an sbatch half way.
    """
    process = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise CommandTimeout(f"{argv[0]} did not answer within {timeout:.0f} s") from None
    return Completed(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


def clean_environment(environ: Mapping[str, str], conf: str | None) -> dict[str, str]:
    """The caller's environment without anything that changes what Slurm's commands do; times in UTC."""
    drop = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SPANK_")
    kept = {key: value for key, value in environ.items() if not key.startswith(drop)}
    if chosen := conf or environ.get("SLURM_CONF"):
        kept["SLURM_CONF"] = chosen
    return kept | {"TZ": "UTC", "LC_ALL": "C.UTF-8"}


def bare_environment(environ: Mapping[str, str], conf: str | None) -> dict[str, str]:
    """What a job may inherit: where Slurm is, nothing of the caller's session."""
    chosen = conf or environ.get("SLURM_CONF")
    path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    return path | ({"SLURM_CONF": chosen} if chosen else {})


# Sent for sure and possibly acted on: the answer got lost.
_UNCERTAIN = re.compile(
    r"Socket timed out|Zero Bytes were transmitted|Unexpected message received|Communication shutdown failure"
    r"|Connection reset|Connection timed out|Transport endpoint|Unspecified error|Unable to contact slurm controller",
    re.IGNORECASE,
)
# The controller, its database, its authentication or its configuration does not answer.
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|reset|timed out)|Zero Bytes were"
    r"|munge (en|de)code|munge\.socket|Protocol authentication|Problem talking to the database|slurm_persist_conn"
    r"|Communication (connection|shutdown) failure|Could not establish a configuration source|in standby mode"
    r"|Unexpected message received|Transport endpoint|temporarily unable to accept|Resource temporarily unavailable"
    r"|Address family not supported",
    re.IGNORECASE,
)
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|Slurm accounting.*(disabled|not.*configured)", re.IGNORECASE
)
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"invalid partition", "`sinfo -s` lists the partitions; set `partition`"),
    (r"node configuration is not available", "no node has that many CPUs, that memory or that feature: ask for less"),
    (r"Node count specification invalid|PartitionNodeLimit", "ask for fewer nodes"),
    (r"More processors requested", "ask for fewer nodes, tasks or CPUs"),
    (r"Invalid (account|qos)", "`sacctmgr show assoc user=$USER` lists accounts and QOS; set `account` or `qos`"),
    (r"time limit|--time", "`sinfo -o '%P %l'` shows the limits; lower `time`"),
    (r"Job violates accounting|QOSMaxSubmit|AssocMaxSubmit", "wait for other jobs to end, or ask for less"),
    (r"dependency", "the job that it depends on is unknown or cannot be depended on: mend `dependency`"),
    (r"reservation", "`scontrol show reservation` lists them; mend `reservation`"),
    (r"Invalid node name|nodelist", "`sinfo -N` lists the nodes; mend `nodelist` or `exclude`"),
    (r"feature", "`sinfo -o '%N %f'` lists the features; mend `constraint`"),
    (r"Access/permission denied|not permitted", "this user may not submit there: ask the administrator"),
)


def submit_error(result: Completed) -> SlurmError:
    """What a failed sbatch means: refused for good, perhaps submitted, or nobody there."""
    text = message(result)
    if result.code < 0 or (_UNCERTAIN.search(text) and "connect failure" not in text):
        return SubmitUncertain(f"sbatch may have submitted the job: {text}")
    if _UNREACHABLE.search(text):
        return SchedulerUnreachable(f"sbatch could not reach Slurm: {text}")
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text, re.IGNORECASE)), "")
    return SubmitRejected(text, remedy)


def is_unreachable(result: Completed) -> bool:
    """Whether a failed query says nothing about the jobs."""
    return result.code < 0 or bool(_UNREACHABLE.search(message(result)))


def has_no_accounting(result: Completed) -> bool:
    """Whether sacct failed because the cluster keeps no accounts (the default of ParallelCluster)."""
    return bool(_NO_ACCOUNTING.search(message(result)))


def message(result: Completed) -> str:
    """What the command complained about, on one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in result.stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {result.code} without a message"


def parse_submission(stdout: str) -> str | None:
    """The job id in what `sbatch --parsable` printed: banner lines before it, `;cluster` behind it."""
    for line in reversed(stdout.splitlines()):
        if match := re.fullmatch(r"\s*([0-9]+)(;\S+)?\s*", line, re.ASCII):
            return match[1]
    return None


def parse_queue(stdout: str) -> list[QueueRow]:
    """The rows of squeue in QUEUE_FORMAT. Lines that are no row (banners) are left out."""
    rows = []
    for line in stdout.splitlines():
        fields = line.split(SEPARATOR, len(QUEUE_FIELDS) - 1)
        if len(fields) < len(QUEUE_FIELDS):
            continue
        job_id, state, reason, nodes, restarts, submitted, status, name = fields
        parsed = parse_state(state)
        rows.append(
            QueueRow(
                job_id=job_id,
                state=parsed,
                reason=None if reason in ("", "None", "(null)") else reason,
                nodes="" if nodes in ("(null)", "None assigned") else nodes,
                name=name,
                restarts=int(restarts) if restarts.isdigit() else 0,
                submitted=parse_time(submitted),
                exit_status=int(status) if status.isdigit() and parsed.is_final else None,
            )
        )
    return rows


def parse_accounting(stdout: str) -> list[AccountingRow]:
    """The rows of sacct in ACCOUNTING_FIELDS."""
    rows = []
    for line in stdout.splitlines():
        fields = line.split(SEPARATOR, 8)
        if len(fields) < 9:
            continue
        job_id, state, code, derived, nodes, submitted, started, ended, name = fields
        exit_code, number = _code(code)
        by = re.fullmatch(r"CANCELLED by ([0-9]+)", state.strip())
        rows.append(
            AccountingRow(
                job_id=job_id,
                state=parse_state(state),
                exit_code=exit_code,
                signal=number,
                derived_exit_code=_code(derived)[0],
                nodes="" if nodes == "None assigned" else nodes,
                name=name,
                submitted=parse_time(submitted),
                started=parse_time(started),
                ended=parse_time(ended),
                cancelled_by=by[1] if by else "",
            )
        )
    return rows


def never_ran(row: AccountingRow) -> bool:
    """A submission that was refused: some use up an id and show as FAILED without ever having started."""
    return row.state is JobState.FAILED and row.started is None


def parse_time(text: str) -> datetime | None:
    """Slurm's time in UTC (the commands run with TZ=UTC); None for Unknown, N/A, None."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


def _code(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
