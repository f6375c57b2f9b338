"""One watcher per scheduler and event loop waits for any number of jobs.

Ends are noticed from exit files, which costs the scheduler nothing; the queue is asked once per interval for all jobs
together, sooner when a new exit file wants to be confirmed, and accounting only to settle what the queue cannot. With
a folder to share, one query answers for the watchers of all processes.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slurm.errors import BrokenRecord
from slurm.exits import Found
from slurm.folder import JobFolder
from slurm.looks import Look, Looks
from slurm.scheduler import Scheduler, Timing
from slurm.verdict import JobStatus, Outcome
from slurm.watch import Watch

logger = logging.getLogger(__name__)


class Watcher:
    """Waits for jobs of one scheduler. Use it from one event loop; its own task runs only while jobs are waited for.

    `shared`: a folder that every watcher of this user and scheduler is given, in whatever process and on whatever
    machine; see `slurm.snapshot.place`. None: it asks for its own jobs by itself.
    """

    def __init__(self, scheduler: Scheduler, timing: Timing | None = None, shared: Path | None = None) -> None:
        self._timing = timing or scheduler.timing
        self._looks = Looks(scheduler, self._timing, shared)
        self._strangers = Watcher(scheduler, timing) if shared else self
        self._watches: set[Watch] = set()
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
        watch = Watch.of(folder, record)
        if self._strangers is not self and await asyncio.to_thread(watch.is_of_another_user):
            return await self._strangers.wait(folder, on_change)  # what is shared are the jobs of this user
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
        pause = min(await self._ask_queue(), await self._ask_accounting())
        return max(0.0, min(self._next_scan - time.monotonic(), pause))

    async def _ask_queue(self) -> float:
        watches = list(self._watches)  # one that arrives meanwhile is not in this look
        if (pause := self._looks.queue_pause(want := _earliest(watches))) > 0:
            return pause
        ids = {watch.record.job_id for watch in watches}
        if look := await asyncio.to_thread(self._looks.queue, ids, want):
            await self._judge(self._take_look(look, watches))
        return self._looks.queue_pause(_earliest(self._watches))

    async def _ask_accounting(self) -> float:
        watches = [watch for watch in self._watches if watch.ask_accounting]
        wanted = {watch.record.job_id: watch.record.submitted.timestamp() for watch in watches}
        if not wanted or (pause := self._looks.accounts_pause(wanted)) > 0:
            return pause if wanted else math.inf
        if accounts := await asyncio.to_thread(self._looks.accounts, wanted):
            if accounts.error:
                logger.warning("%s; asking again", accounts.error)
            told = [w for w in watches if w.record.job_id in accounts.rows and accounts.taken > w.after]
            for watch in told:
                watch.take_accounts(accounts)
            await self._judge(told)
        return self._looks.accounts_pause(wanted)

    async def _scan(self) -> None:
        """Look for exit files: of all jobs once per interval, of a new one at once."""
        everything = time.monotonic() >= self._next_scan
        watches = [watch for watch in self._watches if everything or watch.is_new]
        for watch in watches:
            watch.is_new = False
        changed = await asyncio.to_thread(_changed, watches) if watches else []
        for watch, found in changed:
            watch.notice(found, self._timing)
        await self._judge([watch for watch, _ in changed if watch.is_confirmed])
        if everything:
            self._next_scan = time.monotonic() + self._timing.exit_scan

    def _take_look(self, look: Look, watches: list[Watch]) -> list[Watch]:
        """Note it for those of the jobs that it tells something about; these."""
        watches = [watch for watch in watches if look.taken > watch.after]
        if look.rows is None and any(watch.seen.reachable for watch in watches):
            logger.warning("%s; jobs go on, asking again", look.error)
        for watch in watches:
            watch.take_look(look)
        return watches

    async def _judge(self, watches: list[Watch]) -> None:
        for watch in watches:
            if verdict := await watch.judge(self._timing):
                if verdict.outcome:
                    self._watches.discard(watch)
                watch.tell(verdict)


def _earliest(watches: Iterable[Watch]) -> float | None:
    return min((watch.want for watch in watches if watch.want is not None), default=None)


def _changed(watches: list[Watch]) -> list[tuple[Watch, Found]]:
    return [(watch, found) for watch in watches if (found := watch.exit_file.look())]
