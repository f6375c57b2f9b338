"""How a job stands: one pure function over everything that can be observed of it.

There are three witnesses. The exit file is the truth about the payload, but it may be of an earlier start, and the job
may be requeued after it. The queue is the truth about whether the job lives, and shows an ended job for some minutes
(MinJobAge). Accounting may not exist, lags, and shows final-looking states that are none for up to 13 seconds. So an
end counts when the exit file and the queue agree, or when two looks some time apart do; until then the job is UNKNOWN
or what it last was, never a success or a failure. The end of the log explains ends and never makes one.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from slurm import ending
from slurm.ending import Cause, Clues, Ending
from slurm.folder import ExitRecord, StartRecord
from slurm.markers import LogMarker
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.states import JobState

# A job's name is unique; the time only catches one that was used again, so clocks may be far apart.
_SKEW = timedelta(minutes=10)

Witness = ExitRecord | QueueRow | AccountingRow | None


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

    `signal` is what the job script received or died of; `by_us`: ended because this project cancelled it. `state` is
    Slurm's word, `cause` what is behind it.
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
    cause: Cause

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

    `name` and `submitted` are those of its job record: rows of another job that has its id by now are left out (an
    empty name fits every row). `last_row` is the last row ever seen. `marker` is the end of its log. `claim` and
    `claim_at` are those of the previous verdict.
    """

    job_id: str
    name: str = ""
    submitted: datetime | None = None
    exit: ExitRecord | None = None
    start: StartRecord | None = None
    marker: LogMarker | None = None
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
    taken = _is_foreign(seen, seen.row)
    seen = _own(seen)
    last = seen.row or seen.last_row
    if seen.queue_at is None or not seen.reachable:
        note = "" if seen.reachable else "the scheduler does not answer; the job goes on unwatched"
        shown = last.state if last and not last.state.is_final else JobState.UNKNOWN
        return Verdict(standing=Standing.LIVE, state=shown, note=note, claim=seen.claim, claim_at=seen.claim_at)
    record = matching_exit(seen)
    if seen.row and not seen.row.state.is_final:
        ends = record is not None and not seen.row.state.is_waiting
        return Verdict(standing=Standing.LIVE, state=JobState.COMPLETING if ends else seen.row.state)
    final = last if last and last.state.is_final else None
    if record:
        return _with_exit_file(seen, record, final, seen.queue_at, timing)
    if final:
        end = ending.by_queue(final, _account(seen), _clues(seen))
        # A script that ended well may have had a failing step, and nobody else saw it.
        ask = final.state is JobState.COMPLETED
        return _settle(seen, _queued(final), seen.queue_at, timing.confirm, end, final, ask=ask)
    return _gone(seen, seen.queue_at, timing, taken=taken)


def _with_exit_file(
    seen: Observations, record: ExitRecord, final: QueueRow | None, looked: datetime, timing: Timing
) -> Verdict:
    """The payload has ended and the queue does not show the job as live."""
    clues = _clues(seen, ran=True)
    if final:
        end = ending.by_exit_file(record, final, clues)
        if final.state.may_be_requeued:
            return _settle(seen, _queued(final), looked, timing.confirm, end, record)
        return _final(seen, end, record)
    told = record.signal in ending.ENDING_SIGNALS or record.code - 128 in ending.ENDING_SIGNALS
    if not told or _is_explained(seen):
        return _final(seen, ending.by_exit_file(record, None, clues), record)
    # Somebody ended it, and only accounting can still say who. It says FAILED of whatever it does not understand.
    account = _account(seen)
    end = ending.by_exit_file(record, account, clues)
    if account and account.state is not JobState.FAILED:
        return _final(seen, end, record)
    return _settle(seen, "exit file", looked, max(timing.accounting, timing.confirm), end, record, ask=True)


def _gone(seen: Observations, looked: datetime, timing: Timing, *, taken: bool) -> Verdict:
    """Not in the queue and without an exit file: accounting has the word, or nobody."""
    account, clues = _account(seen), _clues(seen)
    if account and seen.accounting_at:
        codes = f"{account.exit_code}:{account.signal}"
        # For seconds after an outage of its own, accounting shows FAILED 0:0 for whatever ended meanwhile.
        empty = account.state is JobState.FAILED and codes == "0:0" and not account.derived_exit_code
        apart = max(timing.lost, timing.confirm) if empty else timing.confirm
        end = ending.by_accounting(account, clues)
        return _settle(seen, f"accounting {account.state} {codes}", seen.accounting_at, apart, end, account, ask=True)
    told = "accounting does not know it or does not exist"
    if seen.accounting:
        told = f"accounting still says {seen.accounting.state}"
    if taken:
        told = "its id belongs to another job now"
    # An explained end is only confirmed; for any other the exit file may still be on its way.
    apart = timing.confirm if _is_explained(seen) else max(timing.lost, timing.confirm)
    return _settle(seen, "absent", looked, apart, ending.lost(told, clues), seen.last_row, ask=True)


