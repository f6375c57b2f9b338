"""A waiting job: what it waits for, in words, and when waiting makes no sense any more."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm.reasons import Explanation, explain
from slurm.states import JobState
from slurm.verdict import JobStatus


@dataclass(frozen=True)
class WaitLimits:
    """`hopeless_grace`: how long a reason that nobody but a human can remove may last before the job is given up.

    `max_wait`: how long a job may wait for whatever it is before somebody is warned; None: never.
    """

    hopeless_grace: timedelta
    max_wait: timedelta | None


@dataclass(frozen=True)
class Wait:
    """`text`: state, reason with meaning and remedy, and for how long. `give_up`: hopeless for longer than the grace.

    `overdue`: waits for longer than `max_wait`, for whatever reason.
    """

    text: str
    give_up: bool
    overdue: bool


# States in which a job stays until somebody releases it, whatever the reason beside them says.
_HELD = {
    JobState.REQUEUE_HOLD: "Slurm put it back into the queue and holds it",
    JobState.SPECIAL_EXIT: "it ended with one of the cluster's special exit codes, and Slurm holds it",
    JobState.RESV_DEL_HOLD: "its reservation was deleted, and Slurm holds it",
}


def assess(status: JobStatus, waiting_since: datetime, now: datetime, limits: WaitLimits) -> Wait:
    """What to tell about a job that waits, and whether to go on waiting. A job that does not wait is never given up.

    `waiting_since`: since when the reason is a hopeless one if it is (the caller resets it when a reason changes
    back), else since when the job waits.
    """
    if not status.state.is_waiting:
        return Wait(status.state.lower(), give_up=False, overdue=False)
    why = explain_wait(status)
    since = min(status.since, waiting_since)
    return Wait(
        text=f"{status.state.lower()} for {in_words(now - since)}: {why}",
        give_up=why.hopeless and now - waiting_since >= limits.hopeless_grace,
        overdue=limits.max_wait is not None and now - since >= limits.max_wait,
    )


def explain_wait(status: JobStatus) -> Explanation:
    """Why this job waits, from its state and its reason."""
    if status.state in _HELD:
        remedy = f"`scontrol release {status.job_id}` lets it go, once its cause is mended"
        return Explanation(status.reason or status.state, _HELD[status.state], remedy, hopeless=True)
    if status.state is JobState.CONFIGURING and status.reason in (None, "None", "Resources", "Priority"):
        return Explanation("nodes booting", "its nodes are being started", "cloud nodes take some minutes")
    return explain(status.reason or "None")


def in_words(time: timedelta) -> str:
    """The two largest units.

    >>> in_words(timedelta(hours=26, minutes=5)), in_words(timedelta(seconds=75))
    ('1 d 2 h', '1 min 15 s')
    """
    seconds = max(0, int(time.total_seconds()))
    values = {
        "d": seconds // 86400,
        "h": seconds // 3600 % 24,
        "min": seconds // 60 % 60,
        "s": seconds % 60,
    }
    parts = [f"{value} {unit}" for unit, value in values.items()]
    first = next((index for index, value in enumerate(values.values()) if value), len(parts) - 1)
    return " ".join(part for part in parts[first : first + 2] if not part.startswith("0 ") or part == parts[first])
