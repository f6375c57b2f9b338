"""Two runs with one compile cache: one compiles at a time, and a dead one blocks nobody for ever."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain, remember
from slurm.folder import JobFolder
from slurm.spec import JobSpec
from slurm.submission import ensure_submitted
from tasks.compile_cache import cache_to_itself
from tasks.context import Run
from tasks.jobs import run_job
from tasks.jobspecs import Site
from trainium.config.recipe import load_recipe
from trainium.run import claims
from trainium.run.folder import RunFolder
from trainium.run.holder import Holder
from trainium.run.lease import Contest, LeaseLost, Standing
from trainium.run.records import SHARED_LEASE, Output, StageRecord

SOON = 0.3  # seconds; a stale time to wait for
PATIENCE = 30  # seconds


class Heard:
    """What a run says of its progress."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._more = asyncio.Event()

    def started(self, stage: str) -> None: ...

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        self.texts.append(f"{stage}: {text}")
        self._more.set()

    def finished(self, record: StageRecord, *, skipped: bool) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not any(text in said for said in self.texts):
                self._more.clear()
                await self._more.wait()


def run_named(runs: Path, name: str, heard: Heard | None = None, *, shared: bool = True) -> Run:
    """A start of a run, with a compile cache of several."""
    folder = RunFolder.named(runs, name)
    lease = folder.start("", {}, lambda _: [])
    cluster = LocalCluster(runs=runs, stale_after=timedelta(seconds=SOON), adopt_within=timedelta(seconds=0.5))
    remember(cluster, folder.cluster)
    overrides = [f"compile.cache={runs / 'cache'}"] if shared else []
    site = Site(load_recipe("rehearsal", overrides), folder, cluster, NeuronToolchain.stand_in())
    return Run(site, lease, listeners=(heard,) if heard else ())


def compiling_until(file: Path) -> JobSpec:
    """A job that lives until the file is there."""
    command = f"until [ -e {file} ]; do sleep 0.05; done"
    return JobSpec(payload=("bash", "-c", command), environment="project", cwd=str(file.parent))


def die(run: Run, user: str = "") -> None:
    """As a flow on another machine that was killed while it had the cache."""
    cache = run.places.cache / SHARED_LEASE
    holder = replace(Holder.me(SOON, str(run.folder.path)), machine="another boot", host="another-machine")
    assert claims.make(cache, replace(holder, user=user or holder.user), claims.latest(cache) + 1)


def submit(run: Run, spec: JobSpec) -> JobFolder:
    job = JobFolder(run.folder.job("compile", 1))
    name = f"{run.folder.uid}-compile-1"
    ensure_submitted(run.scheduler, spec, job, name, guard=run.lease.check, grace=timedelta(seconds=0.5))
    return job


