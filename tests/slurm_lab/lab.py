"""A real Slurm on this one machine: munged, slurmctld, several slurmd and, on request, mariadbd with slurmdbd.

As root, on loopback only, without systemd or cgroups, with ports, key, sockets and state of its own, so several labs
run side by side. It is ready in about 0.3 s, with accounting in about 3 s:

    with slurm_lab(nodes=2) as lab:
        lab.run("sbatch", "--parsable", "job.sh", check=True)

Partitions: `main` (default) and `hi`, whose jobs preempt those of `main` by requeueing them; with cloud nodes `cloud`,
whose nodes run once they are booted (see faults.py).
The Debian packages it needs are installed by install.sh beside this file.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import prepare, processes
from .processes import Daemon, Process, SlurmLabError, Supervisor, tail

__all__ = ["SlurmLab", "SlurmLabError", "slurm_lab"]

START_SECONDS = 60.0
STOP_SECONDS = 20.0

# Variables through which a surrounding job, or a user's profile, would change what the commands do.
COMMAND_VARIABLES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")


@dataclass
class SlurmLab:
    """A running lab. `folder` holds everything of it; `conf` is what SLURM_CONF must name.

    Daemons go by name: munged, slurmctld, slurmd.n1 …, and with accounting mariadbd and slurmdbd.
    """

    folder: Path
    conf: Path
    nodes: tuple[str, ...]
    accounting: bool
    cloud: tuple[str, ...]
    _supervisor: Supervisor = field(repr=False)
    _daemons: Mapping[str, Daemon] = field(repr=False)
    _processes: dict[str, Process] = field(default_factory=dict, repr=False)

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to talk to this lab."""
        return {"SLURM_CONF": str(self.conf)}

    @property
    def daemons(self) -> tuple[str, ...]:
        """The daemons' names, in the order of their start."""
        return tuple(self._daemons)

    def run(
        self, *argv: str | Path, timeout: float = 60, check: bool = False, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command against this lab; `timeout` in seconds."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(COMMAND_VARIABLES)}
        result = subprocess.run(
            [str(word) for word in argv],
            env=inherited | self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and result.returncode:
            raise SlurmLabError(f"{argv[0]} ended with {result.returncode}: {result.stderr.strip()}")
        return result

    def log(self, name: str) -> Path:
        """The daemon's log, with what it wrote before its own log was open."""
        return self.folder / "log" / f"{name}.out"

    def pid(self, name: str) -> int:
        return self._process(name).pid

    def is_running(self, name: str) -> bool:
        """True for a frozen daemon too."""
        return name in self._processes and self._processes[name].running

    def start(self, name: str) -> None:
        """Start a daemon, also again after `stop`, and return when it takes connections."""
        daemon = self._daemons[name]
        if self.is_running(name):
            raise SlurmLabError(f"{name} runs already")
        if name in self._processes:
            self._processes.pop(name).close()
        # Nothing else of the caller's environment: what a daemon has, its jobs may see.
        environment = {"PATH": prepare.search_path(), "LANG": "C.UTF-8", **self.env}
        process = self._supervisor.start(daemon.argv, environment, self.log(name))
        self._processes[name] = process
        deadline = time.monotonic() + START_SECONDS
        while not daemon.ready():
            if process.wait(0.01):
                code = self._supervisor.exit_code(process)
                raise SlurmLabError(f"{name} ended with {code} while it started. {tail(self.log(name))}")
            if time.monotonic() > deadline:
                raise SlurmLabError(f"{name} was not ready after {START_SECONDS:.0f} s. {tail(self.log(name))}")

    def stop(self, name: str) -> None:
        """End a daemon in an orderly way, or by SIGKILL when that takes too long. The jobs of a slurmd run on."""
        self._end(name, signal.SIGTERM, signal.SIGCONT)  # a frozen one can end only when it is thawed

    def kill(self, name: str) -> None:
        """End a daemon as a crash would."""
        self._end(name, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """Let a daemon hang: its connections are accepted by the kernel and never answered."""
        processes.freeze(self._process(name), STOP_SECONDS)

    def thaw(self, name: str) -> None:
        self._process(name).send(signal.SIGCONT)

    def wait_idle(self, timeout: float = START_SECONDS) -> None:
        """Wait until every node is up and without a job. Raises at once when a daemon has died by itself."""
        deadline = time.monotonic() + timeout
        while True:
            self._check_alive()
            answer = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
            if sorted(answer.stdout.splitlines()) == sorted(f"{node} idle" for node in self.nodes):
                return
            if time.monotonic() > deadline:
                seen = (answer.stdout + answer.stderr).strip()
                raise SlurmLabError(f"not all nodes idle after {timeout:.0f} s: {seen}. {tail(self.log('slurmctld'))}")
            time.sleep(0.02)

    def _check_alive(self) -> None:
        """A node whose slurmd has died goes on looking idle until SlurmdTimeout."""
        for name, process in self._processes.items():
            if not process.running:
                code = self._supervisor.exit_code(process)
                raise SlurmLabError(f"{name} ended with {code}. {tail(self.log(name))}")

    def _end(self, name: str, *signals: signal.Signals) -> None:
        process = self._process(name)
        for number in signals:
            process.send(number)
        if not process.wait(STOP_SECONDS):
            process.send(signal.SIGKILL)
            process.wait(STOP_SECONDS)
        self._supervisor.exit_code(process)  # collects it: a zombie would still look like a process
        self._processes.pop(name).close()

    def _close(self) -> None:
        while self._processes:
            self._processes.popitem()[1].close()

    def _process(self, name: str) -> Process:
        if not self.is_running(name):
            known = ", ".join(self._daemons)
            raise SlurmLabError(f"no running daemon {name!r}; this lab's daemons are {known}")
        return self._processes[name]


@contextlib.contextmanager
def slurm_lab(
    *,
    nodes: int = 2,
    cpus: int = 128,
    accounting: bool = False,
    message_timeout: int = 10,
    cloud: int = 0,
    extra: str = "",
) -> Iterator[SlurmLab]:
    """A lab with nodes n1…nN, all idle. Afterwards nothing of it is left, however this process ends.

    `cpus` per node are declared, not real. `message_timeout` (seconds) is how long clients wait for a controller that
    is down or frozen. `cloud` nodes c1…cN are powered down. `extra` is put at the end of
    slurm.conf. Raises SlurmLabError.
    """
    prepare.check_requirements(accounting)
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    cloud_names = tuple(f"c{number}" for number in range(1, cloud + 1))
    # The path of a socket is limited to 108 bytes, so TMPDIR, which may be long, is not asked.
    folder = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    folder.chmod(0o711)  # munged wants its socket to be reachable by everyone
    data = prepare.database_folder(folder) if accounting else None
    with contextlib.ExitStack() as stack:
        supervisor = Supervisor([folder, *([data] if data else [])])
        stack.callback(supervisor.close)
        ports = stack.enter_context(prepare.reserved_ports("slurmctld", "slurmdbd", "mariadbd", *names, *cloud_names))
        prepare.write_files(
            folder,
            names,
            ports,
            cpus=cpus,
            accounting=accounting,
            message_timeout=message_timeout,
            cloud=cloud_names,
            extra=extra,
        )
        if data:
            _install_database(supervisor, data, folder / "log/mariadb-install-db.out")
        daemons = prepare.commands(folder, names, cloud_names, ports, data)
        lab = SlurmLab(folder, folder / "slurm.conf", names, accounting, cloud_names, supervisor, daemons)
        stack.callback(lab._close)
        for name in lab.daemons:
            if name.removeprefix("slurmd.") not in cloud_names:
                lab.start(name)
        lab.wait_idle()
        yield lab


def _install_database(supervisor: Supervisor, data: Path, log: Path) -> None:
    """Through the supervisor, so that it too ends with the lab."""
    process = supervisor.start(prepare.database_install_command(data), {"PATH": prepare.search_path()}, log)
    process.wait(START_SECONDS)
    code = supervisor.exit_code(process)
    process.close()
    if code != 0:
        raise SlurmLabError(f"mariadb-install-db ended with {code}. {tail(log)}")
