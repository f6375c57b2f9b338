"""What Prefect's automations start: which jobs they cancel, which runs they schedule again, what they leave alone."""

import asyncio
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client, runtime
from prefect.client.schemas.objects import State, StateType
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Failed, Pending, Running

from blocks import LocalCluster, remember
from flows import maintenance
from flows.lifecycle import LABEL, cancel_left_jobs, kept_alive
from flows.maintenance import reap, recover
from slurm.folder import JobFolder
from slurm.spec import JobSpec
from slurm.submission import ensure_submitted
from tasks import cancellation
from tasks.cancellation import cancel_jobs
from tests.flows.surface import flow_run, until
from trainium.run.folder import RunFolder
from trainium.run.lease import Lease


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "ALIVE_WITHIN", 0.3)
    monkeypatch.setattr(maintenance, "CANCELLED_WITHIN", 0.3)
    monkeypatch.setattr(maintenance, "ASK_AGAIN", 0.1)
    monkeypatch.setattr(cancellation, "WATCH_EVERY", 0.1)


async def made(*states: State, folder: RunFolder | None = None, deployed: bool = True) -> UUID:
    """A flow run with this history, in no process of any kind."""
    async with get_client() as client:
        flow_id = await client.create_flow_from_name("finetune")
        if deployed:
            deployment = await client.create_deployment(flow_id, "stand-in")
            run = await client.create_flow_run_from_deployment(deployment, state=Pending())
        else:
            run = await client.create_flow_run(_stand_in, state=Pending())
        if folder is not None:
            await client.update_flow_run_labels(run.id, {LABEL: str(folder.path)})
        for state in states:
            await client.set_flow_run_state(run.id, state, force=True)
    return run.id


@flow(name="finetune")
def _stand_in() -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path, prefect_server: str) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "runs" / "r")
    yield folder
    cancel_jobs(folder)


def submitted(folder: RunFolder) -> JobFolder:
    """A job that would run for ten minutes."""
    cluster = LocalCluster(runs=folder.path.parent)
    remember(cluster, folder.cluster)
    job, name = JobFolder(folder.job("train", 1)), f"{uuid4().hex[:10]}-train-1"
    spec = JobSpec(payload=("sleep", "600"), environment="project", cwd="/")
    ensure_submitted(cluster.scheduler(), spec, job, name, guard=lambda: None, grace=timedelta(seconds=1))
    until("the start of the job", job.read_start, 20)
    return job


def assert_ended(job: JobFolder) -> None:
    ended = until("exit.json of the job", job.read_exit, 20)
    assert ended.signal == signal.SIGTERM


def state_of(run_id: UUID) -> State:
    state = flow_run(run_id).state
    assert state is not None
    return state


@pytest.mark.parametrize("state", [Cancelling(), Cancelled()], ids=["stuck", "done"])
async def test_a_cancelled_runs_job_is_cancelled_without_its_process(folder: RunFolder, state: State) -> None:
    job = submitted(folder)
    record = job.read_job()
    assert record is not None
    run_id = await made(Running(), state, folder=folder)
    assert await reap(run_id) == [record.job_id]
    assert state_of(run_id).type is StateType.CANCELLED
    assert_ended(job)
    assert await reap(run_id) == []


@pytest.mark.parametrize("state", [Running(), Crashed(), AwaitingRetry(), Failed()], ids=lambda state: state.name)
async def test_only_cancelled_runs_are_reaped(folder: RunFolder, state: State) -> None:
    job = submitted(folder)
    run_id = await made(Running(), state, folder=folder)
    assert await reap(run_id) == []
    assert state_of(run_id).name == state.name
    assert job.read_exit() is None
    record = job.read_job()
    assert record is not None
    assert record.cancel_requested is None


async def test_jobs_that_another_flow_run_has_taken_over_are_left_alone(folder: RunFolder) -> None:
    job = submitted(folder)
    run_id = await made(Running(), Cancelled(), folder=folder)
    folder.contest(flow_run=str(uuid4())).take()
    assert await reap(run_id) == []
    await cancel_left_jobs(_stand_in, flow_run(run_id), state_of(run_id))
    record = job.read_job()
    assert record is not None
    assert record.cancel_requested is None


@pytest.mark.parametrize("gone", [False, True], ids=["no folder", "a folder of another machine"])
async def test_a_run_without_jobs_to_be_found_is_cancelled_all_the_same(folder: RunFolder, gone: bool) -> None:
    run_id = await made(Running(), Cancelling(), folder=folder if gone else None)
    assert await reap(run_id) == []
    assert state_of(run_id).type is StateType.CANCELLED


async def test_a_crashed_run_is_scheduled_again(folder: RunFolder) -> None:
    job = submitted(folder)
    run_id = await made(Running(), Crashed(), folder=folder)
    assert "scheduled again after crash number 1" in await recover(run_id)
    assert state_of(run_id).name == "AwaitingRetry"
    assert job.read_exit() is None


@pytest.mark.parametrize(
    ("states", "deployed", "said"),
    [
        ([Running()], True, "nothing to recover"),
        ([Running(), Failed()], True, "nothing to recover"),
        ([Running(), Crashed()], False, "not started through a deployment"),
        # Also when it never got as far as Running: run_count stays 0 then.
        ([Crashed(), Pending(), Crashed()], True, "has crashed 2 times"),
    ],
)
async def test_what_is_left_as_it_is(states: list[State], deployed: bool, said: str, prefect_server: str) -> None:
    run_id = await made(*states, deployed=deployed)
    assert said in await recover(run_id, max_crashes=2)
    assert state_of(run_id).name == states[-1].name


async def test_a_run_that_had_only_been_declared_dead_has_not_crashed(prefect_server: str) -> None:
    run_id = await made(Running(), Crashed(), Running(), Crashed(), Running(), Crashed())
    assert "crash number 1 " in await recover(run_id, max_crashes=2)


async def test_a_run_that_dies_while_it_is_cancelled_is_not_started_again(folder: RunFolder) -> None:
    job = submitted(folder)
    run_id = await made(Running(), Cancelling(), Crashed(), folder=folder)
    assert "Cancelled" in await recover(run_id)
    assert state_of(run_id).type is StateType.CANCELLED
    assert_ended(job)


async def test_a_living_flow_that_is_declared_dead_says_that_it_lives(
    tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `recover` would start it a second time."""
    lease = Lease.take(tmp_path / "lease.json")
    monkeypatch.setattr(maintenance, "ALIVE_WITHIN", 20.0)

    @flow(name="finetune")
    async def living() -> str:
        run_id = UUID(str(runtime.flow_run.id))
        async with kept_alive(lease), get_client() as client:
            await client.set_flow_run_state(run_id, Crashed(), force=True)
            said = await recover(run_id)
            others: list[State] = [Failed(), AwaitingRetry()]
            for declared in others:
                await client.set_flow_run_state(run_id, declared, force=True)
                async with asyncio.timeout(20):
                    while (await client.read_flow_run(run_id)).state_type is not StateType.RUNNING:
                        await asyncio.sleep(0.05)
        return said

    assert "nothing to recover" in await living()
