"""The whole package on a real Slurm: what squeue, sacct, srun and the script really do together."""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm.cluster import SlurmScheduler
from slurm.ending import Cause
from slurm.errors import SchedulerUnreachable, SubmitRejected, SubmitUncertain
from slurm.folder import ExitRecord, Intent, JobFolder
from slurm.scheduler import Timing
from slurm.spec import JobSpec
from slurm.states import JobState
from slurm.submission import cancel, ensure_submitted
from slurm.verdict import JobStatus, Outcome
from slurm.watcher import Watcher
from tests.slurm.conftest import bash, eventually, spec
from tests.slurm_lab.lab import SlurmLab, slurm_lab

pytestmark = pytest.mark.slurm
# Slurm's own pace is kept out of the tests; what is asserted are outcomes.
QUICK = Timing(exit_scan=0.1, queue=0.5, early=0.2, accounting=2, confirm=3, lost=20)


class Jobs:
    """Jobs on one lab, each in a folder of its own with a name that nobody else has."""

    def __init__(self, lab: SlurmLab, root: Path) -> None:
        self.lab, self.root = lab, root
        self.scheduler = SlurmScheduler(conf=lab.conf, timing=QUICK, timeout=timedelta(seconds=60))
        self.watcher = Watcher(self.scheduler)
        self.stamp = f"{time.monotonic_ns():x}"
        self.count = 0

    def folder(self) -> JobFolder:
        self.count += 1
        return JobFolder(self.root / f"it's {self.count}%j #1" / "job")

    def submit(self, spec: JobSpec, folder: JobFolder | None = None) -> JobFolder:
        folder = folder or self.folder()
        name = f"{self.stamp}-{self.count}"
        ensure_submitted(self.scheduler, spec, folder, name, guard=lambda: None, grace=timedelta(seconds=3))
        return folder

    def id(self, folder: JobFolder) -> str:
        record = folder.read_job()
        assert record is not None
        return record.job_id

    async def wait(self, folder: JobFolder, on_change: Callable[[JobStatus], None] = lambda status: None) -> Outcome:
        async with asyncio.timeout(120):
            return await self.watcher.wait(folder, on_change)

    async def logged(self, folder: JobFolder, text: str, seconds: float = 60) -> None:
        await asyncio.to_thread(
            eventually, lambda: folder.log.exists() and text in folder.log.read_text(), f"{text!r} in the log", seconds
        )

    def scontrol(self, *args: str) -> None:
        self.lab.run("scontrol", *args, check=True)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Short: pytest's own names are long, and Slurm limits paths."""
    path = Path(tempfile.mkdtemp(prefix="jobs-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def jobs(slurm: SlurmLab, shared_folder: Path) -> Iterator[Jobs]:
    yield Jobs(slurm, shared_folder)
    slurm.run("scancel", "-u", "root")


def exit_of(folder: JobFolder) -> ExitRecord:
    record = folder.read_exit()
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("payload", "state", "code"),
    [
        ("exit 0", JobState.COMPLETED, 0),
        ("exit 3", JobState.FAILED, 3),
        ("exit 255", JobState.FAILED, 255),
        ("kill -9 $$", JobState.FAILED, 137),
        ("exec no-such-program", JobState.FAILED, 127),
    ],
)
async def test_the_outcome_without_accounting(jobs: Jobs, payload: str, state: JobState, code: int) -> None:
    folder = jobs.submit(bash(payload))
    outcome = await jobs.wait(folder)
    assert (outcome.state, outcome.exit_code, outcome.by_us) == (state, code, False)
    assert outcome.job_id == jobs.id(folder) == exit_of(folder).job_id
    assert outcome.nodes in jobs.lab.nodes


async def test_no_activation_file_no_folder(jobs: Jobs) -> None:
    for fields in ({"activate": "/nowhere/activate"}, {"cwd": "/nowhere"}):
        folder = jobs.submit(spec("true", **fields))
        assert (await jobs.wait(folder)).exit_code == 78
        assert "job script: the " in folder.log.read_text()


async def test_all_fields_are_accepted_by_sbatch(jobs: Jobs) -> None:
    folder = jobs.submit(
        bash(
            "scontrol show job $SLURM_JOB_ID",
            partition="main,hi",
            nodes=2,
            ntasks=4,
            tasks_per_node=2,
            cpus_per_task=64,
            time="1-02:03:00",
            memory="100M",
            nodelist="n[1-2]",
            exclude="n3" if "n3" in jobs.lab.nodes else None,
            exclusive=True,
            dependency="singleton",
            mail_type="END,FAIL",
            mail_user="me+jobs@example.org",
            requeue=False,
            signal="B:USR1@60",
        )
    )
    assert (await jobs.wait(folder)).succeeded
    shown = folder.log.read_text()
    for text in (
        "TimeLimit=1-02:03:00",
        "NumNodes=2",
        "CPUs/Task=64",
        "Requeue=0",
        "MailUser=me+jobs@example.org",
        "NodeList=n[1-2]",
        "ReqNodeList=n[1-2]",
    ):
        assert text in shown


async def test_a_task_per_rank_with_all_cpus(jobs: Jobs) -> None:
    script = "echo $SLURM_PROCID/$SLURM_NTASKS on $SLURMD_NODENAME with $SLURM_CPUS_PER_TASK and $GIVEN"
    fields = {"nodes": 2, "tasks_per_node": 1, "cpus_per_task": 128, "env": {"GIVEN": "a 'b' $c"}}
    folder = jobs.submit(bash(script, per_task=True, **fields))
    assert (await jobs.wait(folder)).succeeded
    assert sorted(folder.log.read_text().splitlines()) == [
        f"{rank}/2 on {node} with 128 and a 'b' $c" for rank, node in enumerate(jobs.lab.nodes[:2])
    ]


async def test_one_bad_task_ends_the_step_and_the_job(jobs: Jobs) -> None:
    script = "[ $SLURM_PROCID = 1 ] && exit 3; sleep 600"
    folder = jobs.submit(bash(script, per_task=True, nodes=2))
    outcome = await jobs.wait(folder)
    assert outcome.state is JobState.FAILED
    assert outcome.exit_code not in (0, None)


async def test_nothing_of_the_caller_reaches_the_job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SBATCH_PARTITION", "no-such-partition")
    monkeypatch.setenv("SLURM_JOB_NAME", "leaked")
    monkeypatch.setenv("HOME", "/home/leaked")
    folder = jobs.submit(bash("env; echo home=$HOME user=$USER lang=$LANG path=$PATH; cat /proc/self/fd/0"))
    assert (await jobs.wait(folder)).succeeded
    shown = folder.log.read_text()
    assert "hf_secret" not in shown
    assert "leaked" not in shown
    assert "SLURM_EXPORT_ENV" not in shown
    assert "SLURM_GET_USER_ENV" not in shown  # a login shell on the node takes seconds, minutes on a busy one
    line = next(line for line in shown.splitlines() if line.startswith("home="))
    assert all(part.split("=", 1)[1] for part in line.split())


@pytest.mark.parametrize("by_us", [True, False])
async def test_scancel_while_running(jobs: Jobs, by_us: bool) -> None:
    folder = jobs.submit(bash("echo ready; sleep 600"))
    await jobs.logged(folder, "ready")
    if by_us:
        cancel(jobs.scheduler, folder)
    else:
        jobs.scheduler.cancel([jobs.id(folder)])
    outcome = await jobs.wait(folder)
    assert (outcome.state, outcome.exit_code, outcome.signal, outcome.by_us) == (JobState.CANCELLED, 143, 15, by_us)


async def test_scancel_while_pending(jobs: Jobs) -> None:
    folder = jobs.submit(bash("true", dependency=f"afterany:{jobs.id(jobs.submit(spec('sleep', '600')))}"))
    changes: list[JobStatus] = []
    waiting = asyncio.create_task(jobs.wait(folder, changes.append))
    await asyncio.to_thread(eventually, lambda: any(c.reason == "Dependency" for c in changes), "pending with a reason")
    cancel(jobs.scheduler, folder)
    outcome = await waiting
    assert (outcome.state, outcome.by_us, outcome.exit_code) == (JobState.CANCELLED, True, None)


async def test_sigterm_to_the_batch_script_only(jobs: Jobs) -> None:
    folder = jobs.submit(bash("echo ready; bash -c 'sleep 600; echo no'; echo no"))
    await jobs.logged(folder, "ready")
    jobs.lab.run("scancel", "--batch", "--signal=TERM", jobs.id(folder), check=True)
    outcome = await jobs.wait(folder)
    assert (outcome.state, outcome.exit_code, outcome.signal) == (JobState.FAILED, 143, 15)
    assert "no" not in folder.log.read_text().splitlines()


async def test_a_job_that_ignores_the_end_is_killed_and_still_has_an_outcome(jobs: Jobs) -> None:
    folder = jobs.submit(bash("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    await jobs.logged(folder, "ready")
    cancel(jobs.scheduler, folder)
    outcome = await jobs.wait(folder)
    assert (outcome.state, outcome.by_us) == (JobState.CANCELLED, True)
    assert not folder.exit.exists()


async def test_requeue_is_no_end(jobs: Jobs) -> None:
    """The first start leaves an exit file with 143; the second one, of the same id, counts."""
    script = "echo start ${SLURM_RESTART_COUNT:-0}; [ ${SLURM_RESTART_COUNT:-0} = 0 ] && sleep 600; exit 4"
    folder = jobs.submit(bash(script, requeue=True))
    changes: list[JobStatus] = []
    waiting = asyncio.create_task(jobs.wait(folder, changes.append))
    await jobs.logged(folder, "start 0")
    jobs.scontrol("requeue", jobs.id(folder))
    await asyncio.to_thread(eventually, folder.exit.exists, "the exit file of the first start")
    # Slurm lets a requeued job wait for cred_expire + 1 s (short in the lab). Told to start at once, one ended with 1
    # instead of 4 on a busy machine: perhaps the node was not done with the first start.
    outcome = await waiting
    assert (outcome.state, outcome.exit_code, outcome.restarts) == (JobState.FAILED, 4, 1)
    assert json.loads((folder.path / "exit.before-1.json").read_text())["code"] == 143
    assert "start 1" in folder.log.read_text()  # appended


async def test_a_held_job_says_so(jobs: Jobs) -> None:
    blocker = jobs.submit(bash("echo ready; sleep 600", exclusive=True, nodes=len(jobs.lab.nodes)))
    await jobs.logged(blocker, "ready")
    folder = jobs.submit(bash("true"))
    jobs.scontrol("hold", jobs.id(folder))
    changes: list[JobStatus] = []
    waiting = asyncio.create_task(jobs.wait(folder, changes.append))
    await asyncio.to_thread(eventually, lambda: any("Held" in (c.reason or "") for c in changes), "held")
    jobs.scontrol("release", jobs.id(folder))
    cancel(jobs.scheduler, blocker)
    assert (await waiting).succeeded


async def test_a_purged_job_is_known_by_its_exit_file(jobs: Jobs) -> None:
    folder = jobs.submit(bash("exit 3"))
    await asyncio.to_thread(eventually, folder.exit.exists, "the exit file")
    await asyncio.to_thread(eventually, lambda: not jobs.scheduler.queue([jobs.id(folder)]), "purged", 120)
    assert (await jobs.wait(folder)).exit_code == 3


def test_rejections_carry_slurms_words(jobs: Jobs) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"partition": "no-such"}, "partition"),
        ({"cpus_per_task": 100_000}, "not available|processors"),
        ({"nodes": 500}, "Node count|processors"),
        ({"constraint": "no-such"}, "feature"),
        ({"nodelist": "no-such"}, "node name"),
        ({"reservation": "no-such"}, "reservation"),
    ]
    for fields, word in cases:
        folder = jobs.folder()
        with pytest.raises(SubmitRejected, match=rf"(?i)({word})"):
            jobs.submit(spec("true", **fields), folder)
        assert not folder.intent.exists()
        assert not folder.job.exists()


