"""What each job of a run is: pure functions from recipe and paths to JobSpecs, so that a dry run shows the same ones.

Jobs in the `project` environment run this project's interpreter; jobs in the `toolchain` environment run NxDT.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blocks import Cluster, NeuronToolchain
from slurm.spec import JobSpec
from tasks.places import Places
from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.config.nxdt import NxdtPaths, Phase
from trainium.config.rules import Facts, layout_of
from trainium.config.schema import Recipe, StageResources
from trainium.launch import Launch
from trainium.model.nxdt_converter import FULL_STATE, SCRIPT, Direction, converter_argv, converter_env
from trainium.run.folder import RunFolder

LAUNCH = "launch.sh"
RESULT = "result.json"


@dataclass(frozen=True)
class Site:
    """A run's recipe and everything around it that a job's description needs."""

    recipe: Recipe
    folder: RunFolder
    cluster: Cluster
    toolchain: NeuronToolchain

    @property
    def places(self) -> Places:
        return Places(self.folder, self.recipe)

    @property
    def layout(self) -> Layout:
        return layout_of(self.recipe)

    @property
    def cores(self) -> int:
        """Cores per node; each has a training process."""
        return Facts(self.recipe, None).cores


def base_config(site: Site) -> dict[str, Any]:
    """The base model's config.json. Raises UserError when it is not there or no JSON object."""
    return read_config(site.places.base)


def to_nxd_job(site: Site, job: Path, share: int | None = None) -> JobSpec:
    """HF → NxD with this project's converter, every tensor compared with its source afterwards.

    share: only that part (from 1) of `convert.array`, to which a job without it adds what is missing before it looks at
    the whole and puts it in its place.
    """
    places, resources, convert = site.places, site.recipe.resources.convert, site.recipe.convert
    command = ("-m", "trainium.checkpoint", "to-nxd", str(places.base), str(places.nxd))
    how = ("--share", f"{share}/{convert.array}") if share else ("--verify",)
    workers = ("--workers", str(convert.workers or resources.cpus_per_task))
    return _project_job(site, resources, job, (*command, *_layout_options(site), *workers, *how, *_report(job)))


def single_file_job(site: Site, job: Path) -> JobSpec:
    """The single file that the toolchain's converter reads, made of the base model."""
    command = ("-m", "trainium.model.nxdt_converter", "prepare", str(site.places.base), str(single_file(site)))
    return _project_job(site, site.recipe.resources.convert, job, command)


def single_file(site: Site) -> Path:
    return site.folder.path / "base-single-file" / FULL_STATE


def verify_nxd_job(site: Site, job: Path) -> JobSpec:
    """Compare what the toolchain's converter wrote with the base model, tensor for tensor."""
    command = ("-m", "trainium.checkpoint", "verify-nxd", str(site.places.base), str(site.places.nxd))
    return _project_job(site, site.recipe.resources.convert, job, (*command, *_layout_options(site), *_report(job)))


def converter_job(site: Site, job: Path, direction: Direction, source: Path, out: Path, arch: Architecture) -> JobSpec:
    """The toolchain's own converter, in the toolchain's environment, without a terminal and without the network."""
    script = site.toolchain.examples / SCRIPT
    config = site.places.base / "config.json"
    resources = site.recipe.resources
    return _job(
        site,
        resources.convert if direction is Direction.TO_NXD else resources.export,
        job,
        environment="toolchain",
        payload=converter_argv(script, direction, source, out, config, site.layout.resolve(arch), arch),
        variables={**site.toolchain.environment, **converter_env()},
    )


def launch_job(site: Site, job: Path, phase: Phase) -> JobSpec:
    """Compile or train: one task per node, each running the launch script of the job's folder."""
    resources = site.recipe.resources
    warn = resources.train.signal_before_end if phase == "train" else None
    return _job(
        site,
        resources.compile if phase == "compile" else resources.train,
        job,
        environment="toolchain",
        payload=("bash", str(job / LAUNCH)),
        variables={**site.toolchain.environment, "PYTHONUNBUFFERED": "1"},
        nodes=resources.nodes,
        per_task=True,
        signal=f"B:USR1@{warn}" if warn else None,
    )


