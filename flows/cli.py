"""The `trainium` command.

Prefect and torch are imported inside the commands that need them: a typing mistake is answered in a blink.
"""

import asyncio
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from trainium.checkpoint import commands
from trainium.errors import StageFailed, TransientError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune LLMs on AWS Trainium through Slurm, from a model name and a dataset to a verified model.",
)
convert_app = typer.Typer(no_args_is_help=True, help="Convert weights between Hugging Face and NxD, without a run.")
convert_app.command("to-nxd")(commands.to_nxd)
convert_app.command("to-hf")(commands.to_hf)
app.add_typer(convert_app, name="convert")
app.command("verify")(commands.verify)

console = Console()
errors = Console(stderr=True)

REFUSED, FAILED = 2, 1
SECOND_CTRL_C = 5.0  # seconds

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the runs.")]
RunOption = Annotated[
    str | None, typer.Option("--run", help="Name of the run; starting it again goes on where it stopped.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")]
WaitOption = Annotated[
    bool,
    typer.Option("--wait", help="While another start of this run is alive, wait for its end and go on from there."),
]


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that differ from the recipe's: key=value …")
    ] = None,
    run_name: RunOption = None,
    runs: RunsOption = Path("runs"),
    cluster: Annotated[
        str | None,
        typer.Option(
            help="local, slurm, or a registered block: slurm-cluster/NAME, local-cluster/NAME. "
            "Default: slurm, or local for instance_type rehearsal."
        ),
    ] = None,
    toolchain: Annotated[
        str | None,
        typer.Option(
            help="rehearsal, installed (NxDT where the tutorial puts it), or the name of a Neuron Toolchain block. "
            "Default: installed, or rehearsal for instance_type rehearsal."
        ),
    ] = None,
    hub: Annotated[
        str | None, typer.Option(help="Name of a registered Hugging Face Hub block. Default: the public hub.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Name of a registered S3 Storage block. Default: boto3's own credentials.")
    ] = None,
    wait: WaitOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run a recipe from the base model to the verified export."""
    from trainium.config.recipe import load_recipe
    from trainium.run.folder import check_run_name

    given = list(overrides or ())
    values = load_recipe(recipe, given)  # refused in a second, before Prefect is even imported
    name = check_run_name(_dated(values.name) if run_name is None else run_name)
    _quiet_prefect()
    from flows import choices

    where, tools = choices.cluster(cluster, runs, values), choices.toolchain(toolchain, values)
    if dry_run:
        _print_dry_run(values, name, where, tools)
        return
    _check(values, where.runs, name)
    sources = {"hub": choices.hub(hub), "storage": choices.storage(storage)}
    _finetune(recipe, name, overrides=given, cluster=where, toolchain=tools, wait_for_run=wait, **sources)


@app.command()
def rehearse(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that differ from the recipe's: key=value …")
    ] = None,
    run_name: RunOption = None,
    runs: RunsOption = Path("runs"),
    wait: WaitOption = False,
) -> None:
    """Run the whole chain on this machine, with the stand-in toolchain that trains on CPUs."""
    run("rehearsal", overrides, run_name=run_name, runs=runs, cluster="local", toolchain="rehearsal", wait=wait)


@app.command()
def cancel(
    run_name: Annotated[str, typer.Argument(help="Name of the run.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Cancel the jobs that a run has in the queue, whether or not its flow is still alive."""
    _quiet_prefect()
    from tasks.cancellation import cancel_jobs
    from trainium.run.folder import RunFolder

    folder = RunFolder.named(runs, run_name)
    if not folder.path.is_dir():
        there = ", ".join(sorted(path.name for path in folder.path.parent.glob("[!.]*/"))) or "none"
        raise UserError(f"there is no run {run_name!r} in {folder.path.parent}. Runs there: {there}")
    ids = cancel_jobs(folder)
    console.print(
        f"Cancelled: {', '.join(ids)}" if ids else f"Run {run_name} has no job in the queue.", highlight=False
    )


