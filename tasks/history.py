"""The history of a training over all its attempts: what an undisturbed one would have had in its only log."""

from dataclasses import dataclass
from pathlib import Path

from tasks.starting_point import began_at
from trainium.logs.progress import Point
from trainium.logs.tail import Tail
from trainium.logs.training import TrainingLog


@dataclass(frozen=True)
class Attempted:
    """One attempt: the step at which it began, and the points of its log in the order of the steps."""

    began: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class History:
    """losses: (global step, loss) in order. attempts: jobs that were begun. repeated: steps trained more than once."""

    losses: list[tuple[int, float]]
    attempts: int
    repeated: int


def merge(attempts: list[Attempted]) -> History:
    """What counts of each attempt: its steps up to the one from which the next attempt went on. Pure.

    How far an attempt came is what its log shows, which may be every tenth step only, so `repeated` may be too small.
    """
    points: dict[int, Point] = {}
    repeated = reached = 0
    for attempt in attempts:
        repeated += max(0, reached - attempt.began)
        points = {step: point for step, point in points.items() if step < attempt.began}
        points |= {point.step: point for point in attempt.points}
        reached = max(attempt.began, *(point.step + 1 for point in attempt.points)) if attempt.points else attempt.began
    losses = [(step, point.loss) for step, point in sorted(points.items()) if point.loss is not None]
    return History(losses, len(attempts), repeated)


def read_attempt(job: Path, log: Path) -> Attempted:
    """An attempt that is over, from its folder and its log. A missing log has no points."""
    reader = TrainingLog(log)
    for block in Tail(log).read():
        reader.feed(block)
    reader.close()
    return Attempted(began_at(job), reader.progress.points)
