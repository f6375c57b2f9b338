"""One run while a fault strikes it: its flow, its folder, its Slurm, its server."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurm.folder import JobFolder
from tests.chaos.cases import Case, Event, Moment
from tests.chaos.evidence import outcome
from tests.chaos.servers import Server
from tests.chaos.settings import Settings
from tests.slurm_lab.faults import QueuedJob, queued_jobs
from tests.slurm_lab.lab import SlurmLab, SlurmLabError
from trainium.files import read_json
from trainium.run.folder import RunFolder

TRAINIUM = Path(sys.executable).with_name("trainium")
REFUSED = 2
FINISHED = "✓"  # before each stage that a flow has finished, or found finished
LOOK = 0.02  # seconds between two looks for a moment


class Flow:
    """One start: `trainium run` in a process and a session of its own."""

    def __init__(self, argv: Iterable[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(TRAINIUM), "run", *argv],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.began = time.monotonic()

    @property
    def code(self) -> int | None:
        """None while it lives; minus the signal that killed it."""
        return self._process.poll()

    @property
    def ended(self) -> bool:
        return self.code is not None

    def send(self, number: signal.Signals) -> None:
        """To the process alone, as `kill` does; a terminal's Ctrl-C reaches no job either."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Its code, or None when it still lives after that time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def accepted(self) -> bool:
        """Whether it has got to work, or has ended."""
        return self.ended or FINISHED in self.text()

    def end(self) -> None:
        """By force, if need be."""
        if not self.ended:
            self._process.kill()
            self._process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        failed = [line for line in lines if line.startswith(("failed:", "refused:"))]
        return (failed or lines or ["no output"])[-1]


@dataclass
class Scene:
    """What a fault can lay hands on. `wrong` collects what must not have happened, `notes` what is worth telling."""

    case: Case
    lab: SlurmLab
    server: Server
    folder: Path  # of everything of this case
    run: RunFolder
    argv: tuple[str, ...]
    settings: Settings
    environment: Mapping[str, str]
    register: Callable[[], None]  # the blocks, again
    stopped: threading.Event  # whoever started all this wants no more of it
    flows: list[Flow] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)

    @property
    def flow(self) -> Flow:
        """The latest start."""
        return self.flows[-1]

    def start(self) -> Flow:
        """Start the run, again if there was a start before."""
        if self.stopped.is_set():
            raise RuntimeError("interrupted")
        log = self.folder / f"start-{len(self.flows) + 1}.log"
        flow = Flow(self.argv, {**self.environment, **self.server.environment}, log)
        self.flows.append(flow)
        return flow

    def end(self) -> None:
        """No flow of it lives any longer."""
        for flow in self.flows:
            flow.end()

    def start_until_accepted(self, seconds: float) -> Flow | None:
        """Start the run until it is not refused because another flow has it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            flow = self.start()
            self.until(flow.accepted, seconds)
            if flow.code != REFUSED:
                return flow
            self.flows.remove(flow)
        return None

    @property
    def done(self) -> bool:
        return outcome(self.run) is not None

    def uid(self) -> str | None:
        with suppress(OSError, ValueError, KeyError):
            uid = str(read_json(self.run.path / "run.json")["uid"])
            if uid not in self.uids:
                self.uids.append(uid)
            return uid
        return None

    def job(self, stage: str) -> JobFolder | None:
        """The latest attempt of a stage."""
        attempts = self.run.attempts(stage)
        return JobFolder(self.run.job(stage, attempts[-1])) if attempts else None

    def alive(self) -> list[QueuedJob]:
        """The run's jobs that have not ended, by Slurm's word; asks until Slurm answers."""
        self.uid()
        while True:
            with suppress(SlurmLabError, subprocess.TimeoutExpired):
                return [job for job in queued_jobs(self.lab) if job.name.startswith(tuple(f"{u}-" for u in self.uids))]
            time.sleep(0.5)

    def live_job(self, *states: str) -> QueuedJob | None:
        """A job of the run in one of the states, as soon as there is one; None when the flow ends before."""
        while not self.flow.ended:
            for job in self.alive():
                if job.state in states:
                    return job
            time.sleep(0.1)
        return None

    def reached(self, moment: Moment) -> bool:
        """Whether what the moment is counted from has happened."""
        if moment.event is Event.STARTED:
            return True
        if moment.event is Event.SAVED:
            return any((self.run.path / "experiment/checkpoints").glob("*.ckpt/done"))
        job = self.job(moment.stage)
        if job is None:
            return False
        files = {Event.SUBMITTING: job.intent, Event.RUNNING: job.start, Event.ENDED: job.exit}
        return files[moment.event].exists()

    def wait_for(self, moment: Moment) -> bool:
        """False when the flow ended before the moment came."""
        if not self.until(lambda: self.flow.ended or self.reached(moment), self.settings.patience, LOOK):
            return False
        self.flow.wait(moment.delay)
        return not self.flow.ended

    def outage(self) -> float:
        """Seconds for which something is away."""
        return self.case.random.uniform(*self.settings.outage)

    def expect_no_jobs(self, why: str) -> None:
        """The run's jobs have to be over soon."""
        if not self.until(lambda: not self.alive(), self.settings.cancelled_within, 0.2):
            jobs = ", ".join(f"{job.job_id} {job.state}" for job in self.alive())
            self.wrong.append(f"{self.settings.cancelled_within:.0f} s after {why} there still is {jobs}")

    @staticmethod
    def until(true: Callable[[], object], seconds: float, every: float = 0.05) -> bool:
        """Whether it came true in time."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(every)
        return True