def _finetune(recipe: str, run_name: str, *, cluster: Any, **parameters: Any) -> None:
    import httpx
    from prefect.exceptions import CancelledRun, ObjectNotFound

    from flows.choices import reach_prefect
    from flows.finetune import finetune
    from flows.signals import CtrlC, ends_with_clean_up
    from flows.terminal import TerminalListener
    from tasks.cancellation import cancel_jobs
    from tasks.listening import listening
    from trainium.run.folder import RunFolder

    folder = RunFolder.named(cluster.runs, run_name)
    ends_with_clean_up()
    reach_prefect()
    console.print(f"Run [bold]{run_name}[/] in {escape(str(folder.path))}", highlight=False, soft_wrap=True)
    ctrl_c = CtrlC()
    try:
        with listening(TerminalListener(console)):
            flow = finetune(recipe, run_name=run_name, cluster=cluster, **parameters)
            report = asyncio.run(ctrl_c.counted(flow))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _detached(folder, lambda: cancel_jobs(folder), ctrl_c.presses)
    except SystemExit:
        with suppress(OSError):  # a terminal that hung up
            errors.print(
                f"\nEnded by a signal. The job of run {run_name}, if one is in the queue, goes on; start the same run "
                "again to follow it.",
                highlight=False,
                soft_wrap=True,
            )
        raise
    except CancelledRun:
        errors.print(f"\nRun {run_name} was cancelled in Prefect, and its job with it.", highlight=False)
        raise typer.Exit(FAILED) from None
    except (httpx.HTTPError, ObjectNotFound) as error:
        raise StageFailed(
            f"Prefect's server could not be told how run {run_name} ended ({error}). The run folder knows: start the "
            "same run again, and what is done is not done again."
        ) from error
    console.print(
        f"\nReport: {report}\nModel:  {folder.path / 'export'}", markup=False, highlight=False, soft_wrap=True
    )


def _check(recipe: Any, runs: Path, run_name: str) -> None:
    """What the plan of a new run would refuse is refused before Prefect's server starts and a folder appears."""
    from trainium.config.plan import plan
    from trainium.config.rules import read_model_config
    from trainium.run.folder import RunFolder

    folder = RunFolder.named(runs, run_name)
    folder.check_place()
    if folder.record("plan") is None:
        plan(recipe, read_model_config(recipe)).check()


def _print_dry_run(recipe: Any, run_name: str, cluster: Any, toolchain: Any) -> None:
    from flows.dry_run import dry_run
    from tasks.jobspecs import Site
    from trainium.run.folder import RunFolder

    for title, text in dry_run(Site(recipe, RunFolder.named(cluster.runs, run_name), cluster, toolchain)):
        print(f"### {title}\n{text}\n")


def _detached(folder: Any, cancel_now: Any, presses: int) -> None:
    """After the first Ctrl-C: the job goes on; a second one, now or while the flow ended, cancels it."""
    if presses < 2:
        errors.print(
            f"\nDetached from run {folder.name}: its job, if one is in the queue, goes on.\n"
            "Start the same run again to follow it. To cancel it:\n"
            f"  trainium cancel {folder.name} --runs {shlex.quote(str(folder.path.parent))}\n"
            f"Ctrl-C again within {SECOND_CTRL_C:.0f} s cancels it now.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        try:
            time.sleep(SECOND_CTRL_C)
            raise typer.Exit(FAILED)
        except KeyboardInterrupt:
            pass
    ids = cancel_now()
    errors.print(f"Cancelled: {', '.join(ids)}" if ids else "There was no job to cancel.", highlight=False)
    raise typer.Exit(FAILED)


def _dated(recipe: str) -> str:
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


def _quiet_prefect() -> None:
    """Before Prefect is imported: its log goes to the UI, the terminal belongs to the run's progress."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    # Its own limit is 20 s; a cold start on two busy cores was measured at 33 s.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")


def main() -> None:
    """Entry point: 0 done, 1 failed, 2 refused; one message and no traceback for everything that was foreseen."""
    from slurm.errors import InvalidJobSpec, SlurmError, SubmitRejected
    from trainium.run.lease import LeaseLost

    try:
        app()
    except (UserError, InvalidJobSpec, SubmitRejected) as error:
        errors.print(f"[bold red]refused:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(REFUSED)
    except (StageFailed, SlurmError, TransientError, LeaseLost, OSError) as error:
        errors.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(FAILED)
