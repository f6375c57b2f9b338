"""Whether the work of a job that did not succeed is tried again, when and where: one pure function over the ledger.

What Slurm and the exit file say decides. The log only explains what they leave open: what a payload that ended with a
code of its own died of. Every kind of end has a budget of its own, counted over the whole ledger, so also over
restarts of the flow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from trainium.logs.diagnose import Diagnosis
from trainium.logs.rules import Role, RuleClass


class Kind(StrEnum):
    """Ends that a new attempt may get past; the values are the names of their budgets."""

    HARDWARE = "hardware"
    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    CAPACITY = "capacity"
    TRANSIENT = "transient"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How many new attempts each kind of end may have in one run and stage, and how long to wait before one."""

    hardware: int
    preemption: int
    time_limit: int
    capacity: int
    transient: int
    ambiguous: int
    capacity_delay: timedelta
    transient_delay: timedelta

    def of(self, kind: Kind) -> int:
        return int(getattr(self, kind))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One attempt that did not succeed, as the ledger keeps it.

    cause: how the scheduler says that it ended (the values of `slurm.verdict.Cause`). classes: of what its log shows,
    the root first, see `classes_of`. nodes: those that may be at fault; none when nobody knows which of several.
    position: the step from which the next attempt goes on; None for work that begins anew every time.
    """

    cause: str
    classes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    position: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Ended":
        return cls(
            cause=str(value["cause"]),
            classes=tuple(value["classes"]),
            nodes=tuple(value["nodes"]),
            position=value["position"],
        )


@dataclass(frozen=True)
class Again:
    """A new attempt after `delay`, on other nodes than `exclude`."""

    delay: timedelta
    exclude: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Stop:
    """No new attempt by itself. `why` says what a person can do."""

    why: str


# Findings that say more than the class of their rule does.
_BY_RULE: Mapping[str, str] = {"hardware": RuleClass.NODE, "no-capacity": Kind.CAPACITY, "slurm-boot": Kind.CAPACITY}
_BY_CAUSE: Mapping[str, Kind] = {
    "node": Kind.HARDWARE,
    "lost": Kind.HARDWARE,
    "preempted": Kind.PREEMPTION,
    "time_limit": Kind.TIME_LIMIT,
    "capacity": Kind.CAPACITY,
    "launch": Kind.AMBIGUOUS,
}
_BY_CLASS: Mapping[str, Kind] = {
    RuleClass.NODE: Kind.HARDWARE,
    RuleClass.TRANSIENT: Kind.TRANSIENT,
    Kind.CAPACITY: Kind.CAPACITY,
    RuleClass.CACHE: Kind.AMBIGUOUS,  # a race for an entry is over the second time, a damaged entry is not
    RuleClass.AMBIGUOUS: Kind.AMBIGUOUS,
}
_FINAL_CAUSES: Mapping[str, str] = {
    "cancelled_by_us": "this run cancelled it; starting the run again goes on",
    "cancelled_outside": "it was cancelled from outside, which is somebody's decision; starting the run again goes on",
    "memory": "the same job would need the same memory: raise `memory` of its stage in the recipe's resources, "
    "or use fewer workers",
}
_FINAL_CLASSES: Mapping[str, str] = {
    RuleClass.DETERMINISTIC: "the same would happen again, on every node",
    RuleClass.CONFIG: "the same would happen again until a setting is changed",
    RuleClass.INTERRUPTED: "it was told to end and nobody knows by whom; starting the run again goes on",
}
_WORDS: Mapping[Kind, str] = {
    Kind.HARDWARE: "a node failed",
    Kind.PREEMPTION: "it was preempted",
    Kind.TIME_LIMIT: "its time was up",
    Kind.CAPACITY: "there were no instances to be had",
    Kind.TRANSIENT: "the failure is one that passes",
    Kind.AMBIGUOUS: "the failure may or may not come again",
}


def classes_of(findings: Sequence[Diagnosis]) -> tuple[str, ...]:
    """What the findings in a log say of a retry, the root first: classes of rules, and `capacity`.

    A log in which nothing is recognised, or only what dying ranks do to each other, says nothing.
    """
    said = (f for f in findings if f.rule != "unrecognised" and f.role in (Role.CAUSE, Role.CONSEQUENCE))
    return tuple(dict.fromkeys(str(_BY_RULE.get(finding.rule, finding.cls)) for finding in said))


def decide(history: Sequence[Ended], budgets: Budgets) -> Again | Stop:
    """What comes after the last of these attempts, all of one stage and none of them a success.

    A time limit needs progress: an attempt that left no newer checkpoint than the one before it would be followed by
    one that gets no further. What Slurm's preemption took is started again in any case, up to its budget.
    """
    last, before = history[-1], history[:-1]
    kind = _kind(last)
    if not isinstance(kind, Kind):
        return Stop(kind)
    if kind is Kind.TIME_LIMIT and (reason := _no_use(last, before)):
        return Stop(reason)
    used, allowed = sum(_kind(ended) is kind for ended in history), budgets.of(kind)
    if used > allowed:
        times = "once" if used == 1 else f"{used} times"
        return Stop(f"{_WORDS[kind]}, {times} now, and attempts.{kind}={allowed} allows no further attempt")
    exclude = _excluded(history)
    delays = {Kind.CAPACITY: budgets.capacity_delay, Kind.TRANSIENT: budgets.transient_delay}
    where = f", without {', '.join(exclude)}" if exclude else ""
    return Again(
        delays.get(kind, timedelta()), exclude, f"{_WORDS[kind]}: {used} of at most {allowed} (attempts.{kind}){where}"
    )


def _kind(ended: Ended) -> Kind | str:
    """The kind of end, or why no attempt gets past it."""
    if ended.cause in _BY_CAUSE:
        return _BY_CAUSE[ended.cause]
    if ended.cause in _FINAL_CAUSES:
        return _FINAL_CAUSES[ended.cause]
    root = ended.classes[0] if ended.classes else ""
    if root in _BY_CLASS:
        return _BY_CLASS[root]
    if root in _FINAL_CLASSES:
        return _FINAL_CLASSES[root]
    if ended.cause == "unknown":
        return Kind.AMBIGUOUS
    return "nothing in its log says that another attempt would end otherwise"


def _no_use(last: Ended, before: Sequence[Ended]) -> str | None:
    """Why a job whose time was up would get no further the next time."""
    if last.position is None:
        return "its time was up, and it cannot go on from where it was: raise `time` of its stage in resources"
    reached = next((ended.position for ended in reversed(before) if ended.position is not None), 0)
    if last.position > reached:
        return None
    return (
        f"its time was up before it had saved a checkpoint after step {reached}, so that the next attempt would get no "
        "further: raise resources.train.time, or lower training.checkpoint_every"
    )


def _excluded(history: Sequence[Ended]) -> tuple[str, ...]:
    """The nodes that failed at any time, and those on which something doubtful has just happened."""
    nodes: dict[str, None] = {}
    for ended in history:
        kind = _kind(ended)
        doubtful = kind is Kind.AMBIGUOUS and ended is history[-1] and RuleClass.CACHE not in ended.classes[:1]
        if doubtful or (kind is Kind.HARDWARE and ended.cause != "lost"):
            nodes |= dict.fromkeys(ended.nodes)
    return tuple(nodes)