def test_an_interrupted_submission_is_adopted_by_name(jobs: Jobs) -> None:
    folder = jobs.submit(spec("sleep", "600"))
    job_id = jobs.id(folder)
    folder.job.unlink()
    record = ensure_submitted(
        jobs.scheduler, spec("true"), folder, f"{jobs.stamp}-1", guard=lambda: None, grace=timedelta(seconds=3)
    )
    assert (record.job_id, record.adopted) == (job_id, True)


def test_queue_asks_for_many_and_none(jobs: Jobs) -> None:
    folder = jobs.submit(spec("sleep", "600"))
    assert set(jobs.scheduler.queue([jobs.id(folder), "999999", "999998"])) == {jobs.id(folder)}
    assert jobs.scheduler.queue(["999999"]) == {}
    assert jobs.scheduler.accounting(["999999"], datetime.now(UTC)) is None
    jobs.scheduler.cancel(["999999"])
    assert jobs.scheduler.find("no-such-name", datetime.now(UTC)) == []


async def test_many_jobs_cost_few_queries(jobs: Jobs) -> None:
    folders = [jobs.submit(bash(f"exit {i % 3}")) for i in range(30)]
    outcomes = await asyncio.gather(*(jobs.wait(folder) for folder in folders))
    assert [outcome.exit_code for outcome in outcomes] == [i % 3 for i in range(30)]


