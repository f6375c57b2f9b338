"""One run at a time compiles into a cache that several runs share.

The compiler's own locks can corrupt a cache on NFS or FSx (read in Neuron's documentation), so it gets one writer at
a time. Training reads the cache and waits for nobody, also where it compiles for itself (`compile.mode: jit`). The
lease is in a hidden folder of the cache; its claim names the run. A flow that dies leaves its compile job running:
whoever takes the lease over waits for the end of that job first, as the scheduler and the job's exit file tell it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from blocks import BrokenClusterFile, Cluster, recall
from slurm.errors import BrokenRecord, SchedulerUnreachable
from slurm.folder import Intent, JobFolder
from slurm.scheduler import Scheduler
from slurm.verdict import JobStatus
from tasks.context import Run, watcher_of
from tasks.stage import log
from trainium.run.folder import BrokenRun, RunFolder
from trainium.run.holder import user_name
from trainium.run.lease import Contest, Lease, LeaseLost, Seen, Standing
from trainium.run.records import SHARED_LEASE

STAGE = "compile"


@asynccontextmanager
async def cache_to_itself(run: Run) -> AsyncIterator[Callable[[], None]]:
    """While inside, no other run compiles into this run's cache; waits for that. A cache of its own needs nothing.

    Call what it gives before every submission: it raises LeaseLost when this process was stopped for so long that
    another run has the cache.

    The lease is kept when the block is left while the job may live: nobody beats for it then, and whoever takes it over
    waits for the job.
    """
    if run.recipe.compile.cache is None:
        yield lambda: None
        return
    lease = await _taken(run)
    heart = asyncio.create_task(_beat(lease))
    try:
        yield lease.check
    finally:
        heart.cancel()
        if not _unended_jobs(run.folder):
            lease.release()


async def _taken(run: Run) -> Lease:
    stale_after = run.site.cluster.stale_after.total_seconds()
    contest = Contest(run.places.cache / SHARED_LEASE, stale_after=stale_after, run=run.folder.path)
    said = ""
    while True:
        seen = contest.look()
        # This run's own lease says that no other flow works on it: what an earlier one of it left is ours.
        mine = seen.holder is not None and seen.holder.run == str(run.folder.path)
        if seen.standing is Standing.GONE and not mine:
            await _end_of_jobs(run, seen)
            seen = contest.look()  # it may have been stopped, not dead
        if (mine or seen.standing in (Standing.FREE, Standing.GONE)) and (lease := contest.claim(seen)):
            return lease
        said = _say(run, f"waiting: {_who(seen)} compiles into the same cache, {run.places.cache}", said)
        await asyncio.sleep(contest.look_every)


async def _beat(lease: Lease) -> None:
    while True:
        await asyncio.sleep(lease.beat_every)
        try:
            await asyncio.to_thread(lease.beat)
        except LeaseLost:
            return  # whoever took it over has waited for the end of our job; the next submission is refused
        except OSError:
            continue  # a filesystem that does not answer for a while


async def _end_of_jobs(run: Run, seen: Seen) -> None:
    """Wait until no compile job of a run whose flow is gone lives. One whose folder was deleted is not known to."""
    if seen.holder is None:
        return
    folder, said = RunFolder(Path(seen.holder.run)), ""
    try:
        cluster = recall(folder.cluster)
    except (OSError, BrokenClusterFile):
        return

    def changed(status: JobStatus) -> None:
        nonlocal said
        text = f"waiting: job {status.job_id} of {_who(seen)}, whose flow is gone, compiles into the same cache"
        said = _say(run, f"{text} ({status.state.lower()})", said)

    for job in _unended_jobs(folder):
        try:
            if job.read_job() is None or seen.holder.user != user_name(os.geteuid()):
                await _until_ended(job, cluster)
            else:
                await watcher_of(cluster).wait(job, changed)
        except BrokenRecord:
            continue  # its folder was deleted meanwhile


async def _until_ended(job: JobFolder, cluster: Cluster) -> None:
    """For jobs that the watcher does not see: those of another user, and those of a flow that died submitting them.

    Two looks have to agree: a job that is being requeued looks ended for some seconds.
    """
    scheduler, intent, agreed = cluster.scheduler(), job.read_intent(), 0
    while intent is not None and agreed < 2:
        live = await asyncio.to_thread(_may_live, scheduler, job, intent)
        looked_for = datetime.now(UTC) > intent.latest + cluster.adopt_within
        agreed = 0 if live or not looked_for else agreed + 1
        await asyncio.sleep(scheduler.timing.queue)


def _may_live(scheduler: Scheduler, job: JobFolder, intent: Intent) -> bool:
    """By its name, which finds only jobs of this user, and by the ids that its flow and it itself have written down."""
    ids = {record.job_id for record in (job.read_job(), job.read_start()) if record}
    try:
        rows = [*scheduler.find(intent.name, intent.first), *scheduler.queue(ids).values()]
    except SchedulerUnreachable:
        return True
    return any(not row.state.is_final for row in rows)


def _unended_jobs(folder: RunFolder) -> list[JobFolder]:
    """Those of which the run's ledger does not know an end."""
    try:
        ended = {entry["attempt"] for entry in folder.ended_attempts(STAGE)}
    except (OSError, BrokenRun, LeaseLost):
        ended = set()
    jobs = [JobFolder(folder.job(STAGE, attempt)) for attempt in folder.attempts(STAGE) if attempt not in ended]
    return [job for job in jobs if job.intent.exists()]


def _who(seen: Seen) -> str:
    return f"run {Path(seen.holder.run).name} of {seen.holder.user}" if seen.holder else "some run"


def _say(run: Run, text: str, said: str) -> str:
    """Once, however often it is true; returned to be compared with next time."""
    if text != said:
        run.progress(STAGE, text)
        log(f"{STAGE}: {text}")
    return text
