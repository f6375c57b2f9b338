"""Two starts of one run: one works, the other is refused or waits; an old one that wakes up touches nothing."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flows.finetune
from blocks import LocalCluster
from flows.cli import app
from flows.finetune import finetune
from slurm.folder import JobFolder
from tasks.context import Run
from tasks.listening import listening
from tests.flows import following
from tests.flows.surface import until
from trainium.files import read_json, write_json
from trainium.run.folder import NotYourRun, RunFolder
from trainium.run.lease import LeaseLost, RunBusy, Standing
from trainium.run.records import StageRecord

PATIENCE = 60  # seconds
SOON = timedelta(seconds=0.5)


class Stages:
    """In place of all stages: what a flow does with its run, until it is told to end."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.at_work = asyncio.Event()
        self.end = asyncio.Event()

    async def __call__(self, run: Run) -> None:
        run.lease.check()
        self.inside.append(run.lease.token)
        self.at_work.set()
        async with asyncio.timeout(PATIENCE):
            await self.end.wait()


class Heard:
    """What a flow says while it waits."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    def started(self, stage: str) -> None: ...

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        if "waiting until it is done or dead" in text:
            self.waits.set()

    def finished(self, record: StageRecord, *, skipped: bool) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages()
    monkeypatch.setattr(flows.finetune, "_stages", stages)
    return stages


async def start(runs: Path, *, wait: bool = False) -> Path:
    cluster = LocalCluster(runs=runs, stale_after=SOON)
    return await finetune("rehearsal", run_name="r", cluster=cluster, wait_for_run=wait)


@asynccontextmanager
async def working(runs: Path, stages: Stages) -> AsyncIterator["asyncio.Task[Path]"]:
    """A flow at work; it ends with the block."""
    flow = asyncio.create_task(start(runs))
    await asyncio.wait({flow, asyncio.create_task(stages.at_work.wait())}, return_when=asyncio.FIRST_COMPLETED)
    yield flow
    stages.end.set()
    await flow


async def test_the_second_start_is_refused(tmp_path: Path, prefect_server: str, stages: Stages) -> None:
    async with working(tmp_path, stages):
        with pytest.raises(RunBusy, match="is being worked on by"):
            await start(tmp_path)
    assert len(stages.inside) == 1
    await start(tmp_path)
    assert len(stages.inside) == 2


async def test_the_second_start_waits_if_it_is_told_to(tmp_path: Path, prefect_server: str, stages: Stages) -> None:
    heard = Heard()
    async with working(tmp_path, stages):
        with listening(heard):
            second = asyncio.create_task(start(tmp_path, wait=True))
        async with asyncio.timeout(PATIENCE):
            await heard.waits.wait()
        assert len(stages.inside) == 1
    async with asyncio.timeout(PATIENCE):
        assert await second == tmp_path / "r" / "report.md"
    assert len(stages.inside) == 2


async def test_a_retry_of_a_flow_run_waits_for_what_may_be_its_own_first_try(
    tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, heard, tries = RunFolder.named(tmp_path, "r"), Heard(), []
    contest = folder.contest()

    async def stages(run: Run) -> None:
        tries.append(run.lease.token)
        if len(tries) == 1:
            run.lease.release()
            held.append(contest.claim(contest.look()))
            raise RuntimeError("the first try ends, and somebody is faster than the second")

    held: list[object] = []
    monkeypatch.setattr(flows.finetune, "_stages", stages)
    retried = finetune.with_options(retries=1, retry_delay_seconds=0)
    cluster = LocalCluster(runs=tmp_path, stale_after=SOON)
    with listening(heard):
        flow = asyncio.create_task(retried("rehearsal", run_name="r", cluster=cluster))
    async with asyncio.timeout(PATIENCE):
        await heard.waits.wait()
        assert len(tries) == 1
        held[0].release()  # type: ignore[attr-defined]
        await flow
    assert len(tries) == 2


def test_the_run_of_another_user_is_refused_before_prefect_starts(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    folder.start("", {}, lambda _: []).release()
    record = read_json(folder.path / "run.json")
    write_json(folder.path / "run.json", {**record, "user": {"name": "alice", "id": 4711}})
    done = CliRunner().invoke(app, ["rehearse", "--run", "r", "--runs", str(tmp_path)])
    assert isinstance(done.exception, NotYourRun)
    assert "belongs to alice" in str(done.exception)


@contextmanager
def another_flow(runs: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that follows the job of the run."""
    command = [sys.executable, "-m", "tests.flows.following", str(runs), str(SOON.total_seconds())]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_stopped_at_work(flow: "subprocess.Popen[bytes]", folder: RunFolder, log: Path) -> JobFolder:
    """SIGSTOP while its job runs."""
    job = JobFolder(folder.job(following.STAGE, 1))
    until("the job at work", (job.path / following.AT_WORK).exists, PATIENCE, log.read_text)
    until("the flow following its job", lambda: "running" in log.read_text(), PATIENCE, log.read_text)
    flow.send_signal(signal.SIGSTOP)
    return job


def wake(flow: "subprocess.Popen[bytes]", log: Path) -> None:
    """SIGCONT; it has to find out by itself."""
    flow.send_signal(signal.SIGCONT)
    assert flow.wait(PATIENCE) == following.LOST, log.read_text()


def content(folder: Path) -> dict[str, bytes]:
    """Of all files; the heartbeat is none."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


async def test_a_flow_that_was_stopped_and_taken_over_wakes_up_and_touches_nothing(tmp_path: Path) -> None:
    folder, log = RunFolder.named(tmp_path, "r"), tmp_path / "log"
    with another_flow(tmp_path, log) as old:
        job = until_stopped_at_work(old, folder, log)
        run = await following.entered_run(tmp_path, SOON.total_seconds())
        following.end_jobs(folder)
        record = await following.follow(run)
        assert [note.attempt for note in record.jobs] == [1]  # the old flow's job
        before = content(tmp_path)
        wake(old, log)
        before.pop(str(log))
        assert {path: text for path, text in content(tmp_path).items() if path != str(log)} == before
    run.lease.check()
    assert len(list((tmp_path / ".local-jobs" / "jobs").iterdir())) == 1
    assert job.read_exit() is not None


async def test_a_flow_whose_run_was_deleted_and_made_again_wakes_up_and_touches_nothing(tmp_path: Path) -> None:
    folder, log = RunFolder.named(tmp_path, "r"), tmp_path / "log"
    with another_flow(tmp_path, log) as old:
        until_stopped_at_work(old, folder, log)
        record = JobFolder(folder.job(following.STAGE, 1)).read_job()
        assert record is not None
        folder.path.rename(tmp_path / "deleted")
        run = await following.entered_run(tmp_path, SOON.total_seconds())
        before = content(folder.path)
        wake(old, log)
        assert content(folder.path) == before
        (row,) = run.scheduler.queue([record.job_id]).values()
        assert not row.state.is_final  # and it has cancelled nothing
    following.end_jobs(RunFolder(tmp_path / "deleted"))


def test_an_unhurried_start_is_told_who_works_on_the_run(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    lease = folder.start("", {}, lambda _: [])
    with pytest.raises(RunBusy) as busy:
        folder.start("", {}, lambda _: [])
    assert busy.value.seen.standing is Standing.ALIVE
    lease.release()
    with pytest.raises(LeaseLost):
        lease.check()
