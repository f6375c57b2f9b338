"""Stage convert: the base model as NxD shards, every tensor equal to its slice of the source."""

import asyncio
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.spec import JobSpec
from tasks.context import Run
from tasks.jobs import FinishedJob, output, run_job
from tasks.jobspecs import base_config, converter_job, single_file, single_file_job, to_nxd_job, verify_nxd_job
from tasks.stage import StageResult, run_stage
from trainium.checkpoint.architecture import Architecture
from trainium.model.nxdt_converter import Direction
from trainium.run.records import StageRecord
from trainium.text import size


@task(name="convert", task_run_name="convert", cache_policy=NO_CACHE)
async def convert(run: Run) -> StageRecord:
    """HF → NxD, with the engine that the recipe names."""
    recipe = run.recipe
    inputs = {
        "parallelism": recipe.parallelism.model_dump(mode="json"),
        "convert": recipe.convert.model_dump(mode="json", exclude={"array", "workers"}),
        "instance": recipe.instance_type,
    }
    work = _native if recipe.convert.engine == "native" else _with_toolchain
    return await run_stage(run, "convert", inputs, lambda: work(run))


async def _native(run: Run) -> StageResult:
    """One job or, with `convert.array`, as many at once, and one that makes a whole of their shares."""
    count = run.recipe.convert.array
    shares = await _shares(run, count) if count > 1 else ()
    job = await run_job(run, "convert", lambda path: to_nxd_job(run.site, path))
    return _result(run, (*shares, job))


async def _shares(run: Run, count: int) -> tuple[FinishedJob, ...]:
    """Ordinary jobs instead of one Slurm array: each has its folder, and is adopted or repeated on its own.

    When one fails the others are waited for, since what they write need not be written again.
    """

    async def share(number: int) -> FinishedJob:
        return await run_job(run, f"convert-share-{number}", lambda path: to_nxd_job(run.site, path, number))

    ended = await asyncio.gather(*(share(number) for number in range(1, count + 1)), return_exceptions=True)
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return tuple(job for job in ended if isinstance(job, FinishedJob))


async def _with_toolchain(run: Run) -> StageResult:
    """Three jobs: the single file the converter wants, the converter, and our own comparison of what it wrote."""
    arch = Architecture.from_config(base_config(run.site))
    merged = single_file(run.site)

    def converter(path: Path) -> JobSpec:
        return converter_job(run.site, path, Direction.TO_NXD, merged, run.places.nxd, arch)

    prepared = await run_job(run, "convert-prepare", lambda path: single_file_job(run.site, path))
    converted = await run_job(run, "convert", converter)
    verified = await run_job(run, "convert-verify", lambda path: verify_nxd_job(run.site, path))
    merged.unlink(missing_ok=True)  # as large as the model, and only this conversion reads it
    return _result(run, (prepared, converted, verified))


def _result(run: Run, jobs: tuple[FinishedJob, ...]) -> StageResult:
    report = jobs[-1].report()
    checked = report["verification"]
    return StageResult(
        outputs=(output(run.places.nxd, jobs),),
        jobs=tuple(job.note for job in jobs),
        verified=(
            f"{checked['shards']} shards, {size(checked['bytes'])}: every one of {checked['tensors']} tensors equal to "
            "its slice of the source",
        ),
        facts=report,
    )