def launch_of(site: Site, job: Path, phase: Phase, config: Path) -> Launch:
    """The launch script's values for one attempt."""
    return Launch(
        phase=phase,
        examples=site.toolchain.examples,
        config=config,
        cache=site.places.cache,
        log_folder=nxdt_paths(site).log_folder(phase),
        version=site.folder.name,
        cores=site.cores,
    )


def nxdt_paths(site: Site) -> NxdtPaths:
    """Where the trainer finds and leaves things."""
    places = site.places
    return NxdtPaths(
        base=places.base,
        model_config=site.folder.config / "config.json",
        train=places.train_rows,
        validation=places.validation_rows,
        nxd=places.nxd,
        experiment=places.experiment,
        cache=places.cache,
    )


def export_job(site: Site, job: Path, checkpoint: Path, *, template: Path | None, card: Path) -> JobSpec:
    """NxD → HF with everything that belongs to a model, verified against the base.

    With the toolchain's converter as the engine the weights are the ones it merged, compared with the checkpoint's.
    """
    export = site.recipe.export
    command = ["-m", "trainium.model.export", "--checkpoint", str(checkpoint), "--base", str(site.places.base)]
    command += ["--out", str(site.places.export), *_layout_options(site), "--model-card-data", str(card)]
    command += ["--full-state", str(merged_file(site))] if site.recipe.convert.engine == "nxdt" else []
    command += ["--chat-template", str(template)] if template else []
    command += ["--dtype", export.dtype] if export.dtype else []
    command += ["--single-file"] if export.single_file else []
    return _project_job(site, site.recipe.resources.export, job, (*command, *_report(job)))


def merged_file(site: Site) -> Path:
    """What the toolchain's converter makes of a training checkpoint."""
    return site.folder.path / "export-single-file" / FULL_STATE


def evaluate_job(site: Site, job: Path) -> JobSpec:
    """Held-out loss and sample answers, base against tuned."""
    evaluate, places = site.recipe.evaluate, site.places
    command = ["-m", "trainium.model.evaluate", "--base", str(places.base), "--tuned", str(places.export)]
    command += ["--data", str(places.validation_rows), "--rows", str(evaluate.rows), "--samples", str(evaluate.samples)]
    command += ["--max-new-tokens", str(evaluate.max_new_tokens), "--seq-length", str(site.recipe.training.seq_length)]
    return _project_job(site, site.recipe.resources.evaluate, job, (*command, *_report(job)))


def _layout_options(site: Site) -> tuple[str, ...]:
    layout = site.layout
    options = {
        "--tp": layout.tp,
        "--pp": layout.pp,
        "--kv-replicator": layout.kv_replicator,
        "--qkv": layout.qkv,
        "--virtual-pp": layout.virtual_pp,
        "--instance-family": layout.instance_family,
    }
    return tuple(word for name, value in options.items() for word in (name, str(value)))


def _report(job: Path) -> tuple[str, str]:
    return "--report", str(job / RESULT)


def _project_job(site: Site, resources: StageResources, job: Path, command: tuple[str, ...]) -> JobSpec:
    variables = {
        "HF_HUB_OFFLINE": "1",  # everything is there already; nothing may ask the network or for a token
        "OMP_NUM_THREADS": str(resources.cpus_per_task),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    payload = (str(site.cluster.python), *command)
    return _job(site, resources, job, environment="project", payload=payload, variables=variables)


def _job(
    site: Site,
    resources: StageResources,
    job: Path,
    *,
    environment: Literal["project", "toolchain"],
    payload: tuple[str, ...],
    variables: Mapping[str, str],
    nodes: int = 1,
    per_task: bool = False,
    signal: str | None = None,
) -> JobSpec:
    shared = site.recipe.resources
    activate = site.toolchain.activate if environment == "toolchain" else None
    return JobSpec(
        payload=payload,
        environment=environment,
        activate=str(activate) if activate else None,
        env=variables,
        cwd=str(job),
        per_task=per_task,
        nodes=nodes,
        ntasks=nodes,
        tasks_per_node=1,
        cpus_per_task=resources.cpus_per_task,
        time=resources.time,
        memory=resources.memory,
        exclusive=resources.exclusive,
        partition=shared.partition,
        account=shared.account,
        qos=shared.qos,
        reservation=shared.reservation,
        constraint=shared.constraint,
        nodelist=shared.nodelist,
        exclude=shared.exclude,
        requeue=shared.requeue,
        signal=signal,
        mail_type=shared.mail_type,
        mail_user=shared.mail_user,
    )
