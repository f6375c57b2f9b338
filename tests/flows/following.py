"""A flow with one stage of one job, which ends when it is told to. Run as a process by test_two_flows.py.

python -m tests.flows.following RUNS STALE_AFTER
"""

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

from blocks import LocalCluster, NeuronToolchain
from flows.entering import entered_lease
from flows.lifecycle import kept_alive
from slurm.spec import JobSpec
from tasks.context import Run
from tasks.jobs import run_job
from tasks.jobspecs import Site
from tasks.stage import StageResult, run_stage
from trainium.config.recipe import load_recipe
from trainium.run.folder import RunFolder
from trainium.run.lease import LeaseLost
from trainium.run.records import StageRecord

STAGE = "convert"
LOST = 17  # the exit code of a flow that has lost its run
AT_WORK, END = "at-work", "end"  # files in the job's folder


class _Say:
    def started(self, stage: str) -> None: ...

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        print(text, flush=True)

    def finished(self, record: StageRecord, *, skipped: bool) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...


async def entered_run(runs: Path, stale_after: float) -> Run:
    folder = RunFolder.named(runs, "r")
    contest = folder.contest(stale_after)
    lease = await entered_lease(lambda: folder.start("", {}, lambda _: [], contest), contest, wait=True)
    site = Site(
        load_recipe("rehearsal"),
        folder,
        LocalCluster(runs=runs, stale_after=timedelta(seconds=stale_after)),
        NeuronToolchain.stand_in(),
    )
    return Run(site, lease, listeners=(_Say(),))


async def follow(run: Run) -> StageRecord:
    """The stage; its job is submitted or adopted."""

    async def work() -> StageResult:
        job = await run_job(run, STAGE, _job)
        return StageResult(jobs=(job.note,))

    async with kept_alive(run.lease):
        return await run_stage(run, STAGE, {}, work)


def end_jobs(folder: RunFolder) -> None:
    (folder.job(STAGE, 1) / END).touch()


def _job(folder: Path) -> JobSpec:
    command = f"touch {AT_WORK}; until [ -e {END} ] || ! sleep 0.05; do :; done"
    return JobSpec(payload=("timeout", "120", "bash", "-c", command), environment="project", cwd=str(folder))


async def _main(runs: Path, stale_after: float) -> None:
    await follow(await entered_run(runs, stale_after))


if __name__ == "__main__":
    try:
        asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2])))
    except LeaseLost as error:
        print(error)
        sys.exit(LOST)
