"""Slurm's job states and what they mean for somebody who waits."""

import logging
from enum import StrEnum

logger = logging.getLogger(__name__)


class JobState(StrEnum):
    """Every state that squeue, sacct or scontrol can print up to Slurm 25.11, and UNKNOWN for anything else."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    POWER_UP_NODE = "POWER_UP_NODE"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    EXPEDITING = "EXPEDITING"
    UPDATE_DB = "UPDATE_DB"
    REVOKED = "REVOKED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    UNKNOWN = "UNKNOWN"

    @property
    def is_waiting(self) -> bool:
        """The job has no running script yet, or not again; CONFIGURING (nodes booting) is a normal wait."""
        return self in _WAITING

    @property
    def is_live(self) -> bool:
        """The job will still do something, or can be released to do it."""
        return self in _WAITING or self in _ACTIVE

    @property
    def is_final(self) -> bool:
        """The job has ended. UNKNOWN is neither live nor final."""
        return self in _FINAL

    @property
    def may_be_requeued(self) -> bool:
        """A final state that Slurm also shows for a few seconds while it puts the job back into the queue."""
        return self in (JobState.NODE_FAIL, JobState.PREEMPTED, JobState.BOOT_FAIL, JobState.LAUNCH_FAILED)


_S = JobState
_WAITING = frozenset({
    _S.PENDING, _S.CONFIGURING, _S.REQUEUED, _S.REQUEUE_FED, _S.REQUEUE_HOLD, _S.SPECIAL_EXIT, _S.RESV_DEL_HOLD,
    _S.POWER_UP_NODE, _S.EXPEDITING,
})  # fmt: skip
# REVOKED: a sibling of a federated job started elsewhere, so the job itself goes on.
_ACTIVE = frozenset({
    _S.RUNNING, _S.COMPLETING, _S.RESIZING, _S.SIGNALING, _S.STAGE_OUT, _S.STOPPED, _S.SUSPENDED, _S.UPDATE_DB,
    _S.REVOKED,
})  # fmt: skip
_FINAL = frozenset(JobState) - _WAITING - _ACTIVE - {_S.UNKNOWN}
_SHORT = {
    "PD": _S.PENDING, "CF": _S.CONFIGURING, "RQ": _S.REQUEUED, "RF": _S.REQUEUE_FED, "RH": _S.REQUEUE_HOLD,
    "SE": _S.SPECIAL_EXIT, "RD": _S.RESV_DEL_HOLD, "PU": _S.POWER_UP_NODE, "R": _S.RUNNING, "CG": _S.COMPLETING,
    "RS": _S.RESIZING, "SI": _S.SIGNALING, "SO": _S.STAGE_OUT, "ST": _S.STOPPED, "S": _S.SUSPENDED,
    "EX": _S.EXPEDITING, "UD": _S.UPDATE_DB, "RV": _S.REVOKED, "CD": _S.COMPLETED, "F": _S.FAILED,
    "CA": _S.CANCELLED, "TO": _S.TIMEOUT, "PR": _S.PREEMPTED, "NF": _S.NODE_FAIL, "OOM": _S.OUT_OF_MEMORY,
    "BF": _S.BOOT_FAIL, "DL": _S.DEADLINE, "LF": _S.LAUNCH_FAILED, "RG": _S.RECONFIG_FAIL,
}  # fmt: skip


def parse_state(text: str) -> JobState:
    """The state in what squeue or sacct printed, long or short, also `CANCELLED by 1000` and a cut `OUT_OF_ME+`.

    A name that is in no table gives UNKNOWN and a warning: it is neither waited on silently nor taken for an end.
    """
    words = text.split()
    word = words[0].rstrip("+").upper() if words else ""
    if words and words[0].endswith("+") and word not in JobState.__members__:
        starts = [name for name in JobState.__members__ if name.startswith(word)]
        word = starts[0] if len(starts) == 1 else word
    if word in _SHORT:
        return _SHORT[word]
    if word in JobState.__members__ and word != "UNKNOWN":
        return JobState[word]
    logger.warning("Slurm shows the job state %r, which this version does not know; treated as UNKNOWN", text)
    return JobState.UNKNOWN
