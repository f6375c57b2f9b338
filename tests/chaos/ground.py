"""Where the runs take place: the servers, the Slurms, and what all runs share."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks import NeuronToolchain, SlurmCluster
from tests.chaos.cases import Case, Lab, Then
from tests.chaos.evidence import Job, Outcome, duplicates, jobs_of, orphans, outcome, wrong_verdicts
from tests.chaos.results import Result
from tests.chaos.scene import Scene
from tests.chaos.servers import Server
from tests.chaos.settings import Settings
from tests.chaos.sources import slower
from tests.slurm_lab import faults
from tests.slurm_lab.faults import ended_jobs, queued_jobs
from tests.slurm_lab.lab import SlurmLab, slurm_lab
from trainium.run.folder import RunFolder

MESSAGE_TIMEOUT = 3  # seconds; a client of a controller that is away gives up after about twice that
WINDING_UP = 30.0  # seconds for jobs to leave the queue after the flow's end


@dataclass(frozen=True)
class Kit:
    """What is run: a recipe with overrides, by which toolchain and interpreter."""

    recipe: str
    overrides: tuple[str, ...]
    toolchain: NeuronToolchain
    python: Path


class Ground:
    """Use as a context manager."""

    def __init__(self, folder: Path, settings: Settings, kit: Kit) -> None:
        self.folder, self.settings, self.kit = folder, settings, kit
        self._stack = ExitStack()
        self._breaking = threading.Lock()  # one run at a time has the server that is broken
        self._second: Server | None = None
        self.stopped = threading.Event()
        self.reference: Outcome | None = None

    def __enter__(self) -> "Ground":
        self.server = Server(self.folder / "server")
        self._stack.callback(self.server.stop)
        self.server.start()
        self.lab = self._stack.enter_context(slurm_lab(nodes=2, message_timeout=MESSAGE_TIMEOUT))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, case: Case) -> Result:
        """The whole of a case. What goes wrong with the harness itself is in the result too."""
        began = time.monotonic()
        result = Result(case.number, case.kind.name, str(case.moment))
        try:
            with self._scene(case) as scene:
                result.folder = str(scene.folder)
                result.struck = _play(scene)
                self._judge(scene, result)
        except Exception as error:  # one run must not end the others
            result.wrong.append(f"the harness failed: {type(error).__name__}: {error}")
        result.seconds = time.monotonic() - began
        if result.good:
            shutil.rmtree(result.folder, ignore_errors=True)
        return result

    def undisturbed(self, case: Case) -> tuple[Result, Outcome | None]:
        """A run without a fault, and what it made."""
        result = Result(case.number, case.kind.name, str(case.moment))
        began = time.monotonic()
        with self._scene(case) as scene:
            _play(scene)
            self._judge(scene, result)
            result.seconds = time.monotonic() - began
            return result, outcome(scene.run)

    @contextmanager
    def _scene(self, case: Case) -> Iterator[Scene]:
        folder = self.folder / case.name
        folder.mkdir()
        with ExitStack() as stack:
            server = stack.enter_context(self._server_to_break()) if case.kind.own_server else self.server
            runs = folder / "runs"
            if case.kind.lab and case.kind.lab.small_disk:  # before the nodes, which would not see it later
                stack.enter_context(faults.small_disk(runs, case.kind.lab.small_disk))
            lab = stack.enter_context(_own_lab(case.kind.lab, folder)) if case.kind.lab else self.lab
            kit, cluster = self.kit, self._cluster(lab, runs)
            toolchain = slower(kit.toolchain, case.kind.step) if case.kind.step else kit.toolchain

            def register() -> None:
                with temporary_settings({PREFECT_API_URL: server.url}):
                    _save(cluster, case.name)
                    _save(toolchain, case.name)

            register()
            words = [kit.recipe, *kit.overrides, *self.settings.overrides, *case.kind.overrides, "--run", case.name]
            words += ["--cluster", f"slurm-cluster/{case.name}", "--toolchain", case.name]
            environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.settings.environment}
            run = RunFolder.named(runs, case.name)
            argv = tuple(words)
            scene = Scene(case, lab, server, folder, run, argv, self.settings, environment, register, self.stopped)
            stack.callback(scene.end)
            yield scene

    def _cluster(self, lab: SlurmLab, runs: Path) -> SlurmCluster:
        settings = self.settings
        return SlurmCluster(
            runs=runs,
            python=self.kit.python,
            slurm_conf=lab.conf,
            adopt_within=settings.adopt_within,
            stale_after=settings.stale_after,
            timing=settings.timing,
        )

    @contextmanager
    def _server_to_break(self) -> Iterator[Server]:
        with self._breaking:
            if self._second is None:
                self._second = Server(self.folder / "server-to-break")
                self._stack.callback(self._second.stop)
                self._second.start()
            yield self._second

    def _judge(self, scene: Scene, result: Result) -> None:
        scene.until(lambda: not scene.alive(), WINDING_UP, 0.5)
        scene.uid()
        jobs = jobs_of(scene.uids, ended_jobs(scene.lab), queued_jobs(scene.lab))
        made = outcome(scene.run)
        result.jobs, result.starts = len(jobs), len(scene.flows)
        result.attempts = max((sum(job.stage == other.stage for other in jobs) for job in jobs), default=0)
        result.duplicates = duplicates(jobs)
        result.orphans = orphans(scene.run, jobs)
        result.wrong = [*scene.wrong, *wrong_verdicts(scene.run, jobs), *_one_job_more(scene, jobs, result.struck)]
        result.notes = scene.notes
        result.state = _state(scene)
        if made is None:
            result.wrong.append(f"not finished after {len(scene.flows)} starts: {scene.flow.last_line()[-300:]}")
        else:
            result.digest = made.digest
            result.equal = self.reference in (None, made)
            if not result.equal and self.reference:
                what = [name for name in ("weights", "losses") if getattr(made, name) != getattr(self.reference, name)]
                result.notes.append(f"unequal: {' and '.join(what)}; losses of steps {_steps(made.losses)}")


def _play(scene: Scene) -> bool:
    """Start, fault, and further starts until the work is done. False: the flow was done before the moment came."""
    kind, settings = scene.case.kind, scene.settings
    scene.start()
    struck = scene.wait_for(scene.case.moment)
    if struck:
        kind.act(scene)
    survived = True
    while True:
        code = scene.flow.wait(settings.patience)
        if code is None:
            scene.wrong.append(f"a flow did not end in {settings.patience:.0f} s; it says: {scene.flow.last_line()}")
            scene.flow.end()
        if survived and kind.then is Then.GOES_ON and code != 0:
            scene.wrong.append(f"the flow ended with {code} and should have gone on: {scene.flow.last_line()[-300:]}")
        survived = False
        if code == 0 or len(scene.flows) >= settings.most_starts:
            return struck
        scene.uid()
        scene.start()


def _one_job_more(scene: Scene, jobs: Sequence[Job], struck: bool) -> list[str]:
    """Where only the flow was interrupted, every stage has one job."""
    if struck and scene.case.kind.then is not Then.NEXT_START:
        return []
    return [f"job {job.job_id} of {job.name} is one too many" for job in jobs if not job.name.endswith("-1")]


def _state(scene: Scene) -> str:
    runs = scene.server.flow_runs(scene.run.path)
    return str(runs[0]["state_name"]) if runs else "unknown"


def _steps(losses: Sequence[tuple[int, float]]) -> str:
    return f"{losses[0][0]} to {losses[-1][0]} ({len(losses)})" if losses else "none"


@contextmanager
def _own_lab(wanted: Lab, folder: Path) -> Iterator[SlurmLab]:
    with slurm_lab(
        nodes=wanted.nodes, accounting=wanted.accounting, cloud=wanted.cloud, message_timeout=MESSAGE_TIMEOUT
    ) as lab:
        if wanted.late_exit:
            with faults.late_exit_files(lab, folder / "programs", wanted.late_exit):
                yield lab
        else:
            yield lab


def _save(block: Any, name: str) -> None:
    """Several times if need be: a server on a busy machine may answer that its database is locked."""
    for last in (False, False, True):
        try:
            block.save(name, overwrite=True)
        except PrefectHTTPStatusError:
            if last:
                raise
            time.sleep(1)
        else:
            return


def leftovers(folder: Path) -> list[str]:
    """Mounts and processes that the runs have left behind."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    left = [f"mount {mount}" for mount in mounts if mount.startswith(str(folder))]
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False)
    return left + [f"process {pid}" for pid in found.stdout.split()]
