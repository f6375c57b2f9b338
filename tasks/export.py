"""Stage export: the trained checkpoint as a Hugging Face model, held against its base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.spec import JobSpec
from tasks.context import Run
from tasks.jobs import FinishedJob, output, run_job
from tasks.jobspecs import base_config, converter_job, export_job, merged_file
from tasks.stage import StageResult, run_stage
from trainium.checkpoint.architecture import Architecture
from trainium.errors import StageFailed
from trainium.files import read_json, write_atomic, write_json
from trainium.model.nxdt_converter import Direction
from trainium.run.records import StageRecord


@task(name="export", task_run_name="export", cache_policy=NO_CACHE)
async def export(run: Run) -> StageRecord:
    """NxD → HF, verified; nothing takes the export's name before it is."""
    inputs = {
        "export": run.recipe.export.model_dump(mode="json"),
        "engine": run.recipe.convert.engine,
    }
    return await run_stage(run, "export", inputs, lambda: _export(run))


async def _export(run: Run) -> StageResult:
    checkpoint = _checkpoint(run)
    jobs = [await _merge_with_toolchain(run, checkpoint)] if run.recipe.convert.engine == "nxdt" else []
    jobs.append(await run_job(run, "export", lambda path: _describe(run, path, checkpoint)))
    report = jobs[-1].report()
    merged_file(run.site).unlink(missing_ok=True)  # as large as the model; its content is in the export
    return StageResult(
        outputs=(output(run.places.export, jobs),),
        jobs=tuple(job.note for job in jobs),
        verified=tuple(report["verified"]),
        notes=tuple(report["notes"]),
        facts=report,
        table=report["table"],
    )


async def _merge_with_toolchain(run: Run, checkpoint: Path) -> FinishedJob:
    arch = Architecture.from_config(base_config(run.site))
    model, out = checkpoint / "model", merged_file(run.site).parent

    def describe(path: Path) -> JobSpec:
        return converter_job(run.site, path, Direction.TO_HF, model, out, arch)

    return await run_job(run, "export-merge", describe)


def _describe(run: Run, job: Path, checkpoint: Path) -> JobSpec:
    """Write what the export job reads beside its script, and describe the job."""
    site = run.site
    template = job / "chat_template.jinja" if site.recipe.export.chat_template is not None else None
    if template is not None:
        write_atomic(template, str(site.recipe.export.chat_template))
    card = job / "model-card.json"
    write_json(card, _card(run))
    return export_job(site, job, checkpoint, template=template, card=card)


def _card(run: Run) -> dict[str, Any]:
    """What the model card says of the run: the recipe's values, and what the stages before found."""
    recipe, losses = run.recipe, _facts(run, "train").get("losses")
    versions = read_json(run.folder.toolchain)["versions"] if run.folder.toolchain.exists() else {}
    return {
        "run": run.folder.name,
        "recipe": recipe.name,
        "base": recipe.model.source,
        "base_revision": _facts(run, "model").get("commit"),
        "dataset": recipe.dataset.source,
        "rows": _facts(run, "dataset").get("rows"),
        "steps": recipe.training.max_steps,
        "seq_length": recipe.training.seq_length,
        "global_batch_size": recipe.training.global_batch_size,
        "learning_rate": recipe.training.learning_rate,
        "final_loss": losses[-1][1] if losses else None,
        "instance_type": recipe.instance_type,
        "toolchain": {name: version for name, version in versions.items() if version},
        "rehearsal": run.site.toolchain.rehearsal,
    }


def _facts(run: Run, stage: str) -> Mapping[str, Any]:
    record = run.folder.record(stage)
    return record.facts if record else {}


def _checkpoint(run: Run) -> Path:
    record = run.folder.record("train")
    if record is None:
        raise StageFailed("export: there is no finished training in this run")
    return Path(record.facts["checkpoint"])
