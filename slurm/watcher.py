"""One watcher per scheduler and event loop waits for any number of jobs.

Ends are noticed from exit files, which costs the scheduler nothing; the queue is asked once per interval for all jobs
together, sooner when a new exit file wants to be confirmed, and accounting only to settle what the queue cannot. With
a folder to share, one query answers for the watchers of all processes.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurm.errors import BrokenRecord
from slurm.exits import ExitFile
from slurm.folder import ExitRecord, JobFolder, JobRecord, StartRecord
from slurm.looks import Accounts, Look, Looks
from slurm.markers import read_marker
from slurm.scheduler import Scheduler, Timing
from slurm.verdict import JobStatus, Observations, Outcome, Standing, Verdict, judge, matching_exit

logger = logging.getLogger(__name__)

_ENDING = timedelta(seconds=60)


@dataclass(eq=False)
class _Watch:
    """One job that is waited for.

    after: only looks taken later (seconds since 1970) tell something about the latest that is known of the job. want:
    when one is wanted before the interval is over.
    """

    folder: JobFolder
    record: JobRecord
    exit_file: ExitFile
    seen: Observations
    after: float
    want: float | None
    events: "asyncio.Queue[JobStatus | Outcome | BaseException]" = field(default_factory=asyncio.Queue)
    status: JobStatus | None = None
    is_new: bool = True
    ask_accounting: bool = False


class Watcher:
    """Waits for jobs of one scheduler. Use it from one event loop; its own task runs only while jobs are waited for.

    `shared`: a folder that every watcher of this user and scheduler is given, in whatever process and on whatever
    machine; see `slurm.snapshot.place`. None: it asks for its own jobs by itself.
    """

    def __init__(self, scheduler: Scheduler, timing: Timing | None = None, shared: Path | None = None) -> None:
        self._scheduler = scheduler
        self._timing = timing or scheduler.timing
        self._looks = Looks(scheduler, self._timing, shared)
        self._strangers = Watcher(scheduler, timing) if shared else self
        self._watches: set[_Watch] = set()
        self._task: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._next_scan = 0.0

    async def wait(self, folder: JobFolder, on_change: Callable[[JobStatus], None]) -> Outcome:
        """How the folder's job ended. `on_change` is called whenever its state, reason, nodes or note change.

        An unreachable scheduler changes nothing but the note. Cancelling this coroutine leaves the job alone. Raises
        BrokenRecord when the folder has no job record.
        """
        record = await asyncio.to_thread(folder.read_job)
        if record is None:
            raise BrokenRecord(f"{folder.job} does not exist: nothing was submitted from this folder")
        if self._strangers is not self and await asyncio.to_thread(_is_of_another_user, folder):
            return await self._strangers.wait(folder, on_change)  # what is shared are the jobs of this user
        now = time.time()
        seen = Observations(job_id=record.job_id, name=record.name, submitted=record.submitted)
        watch = _Watch(folder, record, ExitFile(folder), seen, after=now, want=now)
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
                pause = await self._tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), pause)
        except BaseException as error:
            for watch in self._watches:
                watch.events.put_nowait(error)
            raise

    async def _tick(self) -> float:
        """Do what is due; the seconds until something may be due again."""
        await self._scan()
        pauses = [self._looks.queue_pause(want := _earliest(self._watches))]
        if pauses[0] <= 0:
            watches = list(self._watches)  # one that arrives meanwhile is not in this look
            ids = {watch.record.job_id for watch in watches}
            if look := await asyncio.to_thread(self._looks.queue, ids, want):
                await self._judge(self._take_look(look, watches))
            pauses[0] = self._looks.queue_pause(_earliest(self._watches))
        if unsettled := [watch for watch in self._watches if watch.ask_accounting]:
            wanted = {watch.record.job_id: watch.record.submitted.timestamp() for watch in unsettled}
            pause = self._looks.accounts_pause(wanted)
            if pause <= 0 and (accounts := await asyncio.to_thread(self._looks.accounts, wanted)):
                await self._judge(self._take_accounts(accounts, unsettled))
            pauses.append(self._looks.accounts_pause(wanted))
        return max(0.0, min(self._next_scan - time.monotonic(), *pauses))

    async def _scan(self) -> None:
        """Look for exit files: of all jobs once per interval, of a new one at once."""
        everything = time.monotonic() >= self._next_scan
        watches = [watch for watch in self._watches if everything or watch.is_new]
        for watch in watches:
            watch.is_new = False
        for watch, (start, end) in await asyncio.to_thread(_changed, watches) if watches else ():
            self._notice(watch, start, end)
        if everything:
            self._next_scan = time.monotonic() + self._timing.exit_scan

    def _notice(self, watch: _Watch, start: StartRecord | None, end: ExitRecord | None) -> None:
        """Only a look taken from now on confirms it."""
        watch.seen = replace(watch.seen, start=start, exit=end)
        if end is not None:
            watch.after = time.time()
            watch.want = watch.after + self._timing.settle

    def _take_look(self, look: Look, watches: list[_Watch]) -> list[_Watch]:
        """Note it for those of the jobs that it tells something about; these."""
        watches = [watch for watch in watches if look.taken > watch.after]
        if look.rows is None and any(watch.seen.reachable for watch in watches):
            logger.warning("%s; jobs go on, asking again", look.error)
        for watch in watches:
            watch.want = None
            if look.rows is None:
                watch.seen = replace(watch.seen, reachable=False)
                continue
            row = look.rows.get(watch.record.job_id)
            last, at = row or watch.seen.last_row, datetime.fromtimestamp(look.taken, UTC)
            watch.seen = replace(watch.seen, reachable=True, queue_at=at, row=row, last_row=last)
        return watches

    def _take_accounts(self, accounts: Accounts, watches: list[_Watch]) -> list[_Watch]:
        if accounts.error:
            logger.warning("%s; asking again", accounts.error)
        told = [w for w in watches if w.record.job_id in accounts.rows and accounts.taken > w.after]
        for watch in told:
            at, row = datetime.fromtimestamp(accounts.taken, UTC), accounts.rows[watch.record.job_id]
            watch.seen = replace(watch.seen, accounting_at=at, accounting=row)
        return told

    async def _judge(self, watches: list[_Watch]) -> None:
        for watch in watches:
            verdict = judge(watch.seen, self._timing)
            if verdict.standing is not Standing.LIVE and not (verdict.outcome and verdict.outcome.succeeded):
                clues = await asyncio.to_thread(_with_clues, watch)
                if clues.exit != watch.seen.exit and not watch.seen.row:
                    self._notice(watch, clues.start, clues.exit)  # the look that misses the job is older than it
                    continue
                verdict = judge(clues, self._timing)
                watch.seen = replace(watch.seen, start=clues.start, exit=clues.exit)
            watch.seen = replace(watch.seen, claim=verdict.claim, claim_at=verdict.claim_at)
            watch.ask_accounting = verdict.ask_accounting
            watch.want = watch.want or self._wanted(watch.seen, verdict)
            self._tell(watch, verdict)

    def _wanted(self, seen: Observations, verdict: Verdict) -> float | None:
        """When a look is wanted before the interval is over."""
        looked = seen.queue_at.timestamp() if seen.queue_at else 0.0
        if verdict.standing is Standing.SETTLING and verdict.claim_at:
            confirms = verdict.claim_at.timestamp() + self._timing.confirm
            return confirms if confirms > looked else None  # what takes longer to settle has time
        return looked if verdict.standing is Standing.LIVE and _is_ending(seen) else None

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


def _earliest(watches: Iterable[_Watch]) -> float | None:
    return min((watch.want for watch in watches if watch.want is not None), default=None)


def _changed(watches: list[_Watch]) -> list[tuple[_Watch, tuple[StartRecord | None, ExitRecord | None]]]:
    return [(watch, records) for watch in watches if (records := watch.exit_file.look())]


def _with_clues(watch: _Watch) -> Observations:
    """What explains an end, read from files only once there is one; also an exit file that came after the last scan.

    The wish to cancel is written by others at any time, but always before the job ends of it.
    """
    try:
        record = watch.folder.read_job()
    except BrokenRecord:
        record = None
    requested = bool((record or watch.record).cancel_requested)
    marker = read_marker(watch.folder.log, watch.record.job_id)
    start, end = watch.exit_file.look() or (watch.folder.read_start(), watch.seen.exit)
    return replace(watch.seen, start=start, exit=end, cancel_requested=requested, marker=marker)


def _is_ending(seen: Observations) -> bool:
    """The payload has just ended and the queue has not noticed; an epilog that hangs for longer is not worth asking."""
    record = matching_exit(seen)
    return seen.reachable and record is not None and datetime.now(UTC) - record.ended < _ENDING


def _is_of_another_user(folder: JobFolder) -> bool:
    """Whether somebody else submitted the job, and this user's queue does not show it: they wrote its script."""
    with contextlib.suppress(OSError):
        return folder.script.stat().st_uid != os.getuid()
    return False
