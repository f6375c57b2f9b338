"""One watcher per scheduler and process waits for any number of jobs.

Ends are noticed from exit files, which costs the scheduler nothing; the queue is asked once per interval for all jobs
together, sooner when a new exit file wants to be confirmed, and accounting only to settle what the queue cannot.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from slurm.errors import BrokenRecord, SchedulerUnreachable
from slurm.folder import ExitRecord, JobFolder, JobRecord, StartRecord
from slurm.markers import read_marker
from slurm.scheduler import QueueRow, Scheduler, Timing
from slurm.verdict import JobStatus, Observations, Outcome, Standing, Verdict, judge, matching_exit

logger = logging.getLogger(__name__)

_ENDING = timedelta(seconds=60)


@dataclass(eq=False)
class _Watch:
    folder: JobFolder
    record: JobRecord
    seen: Observations
    events: "asyncio.Queue[JobStatus | Outcome | BaseException]" = field(default_factory=asyncio.Queue)
    status: JobStatus | None = None
    ask_queue: bool = True  # new here, or with an exit file that the queue has not confirmed
    settling: bool = False
    ask_accounting: bool = False


class Watcher:
    """Waits for jobs of one scheduler. Use it from one event loop; its own task runs only while jobs are waited for."""

    def __init__(self, scheduler: Scheduler, timing: Timing | None = None) -> None:
        self._scheduler = scheduler
        self._timing = timing or scheduler.timing
        self._watches: set[_Watch] = set()
        self._task: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._asked_queue = self._asked_accounting = float("-inf")

    async def wait(self, folder: JobFolder, on_change: Callable[[JobStatus], None]) -> Outcome:
        """How the folder's job ended. `on_change` is called whenever its state, reason, nodes or note change.

        An unreachable scheduler changes nothing but the note. Cancelling this coroutine leaves the job alone. Raises
        BrokenRecord when the folder has no job record.
        """
        record = await asyncio.to_thread(folder.read_job)
        if record is None:
            raise BrokenRecord(f"{folder.job} does not exist: nothing was submitted from this folder")
        seen = Observations(job_id=record.job_id, name=record.name, submitted=record.submitted)
        watch = _Watch(folder, record, seen)
        self._watches.add(watch)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="slurm watcher")
        try:
            while True:
                event = await watch.events.get()
                if isinstance(event, Outcome):
                    return event
                if isinstance(event, BaseException):
                    raise event
                on_change(event)
        finally:
            self._watches.discard(watch)

    async def _run(self) -> None:
        try:
            while self._watches:
                self._arrived.clear()
                await self._tick()
                try:
                    await asyncio.wait_for(self._arrived.wait(), self._timing.exit_scan)
                except TimeoutError:
                    continue
        except BaseException as error:
            for watch in self._watches:
                watch.events.put_nowait(error)
            raise

    async def _tick(self) -> None:
        watches = list(self._watches)
        for watch, (start, end) in zip(watches, await asyncio.to_thread(_scan, watches), strict=True):
            watch.ask_queue |= end is not None and end != watch.seen.exit
            watch.seen = replace(watch.seen, start=start, exit=end)
        if self._queue_is_due(watches):
            await self._ask_queue(watches)
            await self._judge(watches)
            unsettled = [watch for watch in watches if watch.ask_accounting]
            if unsettled and time.monotonic() - self._asked_accounting >= self._timing.accounting:
                await self._ask_accounting(unsettled)
                await self._judge(unsettled)

    def _queue_is_due(self, watches: list[_Watch]) -> bool:
        past = time.monotonic() - self._asked_queue
        now = datetime.now(UTC)
        confirm = timedelta(seconds=self._timing.confirm)
        wanted = any(
            w.ask_queue or (w.settling and w.seen.claim_at and now - w.seen.claim_at >= confirm) for w in watches
        )
        return past >= self._timing.queue or (wanted and past >= self._timing.early)

    async def _ask_queue(self, watches: list[_Watch]) -> None:
        """One query for all. The time of a look is taken before it, so that it is never newer than what it saw."""
        now = datetime.now(UTC)
        rows: dict[str, QueueRow] | None
        try:
            rows = await asyncio.to_thread(self._scheduler.queue, [watch.record.job_id for watch in watches])
        except SchedulerUnreachable as error:
            if any(watch.seen.reachable for watch in watches):
                logger.warning("%s; jobs go on, asking again", error)
            rows = None
        self._asked_queue = time.monotonic()
        for watch in watches:
            watch.ask_queue = False
            if rows is None:
                watch.seen = replace(watch.seen, reachable=False)
                continue
            row = rows.get(watch.record.job_id)
            last = row or watch.seen.last_row
            watch.seen = replace(watch.seen, reachable=True, queue_at=now, row=row, last_row=last)

    async def _ask_accounting(self, watches: list[_Watch]) -> None:
        now = datetime.now(UTC)
        since = min(watch.record.submitted for watch in watches)
        ids = [watch.record.job_id for watch in watches]
        try:
            rows = await asyncio.to_thread(self._scheduler.accounting, ids, since)
        except SchedulerUnreachable as error:
            logger.warning("%s; asking again", error)
            rows = None
        self._asked_accounting = time.monotonic()
        for watch in watches:
            row = (rows or {}).get(watch.record.job_id)
            watch.seen = replace(watch.seen, accounting_at=now, accounting=row)

    async def _judge(self, watches: list[_Watch]) -> None:
        for watch in watches:
            verdict = judge(watch.seen, self._timing)
            if verdict.standing is not Standing.LIVE and not (verdict.outcome and verdict.outcome.succeeded):
                verdict = judge(await asyncio.to_thread(_with_clues, watch), self._timing)
            watch.seen = replace(watch.seen, claim=verdict.claim, claim_at=verdict.claim_at)
            watch.settling = verdict.standing is Standing.SETTLING
            watch.ask_accounting = verdict.ask_accounting
            watch.ask_queue = verdict.standing is Standing.LIVE and _is_ending(watch.seen)
            self._tell(watch, verdict)

    def _tell(self, watch: _Watch, verdict: Verdict) -> None:
        if verdict.outcome:
            self._watches.discard(watch)
            watch.events.put_nowait(verdict.outcome)
            return
        row, old = watch.seen.row or watch.seen.last_row, watch.status
        reason = row.reason if row and verdict.state.is_waiting else None
        nodes = row.nodes if row else ""
        since = old.since if old and old.state is verdict.state else datetime.now(UTC)
        status = JobStatus(watch.record.job_id, verdict.state, reason, nodes, since, verdict.note)
        if old != status:
            watch.status = status
            watch.events.put_nowait(status)


def _scan(watches: list[_Watch]) -> list[tuple[StartRecord | None, ExitRecord | None]]:
    return [(watch.folder.read_start(), watch.folder.read_exit()) for watch in watches]


def _is_ending(seen: Observations) -> bool:
    """The payload has just ended and the queue has not noticed; an epilog that hangs for longer is not worth asking."""
    record = matching_exit(seen)
    return seen.reachable and record is not None and datetime.now(UTC) - record.ended < _ENDING


def _with_clues(watch: _Watch) -> Observations:
    """What explains an end, read from files only once there is one.

    The wish to cancel is written by others at any time, but always before the job ends of it.
    """
    try:
        record = watch.folder.read_job()
    except BrokenRecord:
        record = None
    requested = bool((record or watch.record).cancel_requested)
    return replace(watch.seen, cancel_requested=requested, marker=read_marker(watch.folder.log, watch.record.job_id))
