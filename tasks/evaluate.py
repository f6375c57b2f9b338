"""Stage evaluate: the tuned model against its base on rows that neither was trained on."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.context import Run
from tasks.jobs import run_job
from tasks.jobspecs import evaluate_job
from tasks.stage import StageResult, run_stage
from trainium.run.records import StageRecord


@task(name="evaluate", task_run_name="evaluate", cache_policy=NO_CACHE)
async def evaluate(run: Run) -> StageRecord:
    """Held-out loss and sample answers of both models."""
    inputs = {"evaluate": run.recipe.evaluate.model_dump(mode="json"), "seq_length": run.recipe.training.seq_length}
    return await run_stage(run, "evaluate", inputs, lambda: _evaluate(run))


async def _evaluate(run: Run) -> StageResult:
    job = await run_job(run, "evaluate", lambda path: evaluate_job(run.site, path))
    report = job.report()
    base, tuned = report["base"]["loss"], report["tuned"]["loss"]
    better = "lower" if tuned < base else "NOT lower"
    return StageResult(
        jobs=(job.note,),
        verified=(f"held-out loss {base:.4g} → {tuned:.4g} ({better} than the base's) on {report['rows']} rows",),
        facts=report,
        table=[
            {
                "prompt": sample["input"],
                "expected": sample["expected"],
                "base": sample["base"],
                "tuned": sample["tuned"],
            }
            for sample in report["samples"]
        ],
    )
