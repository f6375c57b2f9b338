"""Which faults strike which runs, and when: decided by the seed alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.scene import Scene

STAGES = ("convert", "compile", "train", "export", "evaluate")  # those with a job


class Event(StrEnum):
    """What a moment is counted from."""

    STARTED = "started"  # the flow's process
    SUBMITTING = "submitting"  # intent.json is there, perhaps no job yet
    RUNNING = "running"  # start.json is there
    SAVED = "saved"  # the first complete checkpoint is there
    ENDED = "ended"  # exit.json is there


# Up to how many seconds after the event; a flow takes about that long to the next one.
SPREAD: Mapping[Event, float] = {
    Event.STARTED: 5.0,
    Event.SUBMITTING: 0.2,
    Event.RUNNING: 1.5,
    Event.SAVED: 1.5,
    Event.ENDED: 1.5,
}


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after an event of a stage's latest job ("": of the run)."""

    event: Event
    stage: str = ""
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.stage} {self.event} +{self.delay:.2f} s".lstrip()


class Then(StrEnum):
    """What has to come of a run after its fault."""

    GOES_ON = "goes on"  # the flow that was there ends well
    NEXT_START = "next start"  # its jobs live on, and the next start takes them over: not one job more
    STOPS = "stops"  # its jobs are ended, and nothing is submitted before somebody starts it again
    FAILS = "may fail"  # told in one message what to mend; the next start ends well


@dataclass(frozen=True)
class Lab:
    """The Slurm that a fault needs for itself."""

    nodes: int = 2
    accounting: bool = False
    cloud: int = 0
    late_exit: float = 0.0  # seconds
    small_disk: int = 0  # megabytes under the runs folder


@dataclass(frozen=True)
class Kind:
    """A fault: what is done at the moment, and what has to come of it.

    `lab`: None for the shared one. `own_server`: it breaks Prefect's server. `step`: seconds of a training step, where
    a fault needs more time than the usual ones give it. `weight`: how often among the others.
    """

    name: str
    act: Callable[["Scene"], None]
    then: Then
    moments: tuple[Moment, ...]
    lab: Lab | None = None
    own_server: bool = False
    overrides: tuple[str, ...] = ()
    step: float | None = None
    weight: int = 1


@dataclass(frozen=True)
class Case:
    """One run and its fault."""

    number: int
    kind: Kind
    moment: Moment
    random: Random = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"run-{self.number:03d}"


def moments(*events: Event, stages: Sequence[str] = STAGES) -> tuple[Moment, ...]:
    """Every event of every stage; those of the run once."""
    once = tuple(Moment(event) for event in events if event is Event.STARTED)
    train = tuple(Moment(event, "train") for event in events if event is Event.SAVED)
    per_job = [event for event in events if event not in (Event.STARTED, Event.SAVED)]
    return (*once, *train, *(Moment(event, stage) for stage in stages for event in per_job))


def draw(kinds: Sequence[Kind], runs: int, seed: int, *, first: int = 1) -> list[Case]:
    """`runs` cases: every kind before any comes again, in an order and at moments that the seed decides."""
    chooser = Random(seed)
    pool: list[Kind] = []
    cases = []
    for number in range(first, first + runs):
        if not pool:
            pool = [kind for kind in kinds for _ in range(kind.weight)]
            chooser.shuffle(pool)
        kind = pool.pop()
        own = Random(f"{seed}-{number}-{kind.name}")
        moment = own.choice(kind.moments)
        spread = own.uniform(0, SPREAD[moment.event])
        cases.append(Case(number, kind, Moment(moment.event, moment.stage, spread), own))
    return cases