async def test_with_accounting(slurm_with_accounting: SlurmLab, shared_folder: Path) -> None:
    jobs = Jobs(slurm_with_accounting, shared_folder)
    since = datetime.now(UTC)
    good, bad = jobs.submit(bash("exit 0")), jobs.submit(bash("exit 3"))
    assert (await jobs.wait(good)).succeeded
    assert (await jobs.wait(bad)).exit_code == 3
    ids = [jobs.id(good), jobs.id(bad)]

    def accounted() -> bool:
        rows = jobs.scheduler.accounting(ids, since)
        assert rows is not None
        return len(rows) == 2 and all(row.state.is_final for row in rows.values())

    await asyncio.to_thread(eventually, accounted, "both in the accounts")
    rows = jobs.scheduler.accounting(ids, since)
    assert rows is not None
    assert (rows[ids[0]].state, rows[ids[1]].exit_code) == (JobState.COMPLETED, 3)
    # long after, with no exit file (lost with its filesystem), accounting still tells
    bad.exit.unlink()
    await asyncio.to_thread(eventually, lambda: not jobs.scheduler.queue([ids[1]]), "purged", 120)
    outcome = await jobs.wait(bad)
    assert (outcome.state, outcome.exit_code) == (JobState.FAILED, 3)
    assert "accounting" in outcome.detail
    # and a purged job is still found by its name
    name = bad.read_job()
    assert name is not None
    assert [row.job_id for row in jobs.scheduler.find(name.name, since)] == [ids[1]]


