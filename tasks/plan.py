"""Stage plan: everything that can be known before anything is fetched or submitted."""

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.context import Run
from tasks.jobspecs import base_config
from tasks.stage import StageResult, run_stage
from trainium.config.plan import Plan, plan
from trainium.files import write_json
from trainium.run.records import StageRecord
from trainium.text import size


@task(name="plan", task_run_name="plan", cache_policy=NO_CACHE)
async def make_plan(run: Run) -> StageRecord:
    """Apply every rule to the recipe; the base model's config.json takes part as soon as it is on this machine."""
    inputs = {"recipe": run.recipe.model_dump(mode="json")}
    return await run_stage(run, "plan", inputs, lambda: asyncio.to_thread(_plan, run))


def _plan(run: Run) -> StageResult:
    known = (run.places.base / "config.json").exists()
    made = plan(run.recipe, base_config(run.site) if known else None)
    made.check()
    write_json(run.folder.plan, made.to_json())
    return StageResult(
        verified=(_summary(made),),
        notes=tuple(str(finding) for finding in made.warnings),
        facts={"predicted": made.to_json()["predicted"], "verified": made.verified},
        table=[
            {"severity": finding.severity, "rule": finding.id, "key": finding.key, "message": str(finding)}
            for finding in made.findings
        ],
    )


def check_model(run: Run, config: Mapping[str, Any]) -> None:
    """The same rules, and a plan.json that knows more, once config.json is there for certain.

    Raises PlanError before any job is submitted.
    """
    made = plan(run.recipe, config)
    made.check()
    write_json(run.folder.plan, made.to_json())


def _summary(made: Plan) -> str:
    predicted = made.predicted
    shards = f"{predicted.shards} shards"
    if predicted.model_bytes is not None:
        shards += f" of together {size(predicted.model_bytes)}"
    steps = f"{predicted.steps} steps, {predicted.checkpoints} checkpoints"
    return f"no rule broken; {predicted.cores} cores, {shards}, {steps}"
