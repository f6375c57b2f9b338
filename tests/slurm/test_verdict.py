"""The table of verdicts: every combination of witnesses that Slurm is known to produce, then all combinations at once.

The traps are those of "Slurm as it really behaves" (Slurm 22.05 to 25.11): each has at least one row here.
"""
# ruff: noqa: E501 - a table row is a line

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slurm.ending import Cause
from slurm.folder import ExitRecord, StartRecord
from slurm.markers import LogMarker, MarkerKind
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.states import JobState
from slurm.verdict import Observations, Outcome, Standing, Verdict, judge, matching_exit

T0 = datetime(2030, 1, 1, tzinfo=UTC)
TIMING = Timing(exit_scan=2, queue=15, early=5, accounting=60, confirm=10, lost=300)
S, C, K = JobState, Cause, MarkerKind
LIVE, SETTLING, FINAL = Standing.LIVE, Standing.SETTLING, Standing.FINAL


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def row(
    state: JobState, restarts: int = 0, status: int | None = None, reason: str | None = None, name: str = "n",
    submitted: datetime | None = T0,
) -> QueueRow:  # fmt: skip
    return QueueRow("7", state, reason, "n1", name, restarts, submitted, status)


def exited(code: int, signal: int | None = None, restarts: int = 0, job_id: str = "7") -> ExitRecord:
    return ExitRecord(job_id, restarts, "n1", "n1", code, signal, at(1), at(9))


def started(restarts: int = 0, job_id: str = "7") -> StartRecord:
    return StartRecord(job_id, restarts, "n1", "n1", at(1))


def account(
    state: JobState, code: int = 0, signal: int = 0, derived: int = 0, by: str = "", name: str = "n",
    submitted: datetime | None = T0,
) -> AccountingRow:  # fmt: skip
    return AccountingRow("7", state, code, signal, derived, "n1", name, submitted, at(1), at(9), by)


def log(kind: MarkerKind) -> LogMarker:
    return LogMarker(kind, f"*** {kind} ***")


def seen(**facts: Any) -> Observations:
    facts.setdefault("queue_at", at(10))
    facts.setdefault("last_row", facts.get("row"))
    facts.setdefault("accounting_at", at(10) if "accounting" in facts else None)
    return Observations(job_id="7", name="n", submitted=T0, **facts)


def claimed(claim: str, seconds: float = 0) -> dict[str, Any]:
    """The previous verdict saw the same end."""
    return {"claim": claim, "claim_at": at(seconds)}


def twice(state: JobState, restarts: int = 0, **more: Any) -> dict[str, Any]:
    """Shown by the queue in two looks ten seconds apart."""
    return {"row": row(state, restarts, **more), **claimed(f"queue {state} {restarts}")}


def accounted(found: AccountingRow) -> dict[str, Any]:
    """Gone from the queue, and shown by accounting in two looks a minute apart."""
    claim = f"accounting {found.state} {found.exit_code}:{found.signal}"
    return {"accounting": found, "accounting_at": at(60), "queue_at": at(60), **claimed(claim)}


OURS = {"cancel_requested": True}
GONE = claimed("absent", -300)


@dataclass(frozen=True)
class Case:
    name: str
    facts: dict[str, Any]
    standing: Standing
    state: JobState
    cause: Cause | None = None
    code: int | None = None
    word: str = ""


