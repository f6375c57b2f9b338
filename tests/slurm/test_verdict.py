"""The table of verdicts: every combination of witnesses that reference behaviour of Slurm can produce."""
# ruff: noqa: E501 - a table row is a line

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slurm.folder import ExitRecord, StartRecord
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.states import JobState
from slurm.verdict import Observations, Standing, judge

T0 = datetime(2030, 1, 1, tzinfo=UTC)
TIMING = Timing(exit_scan=2, queue=15, early=5, accounting=60, confirm=10, lost=300)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def row(state: JobState, restarts: int = 0, status: int | None = None, reason: str | None = None) -> QueueRow:
    return QueueRow("7", state, reason, "n1", "n", restarts, T0, status)


def exited(code: int, signal: int | None = None, restarts: int = 0, job_id: str = "7") -> ExitRecord:
    return ExitRecord(job_id, restarts, "n1", "n1", code, signal, at(1), at(9))


def started(restarts: int = 0, job_id: str = "7") -> StartRecord:
    return StartRecord(job_id, restarts, "n1", "n1", at(1))


def account(state: JobState, code: int = 0, signal: int = 0, derived: int = 0) -> AccountingRow:
    return AccountingRow("7", state, code, signal, derived, "n1", "n", T0, at(1), at(9))


def seen(**facts: Any) -> Observations:
    facts.setdefault("queue_at", at(10))
    facts.setdefault("last_row", facts.get("row"))
    return Observations(job_id="7", **facts)


S = JobState


@dataclass
class Case:
    name: str
    facts: dict[str, Any]
    standing: Standing
    state: JobState
    code: int | None = None
    by_us: bool = False
    word: str = ""
    more: dict[str, Any] = field(default_factory=dict)


