"""How a job ended, in a state, a cause and words: what each witness alone can say, as pure functions.

Which witness to believe, and when, is decided in `slurm.verdict`.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum

from slurm.folder import ExitRecord
from slurm.markers import LogMarker, MarkerKind
from slurm.reasons import explain
from slurm.scheduler import AccountingRow, QueueRow
from slurm.states import JobState


class Cause(StrEnum):
    """Why a job ended, for whoever decides what to do next.

    none: it succeeded. code: the payload's own doing. cancelled_by_us, cancelled_outside: somebody's decision.
    time_limit: also a payload that failed after the warning signal before it. preempted: a job of higher priority.
    node: hardware or a node failed. launch: Slurm could not start the script (folder, log, prolog). memory: the
    kernel killed for memory. capacity: its nodes never came up (no instances). lost: it disappeared without a trace.
    unknown: killed, and nothing says by whom or what.
    """

    NONE = "none"
    CODE = "code"
    CANCELLED_BY_US = "cancelled_by_us"
    CANCELLED_OUTSIDE = "cancelled_outside"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    NODE = "node"
    LAUNCH = "launch"
    MEMORY = "memory"
    CAPACITY = "capacity"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Ending:
    """What is known of an end. `code` is the shell's (128 + n after signal n); None where nobody knows it."""

    state: JobState
    code: int | None
    signal: int | None
    cause: Cause
    detail: str


@dataclass(frozen=True, kw_only=True)
class Clues:
    """What explains an end beside its witness. `script_ran`: the script's latest start is on record."""

    cancel_requested: bool = False
    script_ran: bool = True
    marker: LogMarker | None = None


Row = QueueRow | AccountingRow

# What others send to end a job; a program rarely dies of them by itself.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # those that `JobSpec.signal` can ask for before the time limit
_LAUNCH_FAILED = 53  # Slurm shows 0:53 for a script that it could not start
_NO_EXIT_FILE = "; the script left no exit file"
_BY_ACCOUNTING = "; by accounting, the script left no exit file"
_CANNOT_START = "Slurm could not start the script: is the job folder there and writable on the nodes?"

_ENDS: dict[JobState, tuple[Cause, str]] = {
    JobState.COMPLETED: (Cause.NONE, "ended with code 0"),
    JobState.CANCELLED: (Cause.CANCELLED_OUTSIDE, "cancelled from outside"),
    JobState.TIMEOUT: (Cause.TIME_LIMIT, "the time limit ended it"),
    JobState.DEADLINE: (Cause.TIME_LIMIT, "it could not end before its deadline"),
    JobState.OUT_OF_MEMORY: (
        Cause.MEMORY,
        "the kernel killed a process of it for using more memory than the job asked for",
    ),
    JobState.NODE_FAIL: (Cause.NODE, "a node of it failed"),
    JobState.PREEMPTED: (Cause.PREEMPTED, "a job of higher priority took its nodes"),
    JobState.BOOT_FAIL: (Cause.CAPACITY, "its nodes did not boot"),
    JobState.LAUNCH_FAILED: (Cause.LAUNCH, "Slurm could not start it on its nodes"),
    JobState.RECONFIG_FAIL: (Cause.NODE, "its nodes could not be configured"),
}
# What Slurm would have called an end that only the log explains. A requeue is no end.
_BY_MARKER: dict[MarkerKind, JobState] = {
    MarkerKind.CANCELLED: JobState.CANCELLED,
    MarkerKind.TIME_LIMIT: JobState.TIMEOUT,
    MarkerKind.PREEMPTED: JobState.PREEMPTED,
    MarkerKind.NODE: JobState.NODE_FAIL,
    MarkerKind.MEMORY: JobState.OUT_OF_MEMORY,
    MarkerKind.CAPACITY: JobState.BOOT_FAIL,
}
# Reasons that squeue keeps beside FAILED.
_BY_REASON = {
    "TimeLimit": Cause.TIME_LIMIT,
    "OutOfMemory": Cause.MEMORY,
    "NodeDown": Cause.NODE,
    "SystemFailure": Cause.NODE,
}


def by_exit_file(record: ExitRecord, slurm: Row | None, clues: Clues) -> Ending:
    """The script wrote its end down; `slurm` is what Slurm says of it, None where it says nothing (any more)."""
    died = record.code - 128 if 128 < record.code <= 192 else None
    number = record.signal or died
    known = slurm.state if slurm else None
    state: JobState
    if known and known not in (JobState.COMPLETED, JobState.FAILED):
        state = known
    elif record.code == 0 and known is not JobState.FAILED:
        state = JobState.COMPLETED
    elif number in ENDING_SIGNALS and clues.cancel_requested:
        state = JobState.CANCELLED
    elif number in ENDING_SIGNALS and known is None and clues.marker:
        state = _BY_MARKER.get(clues.marker.kind, JobState.FAILED)
    else:
        state = JobState.FAILED
    if state is not JobState.FAILED:
        cause, detail = _of_state(state, slurm, clues)
        if record.code == 0 and state is not JobState.COMPLETED:
            detail += ", although the payload ended with code 0"
        return Ending(state, record.code, number, cause, detail)
    cause, detail = _of_failure(record.code, died if record.signal in _WARNINGS else number, slurm, clues)
    if record.code == 0:
        detail = f"Slurm calls it failed, although the payload ended with code 0: {detail}"
    elif cause is Cause.UNKNOWN and record.signal in ENDING_SIGNALS:
        detail = "told to end by a signal: cancelled from outside, time limit or preemption; nothing says which"
    elif cause in (Cause.CODE, Cause.UNKNOWN) and record.signal in _WARNINGS:
        cause, detail = Cause.TIME_LIMIT, f"{detail} after the warning before its time limit"
    return Ending(state, record.code, number, cause, detail)