CASES = [
    # alive
    Case("nothing asked yet", {"queue_at": None}, LIVE, S.UNKNOWN),
    Case("good exit file, queue not asked", {"queue_at": None, "exit": exited(0)}, LIVE, S.UNKNOWN),
    Case("pending", {"row": row(S.PENDING)}, LIVE, S.PENDING),
    Case("held", {"row": row(S.PENDING, reason="JobHeldUser")}, LIVE, S.PENDING),
    Case("held after launch failure", {"row": row(S.PENDING, 1, reason="launch failed requeued held")}, LIVE, S.PENDING),
    Case("requeued and held", {"row": row(S.REQUEUE_HOLD, 1)}, LIVE, S.REQUEUE_HOLD),
    Case("dependency never satisfied", {"row": row(S.PENDING, reason="DependencyNeverSatisfied")}, LIVE, S.PENDING),
    Case("nodes boot", {"row": row(S.CONFIGURING)}, LIVE, S.CONFIGURING),
    Case("nodes boot, sacct says running", {"row": row(S.CONFIGURING), "accounting": account(S.RUNNING)}, LIVE, S.CONFIGURING),
    Case("node never booted, back in the queue", {"row": row(S.PENDING, 1, reason="BeginTime"), "accounting": account(S.NODE_FAIL)}, LIVE, S.PENDING),
    Case("running", {"row": row(S.RUNNING)}, LIVE, S.RUNNING),
    Case("a state from the future", {"row": row(S.UNKNOWN)}, LIVE, S.UNKNOWN),
    Case("suspended", {"row": row(S.SUSPENDED)}, LIVE, S.SUSPENDED),
    Case("code 0 while the queue shows it running", {"row": row(S.RUNNING), "exit": exited(0)}, LIVE, S.COMPLETING),
    Case("code 0 while the queue shows it pending", {"row": row(S.PENDING), "exit": exited(0)}, LIVE, S.PENDING),
    Case("code 3 while the queue shows it completing", {"row": row(S.COMPLETING), "exit": exited(3)}, LIVE, S.COMPLETING),
    Case("sacct says completed, queue has the last word", {"row": row(S.RUNNING), "accounting": account(S.COMPLETED)}, LIVE, S.RUNNING),
    Case("sacct says FAILED 0:0 after its outage, the queue knows better", {"row": row(S.RUNNING), "accounting": account(S.FAILED)}, LIVE, S.RUNNING),
    Case("time limit in the log while the queue shows it completing", {"row": row(S.COMPLETING), "marker": log(K.TIME_LIMIT)}, LIVE, S.COMPLETING),
    # nobody answers
    Case("outage", {"row": row(S.RUNNING), "reachable": False}, LIVE, S.RUNNING, word="does not answer"),
    Case("outage after an end that was seen once", {"row": row(S.FAILED), "reachable": False, **claimed("queue FAILED 0", -999)}, LIVE, S.UNKNOWN, word="does not answer"),
    Case("outage with a good exit file", {"exit": exited(0), "reachable": False}, LIVE, S.UNKNOWN, word="not answer"),
    Case("outage, accounting knows", {"accounting": account(S.FAILED, 3), "reachable": False}, LIVE, S.UNKNOWN, word="not answer"),
    # the end, agreed by exit file and queue
    Case("good", {"row": row(S.COMPLETED, status=0), "exit": exited(0)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("bad", {"row": row(S.FAILED, status=768), "exit": exited(3)}, FINAL, S.FAILED, C.CODE, 3, "code 3"),
    Case("good and purged", {"last_row": row(S.RUNNING), "exit": exited(0)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("good and never seen", {"exit": exited(0)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("good and purged, sacct says FAILED 0:0 after its outage", {"exit": exited(0), "accounting": account(S.FAILED)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("good, a step that the payload ignored failed", {"exit": exited(0), "accounting": account(S.COMPLETED, derived=5)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("bad and purged, all eight bits", {"exit": exited(255), "accounting": account(S.FAILED, 127)}, FINAL, S.FAILED, C.CODE, 255, "code 255"),
    Case("no activation file", {"exit": exited(78)}, FINAL, S.FAILED, C.CODE, 78),
    Case("payload killed by 9", {"row": row(S.FAILED), "exit": exited(137)}, FINAL, S.FAILED, C.UNKNOWN, 137, "SIGKILL"),
    Case("payload crashed", {"row": row(S.FAILED), "exit": exited(139)}, FINAL, S.FAILED, C.CODE, 139, "SIGSEGV"),
    Case("time limit", {"row": row(S.TIMEOUT), "exit": exited(143, 15)}, FINAL, S.TIMEOUT, C.TIME_LIMIT, 143, "time limit"),
    Case("time limit, the payload was faster", {"row": row(S.TIMEOUT), "exit": exited(0)}, FINAL, S.TIMEOUT, C.TIME_LIMIT, 0, "although"),
    Case("failed after the warning", {"row": row(S.FAILED), "exit": exited(75, 10)}, FINAL, S.FAILED, C.TIME_LIMIT, 75, "code 75 after the warning"),
    Case("died of the warning", {"row": row(S.FAILED), "exit": exited(138, 10)}, FINAL, S.FAILED, C.TIME_LIMIT, 138, "SIGUSR1"),
    Case("told its workers to end after the warning", {"row": row(S.FAILED), "exit": exited(143, 10)}, FINAL, S.FAILED, C.TIME_LIMIT, 143),
    Case("done after the warning", {"row": row(S.COMPLETED), "exit": exited(0, 10)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("scancel by others", {"row": row(S.CANCELLED), "exit": exited(143, 15)}, FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE, 143, "outside"),
    Case("scancel by us", {"row": row(S.CANCELLED), "exit": exited(143, 15), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US, 143, "by this run"),
    Case("scancel by us, purged", {"exit": exited(143, 15), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US, 143),
    Case("scancel by us, purged, the payload was faster than the script", {"exit": exited(143), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US, 143),
    Case("cancelled too late", {"row": row(S.COMPLETED), "exit": exited(0), **OURS}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("failed by itself before our cancel", {"row": row(S.FAILED), "exit": exited(3), **OURS}, FINAL, S.FAILED, C.CODE, 3),
    Case("time limit before our cancel", {"row": row(S.TIMEOUT), "exit": exited(143, 15), **OURS}, FINAL, S.TIMEOUT, C.TIME_LIMIT, 143),
    Case("TERM to the batch script only", {"row": row(S.FAILED), "exit": exited(143, 15)}, FINAL, S.FAILED, C.UNKNOWN, 143, "nothing says which"),
    Case("TERM to the batch script only, in the log", {"row": row(S.FAILED), "exit": exited(143, 15), "marker": log(K.CANCELLED)}, FINAL, S.FAILED, C.CANCELLED_OUTSIDE, 143),
    Case("out of memory although the payload ended well", {"row": row(S.OUT_OF_MEMORY), "exit": exited(0)}, FINAL, S.OUT_OF_MEMORY, C.MEMORY, 0, "although"),
    Case("out of memory inside srun", {"row": row(S.FAILED, status=256), "exit": exited(1), "marker": log(K.MEMORY)}, FINAL, S.FAILED, C.MEMORY, 1, "memory"),
    Case("a node failed under srun", {"row": row(S.FAILED, status=256), "exit": exited(1), "marker": log(K.NODE)}, FINAL, S.FAILED, C.NODE, 1, "node"),
    Case("srun found nodes that did not boot", {"row": row(S.FAILED), "exit": exited(1), "marker": log(K.CAPACITY)}, FINAL, S.FAILED, C.CAPACITY, 1, "boot"),
    Case("failed, then cleaned up in scancel's words", {"row": row(S.FAILED), "exit": exited(1), "marker": log(K.CANCELLED)}, FINAL, S.FAILED, C.CODE, 1),
    Case("a marker does not make a failure of a success", {"row": row(S.COMPLETED), "exit": exited(0), "marker": log(K.MEMORY)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("Slurm says failed, the payload 0", {"row": row(S.FAILED), "exit": exited(0)}, FINAL, S.FAILED, C.UNKNOWN, 0, "although"),
    # told to end long ago, and the queue has forgotten why
    Case("a signal and purged", {"exit": exited(143, 15)}, SETTLING, S.COMPLETING, word="looking for who ended it"),
    Case("a signal and purged, the payload was faster than the script", {"exit": exited(143)}, SETTLING, S.COMPLETING),
    Case("a signal and purged, asked for long", {"exit": exited(143, 15), "queue_at": at(60), **claimed("exit file")}, FINAL, S.FAILED, C.UNKNOWN, 143, "nothing says which"),
    Case("a signal and purged, time limit in the log", {"exit": exited(143, 15), "marker": log(K.TIME_LIMIT)}, FINAL, S.TIMEOUT, C.TIME_LIMIT, 143, "its log"),
    Case("a signal and purged, scancel in the log", {"exit": exited(143, 15), "marker": log(K.CANCELLED)}, FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE, 143),
    Case("a signal and purged, preemption in the log: perhaps requeued and cancelled later", {"exit": exited(143, 15), "marker": log(K.PREEMPTED)}, SETTLING, S.COMPLETING),
    Case("the same, and nobody knows better", {"exit": exited(143, 15), "marker": log(K.PREEMPTED), "queue_at": at(60), **claimed("exit file")}, FINAL, S.PREEMPTED, C.PREEMPTED, 143),
    Case("the same, and accounting does", {"exit": exited(143, 15), "marker": log(K.PREEMPTED), "accounting": account(S.CANCELLED, by="1000")}, FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE, 143, "by user 1000"),
    Case("a signal and purged, requeue in the log, and no more", {"exit": exited(143, 15), "marker": log(K.REQUEUED), "queue_at": at(60), **claimed("exit file")}, FINAL, S.FAILED, C.UNKNOWN, 143),
    Case("a signal and purged, accounting says preempted", {"exit": exited(143, 15), "accounting": account(S.PREEMPTED)}, FINAL, S.PREEMPTED, C.PREEMPTED, 143),
    Case("a signal and purged, accounting says FAILED, which says nothing", {"exit": exited(143, 15), "accounting": account(S.FAILED)}, SETTLING, S.COMPLETING),
    Case("a signal and purged, accounting still says running", {"exit": exited(143, 15), "accounting": account(S.RUNNING)}, SETTLING, S.COMPLETING),
    Case("ended by slurmd after the controller lost its state", {"exit": exited(143, 15), "accounting": account(S.CANCELLED)}, FINAL, S.CANCELLED, C.LOST, 143, "by nobody"),
    # exit files of another start or job
    Case("requeued, waiting", {"row": row(S.PENDING, 1), "exit": exited(143, 15)}, LIVE, S.PENDING),
    Case("requeued, running", {"row": row(S.RUNNING, 1), "exit": exited(143, 15)}, LIVE, S.RUNNING),
    Case("requeued, running, code 0 of the first start", {"row": row(S.RUNNING, 1), "exit": exited(0)}, LIVE, S.RUNNING),
    Case("requeued, purged, old exit file", {"last_row": row(S.RUNNING, 1), "exit": exited(0)}, SETTLING, S.UNKNOWN),
    Case("requeued, then failed without an exit file of its own", {**twice(S.FAILED, 1, status=9), "exit": exited(0)}, FINAL, S.FAILED, C.UNKNOWN, 137),
    Case("requeued, cancelled before it started again", {**twice(S.CANCELLED, 1), "exit": exited(143, 15), "start": started()}, FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE),
    Case("started again, old exit file", {"start": started(1), "exit": exited(0)}, SETTLING, S.UNKNOWN),
    Case("start file of another job", {"start": started(1, job_id="6"), "exit": exited(0)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("exit file of another job", {"exit": exited(0, job_id="6")}, SETTLING, S.UNKNOWN),
    Case("exit file of another job, failed", {**twice(S.FAILED, status=256), "exit": exited(0, job_id="6")}, FINAL, S.FAILED, C.CODE, 1),
    Case("second start ended", {"row": row(S.COMPLETED, 1), "exit": exited(0, restarts=1)}, FINAL, S.COMPLETED, C.NONE, 0),
    # the short-lived ends of a requeue
    Case("preempted for a moment", {"row": row(S.PREEMPTED), "exit": exited(143, 15)}, SETTLING, S.COMPLETING),
    Case("node failed for a moment", {"row": row(S.NODE_FAIL), "start": started()}, SETTLING, S.COMPLETING),
    Case("preempted for good", {**twice(S.PREEMPTED), "exit": exited(143, 15)}, FINAL, S.PREEMPTED, C.PREEMPTED, 143, "priority"),
    Case("preempted for good, ignored the signal", {**twice(S.PREEMPTED, status=15), "start": started()}, FINAL, S.PREEMPTED, C.PREEMPTED, 143),
    Case("node failed for good", {**twice(S.NODE_FAIL), "start": started()}, FINAL, S.NODE_FAIL, C.NODE, None, "node"),
    Case("node failed after a requeue, before the script started again", {**twice(S.NODE_FAIL, 1), "start": started(0)}, FINAL, S.NODE_FAIL, C.CAPACITY),
    Case("node never booted", {**twice(S.NODE_FAIL)}, FINAL, S.NODE_FAIL, C.CAPACITY, None, "did not come up"),
    Case("nodes did not boot", {**twice(S.BOOT_FAIL)}, FINAL, S.BOOT_FAIL, C.CAPACITY, None, "boot"),
    Case("requeue shown by accounting only", {"accounting": account(S.REQUEUED)}, SETTLING, S.UNKNOWN),
    # the end without an exit file: two looks
    Case("killed, first look", {"row": row(S.FAILED, status=9)}, SETTLING, S.COMPLETING),
    Case("killed, second look too soon", {**twice(S.FAILED, status=9), "queue_at": at(9)}, SETTLING, S.COMPLETING),
    Case("killed, second look", twice(S.FAILED, status=9), FINAL, S.FAILED, C.UNKNOWN, 137, "SIGKILL"),
    Case("killed, scancel --signal=KILL in the log", {**twice(S.FAILED, status=9), "marker": log(K.CANCELLED)}, FINAL, S.FAILED, C.CANCELLED_OUTSIDE, 137),
    Case("another claim starts the clock again", {"row": row(S.CANCELLED), **claimed("queue FAILED 0")}, SETTLING, S.COMPLETING),
    Case("killed, purged between the looks", {"last_row": row(S.FAILED, status=768), **claimed("queue FAILED 0")}, FINAL, S.FAILED, C.CODE, 3, "no exit file"),
    Case("no log folder", twice(S.FAILED, status=53, reason="JobLaunchFailure"), FINAL, S.FAILED, C.LAUNCH, None, "could not start the script"),
    Case("script killed by SIGKILL, which Slurm calls a launch failure", {**twice(S.FAILED, status=9, reason="JobLaunchFailure"), "start": started()}, FINAL, S.FAILED, C.UNKNOWN, 137, "killed by signal 9"),
    Case("0:53 alone", twice(S.FAILED, status=53), FINAL, S.FAILED, C.LAUNCH, None, "could not start the script"),
    Case("out of memory, the script too", twice(S.OUT_OF_MEMORY, status=125), FINAL, S.OUT_OF_MEMORY, C.MEMORY, None, "memory"),
    Case("time limit, ignored the signal", {**twice(S.TIMEOUT, status=15), "start": started()}, FINAL, S.TIMEOUT, C.TIME_LIMIT, 143),
    Case("failed with a reason of the system", twice(S.FAILED, status=256, reason="SystemFailure"), FINAL, S.FAILED, C.NODE, 1),
    Case("pending job cancelled by us", {**twice(S.CANCELLED, status=0), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US),
    Case("cancelled by Slurm", twice(S.CANCELLED, reason="DependencyNeverSatisfied"), FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE, None, "never satisfy"),
    Case("completed by the queue, disk full", twice(S.COMPLETED, status=0), FINAL, S.COMPLETED, C.NONE, 0, "no exit file"),
    Case("the same, but a step failed", {**twice(S.COMPLETED, status=0), "accounting": account(S.COMPLETED, derived=5)}, FINAL, S.FAILED, C.CODE, 5, "step"),
    # known to accounting only
    Case("absent", {}, SETTLING, S.UNKNOWN),
    Case("absent, sacct says running", {"accounting": account(S.RUNNING)}, SETTLING, S.UNKNOWN),
    Case("absent, sacct says failed once", {"accounting": account(S.FAILED, 3)}, SETTLING, S.UNKNOWN),
    Case("absent, sacct looked at once, queue asked twice", {"accounting": account(S.FAILED, 3), "accounting_at": at(0), "queue_at": at(100), **claimed("accounting FAILED 3:0")}, SETTLING, S.UNKNOWN),
    Case("absent, sacct says failed twice", accounted(account(S.FAILED, 3)), FINAL, S.FAILED, C.CODE, 3, "accounting"),
    Case("the code is masked", accounted(account(S.FAILED, 127)), FINAL, S.FAILED, C.CODE, 127, "127 or 255"),
    Case("killed, by accounting", accounted(account(S.FAILED, 0, 9)), FINAL, S.FAILED, C.UNKNOWN, 137, "SIGKILL"),
    Case("FAILED 0:0 after an accounting outage, then the truth", {"accounting": account(S.COMPLETED), "accounting_at": at(60), **claimed("accounting FAILED 0:0")}, SETTLING, S.UNKNOWN),
    Case("FAILED 0:0 twice is still no end", accounted(account(S.FAILED)), SETTLING, S.UNKNOWN),
    Case("FAILED 0:0 for long", {"accounting": account(S.FAILED), "accounting_at": at(300), **claimed("accounting FAILED 0:0")}, FINAL, S.FAILED, C.UNKNOWN, None, "nobody knows how"),
    Case("0:53 by accounting", accounted(account(S.FAILED, 0, 53)), FINAL, S.FAILED, C.LAUNCH, None, "could not start"),
    Case("out of memory by accounting", accounted(account(S.OUT_OF_MEMORY, 0, 125)), FINAL, S.OUT_OF_MEMORY, C.MEMORY, None),
    Case("out of memory inside srun, by accounting", {**accounted(account(S.FAILED, 1)), "marker": log(K.MEMORY)}, FINAL, S.FAILED, C.MEMORY, 1),
    Case("sacct says completed", accounted(account(S.COMPLETED)), FINAL, S.COMPLETED, C.NONE, 0, "accounting"),
    Case("sacct says completed, but a step failed", accounted(account(S.COMPLETED, derived=5)), FINAL, S.FAILED, C.CODE, 5, "step"),
    Case("time limit by accounting", accounted(account(S.TIMEOUT)), FINAL, S.TIMEOUT, C.TIME_LIMIT),
    Case("preempted by accounting", accounted(account(S.PREEMPTED)), FINAL, S.PREEMPTED, C.PREEMPTED),
    Case("cancelled by somebody", accounted(account(S.CANCELLED, by="1000")), FINAL, S.CANCELLED, C.CANCELLED_OUTSIDE, None, "by user 1000"),
    Case("cancelled by us, by accounting", {**accounted(account(S.CANCELLED, by="0")), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US),
    Case("cancelled by nobody: the controller lost its state", accounted(account(S.CANCELLED)), FINAL, S.CANCELLED, C.LOST, None, "lost its memory"),
    # known to nobody
    Case("absent for long", GONE, FINAL, S.NODE_FAIL, C.LOST, None, "lost"),
    Case("absent, not yet long", claimed("absent", -280), SETTLING, S.UNKNOWN),
    Case("absent for long, sacct still says running", {**GONE, "accounting": account(S.RUNNING), "start": started()}, FINAL, S.NODE_FAIL, C.LOST, None, "RUNNING"),
    Case("absent after our cancel", {**claimed("absent"), **OURS}, FINAL, S.CANCELLED, C.CANCELLED_BY_US),
    Case("absent, time limit in the log", {**claimed("absent"), "marker": log(K.TIME_LIMIT)}, FINAL, S.TIMEOUT, C.TIME_LIMIT, None, "its log"),
    Case("absent, preempted in the log, perhaps requeued", {**claimed("absent"), "marker": log(K.PREEMPTED)}, SETTLING, S.UNKNOWN),
    Case("absent for long, preempted in the log", {**GONE, "marker": log(K.PREEMPTED)}, FINAL, S.PREEMPTED, C.PREEMPTED),
    # ids start again at 1 when the controller loses its state
    Case("the id runs another job", {"row": row(S.RUNNING, name="x")}, SETTLING, S.UNKNOWN),
    Case("the id ended another job well", {**twice(S.COMPLETED, status=0, name="x")}, SETTLING, S.UNKNOWN),
    Case("the id waits for long as another job", {"row": row(S.PENDING, name="x"), **GONE}, FINAL, S.NODE_FAIL, C.LOST, None, "belongs to another job"),
    Case("the id is another job, restarts included", {"row": row(S.RUNNING, 3, name="x"), "exit": exited(0)}, FINAL, S.COMPLETED, C.NONE, 0),
    Case("an older job of the same id and name", {"row": row(S.CANCELLED, submitted=at(-3600)), **claimed("queue CANCELLED 0")}, SETTLING, S.UNKNOWN),
    Case("an older job of the same id in accounting", accounted(account(S.CANCELLED, submitted=at(-3600))), SETTLING, S.UNKNOWN),
    Case("another job of the same id in accounting", accounted(account(S.COMPLETED, name="x")), SETTLING, S.UNKNOWN),
    Case("a requeue makes the submit time a later one", {"row": row(S.RUNNING, 1, submitted=at(9999))}, LIVE, S.RUNNING),
    Case("clocks may differ by minutes", {"row": row(S.RUNNING, submitted=at(-300))}, LIVE, S.RUNNING),
    Case("no submit time", {"row": row(S.RUNNING, submitted=None)}, LIVE, S.RUNNING),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    verdict = judge(seen(**case.facts), TIMING)
    assert (verdict.standing, verdict.state) == (case.standing, case.state)
    assert (verdict.outcome is not None) == (case.standing is FINAL)
    if verdict.outcome:
        out = verdict.outcome
        assert (out.state, out.cause, out.exit_code) == (case.state, case.cause, case.code)
        assert case.word in out.detail
    else:
        assert case.word in verdict.note


def test_every_cause_has_a_row() -> None:
    assert {case.cause for case in CASES} == {None, *Cause}


def test_only_accounting_can_settle_an_absent_job() -> None:
    assert judge(seen(), TIMING).ask_accounting
    assert judge(seen(exit=exited(143, 15)), TIMING).ask_accounting
    assert judge(seen(row=row(S.COMPLETED)), TIMING).ask_accounting
    assert not judge(seen(row=row(S.FAILED)), TIMING).ask_accounting
    assert not judge(seen(exit=exited(0)), TIMING).ask_accounting


def test_an_outcome_tells_when_where_and_how_often() -> None:
    outcome = judge(seen(row=row(S.COMPLETED, 2), exit=exited(0, restarts=2)), TIMING).outcome
    assert outcome is not None
    assert (outcome.started, outcome.ended, outcome.nodes, outcome.restarts) == (at(1), at(9), "n1", 2)


def test_a_lost_job_still_tells_where_it_was() -> None:
    outcome = judge(seen(start=started(1), **GONE), TIMING).outcome
    assert outcome is not None
    assert (outcome.started, outcome.ended, outcome.nodes, outcome.restarts) == (at(1), None, "n1", 1)


STORIES: dict[str, list[tuple[dict[str, Any], Standing, JobState]]] = {
    "a node fails and the job is put back": [
        ({"row": row(S.RUNNING), "start": started()}, LIVE, S.RUNNING),
        ({"row": row(S.NODE_FAIL), "start": started()}, SETTLING, S.COMPLETING),
        ({"row": row(S.PENDING, 1, reason="BeginTime"), "start": started()}, LIVE, S.PENDING),
        ({"row": row(S.RUNNING, 1), "start": started(1)}, LIVE, S.RUNNING),
        ({"row": row(S.COMPLETED, 1), "start": started(1), "exit": exited(0, restarts=1)}, FINAL, S.COMPLETED),
    ],
    "a preempted job leaves an exit file, is put back and ends well": [
        ({"row": row(S.RUNNING), "exit": exited(143, 15)}, LIVE, S.COMPLETING),
        ({"row": row(S.PREEMPTED), "exit": exited(143, 15)}, SETTLING, S.COMPLETING),
        ({"row": row(S.PENDING, 1), "exit": exited(143, 15)}, LIVE, S.PENDING),
        ({"exit": exited(143, 15), "last_row": row(S.PENDING, 1)}, SETTLING, S.UNKNOWN),
        ({"exit": exited(0, restarts=1), "last_row": row(S.PENDING, 1)}, FINAL, S.COMPLETED),
    ],
    "an outage in the middle of an end": [
        ({"row": row(S.FAILED, status=9)}, SETTLING, S.COMPLETING),
        ({"row": row(S.FAILED, status=9), "reachable": False}, LIVE, S.UNKNOWN),
        ({"row": row(S.FAILED, status=9)}, FINAL, S.FAILED),
    ],
    "accounting comes back": [
        ({"last_row": row(S.RUNNING)}, SETTLING, S.UNKNOWN),
        ({"last_row": row(S.RUNNING), "accounting": account(S.FAILED)}, SETTLING, S.UNKNOWN),
        ({"last_row": row(S.RUNNING), "accounting": account(S.FAILED, 3)}, SETTLING, S.UNKNOWN),
        ({"last_row": row(S.RUNNING), "accounting": account(S.FAILED, 3)}, FINAL, S.FAILED),
    ],
    "an exit file that comes late": [
        ({"last_row": row(S.RUNNING)}, SETTLING, S.UNKNOWN),
        ({"last_row": row(S.RUNNING)}, SETTLING, S.UNKNOWN),
        ({"last_row": row(S.RUNNING), "exit": exited(3)}, FINAL, S.FAILED),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_stories(story: list[tuple[dict[str, Any], Standing, JobState]]) -> None:
    """One look after the other, 20 s apart."""
    verdict = Verdict(standing=LIVE, state=S.UNKNOWN)
    for number, (facts, standing, state) in enumerate(story):
        now = at(20 * number)
        if "accounting" in facts:
            facts = {**facts, "accounting_at": now}
        verdict = judge(seen(**{**facts, "queue_at": now}, claim=verdict.claim, claim_at=verdict.claim_at), TIMING)
        assert (verdict.standing, verdict.state) == (standing, state), number


# Every combination. The axes hold every state, and of the rest one value of each kind that `judge` may tell apart.
FOREIGN = row(S.COMPLETED, 5, 0, name="x")
ROWS: list[tuple[QueueRow | None, QueueRow | None]] = [
    *((found, found) for state in JobState for restarts in (0, 1) for found in [row(state, restarts, 0 if state is S.COMPLETED else 256)]),
    *((None, last) for last in (None, row(S.RUNNING), row(S.FAILED, 0, 53), row(S.NODE_FAIL), row(S.RUNNING, 1))),
    (FOREIGN, row(S.RUNNING)),
    (FOREIGN, FOREIGN),
]  # fmt: skip
EXITS = [None, exited(0), exited(3), exited(143, 15), exited(75, 10), exited(0, restarts=1), exited(0, job_id="6")]
ACCOUNTS = [
    None,
    account(S.RUNNING),
    account(S.COMPLETED),
    account(S.COMPLETED, derived=5),
    account(S.FAILED, 3),
    account(S.FAILED),
    account(S.CANCELLED),
    account(S.CANCELLED, by="0"),
    account(S.NODE_FAIL),
    account(S.COMPLETED, name="x"),
]
MARKERS = [None, log(K.CANCELLED), log(K.TIME_LIMIT), log(K.PREEMPTED), log(K.MEMORY)]


def combinations(state_rows: list[tuple[QueueRow | None, QueueRow | None]]) -> Iterator[Observations]:
    for (now, last), end, found, marker, ours in itertools.product(state_rows, EXITS, ACCOUNTS, MARKERS, (False, True)):
        yield Observations(
            job_id="7", name="n", submitted=T0, queue_at=at(0), row=now, last_row=last, exit=end, accounting=found,
            accounting_at=at(0) if found else None, marker=marker, cancel_requested=ours,
        )  # fmt: skip


def later(looked: Observations, verdict: Verdict, seconds: float) -> Observations:
    """The same things, seen again."""
    return replace(
        looked,
        queue_at=at(seconds),
        accounting_at=at(seconds) if looked.accounting_at else None,
        claim=verdict.claim,
        claim_at=verdict.claim_at,
    )


def check_outcome(looked: Observations, out: Outcome) -> None:
    own = looked.row if looked.row and looked.row.name == "n" else None
    assert out.state.is_final
    assert out.detail
    assert out.succeeded == (out.cause is Cause.NONE)
    assert out.by_us == (out.cause is Cause.CANCELLED_BY_US)
    assert looked.cancel_requested or not out.by_us
    assert out.cause is not Cause.CANCELLED_OUTSIDE or not looked.cancel_requested
    assert own is None or own.state.is_final
    if out.succeeded:
        record = matching_exit(looked)
        assert own is None or own.state is JobState.COMPLETED
        assert record is None or record.code == 0
    if out.exit_code is None:
        assert not out.succeeded


@pytest.mark.parametrize("rows", [ROWS[start : start + 9] for start in range(0, len(ROWS), 9)])
def test_no_combination_breaks_a_promise(rows: list[tuple[QueueRow | None, QueueRow | None]]) -> None:
    for looked in combinations(rows):
        first = judge(looked, TIMING)
        live = looked.row is not None and looked.row.name == "n" and not looked.row.state.is_final
        assert (first.standing is LIVE) == live, looked
        # Unreachable is never an end, whatever else is known.
        assert judge(replace(looked, reachable=False, claim=first.claim, claim_at=at(-9999)), TIMING).standing is LIVE
        # One look makes an end only with an exit file of this very start.
        if first.standing is FINAL:
            assert matching_exit(looked) is not None, looked
        soon = judge(later(looked, first, 5), TIMING)
        assert soon.standing is first.standing, looked
        # Nothing is waited for without end, and what is final stays what it is.
        last = judge(later(looked, soon, 400), TIMING)
        assert (last.standing is FINAL) == (not live), looked
        again = judge(later(looked, last, 9999), TIMING)
        assert (again.standing, again.state, again.outcome) == (last.standing, last.state, last.outcome), looked
        for verdict in (first, soon, last):
            assert (verdict.outcome is not None) == (verdict.standing is FINAL), looked
            if verdict.outcome:
                check_outcome(looked, verdict.outcome)
                assert verdict.outcome == last.outcome, looked
