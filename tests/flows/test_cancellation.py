"""Only a cancelled run takes its job with it; a flow that dies in any other way leaves it for the next start to adopt.

One run folder sees everything that can happen to a flow while a job trains. Every test starts a flow on it again, and
leaves it without a living job or with one that the next test adopts.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from blocks import LocalCluster, NeuronToolchain, remember
from flows.lifecycle import LABEL
from slurm.folder import JobFolder, JobRecord
from slurm.spec import JobSpec
from slurm.submission import ensure_submitted
from tasks.cancellation import cancel_jobs
from tests.flows.conftest import Surface
from tests.flows.surface import Worker, api, job_processes, reference, start, until, until_state
from trainium.run.folder import RunFolder

TRAINIUM = Path(sys.executable).with_name("trainium")
OVERRIDES = ["training.max_steps=4", "training.checkpoint_every=2", "training.warmup_steps=1", "compile.mode=jit"]
RUN = "cancelled"
PATIENCE = 90.0  # seconds for a flow to start and to get to the training on a busy machine


@pytest.fixture(scope="module")
def folder(surface: Surface) -> Iterator[RunFolder]:
    """The run's folder, with a toolchain to be had that needs ten minutes for a step."""
    slow = NeuronToolchain.stand_in()
    slow.environment["REHEARSAL_FAULT"] = "train:slow=600"
    slow.save("slow")
    folder = RunFolder(surface.runs / RUN)
    yield folder
    cancel_jobs(folder)  # whatever a failed test left


