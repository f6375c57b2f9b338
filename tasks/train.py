"""Stage train: NxDT in a job, its progress shown while it runs, its end believed only with the positive marker."""

import asyncio
import math
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.folder import JobFolder
from slurm.spec import JobSpec
from tasks.artifacts import Progress, loss_curve, show_markdown
from tasks.attempts import Resumption
from tasks.context import Run
from tasks.devices import CoreWatch
from tasks.history import Attempted, History, merge, read_attempt
from tasks.jobs import failure_lines, run_job
from tasks.launching import prepare_launch
from tasks.stage import StageResult, run_stage
from tasks.starting_point import began_at, note_divergence, position_after, starting_point
from trainium.checkpoint.training import TrainingCheckpoint, last_complete, list_checkpoints
from trainium.errors import StageFailed
from trainium.logs.tail import Tail
from trainium.logs.training import TrainingLog, TrainingProgress
from trainium.monitor.neuron_monitor import CoreUse
from trainium.run.records import Output, StageRecord
from trainium.text import duration

UI_EVERY = 5.0  # seconds between two updates of the artifact; each is an HTTP call


@task(name="train", task_run_name="train", cache_policy=NO_CACHE)
async def train(run: Run) -> StageRecord:
    """Train to max_steps, or go on from the last complete checkpoint of an attempt that ended early."""
    recipe = run.recipe
    inputs = {
        "training": recipe.training.model_dump(mode="json"),
        "parallelism": recipe.parallelism.model_dump(mode="json"),
        "nodes": recipe.resources.nodes,
    }
    return await run_stage(run, "train", inputs, lambda: _train(run))


async def _train(run: Run) -> StageResult:
    follower = _Follower(run)
    where = {"shards": run.site.layout.shard_count, "max_steps": run.recipe.training.max_steps}
    checkpoints = run.places.checkpoints

    def describe(path: Path) -> JobSpec:
        name, resume = starting_point(path, checkpoints, **where)
        follower.begin(began_at(path))
        return prepare_launch(run.site, path, "train", name, resume)

    resumption = Resumption(began=began_at, after=lambda path: position_after(path, checkpoints, **where))
    job = await run_job(run, "train", describe, follower.tick, resumption)
    progress = await follower.finish(job.folder)
    checkpoint = last_complete(checkpoints, run.site.layout.shard_count)
    history = await asyncio.to_thread(_history, run, job.note.attempt, progress)
    problems = [*map(str, progress.problems), *_unfinished(run, job.folder.path, progress, checkpoint, history)]
    if problems or checkpoint is None:
        run.folder.end_attempt("train", job.note, succeeded=False)
        losses = [(point.step, point.loss) for point in progress.points if point.loss is not None]
        if any(not math.isfinite(loss) for _, loss in losses):
            note_divergence(job.folder.path, losses)
        head = f"train failed: job {job.note.id} ended with code 0, but the training is not what it should be:"
        text = [head, *(f"  {problem}" for problem in problems), f"  log: {job.note.log}", *failure_lines(job.folder)]
        raise StageFailed("\n".join(text))
    losses = history.losses
    await show_markdown("train-loss", loss_curve(losses), f"loss of `{run.folder.name}`, step by step")
    return StageResult(
        outputs=(Output.of(checkpoint.path),),
        jobs=(job.note,),
        verified=(
            f"max_steps={run.recipe.training.max_steps} reached, loss {losses[0][1]:.3g} → {losses[-1][1]:.3g}, finite",
            f"checkpoint of step {checkpoint.step} complete: {run.site.layout.shard_count} shards, marker `done`",
        ),
        notes=(*_notes(progress, follower.cores.peak), *_interruptions(history)),
        facts={
            "checkpoint": str(checkpoint.path),
            "step": checkpoint.step,
            "losses": losses,
            "attempts": history.attempts,
            "repeated_steps": history.repeated,
        },
        table=[
            {"step": item.step, "checkpoint": item.path.name, "complete": item.complete}
            for item in list_checkpoints(checkpoints, run.site.layout.shard_count)
        ],
    )


def _history(run: Run, attempt: int, progress: TrainingProgress) -> History:
    """Of all attempts that began, the last one being the one that has just been followed."""
    folders = [
        JobFolder(run.folder.job("train", number)) for number in run.folder.attempts("train") if number < attempt
    ]
    earlier = [read_attempt(folder.path, folder.log) for folder in folders if folder.read_start()]
    return merge([*earlier, Attempted(began_at(run.folder.job("train", attempt)), progress.points)])


