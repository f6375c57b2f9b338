"""The loop over attempts around one job: who is tried again, where, when, and what stays of it."""

import asyncio
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from blocks import Cluster, LocalCluster, NeuronToolchain, SlurmCluster
from slurm.errors import SubmitRejected
from slurm.folder import JobFolder, JobRecord
from slurm.local import LocalScheduler
from slurm.scheduler import AccountingRow, QueueRow, Scheduler, Timing
from slurm.spec import JobSpec
from slurm.states import JobState
from tasks.attempts import Resumption, avoiding
from tasks.context import Run
from tasks.jobs import FinishedJob, run_job
from tasks.jobspecs import Site
from tests.slurm_lab.lab import SlurmLab
from trainium.config.recipe import load_recipe
from trainium.errors import StageFailed
from trainium.run.folder import RunFolder
from trainium.run.records import StageRecord

TRANSIENT = "echo 'NeuronCore(s) not available - Requested:nc1-nc1 Available:0'; exit 1"
UNCLEAR = "echo '  exitcode  : -9 (pid: 8158)'; exit 1"
DETERMINISTIC = "echo 'Failed to allocate 4.000GB (alignment: none, usage: tensors) on ND 0:NC 4'; exit 1"
PATIENCE = 30.0  # seconds
T = TypeVar("T")


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def started(self, stage: str) -> None: ...

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        self.texts.append(text)

    def finished(self, record: StageRecord, *, skipped: bool) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...


@dataclass
class FullCluster:
    """This machine, whose only node is taken: what must avoid `localhost` is refused or waits for ever."""

    runs: Path
    refuses: bool = False
    waits_for: str = "PartitionNodeLimit"
    python: Path = Path(sys.executable)
    adopt_within: timedelta = timedelta(seconds=2)
    stale_after: timedelta = timedelta(minutes=1)
    waiting: dict[str, JobState] = field(default_factory=dict)
    name: str = ""

    @property
    def queue(self) -> str:
        return f"full {self.runs}"

    def scheduler(self) -> Scheduler:
        return _Full(self)


