"""Following one job to its end: what it is doing, why it waits, and when waiting for it makes no sense any more."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from slurm.errors import SchedulerUnreachable
from slurm.folder import JobFolder
from slurm.submission import cancel
from slurm.verdict import JobStatus, Outcome
from slurm.waiting import Wait, WaitLimits, assess, explain_wait
from tasks.artifacts import show_markdown
from tasks.context import Run
from tasks.stage import log
from trainium.config.fields import as_timedelta
from trainium.logs.tail import last_lines

TICK = 1.0  # seconds between two looks into a running job's log

Tick = Callable[[JobFolder], Awaitable[None]]


@dataclass(frozen=True)
class Watched:
    """How a job ended. `gave_up`: why this flow cancelled it while it waited; None: it did not."""

    outcome: Outcome
    gave_up: str | None = None


async def watch(run: Run, stage: str, folder: JobFolder, on_tick: Tick | None = None) -> Watched:
    """Follow the job to its end, whatever that is; one that waits hopelessly is cancelled after the recipe's grace.

    `on_tick` is called every second while the job may be running, and once after its end; None: show its last line.
    """
    waiting = _Waiting(run, stage, folder)
    tick = on_tick or _show_last_line(run, stage)
    ended = asyncio.ensure_future(run.watcher.wait(folder, waiting.changed))
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=TICK)
            await tick(folder)
            if not ended.done():
                await waiting.look()
        return Watched(await ended, waiting.gave_up)
    finally:
        ended.cancel()


class _Waiting:
    """The job while it waits: says why, warns once when it takes long, gives up when it is hopeless for long."""

    def __init__(self, run: Run, stage: str, folder: JobFolder) -> None:
        attempts = run.recipe.attempts
        longest = as_timedelta(attempts.max_wait) if attempts.max_wait else None
        self._limits = WaitLimits(as_timedelta(attempts.hopeless_grace), longest)
        self._run, self._stage, self._folder = run, stage, folder
        self._status: JobStatus | None = None
        self._since: datetime | None = None  # it waits, whatever for
        self._hopeless_since: datetime | None = None
        self._warned = False
        self.gave_up: str | None = None

    def changed(self, status: JobStatus) -> None:
        """A new state, reason or note of the job."""
        self._status = status
        if not status.state.is_waiting:
            self._since = self._hopeless_since = None
        else:
            self._since = self._since or self._waits_since(status)
            hopeless = explain_wait(status).hopeless
            self._hopeless_since = (self._hopeless_since or datetime.now(UTC)) if hopeless else None
        wait = self._assess()
        text = f"job {status.job_id} {wait.text if wait else status.state.lower()}"
        text += f" ({status.note})" if status.note else ""
        self._run.progress(self._stage, text)
        log(f"{self._stage}: {text}")

    async def look(self) -> None:
        """Time has passed."""
        wait = self._assess()
        if wait is None or self._status is None:
            return
        if wait.overdue and not self._warned:
            self._warned = True
            text = f"job {self._status.job_id} waits for long: {wait.text}"
            self._run.progress(self._stage, text)
            log(f"{self._stage}: {text}", logging.WARNING)
            await show_markdown(f"{self._stage}-waits", text, f"**{self._stage}** waits")
        if wait.give_up and self.gave_up is None:
            self._run.lease.check()
            try:
                await asyncio.to_thread(cancel, self._run.scheduler, self._folder)
            except SchedulerUnreachable as error:
                log(f"{self._stage}: {error}; cancelling the job again soon", logging.WARNING)
                return
            self.gave_up = f"job {self._status.job_id} would not have started by itself and was cancelled: {wait.text}"
            log(f"{self._stage}: {self.gave_up}", logging.WARNING)

    def _assess(self) -> Wait | None:
        since = self._hopeless_since or self._since
        return assess(self._status, since, datetime.now(UTC), self._limits) if self._status and since else None

    def _waits_since(self, status: JobStatus) -> datetime:
        """A job that has never started waits since its submission, also for a flow that adopted it."""
        record = self._folder.read_job()
        return status.since if record is None or self._folder.read_start() else record.submitted


def _show_last_line(run: Run, stage: str) -> Tick:
    async def tick(folder: JobFolder) -> None:
        lines = last_lines(folder.log, 1) if folder.log.exists() else []
        if lines:
            run.progress(stage, lines[0].strip())

    return tick
