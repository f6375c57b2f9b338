"""What a run would submit, as text; nothing is written, fetched or submitted."""

from collections.abc import Iterator
from pathlib import Path

from slurm.folder import JobFolder
from slurm.spec import JobSpec
from tasks.jobspecs import (
    LAUNCH,
    Site,
    base_config,
    converter_job,
    evaluate_job,
    export_job,
    launch_job,
    launch_of,
    merged_file,
    single_file,
    single_file_job,
    to_nxd_job,
    verify_nxd_job,
)
from tasks.launching import nxdt_paths
from trainium.checkpoint.layout import Architecture
from trainium.config.nxdt import Phase, nxdt_config, to_yaml
from trainium.config.plan import Plan, plan
from trainium.config.rules import Facts
from trainium.launch import render_launch
from trainium.model.nxdt_converter import Direction

UID = "0123456789"  # stands for the random number that a run gets when it starts


def dry_run(site: Site) -> Iterator[tuple[str, str]]:
    """(title, text) of everything that the run would write for its jobs, in the order of submission.

    Raises PlanError as the run would. A model that is not on this machine yet is taken to have the shape that the
    recipe expects, and the first text says so.
    """
    known = (site.places.base / "config.json").exists()
    config = base_config(site) if known or site.recipe.model.kind == "folder" else None
    made = plan(site.recipe, config)
    made.check()
    yield "plan", _plan_text(made)
    arch = Facts(site.recipe, config).assumed
    for stage, spec in _jobs(site, arch):
        folder = JobFolder(site.folder.job(stage, 1))
        yield f"jobs/{stage}-1/script.sh", site.cluster.scheduler().render(spec, folder, f"{UID}-{stage}-1")
        if stage in ("compile", "train"):
            phase: Phase = "compile" if stage == "compile" else "train"
            yaml = to_yaml(nxdt_config(site.recipe, config, nxdt_paths(site), phase))
            launch = launch_of(site, folder.path, phase, site.folder.config / f"{phase}.yaml")
            yield f"jobs/{stage}-1/{LAUNCH}", render_launch(launch)
            yield f"config/{phase}.yaml", yaml
    if site.recipe.export.chat_template is not None:
        yield "jobs/export-1/chat_template.jinja", site.recipe.export.chat_template


def _jobs(site: Site, arch: Architecture | None) -> Iterator[tuple[str, JobSpec]]:
    recipe = site.recipe
    checkpoint = _last_checkpoint(site)

    def job(stage: str) -> Path:
        return site.folder.job(stage, 1)

    if recipe.convert.engine == "native" or arch is None:
        yield "convert", to_nxd_job(site, job("convert"))
    else:
        yield "convert-prepare", single_file_job(site, job("convert-prepare"))
        source, out = single_file(site), site.places.nxd
        yield "convert", converter_job(site, job("convert"), Direction.TO_NXD, source, out, arch)
        yield "convert-verify", verify_nxd_job(site, job("convert-verify"))
    if recipe.compile.mode == "aot":
        yield "compile", launch_job(site, job("compile"), "compile")
    yield "train", launch_job(site, job("train"), "train")
    if recipe.convert.engine == "nxdt" and arch is not None:
        model, out = checkpoint / "model", merged_file(site).parent
        yield "export-merge", converter_job(site, job("export-merge"), Direction.TO_HF, model, out, arch)
    template = job("export") / "chat_template.jinja" if recipe.export.chat_template is not None else None
    card = job("export") / "model-card.json"
    yield "export", export_job(site, job("export"), checkpoint, template=template, card=card)
    yield "evaluate", evaluate_job(site, job("evaluate"))


def _last_checkpoint(site: Site) -> Path:
    """Its name as NxDT makes it; the number of consumed samples is exact only without a resume."""
    training = site.recipe.training
    samples = float(training.max_steps * training.global_batch_size)
    name = f"{site.recipe.checkpoint_name}--step={training.max_steps}-consumed_samples={samples}.ckpt"
    return site.places.checkpoints / name


def _plan_text(made: Plan) -> str:
    lines = [f"{key}: {value}" for key, value in made.to_json()["predicted"].items()]
    if not made.verified:
        lines.append(
            "UNVERIFIED: the model's config.json is not on this machine; the recipe's expected shape stands in"
        )
    return "\n".join([*lines, *(f"{finding.severity}: {finding}" for finding in made.findings)])