class _Full(LocalScheduler):
    def __init__(self, cluster: FullCluster) -> None:
        super().__init__(cluster.runs / ".local-jobs")
        self._cluster = cluster

    @property
    def timing(self) -> Timing:
        return Timing(exit_scan=0.05, queue=0.05, early=0.02, accounting=60, confirm=0, lost=3)

    def submit(self, script: Path, name: str) -> str:
        if "--exclude=localhost" not in script.read_text():
            return super().submit(script, name)
        if self._cluster.refuses:
            raise SubmitRejected("Requested node configuration is not available")
        self._cluster.waiting["waiting-1"], self._cluster.name = JobState.PENDING, name
        return "waiting-1"

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        known = self._cluster.waiting
        now = datetime.now(UTC)
        why, name = self._cluster.waits_for, self._cluster.name
        asked = known if job_ids is None else [i for i in job_ids if i in known]
        rows = {i: QueueRow(i, known[i], why, "", name, 0, now) for i in asked}
        others = None if job_ids is None else [i for i in job_ids if i not in known]
        return {**rows, **super().queue(others)}

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        return None

    def cancel(self, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            if job_id in self._cluster.waiting:
                self._cluster.waiting[job_id] = JobState.CANCELLED
        super().cancel([i for i in job_ids if i not in self._cluster.waiting])


def start(tmp_path: Path, *overrides: str, cluster: Cluster | None = None) -> Run:
    """A start of the run `r`; the one before has given its lease back."""
    folder = RunFolder.named(tmp_path, "r")
    recipe = load_recipe("rehearsal", ["attempts.transient_delay=00:00:00", *overrides])
    lease = folder.start("", {}, lambda _: [])
    site = Site(recipe, folder, cluster or LocalCluster(runs=tmp_path), NeuronToolchain.stand_in())
    return Run(site, lease, listeners=[Told()])


def told(run: Run) -> list[str]:
    (listener,) = run.listeners
    assert isinstance(listener, Told)
    return listener.texts


async def work(run: Run, *shells: str, resumption: Resumption | None = None) -> FinishedJob:
    """A job whose attempt n runs the n-th of these commands, or the last one."""

    def describe(path: Path) -> JobSpec:
        shell = shells[min(int(path.name.rpartition("-")[2]), len(shells)) - 1]
        limit = timedelta(seconds=1) if "sleep 600" in shell and resumption else None
        return JobSpec(payload=("bash", "-c", shell), environment="project", cwd=str(path), time=limit)

    return await run_job(run, "convert", describe, resumption=resumption)


async def failing(run: Run, *shells: str, resumption: Resumption | None = None) -> str:
    with pytest.raises(StageFailed) as failure:
        await work(run, *shells, resumption=resumption)
    return str(failure.value)


async def until(look: Callable[[], T | None]) -> T:
    async with asyncio.timeout(PATIENCE):
        while not (found := look()):
            await asyncio.sleep(0.02)
    return found


def job(run: Run, attempt: int) -> JobFolder:
    return JobFolder(run.folder.job("convert", attempt))


def ledger(run: Run) -> list[tuple[int, bool, bool | None]]:
    """(attempt, succeeded, whether another was to follow; None: that was not decided)."""
    return [
        (entry["attempt"], entry["succeeded"], entry["then"]["again"] if "then" in entry else None)
        for entry in run.folder.ended_attempts("convert")
    ]


async def test_a_failure_that_passes_is_tried_again_until_it_has(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert (await work(run, TRANSIENT, TRANSIENT, "true")).note.attempt == 3
    assert ledger(run) == [(1, False, True), (2, False, True), (3, True, None)]
    report = run.folder.report.read_text()
    assert "## Attempts that failed" in report
    assert "2 of at most 3 (attempts.transient)" in report


async def test_budgets_count_over_restarts_and_every_start_by_a_person_gets_an_attempt(tmp_path: Path) -> None:
    run = start(tmp_path, "attempts.transient=1")
    message = await failing(run, TRANSIENT)
    assert "no new attempt by itself: " in message
    assert "attempts.transient=1 allows no further attempt" in message
    assert ledger(run) == [(1, False, True), (2, False, False)]
    run.lease.release()
    run = start(tmp_path, "attempts.transient=1")
    await failing(run, TRANSIENT)
    assert ledger(run)[2:] == [(3, False, False)]
    run.lease.release()
    run = start(tmp_path, "attempts.transient=1")
    assert (await work(run, "true")).note.attempt == 4


@pytest.mark.parametrize(
    ("shell", "why"),
    [(DETERMINISTIC, "the same would happen again, on every node"), ("echo hm; exit 1", "nothing in its log says")],
)
async def test_what_would_happen_again_stops_at_once_with_cause_and_remedy(
    tmp_path: Path, shell: str, why: str
) -> None:
    run = start(tmp_path)
    message = await failing(run, shell)
    assert message.startswith("convert failed: job local-1-")
    assert why in message
    assert ledger(run) == [(1, False, False)]
    assert why in run.folder.report.read_text()


async def test_something_unclear_is_tried_once_on_another_node(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert "attempts.ambiguous=1" in await failing(run, UNCLEAR)
    assert ledger(run) == [(1, False, True), (2, False, False)]
    assert "--exclude" not in job(run, 1).script.read_text()
    assert "#SBATCH --exclude=localhost\n" in job(run, 2).script.read_text()


def test_nodes_to_avoid_are_added_to_those_of_the_recipe_but_never_against_its_node_list() -> None:
    def avoided(exclude: str | None, nodelist: str | None) -> str | None:
        spec = JobSpec(payload=("true",), environment="project", exclude=exclude, nodelist=nodelist)
        return avoiding(spec, ["n1", "n3"]).exclude

    assert avoided(None, None) == "n1,n3"
    assert avoided("m[1-2]", None) == "m[1-2],n1,n3"
    assert avoided(None, "n[3-4]") == "n1"
    assert avoided(None, "n[1-4]") is None


@pytest.mark.parametrize("refuses", [True, False])
async def test_where_no_other_node_is_left_the_same_one_is_taken(tmp_path: Path, refuses: bool) -> None:
    """A cluster of one node would else wait for ever, or refuse the job."""
    run = start(tmp_path, "attempts.hopeless_grace=00:00:00", cluster=FullCluster(tmp_path, refuses=refuses))
    done = await work(run, UNCLEAR, "true")
    assert "--exclude" not in done.folder.script.read_text()
    assert done.note.attempt == (2 if refuses else 3)


async def test_a_job_that_waits_hopelessly_is_cancelled_and_the_run_says_why(tmp_path: Path) -> None:
    cluster = FullCluster(tmp_path, waits_for="JobHeldUser")
    overrides = ["attempts.hopeless_grace=00:00:00", "attempts.max_wait=00:00:00"]
    run = start(tmp_path, *overrides, cluster=cluster)
    held = JobSpec(payload=("true",), environment="project", exclude="localhost")
    with pytest.raises(StageFailed) as failure:
        await run_job(run, "convert", lambda path: held)
    assert cluster.waiting == {"waiting-1": JobState.CANCELLED}
    assert "JobHeldUser" in str(failure.value)
    assert "scontrol release" in str(failure.value)
    assert ledger(run) == [(1, False, False)]
    record = job(run, 1).read_job()
    assert record is not None
    assert record.cancel_requested is not None
    assert len([text for text in told(run) if "waits for long" in text]) == 1


async def test_a_job_cancelled_from_outside_is_submitted_again_by_the_next_start_only(tmp_path: Path) -> None:
    run = start(tmp_path)
    failed = asyncio.create_task(failing(run, "sleep 600"))
    record: JobRecord = await until(job(run, 1).read_job)
    await until(job(run, 1).read_start)
    await asyncio.to_thread(run.scheduler.cancel, [record.job_id])
    assert "cancelled from outside, which is somebody's decision" in await failed
    assert ledger(run) == [(1, False, False)]
    run.lease.release()
    assert (await work(start(tmp_path), "true")).note.attempt == 2


async def test_the_moment_of_the_next_attempt_outlives_the_flow(tmp_path: Path) -> None:
    """A flow that is cancelled while it waits ends at once, and the next start waits for the rest."""
    run = start(tmp_path, "attempts.transient_delay=01:00:00")
    waiting = asyncio.create_task(work(run, TRANSIENT, "true"))
    await until(lambda: any("attempt 2 begins in" in text for text in told(run)))
    await _left_at_once(waiting)
    run.lease.release()

    run = start(tmp_path)  # with another delay in the recipe: what was decided stays
    waiting = asyncio.create_task(work(run, TRANSIENT, "true"))
    await until(lambda: any("attempt 2 begins in" in text for text in told(run)))
    await _left_at_once(waiting)
    assert run.folder.attempts("convert") == (1,)
    run.lease.release()

    ledger_file = tmp_path / "r" / "run.json"
    content = json.loads(ledger_file.read_text())
    content["attempts"][0]["then"]["not_before"] = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    ledger_file.write_text(json.dumps(content))
    assert (await work(start(tmp_path), TRANSIENT, "true")).note.attempt == 2


async def _left_at_once(waiting: "asyncio.Task[FinishedJob]") -> None:
    waiting.cancel()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_time_limit_is_followed_by_an_attempt_while_there_is_progress(tmp_path: Path) -> None:
    reached = {1: 10, 2: 20, 3: 20}
    run = start(tmp_path)
    steps = Resumption(began=lambda path: 0, after=lambda path: reached[int(path.name.rpartition("-")[2])])
    message = await failing(run, "sleep 600", resumption=steps)
    assert "before it had saved a checkpoint after step 20" in message
    assert ledger(run) == [(1, False, True), (2, False, True), (3, False, False)]


@pytest.mark.slurm
async def test_nodes_that_fail_one_after_the_other_are_avoided_while_there_are_others(
    slurm: SlurmLab, tmp_path: Path
) -> None:
    """A real Slurm refuses a job that may run nowhere, and is then asked without conditions."""
    run = start(tmp_path, cluster=SlurmCluster(runs=tmp_path, slurm_conf=slurm.conf))
    broken = "echo 'DMA TX engine 0 is in an abort state'; exit 1"
    done = await work(run, broken, broken, "true")
    first, second, _ = run.folder.ended_attempts("convert")
    assert {first["nodes"], second["nodes"]} == {"n1", "n2"}
    assert first["then"]["exclude"] == [first["nodes"]]
    assert second["then"]["exclude"] == [first["nodes"], second["nodes"]]
    assert "--exclude" not in done.folder.script.read_text()


@pytest.mark.slurm
async def test_of_several_nodes_the_one_whose_task_failed_first_is_at_fault(slurm: SlurmLab, tmp_path: Path) -> None:
    run = start(tmp_path, "attempts.hardware=0", cluster=SlurmCluster(runs=tmp_path, slurm_conf=slurm.conf))
    shell = "[ $SLURM_NODEID = 0 ] && exec sleep 600; echo 'DMA TX engine 0 is in an abort state'; exit 1"

    def describe(path: Path) -> JobSpec:
        payload = ("bash", "-c", shell)
        return JobSpec(payload=payload, environment="project", cwd=str(path), nodes=2, ntasks=2, per_task=True)

    with pytest.raises(StageFailed):
        await run_job(run, "convert", describe)
    (entry,) = run.folder.ended_attempts("convert")
    assert (entry["nodes"], entry["ended"]["nodes"]) == ("n[1-2]", ["n2"])
