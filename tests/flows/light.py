"""The parent flow with two light stages in place of its own, to be interrupted in every way there is.

Everything around the stages is the real thing: run folder, lease, jobs, records, signals, the `trainium` command
(`python -m tests.flows.light run rehearsal --run NAME`) and what a worker runs (`tests/flows/light.py:finetune`).
The job of `train` ends when the file `go` is in the run folder. Each job adds a line to `done-<stage>` there.
"""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows import cli
from flows import finetune as parent
from flows.finetune import finetune
from slurm.spec import JobSpec
from tasks.context import Run
from tasks.jobs import run_job
from tasks.stage import StageResult, run_stage

__all__ = ["finetune"]

_SCRIPT = 'until [ -e "$1" ]; do sleep 0.1; done; echo "$SLURM_JOB_ID" >> "$2"'


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE)
async def _stage(run: Run, stage: str, go: Path) -> None:
    done = run.folder.path / f"done-{stage}"

    def describe(path: Path) -> JobSpec:
        payload = ("/bin/sh", "-c", _SCRIPT, "sh", str(go), str(done))
        return JobSpec(payload=payload, environment="project", cwd="/")

    async def work() -> StageResult:
        job = await run_job(run, stage, describe)
        return StageResult(jobs=(job.note,), verified=(f"{done.name} has {len(done.read_text().split())} line",))

    await run_stage(run, stage, {}, work)


async def _stages(run: Run) -> None:
    await _stage(run, "convert", Path("/"))
    await _stage(run, "train", run.folder.path / "go")


parent._stages = _stages

if __name__ == "__main__":
    cli.main()
