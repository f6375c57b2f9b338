"""Submitting once: against scripted schedulers, and with the process killed between any two steps."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.errors import (
    AmbiguousJob,
    BrokenRecord,
    InvalidJobSpec,
    SchedulerUnreachable,
    SlurmError,
    SubmitRejected,
    SubmitUncertain,
)
from slurm.folder import Intent, JobFolder, JobRecord
from slurm.local import LocalScheduler
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.script import render
from slurm.spec import JobSpec
from slurm.states import JobState
from slurm.submission import cancel, ensure_submitted
from tests.slurm.conftest import bash, record, spec

NAME = "u-train-1"
GRACE = timedelta(seconds=0.3)


class Scripted:
    """A scheduler that does what a test says, one step per submission, and keeps the jobs that it made."""

    timing = Timing(0.01, 0.01, 0.01, 60, 0, 1)
    identity = None

    def __init__(self, *steps: Exception | str) -> None:
        self.steps = list(steps)
        self.jobs: dict[str, tuple[str, datetime]] = {}
        self.submissions = 0
        self.cancelled: list[str] = []
        self.on_find: Callable[[], None] = lambda: None

    def submit(self, script: Path, name: str) -> str:
        assert script.exists()
        self.submissions += 1
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        self.jobs[step] = (name, datetime.now(UTC))
        return step

    def find(self, name: str, since: datetime) -> list[QueueRow]:
        self.on_find()
        return [
            QueueRow(job, JobState.RUNNING, None, "n1", called, 0, when)
            for job, (called, when) in self.jobs.items()
            if called == name and when >= since
        ]

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        raise NotImplementedError

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        raise NotImplementedError

    def cancel(self, job_ids: Collection[str]) -> None:
        self.cancelled += job_ids

    def render(self, spec: JobSpec, folder: JobFolder, name: str) -> str:
        return render(spec, folder, name)


def submit(
    scheduler: Scripted, folder: JobFolder, guard: Callable[[], None] = lambda: None, name: str = NAME
) -> JobRecord:
    return ensure_submitted(scheduler, spec("true"), folder, name, guard=guard, grace=GRACE)


class Lost(SlurmError):
    """A lease that somebody else has."""


def lost() -> None:
    raise Lost


def test_a_second_call_returns_the_recorded_job(folder: JobFolder) -> None:
    scheduler = Scripted("7")
    first = submit(scheduler, folder)
    assert (first.job_id, first.adopted) == ("7", False)
    assert submit(scheduler, folder) == first == folder.read_job()
    assert scheduler.submissions == 1


def test_the_intent_is_on_disk_before_the_submission_and_the_guard_right_before_it(folder: JobFolder) -> None:
    looks: list[bool] = []
    submit(Scripted("7"), folder, guard=lambda: looks.append(folder.intent.exists()))
    assert looks == [False, True]


def test_a_lost_lease_submits_and_writes_nothing(folder: JobFolder) -> None:
    scheduler = Scripted("7")
    with pytest.raises(Lost):
        submit(scheduler, folder, guard=lost)
    assert (scheduler.submissions, folder.path.exists()) == (0, False)


def test_an_interrupted_submission_is_adopted(folder: JobFolder) -> None:
    scheduler = Scripted()
    now = datetime.now(UTC)
    folder.write(folder.intent, Intent(NAME, now, now))
    scheduler.jobs["7"] = (NAME, now)
    adopted = submit(scheduler, folder)
    assert (adopted.job_id, adopted.adopted, scheduler.submissions) == ("7", True, 0)


def test_a_job_that_only_its_start_record_knows_is_adopted(folder: JobFolder) -> None:
    """Purged from the queue, and no accounting."""
    scheduler = Scripted()
    now = datetime.now(UTC)
    folder.write(folder.intent, Intent(NAME, now, now))
    folder.start.write_text(
        f'{{"job_id": "7", "restart_count": 0, "node": "n1", "nodes": "n1", "started": "{now.isoformat()}"}}'
    )
    assert submit(scheduler, folder).job_id == "7"
    scheduler.jobs["8"] = (NAME, now)
    folder.job.unlink()
    with pytest.raises(AmbiguousJob, match="7, 8"):
        submit(scheduler, folder)


def test_several_jobs_of_one_name_are_for_a_human(folder: JobFolder) -> None:
    scheduler = Scripted()
    now = datetime.now(UTC)
    folder.write(folder.intent, Intent(NAME, now, now))
    scheduler.jobs |= {"7": (NAME, now), "8": (NAME, now)}
    with pytest.raises(AmbiguousJob, match="7, 8"):
        submit(scheduler, folder)
    assert not folder.job.exists()


def test_an_older_job_of_that_name_is_another_job(folder: JobFolder) -> None:
    scheduler = Scripted("9")
    now = datetime.now(UTC)
    scheduler.jobs["7"] = (NAME, now - timedelta(days=1))
    folder.write(folder.intent, Intent(NAME, now, now))
    assert submit(scheduler, folder).job_id == "9"


def test_an_uncertain_submission_that_made_a_job_is_adopted(folder: JobFolder) -> None:
    scheduler = Scripted(SubmitUncertain("timed out"))
    scheduler.on_find = lambda: scheduler.jobs.update({"7": (NAME, datetime.now(UTC))})
    assert (submit(scheduler, folder).job_id, scheduler.submissions) == ("7", 1)


def test_an_uncertain_submission_that_made_none_is_repeated_after_the_grace_period(folder: JobFolder) -> None:
    scheduler = Scripted(SubmitUncertain("timed out"), "8")
    finds: list[datetime] = []
    scheduler.on_find = lambda: finds.append(datetime.now(UTC))
    assert (submit(scheduler, folder).job_id, scheduler.submissions) == ("8", 2)
    assert finds[-1] - finds[0] >= GRACE * 0.9
    intent = folder.read_intent()
    assert intent is not None
    assert intent.tries == 2
    assert intent.latest - intent.first >= GRACE * 0.9


def test_submissions_nobody_hears_of_end_after_three(folder: JobFolder) -> None:
    scheduler = Scripted(*[SubmitUncertain("timed out")] * 3)
    with pytest.raises(SubmitUncertain):
        submit(scheduler, folder)
    assert scheduler.submissions == 3


def test_a_refused_submission_leaves_nothing_to_look_for(folder: JobFolder) -> None:
    scheduler = Scripted(SubmitRejected("no such partition", "sinfo"), "7")
    with pytest.raises(SubmitRejected, match=r"no such partition \(sinfo\)"):
        submit(scheduler, folder)
    scheduler.on_find = lambda: pytest.fail("looked a refused job up")
    assert submit(scheduler, folder).job_id == "7"


def test_an_outage_leaves_the_intent_and_the_next_call_looks_first(folder: JobFolder) -> None:
    scheduler = Scripted(SchedulerUnreachable("down"))
    with pytest.raises(SchedulerUnreachable):
        submit(scheduler, folder)
    scheduler.jobs["7"] = (NAME, datetime.now(UTC))
    assert submit(scheduler, folder).adopted


def test_an_array_and_a_foreign_folder_are_refused(folder: JobFolder) -> None:
    with pytest.raises(InvalidJobSpec, match="array"):
        ensure_submitted(Scripted(), spec("true", array="0-3"), folder, NAME, guard=lost, grace=GRACE)
    submit(Scripted("7"), folder)
    with pytest.raises(SlurmError, match="belongs to the job u-train-1"):
        submit(Scripted("8"), folder, name="u-train-2")


def test_a_broken_record_is_named_not_guessed(folder: JobFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.job.write_text('{"job_id": "7"')
    with pytest.raises(BrokenRecord, match=r"job\.json"):
        submit(Scripted("8"), folder)


def test_a_cancel_is_remembered_before_it_is_asked_for(folder: JobFolder) -> None:
    scheduler = Scripted("7")
    cancel(scheduler, folder)
    assert scheduler.cancelled == []
    submitted = submit(scheduler, folder)
    cancel(scheduler, folder)
    after = folder.read_job()
    assert after is not None
    assert after.cancel_requested is not None
    assert replace(after, cancel_requested=None) == submitted
    assert scheduler.cancelled == ["7"]


# os._exit at the n-th step; every step is something that the outside world can see.
KILLED = """
    import os, sys
    from datetime import timedelta
    from pathlib import Path
    import slurm.folder, slurm.submission
    from slurm.local import LocalScheduler
    from slurm.spec import JobSpec
    folder, root, left = slurm.folder.JobFolder(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    def step():
        global left
        left -= 1
        if left == 0:
            os._exit(9)
    replace = Path.replace
    def counted(self, target):
        step()
        replace(self, target)
        step()
    Path.replace = counted  # every record is written by a rename
    class Killed(LocalScheduler):
        def submit(self, script, name):
            step()
            job_id = super().submit(script, name)
            step()
            return job_id
    spec = JobSpec(payload=("bash", "-c", "echo ran"), environment="project")
    slurm.submission.ensure_submitted(
        Killed(root), spec, folder, "u-train-1", guard=step, grace=timedelta(seconds=0.5))
"""


def test_killed_between_any_two_steps_there_is_one_job(tmp_path: Path) -> None:
    step = 0
    while True:
        step += 1
        folder, root = JobFolder(tmp_path / str(step) / "job"), tmp_path / str(step) / "cluster"
        argv = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder.path), str(root), str(step)]
        code = subprocess.run(argv, check=False, timeout=60).returncode
        assert code in (0, 9)
        local = LocalScheduler(root)
        submitted = ensure_submitted(
            local, bash("echo ran"), folder, NAME, guard=lambda: None, grace=timedelta(seconds=0.5)
        )
        jobs = [path.name for path in (root / "jobs").iterdir() if not path.name.startswith(".")]
        assert jobs == [submitted.job_id], f"killed at step {step}"
        assert record(folder.job)["job_id"] == submitted.job_id
        if code == 0:
            break
    assert step > 10  # else the steps are not what they should be


@pytest.mark.parametrize(("taken_over", "error"), [(False, AmbiguousJob), (True, Lost)])
def test_a_submission_that_comes_too_late_is_taken_back(
    folder: JobFolder, taken_over: bool, error: type[SlurmError]
) -> None:
    """The process was stopped between guard and submission; another one has taken over and made the job meanwhile."""

    class Late(Scripted):
        def submit(self, script: Path, name: str) -> str:
            folder.write(folder.job, JobRecord("8", NAME, datetime.now(UTC)))
            return super().submit(script, name)

    def guard() -> None:
        if taken_over and scheduler.cancelled:
            lost()

    scheduler = Late("7")
    with pytest.raises(error):
        submit(scheduler, folder, guard)
    assert scheduler.cancelled == ["7"]
    kept = folder.read_job()
    assert kept is not None
    assert kept.job_id == "8"