@pytest.fixture(scope="module")
def worker(surface: Surface, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker") / "cancelling.log", {}) as worker:
        yield worker


def start_deployed() -> UUID:
    return start("finetune/rehearsal", run_name=RUN, overrides=OVERRIDES, toolchain=reference("neuron-toolchain/slow"))


@contextmanager
def started_by_command(folder: RunFolder, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The same run, followed at a terminal."""
    argv = [str(TRAINIUM), "run", "rehearsal", *OVERRIDES, "--run", RUN, "--runs", str(folder.path.parent)]
    argv += ["--toolchain", "slow"]
    with log.open("w") as output:
        flow = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield flow
    finally:
        with suppress(ProcessLookupError):
            flow.kill()
        flow.wait()


def training(folder: RunFolder) -> JobFolder:
    """The latest attempt's job."""
    return JobFolder(folder.job("train", max(folder.attempts("train"))))


def until_training(folder: RunFolder, worker_or_log: Worker | Path) -> tuple[JobFolder, JobRecord]:
    """Until the latest training job's trainer runs."""

    def look() -> tuple[JobFolder, JobRecord] | None:
        if not folder.attempts("train"):
            return None
        job = training(folder)
        record = job.read_job()
        if record is None or record.cancel_requested or job.read_exit():
            return None
        running = [" ".join(process.argv) for process in job_processes(folder.uid)]
        return (job, record) if any("training_orchestrator.py" in line for line in running) else None

    return until("a training job", look, PATIENCE, lambda: _text(worker_or_log))


def _text(worker_or_log: Worker | Path) -> str:
    return worker_or_log.text() if isinstance(worker_or_log, Worker) else worker_or_log.read_text()


def until_followed(run_id: UUID, job_id: str, worker: Worker) -> None:
    """Until a flow run has said that it follows the job."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id]))

    def look() -> bool:
        with api() as client:
            return any(f"train: job {job_id}" in entry.message for entry in client.read_logs(wanted))

    until(f"flow run following {job_id}", look, PATIENCE, worker.text)


def cancel_through_the_api(run_id: UUID) -> None:
    with api() as client:
        client.set_flow_run_state(run_id, Cancelling())


def assert_cancelled_by_us(folder: RunFolder, job: JobFolder) -> None:
    ended = until("exit.json of the job", job.read_exit, 40)
    assert ended.signal == signal.SIGTERM
    assert ended.code != 0
    record = job.read_job()
    assert record is not None
    assert record.cancel_requested is not None
    assert record.cancel_requested <= ended.ended
    until("the end of every process of the job", lambda: not job_processes(folder.uid), 40)


def assert_alive(folder: RunFolder, job: JobFolder) -> None:
    assert job_processes(folder.uid)
    assert job.read_exit() is None
    record = job.read_job()
    assert record is not None
    assert record.cancel_requested is None


def test_cancelling_a_workers_flow_run_cancels_its_job(folder: RunFolder, worker: Worker) -> None:
    run_id = start_deployed()
    job, _ = until_training(folder, worker)
    cancel_through_the_api(run_id)
    until_state(run_id, "Cancelled", PATIENCE, worker.text)
    assert_cancelled_by_us(folder, job)
    assert folder.record("train") is None
    assert folder.record("convert") is not None  # what was finished stays finished


def test_a_terminated_command_leaves_the_job_and_the_next_start_adopts_it(
    folder: RunFolder, worker: Worker, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with started_by_command(folder, first) as flow:
        job, record = until_training(folder, first)
        until("the command says which job", lambda: record.job_id in first.read_text(), 20)
        flow.terminate()
        assert flow.wait(60) != 0
    assert_alive(folder, job)
    submitted = sorted(folder.jobs.glob("train-*"))

    with started_by_command(folder, second) as flow:
        until("the next start says the same job", lambda: record.job_id in second.read_text(), PATIENCE)
        assert_alive(folder, job)
        assert job.read_job() == record
        assert sorted(folder.jobs.glob("train-*")) == submitted
        assert len([path for path in _submissions(folder) if record.name in path.read_text()]) == 1
        # Nobody signals a flow inside another program: it has to see for itself that it was cancelled.
        run_id = _running_flow_run(folder)
        cancel_through_the_api(run_id)
        assert flow.wait(60) == 1
    until_state(run_id, "Cancelled", 20, second.read_text)
    assert f"Run {RUN} was cancelled in Prefect, and its job with it." in second.read_text()
    assert_cancelled_by_us(folder, job)


def _submissions(folder: RunFolder) -> list[Path]:
    return list((folder.path.parent / ".local-jobs" / "jobs").glob("*/job.json"))


def _running_flow_run(folder: RunFolder) -> UUID:
    with api() as client:
        (run,) = [
            run
            for run in client.read_flow_runs(limit=50)
            if run.state_type is StateType.RUNNING and run.labels.get(LABEL) == str(folder.path)
            if run.deployment_id is None and client.read_flow_run(run.id).state_type is StateType.RUNNING
        ]
    return run.id


def test_the_command_cancels_the_job_of_a_flow_that_was_killed(folder: RunFolder, worker: Worker) -> None:
    run_id = start_deployed()
    job, record = until_training(folder, worker)
    until_followed(run_id, record.job_id, worker)
    _kill(worker, signal.SIGKILL)
    until_state(run_id, "Crashed", PATIENCE, worker.text)
    assert_alive(folder, job)

    argv = [str(TRAINIUM), "cancel", RUN, "--runs", str(folder.path.parent)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"Cancelled: {record.job_id}\n"), done.stderr
    assert_cancelled_by_us(folder, job)
    again = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (again.returncode, again.stdout) == (0, f"Run {RUN} has no job in the queue.\n"), again.stderr


def test_the_workers_hook_cancels_the_job_when_the_flow_dies_before_it_could(folder: RunFolder, worker: Worker) -> None:
    """The flow hangs when it is told to end, and is then killed: the hook runs in a new process of the worker.

    The worker has to live, and to have heard of the cancellation before the flow's end: else nobody of Prefect 3.9.1
    runs the hook, the flow run stays Cancelling, and `trainium cancel` is what ends the job.
    """
    run_id = start_deployed()
    job, record = until_training(folder, worker)
    until_followed(run_id, record.job_id, worker)
    _kill(worker, signal.SIGSTOP)
    cancel_through_the_api(run_id)
    until("the worker's signal to the flow", lambda: _told_to_end(worker), PATIENCE, worker.text)
    assert_alive(folder, job)
    _kill(worker, signal.SIGKILL)
    until_state(run_id, "Cancelled", PATIENCE, worker.text)
    assert_cancelled_by_us(folder, job)


def _kill(worker: Worker, number: signal.Signals) -> None:
    (flow,) = worker.children()
    os.kill(flow, number)


def _told_to_end(worker: Worker) -> bool:
    """Whether SIGTERM waits for a flow process that is stopped: bit n - 1 of the pending signals is signal n."""
    (flow,) = worker.children()
    status = Path(f"/proc/{flow}/status").read_text()
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in pending)


def test_every_cancelled_attempt_was_followed_by_a_new_one(folder: RunFolder) -> None:
    """A cancelled job is neither adopted nor taken for a failure of the start that finds it."""
    jobs = [JobFolder(folder.job("train", attempt)).read_job() for attempt in folder.attempts("train")]
    assert len(jobs) >= 2
    assert all(job is not None and job.cancel_requested is not None for job in jobs)
    assert len({job.job_id for job in jobs if job is not None}) == len(jobs)


def test_a_job_that_nobody_wrote_down_is_cancelled_by_its_name(tmp_path: Path) -> None:
    """Its flow was killed after the submission, before job.json."""
    run = RunFolder(tmp_path / "runs" / "r")
    cluster = LocalCluster(runs=tmp_path / "runs")
    remember(cluster, run.cluster)
    job, name = JobFolder(run.job("train", 1)), f"{uuid4().hex[:10]}-train-1"
    spec = JobSpec(payload=("sleep", "600"), environment="project", cwd="/")
    ensure_submitted(cluster.scheduler(), spec, job, name, guard=lambda: None, grace=timedelta(seconds=1))
    submitted = job.read_job()
    assert submitted is not None
    until("the start of the job", job.read_start, 20)
    job.job.unlink()
    assert cancel_jobs(run) == [submitted.job_id]
    ended = until("exit.json of the job", job.read_exit, 40)
    assert ended.signal == signal.SIGTERM
    record = job.read_job()
    assert record is not None
    assert record.adopted
    assert record.cancel_requested is not None
    assert cancel_jobs(run) == []
