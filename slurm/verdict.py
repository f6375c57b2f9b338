"""How a job stands: one pure function over everything that can be observed of it.

There are three witnesses. The exit file is the truth about the payload, but it may be of an earlier start, and the job
may be requeued after it. The queue is the truth about whether the job lives, and shows an ended job for some minutes
(MinJobAge). Accounting may not exist, lags, and shows final-looking states that are none for up to 13 seconds. So an
end counts when the exit file and the queue agree, or when two looks some time apart do; until then the job is UNKNOWN
or what it last was, never a success or a failure.
"""

import signal
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from slurm.folder import ExitRecord, StartRecord
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.states import JobState


@dataclass(frozen=True)
class JobStatus:
    """How a job that has not ended stands. `note` is for the reader: an outage, or what is being waited for."""

    job_id: str
    state: JobState
    reason: str | None
    nodes: str
    since: datetime
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `exit_code` is the shell's (128 + n after signal n), None where nobody knows it.

    `signal` is what the job script received or died of; `by_us`: ended because this project cancelled it.
    """

    job_id: str
    state: JobState
    exit_code: int | None
    signal: int | None
    restarts: int
    nodes: str
    started: datetime | None
    ended: datetime | None
    by_us: bool
    detail: str

    @property
    def succeeded(self) -> bool:
        return self.state is JobState.COMPLETED and self.exit_code == 0


class Standing(StrEnum):
    """LIVE: wait. SETTLING: it looks ended, ask again. FINAL: it has ended."""

    LIVE = "live"
    SETTLING = "settling"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What is known of one job. `row` is its row in the last answered queue query, made at `queue_at` (None: none yet).

    `last_row` is the last row ever seen. `claim` and `claim_at` are those of the previous verdict.
    """

    job_id: str
    exit: ExitRecord | None = None
    start: StartRecord | None = None
    reachable: bool = True
    queue_at: datetime | None = None
    row: QueueRow | None = None
    last_row: QueueRow | None = None
    accounting_at: datetime | None = None
    accounting: AccountingRow | None = None
    cancel_requested: bool = False
    claim: str = ""
    claim_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`state` is for display while not final. `claim` names the end that is being confirmed, first seen at `claim_at`.

    `ask_accounting`: only accounting can settle it.
    """

    standing: Standing
    state: JobState
    outcome: Outcome | None = None
    claim: str = ""
    claim_at: datetime | None = None
    ask_accounting: bool = False
    note: str = ""


def judge(seen: Observations, timing: Timing) -> Verdict:
    """Merge the witnesses; see the table in tests/slurm/test_verdict.py."""
    last = seen.row or seen.last_row
    if seen.queue_at is None or not seen.reachable:
        note = "" if seen.reachable else "the scheduler does not answer; the job goes on unwatched"
        shown = last.state if last and not last.state.is_final else JobState.UNKNOWN
        return Verdict(standing=Standing.LIVE, state=shown, note=note, claim=seen.claim, claim_at=seen.claim_at)
    record = matching_exit(seen)
    if seen.row and not seen.row.state.is_final:
        ending = record is not None and not seen.row.state.is_waiting
        return Verdict(standing=Standing.LIVE, state=JobState.COMPLETING if ending else seen.row.state)
    final = last if last and last.state.is_final else None
    if record and not (final and final.state.may_be_requeued):
        return _final(_from_exit(seen, record, final))
    if final:
        claim = f"queue {final.state} {final.restarts}"
        return _settle(seen, claim, seen.queue_at, timing.confirm, _from_queue(seen, final, record))
    account = seen.accounting
    if account and account.state.is_final and seen.accounting_at:
        claim = f"accounting {account.state} {account.exit_code}:{account.signal}"
        verdict = _settle(seen, claim, seen.accounting_at, timing.confirm, _from_accounting(seen, account))
    else:
        verdict = _settle(seen, "absent", seen.queue_at, timing.lost, _lost(seen, account))
    return verdict


def matching_exit(seen: Observations) -> ExitRecord | None:
    """The exit file, if it is of this job and of its latest start."""
    record = seen.exit
    restarts = max(row.restarts for row in (seen.row, seen.last_row) if row) if seen.row or seen.last_row else 0
    if seen.start and seen.start.job_id == seen.job_id:
        restarts = max(restarts, seen.start.restart_count)
    if record is None or record.job_id != seen.job_id or record.restart_count < restarts:
        return None
    return record


def _final(outcome: Outcome) -> Verdict:
    return Verdict(standing=Standing.FINAL, state=outcome.state, outcome=outcome)


def _settle(seen: Observations, claim: str, looked: datetime, apart: float, outcome: Outcome) -> Verdict:
    since = seen.claim_at if claim == seen.claim and seen.claim_at else looked
    if looked - since >= timedelta(seconds=apart):
        return _final(outcome)
    unknown = claim.startswith(("absent", "accounting"))
    return Verdict(
        standing=Standing.SETTLING,
        state=JobState.UNKNOWN if unknown else JobState.COMPLETING,
        claim=claim,
        claim_at=since,
        ask_accounting=unknown,
        note="not in the queue any more and no exit file yet" if unknown else "ended by the queue, being confirmed",
    )


def _from_exit(seen: Observations, record: ExitRecord, final: QueueRow | None) -> Outcome:
    number = record.signal or (record.code - 128 if 128 < record.code <= 192 else None)
    told_to_end = record.signal in _ENDING
    state: JobState
    if final is not None and final.state not in (JobState.COMPLETED, JobState.FAILED):
        state = final.state
    elif record.code == 0 and (final is None or final.state is JobState.COMPLETED):
        state = JobState.COMPLETED
    else:
        state = JobState.CANCELLED if number in _ENDING and seen.cancel_requested else JobState.FAILED
    if record.code == 0 and state is not JobState.COMPLETED:
        detail = f"{_ENDS.get(state, str(state))}, although the payload ended with code 0"
    elif state in _ENDS:
        detail = _ENDS[state]
    elif told_to_end:
        detail = (
            "told to end by a signal: cancelled from outside, time limit or preemption; the queue does not say which"
        )
    else:
        detail = _code_text(record.code, number)
    return _outcome(seen, state, record.code, number, record.nodes, record.started, record.ended, detail)


def _from_queue(seen: Observations, row: QueueRow, record: ExitRecord | None) -> Outcome:
    if record:
        return _from_exit(seen, record, row)
    code, number = _wait_status(row.exit_status)
    if code == 0 and row.state is not JobState.COMPLETED:
        code = None  # it never ran, or did not end by itself
    if row.reason == "JobLaunchFailure" or (row.state is JobState.FAILED and number == 53):
        detail = "Slurm could not start the script: is the job folder there and writable on the nodes?"
    else:
        detail = _ENDS.get(row.state) or _code_text(code, number)
    started = seen.start.started if seen.start and seen.start.job_id == seen.job_id else None
    return _outcome(seen, row.state, code, number, row.nodes, started, None, f"{detail}; the script left no exit file")


def _from_accounting(seen: Observations, row: AccountingRow) -> Outcome:
    state, detail = row.state, _ENDS.get(row.state) or _code_text(row.exit_code, row.signal or None)
    if state is JobState.COMPLETED and row.derived_exit_code:
        state, detail = JobState.FAILED, f"a step of the job ended with code {row.derived_exit_code}"
    code: int | None = 128 + row.signal if row.signal else row.exit_code
    if code == 0 and state is not JobState.COMPLETED:
        code = row.derived_exit_code or None
    detail += "; by accounting, the script left no exit file"
    return _outcome(seen, state, code, row.signal or None, row.nodes, row.started, row.ended, detail)


def _lost(seen: Observations, account: AccountingRow | None) -> Outcome:
    told = f"accounting still says {account.state}" if account else "accounting does not know it or does not exist"
    detail = f"the job is lost: not in the queue, no exit file, and {told}; its node or the scheduler's memory was lost"
    last = seen.last_row
    nodes = (last.nodes if last else "") or (seen.start.nodes if seen.start else "")
    started = seen.start.started if seen.start else None
    return _outcome(seen, JobState.NODE_FAIL, None, None, nodes, started, None, detail)


def _outcome(
    seen: Observations,
    state: JobState,
    code: int | None,
    number: int | None,
    nodes: str,
    started: datetime | None,
    ended: datetime | None,
    detail: str,
) -> Outcome:
    by_us = seen.cancel_requested and state is JobState.CANCELLED
    if state is JobState.CANCELLED:
        detail = ("cancelled by this run" if by_us else "cancelled from outside") + detail.removeprefix("cancelled")
    counts = [row.restarts for row in (seen.row, seen.last_row) if row]
    counts += [record.restart_count for record in (seen.exit, seen.start) if record and record.job_id == seen.job_id]
    return Outcome(
        seen.job_id, state, code, number, max(counts, default=0), nodes, started, ended, by_us=by_us, detail=detail
    )


_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ENDS = {
    JobState.COMPLETED: "ended with code 0",
    JobState.CANCELLED: "cancelled",
    JobState.TIMEOUT: "the time limit ended it",
    JobState.OUT_OF_MEMORY: "the kernel killed a process of it for using more memory than the job asked for",
    JobState.NODE_FAIL: "a node of it failed",
    JobState.PREEMPTED: "a job of higher priority took its nodes",
    JobState.BOOT_FAIL: "its nodes did not boot",
    JobState.DEADLINE: "it could not end before its deadline",
    JobState.LAUNCH_FAILED: "Slurm could not start it on its nodes",
    JobState.RECONFIG_FAIL: "its nodes could not be configured",
}


def _wait_status(status: int | None) -> tuple[int | None, int | None]:
    if status is None:
        return None, None
    code, number = status >> 8 & 0xFF, status & 0x7F
    return (128 + number if number else code), (number or None)


def _code_text(code: int | None, number: int | None) -> str:
    if number:
        try:
            return f"killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"ended with code {code}"
    return f"ended with code {code}" if code is not None else "ended, nobody knows how"