LIVE, SETTLING, FINAL = Standing.LIVE, Standing.SETTLING, Standing.FINAL
FAIL_CLAIM = {"claim": "queue FAILED 0", "claim_at": at(0)}
CASES = [
    Case("nothing asked yet", {"queue_at": None}, LIVE, S.UNKNOWN),
    Case("good exit file, queue not asked", {"queue_at": None, "exit": exited(0)}, LIVE, S.UNKNOWN),
    Case("pending", {"row": row(S.PENDING)}, LIVE, S.PENDING),
    Case("nodes boot", {"row": row(S.CONFIGURING)}, LIVE, S.CONFIGURING),
    Case("running", {"row": row(S.RUNNING)}, LIVE, S.RUNNING),
    Case("a state from the future", {"row": row(S.UNKNOWN)}, LIVE, S.UNKNOWN),
    Case("suspended", {"row": row(S.SUSPENDED)}, LIVE, S.SUSPENDED),
    Case("code 0 while the queue shows it running", {"row": row(S.RUNNING), "exit": exited(0)}, LIVE, S.COMPLETING),
    Case("code 3 while the queue shows it completing", {"row": row(S.COMPLETING), "exit": exited(3)}, LIVE, S.COMPLETING),
    Case("outage", {"row": row(S.RUNNING), "reachable": False}, LIVE, S.RUNNING, word="does not answer"),
    Case("outage with a good exit file", {"exit": exited(0), "reachable": False}, LIVE, S.UNKNOWN, word="not answer"),
    # the end, agreed by exit file and queue
    Case("good", {"row": row(S.COMPLETED, status=0), "exit": exited(0)}, FINAL, S.COMPLETED, 0),
    Case("bad", {"row": row(S.FAILED, status=768), "exit": exited(3)}, FINAL, S.FAILED, 3, word="code 3"),
    Case("good and purged", {"last_row": row(S.RUNNING), "exit": exited(0)}, FINAL, S.COMPLETED, 0),
    Case("good and never seen", {"exit": exited(0)}, FINAL, S.COMPLETED, 0),
    Case("bad and purged", {"exit": exited(255)}, FINAL, S.FAILED, 255),
    Case("payload killed by 9", {"row": row(S.FAILED), "exit": exited(137)}, FINAL, S.FAILED, 137, word="SIGKILL"),
    Case("time limit", {"row": row(S.TIMEOUT), "exit": exited(143, 15)}, FINAL, S.TIMEOUT, 143, word="time limit"),
    Case("scancel by others", {"row": row(S.CANCELLED), "exit": exited(143, 15)}, FINAL, S.CANCELLED, 143, word="outside"),
    Case(
        "scancel by us",
        {"row": row(S.CANCELLED), "exit": exited(143, 15), "cancel_requested": True},
        FINAL, S.CANCELLED, 143, by_us=True, word="by this run",
    ),
    Case(
        "scancel by us, purged",
        {"exit": exited(143, 15), "cancel_requested": True}, FINAL, S.CANCELLED, 143, by_us=True,
    ),
    Case(
        "scancel by us, purged, the payload was faster than the script",
        {"exit": exited(143), "cancel_requested": True}, FINAL, S.CANCELLED, 143, by_us=True,
    ),
    Case("a signal and purged", {"exit": exited(143, 15)}, FINAL, S.FAILED, 143, word="cancelled from outside, time limit"),
    Case(
        "cancelled too late", {"row": row(S.COMPLETED), "exit": exited(0), "cancel_requested": True},
        FINAL, S.COMPLETED, 0,
    ),
    Case(
        "failed by itself before our cancel", {"row": row(S.FAILED), "exit": exited(3), "cancel_requested": True},
        FINAL, S.FAILED, 3,
    ),
    Case(
        "out of memory although the payload ended well", {"row": row(S.OUT_OF_MEMORY), "exit": exited(0)},
        FINAL, S.OUT_OF_MEMORY, 0, word="although",
    ),
    Case("Slurm says failed, the payload 0", {"row": row(S.FAILED), "exit": exited(0)}, FINAL, S.FAILED, 0, word="although"),
    # exit files of another start or job
    Case("requeued, waiting", {"row": row(S.PENDING, 1), "exit": exited(143, 15)}, LIVE, S.PENDING),
    Case("requeued, running", {"row": row(S.RUNNING, 1), "exit": exited(143, 15)}, LIVE, S.RUNNING),
    Case("requeued, purged, old exit file", {"last_row": row(S.RUNNING, 1), "exit": exited(0)}, SETTLING, S.UNKNOWN),
    Case("started again, old exit file", {"start": started(1), "exit": exited(0)}, SETTLING, S.UNKNOWN),
    Case("exit file of another job", {"exit": exited(0, job_id="6")}, SETTLING, S.UNKNOWN),
    Case("second start ended", {"row": row(S.COMPLETED, 1), "exit": exited(0, restarts=1)}, FINAL, S.COMPLETED, 0),
    # the end without an exit file: two looks
    Case("killed, first look", {"row": row(S.FAILED, status=9)}, SETTLING, S.COMPLETING),
    Case("killed, second look too soon", {"row": row(S.FAILED, status=9), **FAIL_CLAIM, "queue_at": at(9)}, SETTLING, S.COMPLETING),
    Case("killed, second look", {"row": row(S.FAILED, status=9), **FAIL_CLAIM}, FINAL, S.FAILED, 137, word="SIGKILL"),
    Case("another claim starts the clock again", {"row": row(S.CANCELLED), **FAIL_CLAIM}, SETTLING, S.COMPLETING),
    Case(
        "killed, purged between the looks", {"last_row": row(S.FAILED, status=768), **FAIL_CLAIM},
        FINAL, S.FAILED, 3, word="no exit file",
    ),
    Case(
        "no log folder", {"row": row(S.FAILED, status=53, reason="JobLaunchFailure"), **FAIL_CLAIM},
        FINAL, S.FAILED, 181, word="could not start the script",
    ),
    Case("preempted for a moment", {"row": row(S.PREEMPTED), "exit": exited(143, 15)}, SETTLING, S.COMPLETING),
    Case(
        "preempted for good",
        {"row": row(S.PREEMPTED), "exit": exited(143, 15), "claim": "queue PREEMPTED 0", "claim_at": at(0)},
        FINAL, S.PREEMPTED, 143, word="priority",
    ),
    Case(
        "node failed", {"row": row(S.NODE_FAIL), "claim": "queue NODE_FAIL 0", "claim_at": at(0)},
        FINAL, S.NODE_FAIL, None, word="node",
    ),
    Case(
        "pending job cancelled by us",
        {"row": row(S.CANCELLED, status=0), "claim": "queue CANCELLED 0", "claim_at": at(0), "cancel_requested": True},
        FINAL, S.CANCELLED, None, by_us=True,
    ),
    Case(
        "completed by the queue, disk full", {"row": row(S.COMPLETED, status=0), "claim": "queue COMPLETED 0", "claim_at": at(0)},
        FINAL, S.COMPLETED, 0, word="no exit file",
    ),
    # known to accounting only
    Case("absent", {}, SETTLING, S.UNKNOWN),
    Case("absent, sacct says running", {"accounting": account(S.RUNNING), "accounting_at": at(10)}, SETTLING, S.UNKNOWN),
    Case("absent, sacct says failed once", {"accounting": account(S.FAILED, 3), "accounting_at": at(10)}, SETTLING, S.UNKNOWN),
    Case(
        "absent, sacct looked at once, asked twice",
        {"accounting": account(S.FAILED, 3), "accounting_at": at(0), "queue_at": at(100),
         "claim": "accounting FAILED 3:0", "claim_at": at(0)},
        SETTLING, S.UNKNOWN,
    ),
    Case(
        "absent, sacct says failed twice",
        {"accounting": account(S.FAILED, 3), "accounting_at": at(60), "claim": "accounting FAILED 3:0", "claim_at": at(0)},
        FINAL, S.FAILED, 3, word="accounting",
    ),
    Case(
        "FAILED 0:0 after an accounting outage, then the truth",
        {"accounting": account(S.COMPLETED), "accounting_at": at(60), "claim": "accounting FAILED 0:0", "claim_at": at(0)},
        SETTLING, S.UNKNOWN,
    ),
    Case(
        "sacct says completed, but a step failed",
        {"accounting": account(S.COMPLETED, derived=5), "accounting_at": at(60), "claim": "accounting COMPLETED 0:0", "claim_at": at(0)},
        FINAL, S.FAILED, 5, word="step",
    ),
    Case(
        "sacct says completed, queue has the last word", {"row": row(S.RUNNING), "accounting": account(S.COMPLETED), "accounting_at": at(9)},
        LIVE, S.RUNNING,
    ),
    Case("absent for long", {"claim": "absent", "claim_at": at(-300)}, FINAL, S.NODE_FAIL, None, word="lost"),
    Case("absent, not yet long", {"claim": "absent", "claim_at": at(-280)}, SETTLING, S.UNKNOWN),
    Case(
        "absent for long, sacct still says running",
        {"claim": "absent", "claim_at": at(-300), "accounting": account(S.RUNNING), "accounting_at": at(0), "start": started()},
        FINAL, S.NODE_FAIL, None, word="RUNNING",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    verdict = judge(seen(**case.facts), TIMING)
    assert (verdict.standing, verdict.state) == (case.standing, case.state)
    assert (verdict.outcome is not None) == (case.standing is FINAL)
    if verdict.outcome:
        out = verdict.outcome
        assert (out.state, out.exit_code, out.by_us) == (case.state, case.code, case.by_us)
        assert out.succeeded == (case.state is S.COMPLETED)
        assert case.word in out.detail
    else:
        assert case.word in verdict.note


@pytest.mark.parametrize("state", [state for state in JobState if state.is_live])
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("reachable", [True, False])
def test_no_live_job_is_ever_final(state: JobState, code: int, reachable: bool) -> None:
    facts = {"row": row(state), "exit": exited(code), "reachable": reachable, "claim": "absent", "claim_at": at(-9999)}
    assert judge(seen(**facts), TIMING).standing is LIVE


@pytest.mark.parametrize("state", [state for state in JobState if state.is_final])
def test_code_0_succeeds_only_when_slurm_does_not_disagree(state: JobState) -> None:
    facts = {"row": row(state), "exit": exited(0), "claim": f"queue {state} 0", "claim_at": at(0)}
    outcome = judge(seen(**facts), TIMING).outcome
    assert outcome is not None
    assert outcome.succeeded == (state is S.COMPLETED)


def test_only_accounting_can_settle_an_absent_job() -> None:
    assert judge(seen(), TIMING).ask_accounting
    assert not judge(seen(row=row(S.FAILED)), TIMING).ask_accounting
    assert not judge(seen(exit=exited(0)), TIMING).ask_accounting


def test_an_outcome_tells_when_where_and_how_often() -> None:
    outcome = judge(seen(row=row(S.COMPLETED, 2), exit=exited(0, restarts=2)), TIMING).outcome
    assert outcome is not None
    assert (outcome.started, outcome.ended, outcome.nodes, outcome.restarts) == (at(1), at(9), "n1", 2)
