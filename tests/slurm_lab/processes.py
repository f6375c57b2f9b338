"""Handles on a lab's daemons, and on the supervisor that owns them (see supervisor.py)."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_LINES = 25


class SlurmLabError(RuntimeError):
    """A lab, or one of its daemons, cannot do what was asked; the message says why and shows the end of the log."""


@dataclass(frozen=True)
class Daemon:
    """How to start a daemon, and how to see that it takes connections."""

    argv: tuple[str, ...]
    ready: Callable[[], bool]


class Process:
    """A running daemon, held by pidfd so that a signal can never reach a later process with the same pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it may have ended, and been reaped, already
            self._pidfd = os.pidfd_open(pid)

    @property
    def running(self) -> bool:
        return not self.wait(0)

    def wait(self, seconds: float) -> bool:
        """True once the process has ended, False when it still runs after that time."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def send(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def state(self) -> str:
        """The state letter of /proc/PID/stat: `T` when stopped."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Supervisor:
    """Starts processes whose end is certain: closing it, or the end of this process, ends them all.

    `folders` are removed last.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C at the terminal is not for it
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
        answer = self._ask({"argv": list(argv), "env": dict(env), "log": str(log)})
        if "error" in answer:
            raise SlurmLabError(f"{argv[0]} cannot be started: {answer['error']}")
        return Process(answer["pid"])

    def exit_code(self, process: Process) -> int | None:
        """None while it runs; minus the signal when it was killed."""
        code: int | None = self._ask({"ended": process.pid})["code"]
        return code

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        code = self._child.wait()
        self._child.stdout.close()
        if code:
            raise SlurmLabError(f"the lab's supervisor ended with {code}: some of its processes may still run")


def is_listening(port: int) -> bool:
    """Whether someone listens on that IPv4 port, by the kernel's table: a connection would show in the daemon's log."""
    listen = "0A"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == listen and int(local.rpartition(":")[2], 16) == port:
            return True
    return False


def accepts(path: Path) -> bool:
    """Whether someone listens on that Unix socket; its file alone may be left from a process that was killed."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def freeze(process: Process, seconds: float) -> None:
    """SIGSTOP, and wait until the kernel has stopped it."""
    process.send(signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while process.state != "T":
        if time.monotonic() > deadline:
            raise SlurmLabError(f"process {process.pid} did not stop")
        time.sleep(0.005)


def tail(log: Path) -> str:
    """The end of a log, as the end of an error message."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
    return "\n".join([f"The end of {log.name}:", *lines]) if lines else f"{log.name} is empty."
