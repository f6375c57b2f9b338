"""What slurmstepd and srun wrote at the end of a job's log about why it ended.

It never tells whether a job has ended: a payload can print anything. It explains an end that is known, which for a job
that left the queue long ago, on a cluster without accounting, nothing else does. Wordings: Slurm 19.05 to 24.11,
`_handle_signal_container` of slurmstepd, the task/cgroup plugin, and srun's allocation code.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_TAIL = 64 * 1024  # bytes; after the last words of slurmstepd only the payload's farewell follows
_LINE = 200


class MarkerKind(StrEnum):
    """What the log says. The first five are slurmstepd's reasons to end the job, the others troubles on the way."""

    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    NODE = "node"
    REQUEUED = "requeued"
    MEMORY = "memory"
    CAPACITY = "capacity"

    @property
    def is_conclusive(self) -> bool:
        """After this the job does not go back into the queue."""
        return self in (MarkerKind.CANCELLED, MarkerKind.TIME_LIMIT)


@dataclass(frozen=True)
class LogMarker:
    """`line` is the evidence, for people."""

    kind: MarkerKind
    line: str


# A step that is "CANCELLED" without a reason was ended by srun itself after a bad exit of one of its tasks.
_ENDED = re.compile(
    r"\*\*\* (?:(?P<job>JOB)|STEP) (?P<id>[0-9]+)\S* ON \S+ "
    r"(?:CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+[A-Z]))?|(?P<hardware>UNCORRECTABLE MEMORY ERROR) AT)"
)
_REASONS = {
    "TIME LIMIT": MarkerKind.TIME_LIMIT,
    "PREEMPTION": MarkerKind.PREEMPTED,
    "NODE FAILURE": MarkerKind.NODE,
    "JOB REQUEUE": MarkerKind.REQUEUED,
}
# Later ones win: nodes that do not boot are reported as failed as well, and nobody else reports memory.
_TROUBLES: tuple[tuple[MarkerKind, re.Pattern[str]], ...] = (
    (MarkerKind.NODE, re.compile(r"srun: error: Node failure on \S+")),
    (
        MarkerKind.CAPACITY,
        re.compile(
            r"InsufficientInstanceCapacity|srun: error: Nodes \S+ are still not ready"
            r"|Something is wrong with the boot of the nodes"
        ),
    ),
    (
        MarkerKind.MEMORY,
        re.compile(
            r"Detected [0-9]+ oom[-_]kill event\S* in (?:StepId=|step )(?P<id>[0-9]+)"
            r"|srun: error: \S+: tasks? [0-9,\[\]-]+: Out Of Memory"
        ),
    ),
)
_NEW_START = re.compile(r"job script: start [0-9]+ of job ")


def find_marker(text: str, job_id: str) -> LogMarker | None:
    """The marker that explains this job's latest start, if there is one.

    A reason to end the whole job goes before a trouble, and the last of its kind before earlier ones. Lines may be
    glued together or rewritten by progress bars, so nothing is expected at the start of a line.

    >>> find_marker("*** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***", "7").kind
    <MarkerKind.TIME_LIMIT: 'time_limit'>
    """
    ended: LogMarker | None = None
    troubles: dict[MarkerKind, LogMarker] = {}
    for line in re.split(r"[\r\n]+", text):
        if _NEW_START.search(line):
            ended, troubles = None, {}
        for found in _ENDED.finditer(line):
            if kind := _reason(found, job_id):
                ended = _marker(kind, line, found.start())
        for kind, pattern in _TROUBLES:
            if (hit := pattern.search(line)) and hit.groupdict().get("id") in (None, job_id):
                troubles[kind] = _marker(kind, line, hit.start())
    return ended or next((troubles[kind] for kind, _ in reversed(_TROUBLES) if kind in troubles), None)


def read_marker(log: Path, job_id: str) -> LogMarker | None:
    """`find_marker` on the end of a log; None where there is no log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            tail = file.read(_TAIL)
    except OSError:
        return None
    return find_marker(tail.decode(errors="replace"), job_id)


def _reason(found: re.Match[str], job_id: str) -> MarkerKind | None:
    if found["id"] != job_id:
        return None
    if found["hardware"]:
        return MarkerKind.NODE
    if found["why"]:
        return next((kind for words, kind in _REASONS.items() if found["why"].startswith(words)), None)
    return MarkerKind.CANCELLED if found["job"] else None


def _marker(kind: MarkerKind, line: str, start: int) -> LogMarker:
    return LogMarker(kind, "".join(c if c.isprintable() else " " for c in line[start : start + _LINE]).strip())
