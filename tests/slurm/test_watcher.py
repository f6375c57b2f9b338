"""The watcher with real local jobs, and with a scripted scheduler where Slurm's moods matter."""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.errors import BrokenRecord, SchedulerUnreachable
from slurm.folder import JobFolder, JobRecord
from slurm.local import LocalScheduler
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.states import JobState
from slurm.submission import cancel, ensure_submitted
from slurm.verdict import JobStatus, Outcome
from slurm.watcher import Watcher
from tests.slurm.conftest import OnlyAsked, bash

FAST = Timing(exit_scan=0.01, queue=0.05, early=0.02, accounting=0.05, confirm=0.1, lost=0.3)


def submitted(local: LocalScheduler, folder: JobFolder, script: str) -> JobFolder:
    ensure_submitted(local, bash(script), folder, "u-train-1", guard=lambda: None, grace=timedelta(seconds=1))
    return folder


def ignore(status: JobStatus) -> None:
    pass


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_local_jobs_are_watched_to_their_ends(local: LocalScheduler, tmp_path: Path) -> None:
    watcher = Watcher(local)
    scripts = ["exit 0", "exit 3", "kill -9 $$", "echo hi"]
    folders = [submitted(local, JobFolder(tmp_path / f"job {i}"), script) for i, script in enumerate(scripts)]
    outcomes = await asyncio.gather(*(watcher.wait(folder, ignore) for folder in folders))
    assert [(o.state, o.exit_code) for o in outcomes] == [
        (JobState.COMPLETED, 0),
        (JobState.FAILED, 3),
        (JobState.FAILED, 137),
        (JobState.COMPLETED, 0),
    ]
    assert [o.succeeded for o in outcomes] == [True, False, False, True]
    assert outcomes[1].started and outcomes[1].ended and outcomes[1].nodes == "localhost"  # noqa: PT018


async def test_a_job_that_ended_long_ago_is_known_at_once(local: LocalScheduler, folder: JobFolder) -> None:
    submitted(local, folder, "exit 3")
    await until(lambda: folder.exit.exists())
    assert (await Watcher(local).wait(folder, ignore)).exit_code == 3


async def test_our_cancel_and_a_foreign_one(local: LocalScheduler, tmp_path: Path) -> None:
    watcher = Watcher(local)
    ours, theirs = (submitted(local, JobFolder(tmp_path / n), "echo ready; sleep 600") for n in ("ours", "theirs"))
    waiting = [asyncio.create_task(watcher.wait(folder, ignore)) for folder in (ours, theirs)]
    await until(lambda: all(f.log.exists() and "ready" in f.log.read_text() for f in (ours, theirs)))
    cancel(local, ours)
    local.cancel([json.loads(theirs.job.read_text())["job_id"]])
    mine, other = await asyncio.gather(*waiting)
    assert (mine.state, mine.by_us, mine.detail) == (JobState.CANCELLED, True, "cancelled by this run")
    assert (other.state, other.by_us, other.detail) == (JobState.CANCELLED, False, "cancelled from outside")


async def test_cancelling_the_wait_leaves_the_job_alone(local: LocalScheduler, folder: JobFolder) -> None:
    watcher = Watcher(local)
    submitted(local, folder, "echo ready; while [ ! -e go ]; do sleep 0.02; done")
    waiting = asyncio.create_task(watcher.wait(folder, ignore))
    await until(lambda: folder.log.exists() and "ready" in folder.log.read_text())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (folder.path / "go").touch()
    assert (await watcher.wait(folder, ignore)).succeeded


async def test_a_folder_without_a_job_is_an_error(local: LocalScheduler, folder: JobFolder) -> None:
    with pytest.raises(BrokenRecord, match="nothing was submitted"):
        await Watcher(local).wait(folder, ignore)


async def test_an_error_in_on_change_goes_to_its_caller_only(local: LocalScheduler, tmp_path: Path) -> None:
    def explode(status: JobStatus) -> None:
        raise ZeroDivisionError

    watcher = Watcher(local)
    bad, good = (submitted(local, JobFolder(tmp_path / name), "sleep 0.5") for name in ("bad", "good"))
    results = await asyncio.gather(watcher.wait(bad, explode), watcher.wait(good, ignore), return_exceptions=True)
    assert isinstance(results[0], ZeroDivisionError)
    assert isinstance(results[1], Outcome)


class Mood(OnlyAsked):
    """Slurm as a test wants it: a queue row, an outage, an accounting row, changed while the watcher looks."""

    timing = FAST
    identity = None

    def __init__(self) -> None:
        self.row: QueueRow | None = QueueRow("7", JobState.PENDING, "Priority", "", "n", 0, None)
        self.account: AccountingRow | None = None
        self.down = False
        self.queries: list[int] = []
        self.accountings = 0

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        assert job_ids is not None
        self.queries.append(len(job_ids))
        if self.down:
            raise SchedulerUnreachable("squeue failed: connect failure")
        return {job: replace(self.row, job_id=job) for job in job_ids if self.row}

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        self.accountings += 1
        return {"7": self.account} if self.account else None