def matching_exit(seen: Observations) -> ExitRecord | None:
    """The exit file, if it is of this job and of its latest start."""
    record = seen.exit
    if record is None or record.job_id != seen.job_id or record.restart_count < _restarts(_own(seen)):
        return None
    return record


def _own(seen: Observations) -> Observations:
    """Without what Slurm says of another job: ids start again at 1 when the controller loses its state."""
    return replace(
        seen,
        row=None if _is_foreign(seen, seen.row) else seen.row,
        last_row=None if _is_foreign(seen, seen.last_row) else seen.last_row,
        accounting=None if _is_foreign(seen, seen.accounting) else seen.accounting,
    )


def _is_foreign(seen: Observations, row: QueueRow | AccountingRow | None) -> bool:
    if row is None:
        return False
    older = bool(seen.submitted and row.submitted and row.submitted < seen.submitted - _SKEW)
    return older or bool(seen.name and row.name != seen.name)


def _account(seen: Observations) -> AccountingRow | None:
    return seen.accounting if seen.accounting and seen.accounting.state.is_final else None


def _is_explained(seen: Observations) -> bool:
    """Whether the end was asked for by us, or slurmstepd wrote down one after which no job is put back."""
    return seen.cancel_requested or (seen.marker is not None and seen.marker.kind.is_conclusive)


def _restarts(seen: Observations) -> int:
    """How often the job is known to have been put back into the queue, without the exit file's word."""
    counts = [row.restarts for row in (seen.row, seen.last_row) if row]
    if seen.start and seen.start.job_id == seen.job_id:
        counts.append(seen.start.restart_count)
    return max(counts, default=0)


def _clues(seen: Observations, *, ran: bool = False) -> Clues:
    start = seen.start
    ran = ran or (start is not None and start.job_id == seen.job_id and start.restart_count >= _restarts(seen))
    return Clues(cancel_requested=seen.cancel_requested, script_ran=ran, marker=seen.marker)


def _queued(row: QueueRow) -> str:
    return f"queue {row.state} {row.restarts}"


def _settle(
    seen: Observations, claim: str, looked: datetime, apart: float, end: Ending, witness: Witness, *, ask: bool = False
) -> Verdict:
    """Final once this claim has stood for `apart` seconds between two looks."""
    since = seen.claim_at if claim == seen.claim and seen.claim_at else looked
    if looked - since >= timedelta(seconds=apart):
        return replace(_final(seen, end, witness), claim=claim, claim_at=since)
    state, note = JobState.UNKNOWN, "not in the queue any more and no exit file yet"
    if claim.startswith("queue"):
        state, note = JobState.COMPLETING, "ended by the queue, being confirmed"
    elif isinstance(witness, ExitRecord):
        state, note = JobState.COMPLETING, "told to end and not in the queue any more; looking for who ended it"
    return Verdict(standing=Standing.SETTLING, state=state, claim=claim, claim_at=since, ask_accounting=ask, note=note)


def _final(seen: Observations, end: Ending, witness: Witness) -> Verdict:
    start = seen.start if seen.start and seen.start.job_id == seen.job_id else None
    started, ended = start.started if start else None, None
    if isinstance(witness, ExitRecord | AccountingRow):
        started, ended = witness.started, witness.ended
    outcome = Outcome(
        job_id=seen.job_id,
        state=end.state,
        exit_code=end.code,
        signal=end.signal,
        restarts=max(_restarts(seen), witness.restart_count if isinstance(witness, ExitRecord) else 0),
        nodes=(witness.nodes if witness else "") or (start.nodes if start else ""),
        started=started,
        ended=ended,
        by_us=end.cause is Cause.CANCELLED_BY_US,
        detail=end.detail,
        cause=end.cause,
    )
    return Verdict(standing=Standing.FINAL, state=end.state, outcome=outcome)