async def test_outages_change_nothing(shared_folder: Path) -> None:
    """A Slurm of its own: the controller down, frozen, and back."""
    with slurm_lab() as lab:
        jobs = Jobs(lab, shared_folder)
        folder = jobs.submit(bash("echo ready; while [ ! -e go ]; do sleep 0.1; done; exit 5"))
        changes: list[JobStatus] = []
        waiting = asyncio.create_task(jobs.wait(folder, changes.append))
        await jobs.logged(folder, "ready")
        lab.stop("slurmctld")
        await asyncio.to_thread(eventually, lambda: "does not answer" in changes[-1].note, "the outage is told", 90)
        with pytest.raises(SchedulerUnreachable):
            await asyncio.to_thread(jobs.submit, spec("true"))
        (folder.path / "go").touch()
        await asyncio.to_thread(eventually, folder.exit.exists, "the job ends during the outage")
        assert not waiting.done()
        lab.start("slurmctld")
        assert (await waiting).exit_code == 5
        assert JobState.UNKNOWN not in {change.state for change in changes}


async def test_a_frozen_controller_makes_one_job_and_not_two(shared_folder: Path) -> None:
    with slurm_lab() as lab:
        jobs = Jobs(lab, shared_folder)
        lab.freeze("slurmctld")
        folder = jobs.folder()
        with pytest.raises((SchedulerUnreachable, SubmitUncertain)):
            await asyncio.to_thread(jobs.submit, bash("exit 0"), folder)
        intent = folder.read_intent()
        assert isinstance(intent, Intent)
        lab.thaw("slurmctld")
        jobs.submit(bash("exit 0"), folder)
        assert (await jobs.wait(folder)).succeeded
        found = jobs.scheduler.find(intent.name, intent.first)
        assert [row.job_id for row in found] == [jobs.id(folder)]