def by_queue(row: QueueRow, accounting: AccountingRow | None, clues: Clues) -> Ending:
    """The queue shows the end and there is no exit file: SIGKILL, a full disk, or no start at all."""
    if row.state is JobState.COMPLETED:
        return _completed(accounting, clues, _NO_EXIT_FILE)
    code, number = _wait_status(row.exit_status)
    if row.state is not JobState.FAILED:
        code = code or None  # it never ran, or did not end by itself
        cause, detail = _of_state(row.state, row, clues)
    elif row.exit_status == _LAUNCH_FAILED or (row.reason == "JobLaunchFailure" and not clues.script_ran):
        code, number, cause, detail = None, None, Cause.LAUNCH, _CANNOT_START
    else:
        code = code or None
        cause, detail = _of_failure(code, number, row, clues)
    return Ending(row.state, code, number, cause, detail + _NO_EXIT_FILE)


def by_accounting(row: AccountingRow, clues: Clues) -> Ending:
    """Only accounting knows the end. It keeps seven bits of a code: 255 is shown as 127, 137 as 9."""
    if row.state is JobState.COMPLETED:
        return _completed(row, clues, _BY_ACCOUNTING)
    number = row.signal if 0 < row.signal < signal.NSIG else None
    code = 128 + number if number else row.exit_code or row.derived_exit_code or None
    if row.state is not JobState.FAILED:
        cause, detail = _of_state(row.state, row, clues)
    elif row.signal == _LAUNCH_FAILED:
        code, number, cause, detail = None, None, Cause.LAUNCH, _CANNOT_START
    else:
        cause, detail = _of_failure(code, number, row, clues)
        if code and not number:
            detail += f" or {code + 128} (accounting keeps seven bits)"
    return Ending(row.state, code, number, cause, detail + _BY_ACCOUNTING)


def lost(told: str, clues: Clues) -> Ending:
    """Neither the queue nor an exit file nor accounting knows the end; `told` is what they said instead."""
    state = _BY_MARKER.get(clues.marker.kind) if clues.marker else None
    if clues.cancel_requested:
        state = JobState.CANCELLED
    if state:
        cause, detail = _of_state(state, None, clues)
        return Ending(state, None, None, cause, f"{detail}; it is not in the queue any more and left no exit file")
    detail = f"the job is lost: not in the queue, no exit file, and {told}; its node or the scheduler's memory was lost"
    return Ending(JobState.NODE_FAIL, None, None, Cause.LOST, detail)


def _completed(accounting: AccountingRow | None, clues: Clues, note: str) -> Ending:
    """COMPLETED by Slurm alone: the script ended well, but a step of it (an srun in it) need not have."""
    if accounting and accounting.derived_exit_code:
        code = accounting.derived_exit_code
        cause, detail = _of_failure(code, None, None, clues)
        return Ending(JobState.FAILED, code, None, cause, f"a step of the job {detail}{note}")
    cause, detail = _ENDS[JobState.COMPLETED]
    return Ending(JobState.COMPLETED, 0, None, cause, detail + note)


def _of_state(state: JobState, slurm: Row | None, clues: Clues) -> tuple[Cause, str]:
    """Cause and words of an end that has a name of its own."""
    cause, detail = _ENDS[state]
    marker = clues.marker
    if state is JobState.NODE_FAIL and not clues.script_ran:
        return Cause.CAPACITY, "its nodes did not come up, or failed before the script started"
    if state is JobState.CANCELLED:
        if clues.cancel_requested:
            return Cause.CANCELLED_BY_US, "cancelled by this run"
        if isinstance(slurm, QueueRow) and slurm.reason and (why := explain(slurm.reason)).hopeless:
            detail = f"cancelled by Slurm, {why.reason}: {why.meaning}"
        if isinstance(slurm, AccountingRow) and slurm.cancelled_by:
            detail += f" by user {slurm.cancelled_by}"
        elif isinstance(slurm, AccountingRow) and marker is None:
            # So look old jobs when a controller that lost its state starts again; scancel leaves a name.
            return Cause.LOST, "the controller lost its memory of it: accounting calls it cancelled, but by nobody"
    if slurm is None and marker and _BY_MARKER.get(marker.kind) is state:
        detail += f" (its log: {marker.line})"
    return cause, detail


def _of_failure(code: int | None, number: int | None, slurm: Row | None, clues: Clues) -> tuple[Cause, str]:
    """Cause and words of an end that Slurm calls nothing but a failure."""
    text = _code_text(code, number)
    killed = not code or number in (*ENDING_SIGNALS, signal.SIGKILL)
    marker = clues.marker
    # "Cancelled" explains only what died of a signal: a job that fails is cleaned up in the same words.
    if marker and (state := _BY_MARKER.get(marker.kind)) and (killed or marker.kind is not MarkerKind.CANCELLED):
        cause, why = _of_state(state, None, clues)
        return cause, f"{text}: {why}"
    if isinstance(slurm, QueueRow) and slurm.reason in _BY_REASON:
        return _BY_REASON[slurm.reason], f"{text}, {slurm.reason}"
    return (Cause.UNKNOWN if killed else Cause.CODE), text


def _wait_status(status: int | None) -> tuple[int | None, int | None]:
    """Shell code and signal. Slurm has numbers of its own above the signals, as 125 for out of memory."""
    if status is None:
        return None, None
    code, number = status >> 8 & 0xFF, status & 0x7F
    if number >= signal.NSIG:
        return None, None
    return (128 + number if number else code), (number or None)


def _code_text(code: int | None, number: int | None) -> str:
    if number:
        try:
            return f"killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"ended with code {code}"
    return f"ended with code {code}" if code is not None else "ended, nobody knows how"
