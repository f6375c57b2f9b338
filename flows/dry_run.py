"""What a run would submit, as text; nothing is written, fetched or submitted."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

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
    nxdt_paths,
    single_file,
    single_file_job,
    to_nxd_job,
    verify_nxd_job,
)
from trainium.checkpoint.architecture import Architecture
from trainium.config.deviations import ABSENT, DEVIATIONS
from trainium.config.nxdt import Phase, nxdt_config, to_yaml, trainer_model_config
from trainium.config.plan import Plan, plan
from trainium.config.recipe import recipe_yaml
from trainium.config.rules import Facts
from trainium.config.schema import Recipe
from trainium.config.script_deviations import SCRIPT_DEVIATIONS
from trainium.launch import render_launch
from trainium.model.nxdt_converter import Direction

UID = "0123456789"  # stands for the random number that a run gets when it starts


def dry_run(site: Site) -> Iterator[tuple[str, str]]:
    """(title, text) of what the run would write for its jobs, in the order of submission; file names are its titles.

    At the end, where and why this is not what the tutorial does. Raises PlanError as the run would. A model that is not
    on this machine yet is taken to have the shape that the recipe expects, and the first text says so.
    """
    config = base_config(site) if (site.places.base / "config.json").exists() else None
    made = plan(site.recipe, config)
    made.check()
    yield "plan", _plan_text(made)
    yield "recipe.yaml", recipe_yaml(site.recipe)
    if config is not None:
        yield "config/config.json", json.dumps(trainer_model_config(config), indent=2, ensure_ascii=False)
    arch = Facts(site.recipe, config).assumed
    for stage, spec in _jobs(site, arch):
        folder = JobFolder(site.folder.job(stage, 1))
        yield f"jobs/{stage}-1/script.sh", site.cluster.scheduler().render(spec, folder, f"{UID}-{stage}-1")
        if stage in ("compile", "train"):
            phase: Phase = "compile" if stage == "compile" else "train"
            yaml = to_yaml(_nxdt_config(site, config, phase))
            launch = launch_of(site, folder.path, phase, site.folder.config / f"{phase}.yaml")
            yield f"jobs/{stage}-1/{LAUNCH}", render_launch(launch)
            yield f"config/{phase}.yaml", yaml
    if site.recipe.export.chat_template is not None:
        yield "jobs/export-1/chat_template.jinja", site.recipe.export.chat_template
    yield "differences from the tutorial's configuration", _config_differences(site, config)
    yield "differences from the tutorial's commands", _script_differences(site.recipe)


def _jobs(site: Site, arch: Architecture | None) -> Iterator[tuple[str, JobSpec]]:
    recipe = site.recipe
    checkpoint = _last_checkpoint(site)

    def job(stage: str) -> Path:
        return site.folder.job(stage, 1)

    if recipe.convert.engine == "native" or arch is None:
        count = recipe.convert.array
        for share in range(1, count + 1) if count > 1 else ():
            yield f"convert-share-{share}", to_nxd_job(site, job(f"convert-share-{share}"), share)
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
    """Its name as NxDT makes it: consumed_samples is of the last logged step, so 728 of 800 in the tutorial."""
    training = site.recipe.training
    last_logged = (training.max_steps - 1) // training.log_every * training.log_every
    samples = float((last_logged + 1) * training.global_batch_size)
    name = f"{site.recipe.checkpoint_name}--step={training.max_steps}-consumed_samples={samples}.ckpt"
    return site.places.checkpoints / name


def _nxdt_config(site: Site, model_config: Mapping[str, Any] | None, phase: Phase) -> DictConfig:
    return nxdt_config(site.recipe, model_config, nxdt_paths(site), phase)


def _config_differences(site: Site, model_config: Mapping[str, Any] | None) -> str:
    """Ours as this recipe has them; what only a resume changes, in words."""
    phases: tuple[Phase, ...] = ("compile", "train")
    configs = {phase: _nxdt_config(site, model_config, phase) for phase in phases}
    lines: list[str] = []
    for deviation in DEVIATIONS:
        config = configs["compile" if deviation.when == "compile" else "train"]
        resumed = deviation.when == "resume"
        ours = deviation.ours if resumed else OmegaConf.select(config, deviation.key, default=ABSENT)
        if ours != deviation.tutorial:
            key = deviation.key if deviation.when == "always" else f"{deviation.key} ({deviation.when})"
            lines += _difference(key, deviation.tutorial, ours, deviation.reason)
    return "\n".join(lines)


def _script_differences(recipe: Recipe) -> str:
    lines: list[str] = []
    for deviation in SCRIPT_DEVIATIONS:
        if deviation.engine in (None, recipe.convert.engine):
            lines += _difference(
                f"{deviation.step}: {deviation.key}", deviation.tutorial, deviation.ours, deviation.reason
            )
    return "\n".join(lines)


def _difference(key: str, tutorial: Any, ours: Any, reason: str) -> tuple[str, str]:
    before, after = ("null" if value is None else str(value) for value in (tutorial, ours))
    return f"{key}: {before} → {after}", f"    {reason}"


def _plan_text(made: Plan) -> str:
    lines = [f"{key}: {value}" for key, value in made.to_json()["predicted"].items()]
    if not made.verified:
        lines.append(
            "UNVERIFIED: the model's config.json is not on this machine; the recipe's expected shape stands in"
        )
    return "\n".join([*lines, *(f"{finding.severity}: {finding}" for finding in made.findings)])
