"""Waiting jobs: when to warn, when to give up, and what to say."""

from datetime import UTC, datetime, timedelta

import pytest

from slurm.states import JobState
from slurm.verdict import JobStatus
from slurm.waiting import WaitLimits, assess, in_words

T0 = datetime(2030, 1, 1, tzinfo=UTC)
LIMITS = WaitLimits(hopeless_grace=timedelta(minutes=10), max_wait=timedelta(hours=2))


def status(reason: str | None, state: JobState = JobState.PENDING) -> JobStatus:
    return JobStatus("7", state, reason, "", T0)


def after(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


HOPELESS = [
    "DependencyNeverSatisfied",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "JobHeldUser",
    "JobHeldAdmin",
    "(launch failed requeued held)",
    "QOSMaxWallDurationPerJobLimit",
    "BadConstraints",
]
PATIENT = [
    "Resources",
    "Priority",
    "Dependency",
    "QOSMaxJobsPerUserLimit",
    "AssocGrpCpuLimit",
    "ReqNodeNotAvail, UnavailableNodes:n1",
    "BeginTime",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "Sunspots",
    None,
]


@pytest.mark.parametrize("reason", HOPELESS)
def test_a_hopeless_reason_is_given_up_after_the_grace(reason: str) -> None:
    assert not assess(status(reason), T0, after(9.9), LIMITS).give_up
    late = assess(status(reason), T0, after(10), LIMITS)
    assert late.give_up
    assert "will not start by itself" in late.text
    assert "pending for 10 min: " in late.text


@pytest.mark.parametrize("reason", PATIENT)
def test_any_other_reason_is_waited_for(reason: str | None) -> None:
    wait = assess(status(reason), T0, after(60 * 24 * 30), LIMITS)
    assert not wait.give_up
    assert wait.overdue


def test_the_grace_starts_when_the_reason_became_hopeless() -> None:
    """Pending for an hour, held for five minutes."""
    wait = assess(status("JobHeldUser"), after(55), after(60), LIMITS)
    assert not wait.give_up
    assert "pending for 1 h" in wait.text
    assert assess(status("JobHeldUser"), after(55), after(65), LIMITS).give_up


@pytest.mark.parametrize("state", [JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT, JobState.RESV_DEL_HOLD])
@pytest.mark.parametrize("reason", ["BeginTime", None])
def test_a_held_state_is_hopeless_whatever_the_reason(state: JobState, reason: str | None) -> None:
    wait = assess(status(reason, state), T0, after(10), LIMITS)
    assert wait.give_up
    assert "scontrol release 7" in wait.text


def test_long_waits_are_overdue_only_where_there_is_a_limit() -> None:
    assert not assess(status("Priority"), T0, after(119), LIMITS).overdue
    assert assess(status("Priority"), T0, after(120), LIMITS).overdue
    endless = WaitLimits(hopeless_grace=timedelta(minutes=10), max_wait=None)
    assert not assess(status("Priority"), T0, after(10**6), endless).overdue


def test_booting_nodes_are_told_as_such() -> None:
    wait = assess(status(None, JobState.CONFIGURING), T0, after(3), LIMITS)
    assert "configuring for 3 min: nodes booting: its nodes are being started" in wait.text
    assert not wait.give_up


@pytest.mark.parametrize("state", [state for state in JobState if not state.is_waiting])
def test_a_job_that_does_not_wait_is_neither_late_nor_hopeless(state: JobState) -> None:
    wait = assess(status("JobHeldUser", state), T0, after(10**6), LIMITS)
    assert (wait.give_up, wait.overdue) == (False, False)


def test_a_clock_that_goes_backwards_is_no_wait() -> None:
    assert "for 0 s" in assess(status("Priority"), T0, after(-5), LIMITS).text


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (timedelta(0), "0 s"),
        (timedelta(seconds=59.9), "59 s"),
        (timedelta(minutes=1), "1 min"),
        (timedelta(minutes=61), "1 h 1 min"),
        (timedelta(hours=2, seconds=5), "2 h"),
        (timedelta(days=3, hours=4, minutes=5), "3 d 4 h"),
    ],
)
def test_durations(time: timedelta, text: str) -> None:
    assert in_words(time) == text
