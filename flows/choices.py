"""From the names on the command line to the blocks that the flow takes."""

import contextvars
import signal
import threading
from pathlib import Path
from typing import Any, TypeVar

from prefect import get_client
from prefect.blocks.core import Block
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage, SlurmCluster
from flows.finetune import default_cluster, default_toolchain
from trainium.config.schema import Recipe
from trainium.errors import StageFailed, UserError

B = TypeVar("B", bound=Block)


def cluster(choice: str | None, runs: Path, recipe: Recipe) -> SlurmCluster | LocalCluster:
    """--cluster; a registered block brings its own folder of the runs."""
    if choice is None:
        return default_cluster(recipe, runs)
    if choice in ("local", "slurm"):
        return LocalCluster(runs=runs) if choice == "local" else SlurmCluster(runs=runs)
    kind, _, name = choice.partition("/")
    if kind == "slurm-cluster" and name:
        return _load(SlurmCluster, name, "--cluster", "Use local, slurm, or another name. ")
    if kind == "local-cluster" and name:
        return _load(LocalCluster, name, "--cluster", "Use local, slurm, or another name. ")
    raise UserError(
        f"--cluster {choice!r} is none of: local, slurm, slurm-cluster/NAME, local-cluster/NAME "
        "(the last two are registered blocks)"
    )


def toolchain(choice: str | None, recipe: Recipe) -> NeuronToolchain:
    """--toolchain"""
    if choice is None:
        return default_toolchain(recipe)
    known = {"rehearsal": NeuronToolchain.stand_in, "installed": NeuronToolchain.installed}
    if choice in known:
        return known[choice]()
    return _load(NeuronToolchain, choice, "--toolchain", "Use rehearsal, installed, or another name. ")


def hub(choice: str | None) -> HuggingFaceHub | None:
    """--hub"""
    return None if choice is None else _load(HuggingFaceHub, choice, "--hub")


def storage(choice: str | None) -> S3Storage | None:
    """--storage"""
    return None if choice is None else _load(S3Storage, choice, "--storage")


def reach_prefect() -> None:
    """A server that the user's settings name and that is down would show itself as a traceback of the HTTP client."""
    url = PREFECT_API_URL.value()
    if url is None:
        if PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
            _start_a_server()
        return
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        raise StageFailed(
            f"Prefect's server at {url} does not answer ({error}). Start it with `prefect server start`, or unset "
            "PREFECT_API_URL (`prefect config unset PREFECT_API_URL`) to do without a server of your own."
        )


def _start_a_server() -> None:
    """Prefect's temporary server, which would start at the first call, but deaf to the terminal's Ctrl-C and hang-up.

    They go to every process of the terminal: the flow would have nobody left to tell that it was interrupted, and
    would try for a minute. Its end is SIGTERM, by Prefect's atexit function.
    """
    from prefect.server.api.server import SubprocessASGIServer  # seconds of import, needed here only

    failed: list[BaseException] = []

    def start() -> None:
        # A process that is started inherits the mask of the thread that does it. Only this thread is deaf meanwhile.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            SubprocessASGIServer().start()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(start,), daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _load(block: type[B], name: str, option: str, instead: str = "") -> B:
    """The registered document; `instead` names what needs no registration."""
    reach_prefect()
    try:
        loaded: Any = block.load(name)
    except ValueError as error:
        raise UserError(
            f"{option}: no {block.__name__} block named {name!r} is registered. {instead}Register blocks with "
            "`python -m deployments.register`, or make one in the Prefect UI."
        ) from error
    assert isinstance(loaded, block)
    return loaded
