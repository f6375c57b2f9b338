"""How the tests of the Prefect surface use it: commands, the API, a real worker, and the processes of jobs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def command(*argv: str, environment: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """Run `python -m …` from the repository's root; its output. Fails the test with that output on another code."""
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def api() -> SyncPrefectClient:
    return get_client(sync_client=True)


def until(what: str, look: Callable[[], T | None], timeout: float, diagnose: Callable[[], str] = str) -> T:
    """The first true answer of `look`; fails after `timeout` seconds, saying what was waited for."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer := look():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout} s: {what}\n{diagnose()}")


def flow_run(run_id: UUID) -> FlowRun:
    with api() as client:
        return client.read_flow_run(run_id)


def until_state(run_id: UUID, name: str, timeout: float, diagnose: Callable[[], str] = str) -> FlowRun:
    def look() -> FlowRun | None:
        run = flow_run(run_id)
        if run.state is not None and run.state.is_final() and run.state.name != name:
            raise AssertionError(f"{run.state!r} instead of {name}\n{diagnose()}")
        return run if run.state is not None and run.state.name == name else None

    return until(f"flow run {name}", look, timeout, diagnose)


class Worker:
    """A real `prefect worker start` in a session of its own, ended with everything it started."""

    def __init__(self, log: Path, environment: Mapping[str, str], *, once: bool = False) -> None:
        self.log = log
        argv = ["prefect", "worker", "start", "--pool", "trainium", "--type", "process", "--name", log.stem]
        argv += ["--install-policy", "never", *(["--run-once"] if once else [])]
        quick = {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                cwd=log.parent,  # not the repository: the deployment says itself where the flow is
                env={**os.environ, **quick, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def text(self) -> str:
        return f"{self.log}:\n{self.log.read_text()[-6000:]}"

    def children(self) -> list[int]:
        """The flow runs' processes."""
        return [pid for pid, parent in _parents().items() if parent == self.process.pid]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        flows = self.children()
        for pid in [self.process.pid, *flows]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Process:
    pid: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def job_name(self) -> str:
        return self.environment.get("SLURM_JOB_NAME", "")


def processes() -> Iterator[Process]:
    """Every living process of this user, as `ps` would show it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                argv = (entry / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
                environment = (entry / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
                pairs = (item.partition("=") for item in environment if item)
                if argv:  # a zombie has none
                    yield Process(int(entry.name), tuple(argv), {name: value for name, _, value in pairs})


def job_processes(uid: str) -> list[Process]:
    """Those of a run's jobs: the environment of a job names it, and jobs are called after the run's uid."""
    return [process for process in processes() if process.job_name.startswith(f"{uid}-")]


@contextmanager
def watched_processes() -> Iterator[dict[tuple[int, tuple[str, ...]], Process]]:
    """Collects what lives while the block runs, looking several times a second."""
    seen: dict[tuple[int, tuple[str, ...]], Process] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for process in processes():
                seen[process.pid, process.argv] = process

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def deployment(name: str) -> Any:
    with api() as client:
        return client.read_deployment_by_name(name)


def start(name: str, **parameters: Any) -> UUID:
    """Create a flow run of a deployment, to be run at once."""
    found = deployment(name)
    with api() as client:
        return client.create_flow_run_from_deployment(found.id, parameters=parameters).id


def reference(slug: str) -> dict[str, Any]:
    """A block as a parameter: the server resolves it, its secrets are in no request."""
    return {"$ref": {"block_document_slug": slug}}