@pytest.fixture
async def go(tmp_path: Path) -> AsyncIterator[Path]:
    """The file that ends the jobs of a test."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()


async def has_the_cache(run: Run) -> None:
    async with asyncio.timeout(PATIENCE), cache_to_itself(run) as check:
        check()


async def test_the_second_waits_while_the_first_compiles_and_says_so(tmp_path: Path) -> None:
    heard = Heard()
    first, second = run_named(tmp_path, "first"), run_named(tmp_path, "second", heard)
    async with cache_to_itself(first):
        waiting = asyncio.create_task(has_the_cache(second))
        await heard.until("compile: waiting: run first of ")
        await heard.until(str(tmp_path / "cache"))
        assert not waiting.done()
    await waiting
    assert len(heard.texts) == 1


async def test_a_cache_of_its_own_needs_no_lease(tmp_path: Path) -> None:
    run = run_named(tmp_path, "alone", shared=False)
    await has_the_cache(run)
    assert not run.places.cache.exists()


async def test_the_job_of_a_dead_flow_is_waited_for(tmp_path: Path, go: Path) -> None:
    heard = Heard()
    dead, second = run_named(tmp_path, "dead"), run_named(tmp_path, "second", heard)
    die(dead)
    job = submit(dead, compiling_until(go))
    record = job.read_job()
    assert record is not None
    waiting = asyncio.create_task(has_the_cache(second))
    await heard.until(f"waiting: job {record.job_id} of run dead of ")
    assert not waiting.done()
    assert job.read_exit() is None
    go.touch()
    await waiting
    assert job.read_exit() is not None


@pytest.mark.parametrize("whose", ["unrecorded", "another user's"])
async def test_a_job_that_the_watcher_does_not_see_is_waited_for_too(tmp_path: Path, go: Path, whose: str) -> None:
    dead, second = run_named(tmp_path, "dead"), run_named(tmp_path, "second")
    if whose == "unrecorded":
        die(dead)
        submit(dead, compiling_until(go)).job.unlink()
    else:
        die(dead, user="alice")
        submit(dead, compiling_until(go))
    waiting = asyncio.create_task(has_the_cache(second))
    contest = Contest(tmp_path / "cache" / SHARED_LEASE)
    async with asyncio.timeout(PATIENCE):
        while contest.look().standing is not Standing.GONE:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # longer than the submission would be looked for
    assert not waiting.done()
    go.touch()
    await waiting


@pytest.mark.parametrize("left", ["nothing", "an intent", "no folder"])
async def test_a_dead_flow_without_a_job_blocks_nobody(tmp_path: Path, left: str) -> None:
    dead, second = run_named(tmp_path, "dead"), run_named(tmp_path, "second")
    die(dead)
    if left == "an intent":
        job = submit(dead, JobSpec(payload=("true",), environment="project", cwd=str(tmp_path)))
        async with asyncio.timeout(PATIENCE):
            while job.read_exit() is None:
                await asyncio.sleep(0.05)
        job.job.unlink()
        job.start.unlink()
    elif left == "no folder":
        dead.folder.path.rename(tmp_path / "away")
    await has_the_cache(second)


async def test_the_next_start_of_a_run_has_its_own_lease_at_once(tmp_path: Path) -> None:
    run = run_named(tmp_path, "again")
    run.site.cluster.stale_after = timedelta(days=1)
    die(run)
    await has_the_cache(run)


async def test_a_flow_that_is_interrupted_keeps_the_cache_for_its_job(tmp_path: Path, go: Path) -> None:
    heard = Heard()
    first, second = run_named(tmp_path, "first", heard), run_named(tmp_path, "second")

    async def compile_first() -> None:
        async with cache_to_itself(first):
            await run_job(first, "compile", lambda _: compiling_until(go))

    flow = asyncio.create_task(compile_first())
    await heard.until("running")
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    assert Contest(tmp_path / "cache" / SHARED_LEASE).look().standing is not Standing.FREE
    waiting = asyncio.create_task(has_the_cache(second))
    await asyncio.sleep(2 * SOON)
    assert not waiting.done()
    await_first = asyncio.create_task(compile_first())  # its next start adopts the job
    go.touch()
    await await_first
    await waiting
    assert first.folder.attempts("compile") == (1,)


async def test_whoever_lost_the_cache_while_stopped_submits_nothing(tmp_path: Path) -> None:
    first, second = run_named(tmp_path, "first"), run_named(tmp_path, "second")
    async with cache_to_itself(first) as check:
        contest = Contest(tmp_path / "cache" / SHARED_LEASE, run=second.folder.path)
        assert contest.claim(contest.look()) is not None  # as after a long silence
        with pytest.raises(LeaseLost, match="cache was taken over"):
            check()


def test_the_lease_is_no_part_of_what_was_compiled(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "neuronxcc" / "MODULE_1").mkdir(parents=True)
    (cache / "neuronxcc" / "MODULE_1" / "model.neff").write_bytes(b"123")
    before = Output.of(cache, shared=True)
    contest = Contest(cache / SHARED_LEASE)
    lease = contest.claim(contest.look())
    assert Output.of(cache, shared=True) == before
    assert lease is not None
    lease.release()
    assert before.still_there()
