"""Stage compile: all graphs ahead of time, and the gate that finds the errors hidden in the logs."""

from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.spec import JobSpec
from tasks.compile_cache import cache_to_itself
from tasks.context import Run
from tasks.jobs import failure_lines, output, run_job
from tasks.launching import prepare_launch
from tasks.stage import StageResult, run_stage
from trainium.errors import StageFailed
from trainium.logs.compile_gate import CompileVerdict, compile_gate
from trainium.run.records import StageRecord
from trainium.text import size


@task(name="compile", task_run_name="compile", cache_policy=NO_CACHE)
async def compile_graphs(run: Run) -> StageRecord:
    """neuron_parallel_compile in a job of its own, or nothing with `compile.mode: jit`."""
    recipe = run.recipe
    inputs = {
        "compile": recipe.compile.model_dump(mode="json"),
        "training": recipe.training.model_dump(mode="json"),
        "instance": recipe.instance_type,
        "nodes": recipe.resources.nodes,
    }
    work = _compile if recipe.compile.mode == "aot" else _skip
    return await run_stage(run, "compile", inputs, lambda: work(run))


async def _skip(run: Run) -> StageResult:
    return StageResult(verified=("left to the training job (compile.mode: jit)",))


async def _compile(run: Run) -> StageResult:
    async with cache_to_itself(run) as check_cache:
        return await _compile_alone(run, check_cache)


async def _compile_alone(run: Run, check_cache: Callable[[], None]) -> StageResult:
    def describe(path: Path) -> JobSpec:
        check_cache()
        return prepare_launch(run.site, path, "compile", "compile")

    job = await run_job(run, "compile", describe)
    verdict = compile_gate(
        [job.folder.log], nodes=run.recipe.resources.nodes, results=job.folder.path, cache=run.places.cache
    )
    if not verdict.ok:
        # The job ended with code 0, so only this entry keeps the next start from believing it.
        run.folder.end_attempt("compile", job.note, succeeded=False)
        raise StageFailed(_refusal(verdict, job.note.id, str(job.folder.log), failure_lines(job.folder)))
    return StageResult(
        outputs=(output(run.places.cache, (job,), shared=True),),
        jobs=(job.note,),
        verified=(verdict.summary,),
        facts={"total": verdict.total, "cached": verdict.cached},
        table=[
            {
                "graph": graph.module,
                "status": "compiled" if graph.ok else "FAILED",
                "seconds": graph.seconds if graph.seconds is not None else "–",
                "neff": size(graph.neff_bytes) if graph.neff_bytes is not None else "–",
            }
            for graph in verdict.graphs
        ],
    )


def _refusal(verdict: CompileVerdict, job_id: str, log: str, last: list[str]) -> str:
    findings = [f"  {finding.summary} ({finding.cls}). {finding.action}" for finding in verdict.findings[:5]]
    head = f"compile failed: job {job_id} ended with code 0, but not every graph was compiled: {verdict.summary}"
    return "\n".join([head, *findings, f"  log: {log}", *last])
