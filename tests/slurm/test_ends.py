"""What a watcher finds out about an end, from files beside the exit file: the log and the wish to cancel."""

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm.ending import Cause
from slurm.folder import JobFolder
from slurm.local import LocalScheduler
from slurm.scheduler import QueueRow, Timing
from slurm.states import JobState
from slurm.submission import cancel, ensure_submitted
from slurm.verdict import JobStatus, Outcome
from slurm.watcher import Watcher
from tests.slurm.conftest import bash, eventually

OOM = "srun: error: n1: task 0: Out Of Memory"


class LostState(LocalScheduler):
    """A controller that lost its state, and gave every id to another job, which ran well."""

    @property
    def timing(self) -> Timing:
        return replace(super().timing, lost=0.3)

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        other = QueueRow("", JobState.COMPLETED, None, "n1", "another job", 0, None, 0)
        return {job_id: replace(other, job_id=job_id) for job_id in job_ids or ()}


async def end_of(scheduler: LocalScheduler, folder: JobFolder, script: str) -> Outcome:
    ensure_submitted(scheduler, bash(script), folder, "u-train-1", guard=lambda: None, grace=timedelta(seconds=1))
    return await Watcher(scheduler).wait(folder, ignore)


def ignore(status: JobStatus) -> None:
    pass


async def test_the_cause_of_a_failure_may_be_in_its_log(local: LocalScheduler, folder: JobFolder) -> None:
    outcome = await end_of(local, folder, f"echo '{OOM}'; exit 1")
    assert (outcome.state, outcome.cause, outcome.exit_code) == (JobState.FAILED, Cause.MEMORY, 1)


async def test_what_a_good_job_prints_does_not_matter(local: LocalScheduler, folder: JobFolder) -> None:
    outcome = await end_of(local, folder, f"echo '{OOM}'")
    assert (outcome.succeeded, outcome.cause) == (True, Cause.NONE)


async def test_code_signals_and_cancelling(local: LocalScheduler, folder: JobFolder, tmp_path: Path) -> None:
    assert (await end_of(local, folder, "exit 3")).cause is Cause.CODE
    assert (await end_of(local, JobFolder(tmp_path / "killed"), "kill -9 $$")).cause is Cause.UNKNOWN
    ours = JobFolder(tmp_path / "ours")
    ensure_submitted(
        local, bash("echo up; sleep 600"), ours, "u-train-2", guard=lambda: None, grace=timedelta(seconds=1)
    )
    eventually(lambda: ours.log.exists() and "up" in ours.log.read_text(), "the job runs")
    cancel(local, ours)
    assert (await Watcher(local).wait(ours, ignore)).cause is Cause.CANCELLED_BY_US


async def test_a_job_whose_id_belongs_to_another_one(tmp_path: Path, folder: JobFolder) -> None:
    """The other job's good end is not ours; our own exit file is."""
    lost = LostState(tmp_path / "cluster", kill_wait=timedelta(seconds=2))
    outcome = await end_of(lost, folder, "read -r _ _ _ script _ </proc/$PPID/stat; kill -9 $script; sleep 600")
    assert (outcome.succeeded, outcome.cause, outcome.state) == (False, Cause.LOST, JobState.NODE_FAIL)
    assert "belongs to another job" in outcome.detail
    assert (await end_of(lost, JobFolder(tmp_path / "other"), "exit 5")).exit_code == 5
