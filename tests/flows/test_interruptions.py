"""Whatever ends the flow's process or takes Prefect away: one job, adopted by the next start, and a run that completes.

The flow has light stages (tests/flows/light.py); the server is this module's own, because it is killed here.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelling

from flows.lifecycle import LABEL
from slurm.folder import JobFolder, JobRecord
from tasks.cancellation import cancel_jobs
from tests.flows.server import PrefectServer
from tests.flows.surface import ROOT, Worker, api, flow_run, job_processes, reference, until, until_state
from tests.flows.surface import command as command_of
from trainium.run.folder import RunFolder

PATIENCE = 60.0  # seconds for a flow to start on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    try:
        with server.used():
            yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path_factory.mktemp("lives") / "runs" / "lives")
    yield folder
    cancel_jobs(folder)


@pytest.fixture(scope="module", autouse=True)
def nothing_ignored() -> Iterator[None]:
    """A process that is started ignores what pytest was started to ignore: SIGHUP under nohup, say."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Command:
    """`trainium run`, followed through its output."""

    def __init__(self, folder: RunFolder, log: Path) -> None:
        self.log = log
        argv = [sys.executable, "-X", "faulthandler", "-m", "tests.flows.light", "run", "rehearsal"]
        argv += ["--run", folder.name, "--runs", str(folder.path.parent)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text()

    def living_text(self) -> str:
        assert self.process.poll() is None, self.text()
        return self.text()

    def until_said(self, text: str) -> None:
        def look() -> bool:
            return text in self.text() or text in self.living_text()

        until(f"{text!r} from the command", look, PATIENCE, self.text)

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its threads say where they are
            self.process.wait()
            raise AssertionError(f"still there:\n{self.text()}") from None


@contextmanager
def command(folder: RunFolder, log: Path) -> Iterator[Command]:
    started = Command(folder, log)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def until_followed(flow: Command, folder: RunFolder) -> JobRecord:
    """Until the flow says that it follows the running job of `train`; that job."""
    record = until_submitted(folder, flow.living_text)
    flow.until_said(f"job {record.job_id} running")
    return record


def until_submitted(folder: RunFolder, diagnose: Callable[[], str]) -> JobRecord:
    """The latest job of `train`, once it runs."""

    def look() -> JobRecord | None:
        diagnose()
        job = _latest(folder) if folder.attempts("train") else None
        record = job.read_job() if job else None
        # A cancelled one is still the latest while the next start looks whether it has ended.
        return record if job and record and job.read_start() and record.cancel_requested is None else None

    return until("a running job", look, PATIENCE, diagnose)


def _latest(folder: RunFolder) -> JobFolder:
    return JobFolder(folder.job("train", max(folder.attempts("train"))))


def assert_alive(folder: RunFolder, record: JobRecord) -> None:
    job = _latest(folder)
    assert job.read_job() == record  # the same, and nobody has asked for its end
    assert job.read_exit() is None
    assert job_processes(folder.uid)


def assert_each_stage_was_done_once(folder: RunFolder) -> None:
    assert folder.report.exists()
    for stage in ("convert", "train"):
        record = folder.record(stage)
        assert record is not None
        (job,) = record.jobs
        assert (folder.path / f"done-{stage}").read_text().split() == [job.id]


def flow_runs(folder: RunFolder) -> list[FlowRun]:
    """Those of the run folder, the newest first."""
    with api() as client:
        found = [run for run in client.read_flow_runs(limit=200) if run.labels.get(LABEL) == str(folder.path)]
    return sorted(found, key=lambda run: str(run.created), reverse=True)


def test_the_automations_end_what_nobody_is_left_to_end(server: PrefectServer, tmp_path: Path) -> None:
    """Worker and flows are killed. One run is then cancelled, the other one falls silent. A new worker comes."""
    runs = tmp_path / "runs"
    command_of("deployments.register", "--runs", str(runs), "--silent-after", "10")
    deployment = asyncio.run(_deploy())
    cancelled, silent = RunFolder(runs / "cancelled"), RunFolder(runs / "silent")
    with Worker(tmp_path / "first.log", {}) as worker:
        ids = [_start(deployment, folder) for folder in (cancelled, silent)]
        records = [until_submitted(folder, worker.text) for folder in (cancelled, silent)]
        until("labels", lambda: all(flow_run(run_id).labels.get(LABEL) for run_id in ids), PATIENCE, worker.text)
        flows = worker.children()
        worker.process.kill()
        for pid in flows:
            os.kill(pid, signal.SIGKILL)
    for folder, record in zip((cancelled, silent), records, strict=True):
        assert_alive(folder, record)
    with api() as client:
        client.set_flow_run_state(ids[0], Cancelling())
    with Worker(tmp_path / "second.log", {}) as worker:
        until("the end of the cancelled job", _latest(cancelled).read_exit, PATIENCE, worker.text)
        until("the run's recovery", lambda: flow_run(ids[1]).run_count > 1, PATIENCE, worker.text)
        assert_alive(silent, records[1])
        (silent.path / "go").touch()
        until_state(ids[1], "Completed", PATIENCE, worker.text)
        until_state(ids[0], "Cancelled", PATIENCE, worker.text)
    assert_each_stage_was_done_once(silent)
    assert cancelled.record("train") is None
    assert cancelled.attempts("train") == (1,)


async def _deploy() -> UUID:
    async with get_client() as client:
        return await client.create_deployment(
            await client.create_flow_from_name("finetune"),
            "light",
            work_pool_name="trainium",
            entrypoint="tests/flows/light.py:finetune",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
            job_variables={"stream_output": False, "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}},
        )


def _start(deployment: UUID, folder: RunFolder) -> UUID:
    parameters = {"recipe": "rehearsal", "run_name": folder.name, "cluster": reference("local-cluster/rehearsal")}
    with api() as client:
        return client.create_flow_run_from_deployment(deployment, parameters=parameters).id


# How the flow's process ends, and with which code: a signal of its own, or what `trainium` returns.
@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGKILL, -signal.SIGKILL, StateType.RUNNING),  # nobody was left to say anything
        (signal.SIGTERM, 128 + signal.SIGTERM, StateType.CRASHED),
        (signal.SIGHUP, 128 + signal.SIGHUP, StateType.CRASHED),
        (signal.SIGINT, 1, StateType.CRASHED),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_the_flow_and_leaves_its_job(
    number: signal.Signals,
    code: int,
    state: StateType,
    server: PrefectServer,
    module_folder: RunFolder,
    tmp_path: Path,
) -> None:
    with command(module_folder, tmp_path / "log") as flow:
        record = until_followed(flow, module_folder)
        os.kill(flow.process.pid, number)
        assert flow.ended() == code, flow.text()
    assert_alive(module_folder, record)
    assert flow_runs(module_folder)[0].state_type is state
    assert module_folder.attempts("train") == (1,)
    assert "Traceback" not in flow.text()
    if number is signal.SIGINT:
        assert "Start the same run again to follow it. To cancel it:\n  trainium cancel lives --runs" in flow.text()


def test_two_quick_ctrl_c_cancel_the_job(server: PrefectServer, module_folder: RunFolder, tmp_path: Path) -> None:
    with command(module_folder, tmp_path / "log") as flow:
        record = until_followed(flow, module_folder)
        for _ in range(2):
            os.kill(flow.process.pid, signal.SIGINT)
            until("the signal's delivery", lambda: not _pending(flow.process.pid, signal.SIGINT), 10)
        assert flow.ended() == 1
    assert f"Cancelled: {record.job_id}" in flow.text()
    ended = until("exit.json", _latest(module_folder).read_exit, 20)
    assert ended.signal == signal.SIGTERM


def _pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        lines = status.read_text().splitlines()
    except FileNotFoundError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_a_server_that_is_away_changes_nothing(server: PrefectServer, module_folder: RunFolder, tmp_path: Path) -> None:
    """Away while the job ends; back later: the run is Completed there too. The cancelled job has a successor."""
    with command(module_folder, tmp_path / "log") as flow:
        until_followed(flow, module_folder)
        assert module_folder.attempts("train") == (1, 2)
        server.kill()
        (module_folder.path / "go").touch()
        flow.until_said("waiting for Prefect's server")
        assert module_folder.record("train") is not None
        server.start()
        assert flow.ended() == 0, flow.text()
    assert_each_stage_was_done_once(module_folder)
    assert flow_runs(module_folder)[0].state_type is StateType.COMPLETED


@pytest.mark.slow
def test_a_lost_database_loses_no_job(server: PrefectServer, tmp_path: Path) -> None:
    """Two flows go on beside a server that does not know them. One dies then, the other one's job ends."""
    dies, ends = (RunFolder(tmp_path / "runs" / name) for name in ("dies", "ends"))
    with command(dies, tmp_path / "dies.log") as first, command(ends, tmp_path / "ends.log") as second:
        record, _ = until_followed(first, dies), until_followed(second, ends)
        server.kill()
        server.lose_database()
        server.start()
        assert_alive(dies, record)
        first.process.kill()
        (ends.path / "go").touch()
        assert second.ended() == 1, second.text()
        assert "Prefect's server could not be told how run ends ended" in second.text()
    with command(dies, tmp_path / "again.log") as first, command(ends, tmp_path / "once-more.log") as second:
        assert second.ended() == 0, second.text()
        assert until_followed(first, dies) == record
        (dies.path / "go").touch()
        assert first.ended() == 0, first.text()
    for folder in (dies, ends):
        assert_each_stage_was_done_once(folder)
        assert [run.state_type for run in flow_runs(folder)] == [StateType.COMPLETED]