def _unfinished(
    run: Run, job: Path, progress: TrainingProgress, checkpoint: TrainingCheckpoint | None, history: History
) -> list[str]:
    steps, began = run.recipe.training.max_steps, began_at(job)
    problems = [] if history.losses else ["the log shows no loss"]
    first = progress.points[0].step if progress.points else began
    if first < began:
        problems.append(f"it was to go on from step {began}, but trained from step {first} on")
    if checkpoint is None:
        problems.append(f"there is no complete checkpoint in {run.places.checkpoints}")
    elif checkpoint.step != steps:
        problems.append(f"the last complete checkpoint is of step {checkpoint.step}, not {steps}: {checkpoint.path}")
    return problems


def _interruptions(history: History) -> tuple[str, ...]:
    if history.attempts == 1:
        return ()
    return (f"{history.attempts} attempts; steps that were trained more than once, by the logs: {history.repeated}",)


def _notes(progress: TrainingProgress, cores: CoreUse | None) -> tuple[str, ...]:
    """What the log says of time, and the monitors of the cores."""
    saves = [save.seconds for save in progress.checkpoints if save.seconds is not None]
    notes = [f"{cores}, as the nodes' neuron-monitor had it"] if cores else []
    if progress.seconds_per_step is not None:
        notes.append(f"{duration(progress.seconds_per_step)} per step, as far as a log of whole seconds tells")
    if saves:
        notes.append(f"{len(saves)} checkpoints saved, each in at most {duration(max(saves))}")
    return tuple(notes)


class _Follower:
    """Reads the job's log as it grows, attempt after attempt."""

    def __init__(self, run: Run) -> None:
        self.cores = CoreWatch()
        self._run = run
        self._began = 0
        self._log: TrainingLog | None = None
        self._tail: Tail | None = None
        self._bar = Progress("train-progress")
        self._shown = 0.0

    def begin(self, step: int) -> None:
        """An attempt that begins at this global step; the next look is into its log."""
        self._began = step
        self._log = self._tail = None

    async def tick(self, folder: JobFolder) -> None:
        self.cores.look(folder.path)
        progress = self._read(folder).progress
        if not progress.points:
            return
        fraction, text = self._fraction(progress), self._line(progress)
        self._run.progress("train", text, fraction)
        if time.monotonic() - self._shown > UI_EVERY:
            self._shown = time.monotonic()
            await self._bar.update(fraction, text)

    async def finish(self, folder: JobFolder) -> TrainingProgress:
        """What the whole log says; the bar ends where the training did, however short ago it was moved."""
        log = self._read(folder)
        log.close()
        await self._bar.update(self._fraction(log.progress), self._line(log.progress))
        return log.progress

    def _fraction(self, progress: TrainingProgress) -> float:
        return min(progress.step / self._run.recipe.training.max_steps, 1.0)

    def _line(self, progress: TrainingProgress) -> str:
        return _line(progress, self._run.recipe.training.max_steps, self.cores.peak)

    def _read(self, folder: JobFolder) -> TrainingLog:
        if self._tail is None or self._log is None:
            self._tail, self._log = Tail(folder.log), self._new_log(folder)
        restarts = self._tail.restarts
        for block in self._tail.read():
            if self._tail.restarts != restarts:  # the log began anew: what was read of the old one counts no more
                restarts, self._log = self._tail.restarts, self._new_log(folder)
            self._log.feed(block)
        return self._log

    def _new_log(self, folder: JobFolder) -> TrainingLog:
        recipe = self._run.recipe
        return TrainingLog(
            folder.log,
            max_steps=recipe.training.max_steps,
            expect_resume=self._began > 0,
            nodes=recipe.resources.nodes,
        )


def _line(progress: TrainingProgress, steps: int, cores: CoreUse | None) -> str:
    text = f"step {progress.step} of {steps}"
    loss = next((point.loss for point in reversed(progress.points) if point.loss is not None), None)
    if loss is not None:
        text += f", loss {loss:.4g}"
    if progress.eta_seconds is not None:
        text += f", {duration(progress.eta_seconds)} left"
    return f"{text}, {cores}" if cores else text
