"""The log of a training job, read while it grows."""

import re
import statistics
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainium.logs.diagnose import Diagnosis, diagnosis_of, root_first
from trainium.logs.progress import Point, parse_point
from trainium.logs.rules import Context, RuleClass
from trainium.logs.scanner import Marker, Scanner

_STAGE = "train"
_RECENT_STEPS = 20
_SAVING = re.compile(r"saving of checkpoint (\S+) (began|requested|completed)")
_STEP_IN_NAME = re.compile(r"step[_=](\d+)")
_LAST_STEP = re.compile(r"max_steps=(\d+)")
_STEP_KEY = "global_step="


@dataclass(frozen=True)
class CheckpointSave:
    """A checkpoint as the log tells of it: complete once its end was printed. Durations come from the printed times."""

    name: str
    step: int | None
    complete: bool
    began: datetime | None = None
    ended: datetime | None = None

    @property
    def seconds(self) -> float | None:
        """How long the saving took; None while it lasts or when no times were printed."""
        return (self.ended - self.began).total_seconds() if self.began and self.ended else None


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training is, as far as its log tells.

    Attributes:
        step, max_steps: the last global step seen (0 before the first), the step it is to reach.
        points: the metrics, one per step, in the order of the steps.
        seconds_per_step: the usual pace of the last steps, from the bar's elapsed time (its own rate has two decimals).
        eta_seconds: what is left at that pace.
        checkpoints: in the order in which they were begun.
        compilations: how often the compiler was called; after a complete compile stage only for saving and validation.
        finished: the trainer said that it reached its last step, the only sign of success.
        problems: what makes the training wrong even when the job exits 0, root first; none so far while it runs well.
        diagnoses: everything the rules found; explains a job that failed.
    """

    step: int
    max_steps: int | None
    points: tuple[Point, ...]
    seconds_per_step: float | None
    eta_seconds: float | None
    checkpoints: tuple[CheckpointSave, ...]
    compilations: int
    finished: bool
    problems: tuple[Diagnosis, ...]
    diagnoses: tuple[Diagnosis, ...]


def _pace(step_times: list[float]) -> float | None:
    """Seconds per step: the mean without the slowest tenth, in which a checkpoint was saved or a graph compiled.

    No median: the bar counts whole seconds, so fast steps take 0 or 1.
    """
    usual = sorted(step_times)[: len(step_times) - (len(step_times) + 9) // 10] if len(step_times) > 2 else step_times
    return statistics.mean(usual) if usual else None


class TrainingLog:
    """Feed it the bytes of a log in pieces of any size; `progress` is right at any time.

    Args:
        path: the name under which lines are cited.
        max_steps: the step the recipe asks for.
        expect_resume: whether the job is to continue from a checkpoint, so that starting from scratch is a failure.
        nodes: of the job.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_steps: int | None = None,
        expect_resume: bool = False,
        nodes: int = 1,
    ) -> None:
        self._path = path
        self._max_steps = max_steps
        self._scanner = Scanner(Context(_STAGE, nodes, expect_resume), self._marker)
        self._points: dict[int, Point] = {}
        self._step_times: list[float] = []
        self._saves: dict[str, CheckpointSave] = {}
        self._compilations = 0
        self._finished = False
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._scanner.feed(data)
        # A bar is rewritten by what comes after it, so its newest state has no line end. Taking it twice is harmless.
        line = self._scanner.unfinished.rstrip()
        if line.endswith("]") and _STEP_KEY in line:
            self._add(parse_point(line, line.rindex(_STEP_KEY)))

    def close(self) -> None:
        """The job is over and everything was fed: ending without the marker of success is now a problem."""
        self._scanner.close()
        self._closed = True

    @property
    def progress(self) -> TrainingProgress:
        """The state after what was fed so far."""
        found = root_first(diagnosis_of(f, self._path, _STAGE) for f in self._scanner.findings.values())
        problems = tuple(diagnosis for diagnosis in found if diagnosis.silent)
        if self._closed and not self._finished:
            problems += (self._no_end(),)
        step = max(self._points, default=0)
        if self._finished and self._max_steps is not None:
            step = self._max_steps
        pace = _pace(self._step_times)
        left = None if self._max_steps is None else max(0, self._max_steps - step)
        return TrainingProgress(
            step=step,
            max_steps=self._max_steps,
            points=tuple(self._points.values()),
            seconds_per_step=pace,
            eta_seconds=None if pace is None or left is None else pace * left,
            checkpoints=tuple(self._saves.values()),
            compilations=self._compilations,
            finished=self._finished,
            problems=problems,
            diagnoses=found,
        )

    def _marker(self, marker: Marker) -> None:
        match marker.rule:
            case "training-progress":
                self._add(parse_point(marker.text, marker.start))
            case "checkpoint-began" | "checkpoint-completed":
                self._save(marker)
            case "compiler-called":
                self._compilations += 1
            case "training-finished":
                if reached := _LAST_STEP.search(marker.text, marker.start):
                    self._max_steps = int(reached[1])
                self._finished = True

    def _add(self, point: Point | None) -> None:
        last = next(reversed(self._points.values()), None)
        if point is None or (last is not None and point.step == last.step):
            return
        if last is not None and point.step < last.step:
            # A restarted job goes on in the same file, from an earlier checkpoint: what came after that is void.
            self._points = {step: kept for step, kept in self._points.items() if step < point.step}
            self._finished = False
        elif last is not None and (passed := (point.elapsed or 0.0) - (last.elapsed or 0.0)) >= 0:
            # The bar's clock starts again with every epoch; the step that crosses it has no time.
            self._step_times.append(passed / (point.step - last.step))
            del self._step_times[:-_RECENT_STEPS]
        self._points[point.step] = point

    def _save(self, marker: Marker) -> None:
        match = _SAVING.search(marker.text, marker.start)
        if match is None:
            return
        name, event = match.groups()
        known = self._saves.get(name)
        if event == "completed":
            if known is not None:
                self._saves[name] = replace(known, complete=True, ended=marker.time)
        elif known is None:
            step = _STEP_IN_NAME.search(name)
            self._saves[name] = CheckpointSave(name, int(step[1]) if step else None, False, marker.time)

    @staticmethod
    def _no_end() -> Diagnosis:
        return Diagnosis(
            rule="no-end-marker",
            cls=RuleClass.AMBIGUOUS,
            stage=_STAGE,
            summary="the log ends without `max_steps=… reached`: the training did not get to its last step",
            evidence=(),
            count=1,
            action="see how the job ended; resume from the last complete checkpoint",
            silent=True,
        )