class Watched:
    """One job of a Mood, waited for."""

    def __init__(self, mood: Mood, folder: JobFolder, watcher: Watcher | None = None, job_id: str = "7") -> None:
        folder.write(folder.job, JobRecord(job_id, "n", datetime.now(UTC)))
        self.mood, self.folder, self.job_id = mood, folder, job_id
        self.changes: list[JobStatus] = []
        self.task = asyncio.create_task((watcher or Watcher(mood)).wait(folder, self.changes.append))

    async def shows(self, state: JobState, note: str = "") -> JobStatus:
        def last() -> bool:
            return bool(self.changes) and self.changes[-1].state is state and note in self.changes[-1].note

        await until(last)
        return self.changes[-1]

    def exits(self, code: int, restarts: int = 0) -> None:
        now = datetime.now(UTC).isoformat()
        data = {"job_id": self.job_id, "restart_count": restarts, "node": "n1", "nodes": "n1", "code": code}
        whole = self.folder.path / "exit.tmp"
        whole.write_text(json.dumps(data | {"signal": None, "started": now, "ended": now}))
        whole.rename(self.folder.exit)

    async def queried(self, times: int) -> None:
        target = len(self.mood.queries) + times
        await until(lambda: len(self.mood.queries) >= target)


async def test_changes_are_told_once_each(folder: JobFolder) -> None:
    mood = Mood()
    job = Watched(mood, folder)
    assert (await job.shows(JobState.PENDING)).reason == "Priority"
    mood.row = QueueRow("7", JobState.PENDING, "Resources", "", "n", 0, None)
    await until(lambda: job.changes[-1].reason == "Resources")
    assert job.changes[0].since == job.changes[1].since  # it has been pending all the time
    mood.row = QueueRow("7", JobState.CONFIGURING, "None", "n1", "n", 0, None)
    await job.shows(JobState.CONFIGURING)
    mood.row = QueueRow("7", JobState.RUNNING, None, "n1", "n", 0, None)
    assert (await job.shows(JobState.RUNNING)).nodes == "n1"
    await job.queried(3)
    assert [c.state for c in job.changes].count(JobState.RUNNING) == 1
    job.exits(0)
    await job.shows(JobState.COMPLETING)
    mood.row = None
    assert (await job.task).succeeded


async def test_an_outage_changes_nothing_but_the_note(folder: JobFolder) -> None:
    mood = Mood()
    mood.row = QueueRow("7", JobState.RUNNING, None, "n1", "n", 0, None)
    job = Watched(mood, folder)
    await job.shows(JobState.RUNNING)
    mood.down = True
    assert (await job.shows(JobState.RUNNING, "does not answer")).nodes == "n1"
    job.exits(0)
    await job.queried(3)
    assert not job.task.done()
    mood.down, mood.row = False, None
    assert (await job.task).succeeded


async def test_a_requeued_job_lives_on(folder: JobFolder) -> None:
    mood = Mood()
    mood.row = QueueRow("7", JobState.RUNNING, None, "n1", "n", 0, None)
    job = Watched(mood, folder)
    job.exits(143)
    await job.shows(JobState.COMPLETING)
    mood.row = QueueRow("7", JobState.PENDING, "BeginTime", "", "n", 1, None)
    await job.shows(JobState.PENDING)
    mood.row = None  # purged before anybody looked again; the exit file is that of the first start
    await job.shows(JobState.UNKNOWN)
    job.exits(0, restarts=1)
    outcome = await job.task
    assert (outcome.succeeded, outcome.restarts) == (True, 1)


async def test_without_an_exit_file_accounting_settles_it(folder: JobFolder) -> None:
    mood = Mood()
    mood.row, now = None, datetime.now(UTC)
    mood.account = AccountingRow("7", JobState.OUT_OF_MEMORY, 0, 125, 0, "n1", "n", now, now, now)
    outcome = await Watched(mood, folder).task
    assert (outcome.state, outcome.succeeded) == (JobState.OUT_OF_MEMORY, False)
    assert mood.accountings >= 2


async def test_an_exit_file_that_came_after_the_scan_still_tells_how_it_ended(folder: JobFolder) -> None:
    mood = Mood()
    mood.row = QueueRow("7", JobState.RUNNING, None, "n1", "n", 0, None)
    job = Watched(mood, folder, Watcher(mood, replace(FAST, exit_scan=3600)))
    await job.shows(JobState.RUNNING)
    job.exits(3)
    mood.row = QueueRow("7", JobState.FAILED, None, "n1", "n", 0, None, 3 << 8)
    outcome = await job.task
    assert (outcome.exit_code, outcome.detail) == (3, "ended with code 3")


async def test_a_job_that_nobody_knows_is_lost_after_a_while(folder: JobFolder) -> None:
    mood = Mood()
    mood.row = None
    job = Watched(mood, folder)
    await job.shows(JobState.UNKNOWN, "no exit file yet")
    outcome = await job.task
    assert (outcome.state, outcome.exit_code) == (JobState.NODE_FAIL, None)
    assert "lost" in outcome.detail


async def test_all_jobs_are_asked_for_at_once_and_no_oftener_than_allowed(tmp_path: Path) -> None:
    mood = Mood()
    mood.row = QueueRow("7", JobState.RUNNING, None, "n1", "n", 0, None)
    timing = replace(FAST, queue=3600, early=0.3)
    watcher = Watcher(mood, timing)
    jobs = [Watched(mood, JobFolder(tmp_path / str(i)), watcher, str(i)) for i in range(50)]
    for job in jobs:
        await job.shows(JobState.RUNNING)
    before, started = len(mood.queries), asyncio.get_running_loop().time()
    assert mood.queries[-1] == 50
    mood.row = None
    for job in jobs:  # a burst of ends brings the next query forward, but not one per end
        job.exits(0)
    outcomes = await asyncio.gather(*(job.task for job in jobs))
    assert all(outcome.succeeded for outcome in outcomes)
    passed = asyncio.get_running_loop().time() - started
    assert len(mood.queries) - before <= passed / timing.early + 1