async def test_a_log_that_cannot_be_opened_is_a_launch_failure(jobs: Jobs) -> None:
    folder = jobs.folder()
    folder.log.mkdir(parents=True)
    outcome = await jobs.wait(jobs.submit(bash("true"), folder))
    assert (outcome.state, outcome.cause, outcome.exit_code) == (JobState.FAILED, Cause.LAUNCH, None)


async def test_preempted_and_not_put_back(jobs: Jobs) -> None:
    everything: dict[str, Any] = {"exclusive": True, "nodes": len(jobs.lab.nodes)}
    folder = jobs.submit(bash("echo ready; sleep 600", requeue=False, **everything))
    await jobs.logged(folder, "ready")
    other = jobs.submit(bash("true", partition="hi", **everything))
    outcome = await jobs.wait(folder)
    assert (outcome.state, outcome.cause, outcome.exit_code) == (JobState.PREEMPTED, Cause.PREEMPTED, 143)
    assert (await jobs.wait(other)).succeeded
    # Long after, the log alone knows. Perhaps it was put back and then cancelled: whoever has accounts is asked first.
    await asyncio.to_thread(eventually, lambda: not jobs.scheduler.queue([jobs.id(folder)]), "purged", 120)
    jobs.watcher = Watcher(jobs.scheduler)
    later = await jobs.wait(folder)
    assert (later.state, later.cause) == (JobState.PREEMPTED, Cause.PREEMPTED)


async def test_scancel_from_outside_is_known_long_after(jobs: Jobs) -> None:
    """A user's decision must not be taken for a failure, although the cluster keeps no accounts."""
    folder = jobs.submit(bash("echo ready; sleep 600"))
    stubborn = jobs.submit(bash("trap '' TERM; echo ready; while :; do sleep 0.1; done"))
    for job in (folder, stubborn):
        await jobs.logged(job, "ready")
    ids = [jobs.id(folder), jobs.id(stubborn)]
    jobs.scheduler.cancel(ids)
    await asyncio.to_thread(eventually, lambda: not jobs.scheduler.queue(ids), "purged", 120)
    assert not stubborn.exit.exists()
    for job in (folder, stubborn):
        outcome = await jobs.wait(job)
        assert (outcome.state, outcome.cause, outcome.by_us) == (JobState.CANCELLED, Cause.CANCELLED_OUTSIDE, False)


async def test_a_controller_that_lost_its_memory(shared_folder: Path) -> None:
    """Accounting shows its old jobs as cancelled, by nobody, and their ids are given to new ones."""
    with slurm_lab(accounting=True) as lab:
        jobs = Jobs(lab, shared_folder)
        old = jobs.submit(bash("echo ready; exec sleep 600"))
        await jobs.logged(old, "ready")
        lab.kill("slurmctld")
        for saved in (lab.folder / "state").iterdir():
            if saved.is_file():
                saved.unlink()
        lab.start("slurmctld")
        outcome = await jobs.wait(old)
        assert (outcome.succeeded, outcome.cause, outcome.by_us) == (False, Cause.LOST, False)
        new = jobs.submit(bash("true"))
        assert jobs.id(new) == jobs.id(old)
        assert (await jobs.wait(new)).succeeded
