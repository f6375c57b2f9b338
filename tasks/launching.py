"""What compile and train have in common: a generated NxDT config and a launch script."""

from pathlib import Path

from slurm.spec import JobSpec
from tasks.jobspecs import LAUNCH, Site, base_config, launch_job, launch_of, nxdt_paths
from trainium.config.nxdt import Phase, ResumePoint, nxdt_config, to_yaml, trainer_model_config
from trainium.files import write_atomic, write_json
from trainium.launch import render_launch


def prepare_launch(site: Site, job: Path, phase: Phase, name: str, resume: ResumePoint | None = None) -> JobSpec:
    """Write `config/<name>.yaml` and the job's launch script, and describe the job."""
    config = site.folder.config / f"{name}.yaml"
    base, paths = base_config(site), nxdt_paths(site)
    write_json(paths.model_config, trainer_model_config(base))
    write_atomic(config, to_yaml(nxdt_config(site.recipe, base, paths, phase, resume)))
    write_atomic(job / LAUNCH, render_launch(launch_of(site, job, phase, config)))
    return launch_job(site, job, phase)
