"""The parent flow: from a model name and a dataset to a fine-tuned, verified model."""

from datetime import datetime
from pathlib import Path
from typing import cast

from prefect import flow, runtime
from prefect.states import Cancelled

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage, SlurmCluster, remember
from flows.entering import entered
from flows.lifecycle import InterruptedByApi, cancel_left_jobs, kept_alive, labelled
from tasks.compile import compile_graphs
from tasks.context import Run
from tasks.convert import convert
from tasks.dataset import prepare_dataset
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.jobspecs import Site
from tasks.listening import current_listeners
from tasks.model import fetch_model
from tasks.plan import make_plan
from tasks.report import write_report
from tasks.toolchain import probe_toolchain
from tasks.train import train
from trainium.config.overrides import RecipeOverrides
from trainium.config.recipe import difference, frozen_part, load_recipe, recipe_yaml
from trainium.config.schema import Recipe
from trainium.run.folder import RunFolder, check_run_name
from trainium.run.lease import Lease

DEFAULT_RUNS = Path("runs")


@flow(name="finetune", log_prints=False, validate_parameters=True, on_cancellation=[cancel_left_jobs])
async def finetune(
    recipe: str,
    overrides: list[str] | RecipeOverrides | None = None,
    run_name: str | None = None,
    cluster: SlurmCluster | LocalCluster | None = None,
    toolchain: NeuronToolchain | None = None,
    hub: HuggingFaceHub | None = None,
    storage: S3Storage | None = None,
    wait_for_run: bool = False,
) -> Path:
    """Fine-tune a model on AWS Trainium.

    Args:
        recipe: Name of a recipe in deployments/recipes, or path of a YAML file.
        overrides: Values that differ from the recipe's: `key.nested=value` lines (list), or the form's fields
            (RecipeOverrides), where a value that stays None is the recipe's.
        run_name: Name of the run and of its folder. Starting it again goes on where it stopped.
            Default: the recipe's name and the scheduled time of this flow run.
        cluster: Where jobs run, and in which folder the run is. Default: Slurm as this machine knows it, or this
            machine alone for a recipe whose instance type is `rehearsal`; with the runs in `runs/`.
        toolchain: What compiles and trains. Default: NxDT where the tutorial installs it, or the stand-in for CPUs
            for a recipe whose instance type is `rehearsal`.
        hub: Where the base model comes from, and the token for it. Default: the hub that HF_ENDPOINT names, or the
            public one, with the token of HF_TOKEN or `hf auth login`.
        storage: Where an s3:// dataset comes from. Default: Amazon's S3 with boto3's own credentials.
        wait_for_run: While another start of this run is alive, wait until it is done or dead and then go on, instead of
            being refused. A retry of the same flow run always waits: what is alive then is often its own first try.

    Returns:
        The path of the run's report. A run that is cancelled through the API raises Prefect's CancelledRun.
    """
    values = load_recipe(recipe, overrides.as_dotlist() if isinstance(overrides, RecipeOverrides) else overrides or ())
    cluster = cluster or default_cluster(values)
    folder = RunFolder.named(cluster.runs, run_name or default_run_name(values, runtime.flow_run.scheduled_start_time))
    wait = wait_for_run or runtime.flow_run.run_count > 1
    contest = folder.contest(cluster.stale_after.total_seconds(), str(runtime.flow_run.id or ""))
    frozen = frozen_part(values)

    def start() -> Lease:
        return folder.start(recipe_yaml(values), frozen, lambda old: difference(old, frozen), contest)

    try:
        async with entered(start, contest, wait=wait) as lease:
            remember(cluster, folder.cluster)
            site = Site(values, folder, cluster, toolchain or default_toolchain(values))
            run = Run(site, lease, hub=hub, storage=storage, listeners=current_listeners())
            async with labelled(folder), kept_alive(lease):
                await _stages(run)
            lease.check()
            return await write_report(run)
    except InterruptedByApi:
        # What a flow returns as a state becomes the run's; any exception would make it Failed or Crashed.
        return cast(Path, Cancelled(message="Cancelled through the API, and the run's job with it."))


async def _stages(run: Run) -> None:
    """What comes after what; each returns at once when its record stands."""
    await make_plan(run)
    probe_toolchain(run)
    await fetch_model(run)
    await prepare_dataset(run)
    await convert(run)
    await compile_graphs(run)
    await train(run)
    await export(run)
    await evaluate(run)


def default_cluster(recipe: Recipe, runs: Path = DEFAULT_RUNS) -> SlurmCluster | LocalCluster:
    """Nobody should find a model of days training on the head node because an option was forgotten."""
    return LocalCluster(runs=runs) if recipe.instance_type == "rehearsal" else SlurmCluster(runs=runs)


def default_toolchain(recipe: Recipe) -> NeuronToolchain:
    return NeuronToolchain.stand_in() if recipe.instance_type == "rehearsal" else NeuronToolchain.installed()


def default_run_name(recipe: Recipe, scheduled: datetime) -> str:
    """Recipe and scheduled time: the same in every retry of a flow run, another one next week."""
    return check_run_name(f"{recipe.name}-{scheduled:%Y%m%d-%H%M%S}")
