"""One flow run per run folder at a time, on a filesystem that many machines see.

The lease is a file with an owner and a generation. Taking it over raises the generation; the old owner, should it
wake up, reads the file before everything that cannot be undone and finds that it has lost.
"""

import fcntl
import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainium.errors import UserError
from trainium.files import read_json, write_json

STALE_AFTER = 60.0  # seconds without a heartbeat from another machine
HEARTBEAT_EVERY = 10.0  # seconds


class RunBusy(UserError):
    """Another live process works on this run folder."""


class LeaseLost(RuntimeError):
    """Another process took the run over; this one must touch nothing more."""


@dataclass(frozen=True)
class Owner:
    """One flow run of one process. Pids are reused, so the start time belongs to it; one process may run two flows."""

    user: str
    host: str
    pid: int
    process_started: str
    token: str

    @classmethod
    def me(cls) -> "Owner":
        started = _start_time(os.getpid()) or ""
        return cls(getpass.getuser(), socket.gethostname(), os.getpid(), started, secrets.token_hex(4))

    def known_dead(self) -> bool:
        """True only when it can be known: the process belonged to this machine and is gone."""
        return self.host == socket.gethostname() and _start_time(self.pid) != self.process_started

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid})"


class Lease:
    """The right to submit and cancel jobs of one run."""

    def __init__(self, path: Path, owner: Owner, generation: int) -> None:
        self._path = path
        self._owner = owner
        self._generation = generation

    @classmethod
    def take(cls, path: Path, *, stale_after: float = STALE_AFTER) -> "Lease":
        """Take the lease, or raise RunBusy naming who has it."""
        owner = Owner.me()
        with _locked(path):
            held = _read(path)
            if held is not None:
                holder = Owner(**held["owner"])
                silent = time.time() - held["heartbeat"]
                if not held["released"] and not holder.known_dead() and silent < stale_after:
                    raise RunBusy(
                        f"The run in {path.parent} is being worked on by {holder}, last seen {silent:.0f} s ago. "
                        "Wait for it, watch it in the Prefect UI, or give this run another name."
                    )
            lease = cls(path, owner, held["generation"] + 1 if held else 1)
            lease._write(released=False)
        return lease

    def check(self) -> None:
        """Raise LeaseLost unless this process still has the lease. Called right before every sbatch and scancel."""
        held = _read(self._path)
        if held is None:
            raise LeaseLost(f"{self._path} is gone: the run folder was deleted while this flow was working in it.")
        if held["generation"] != self._generation:
            raise LeaseLost(f"The run in {self._path.parent} was taken over by {Owner(**held['owner'])}.")

    def beat(self) -> None:
        """Say that this process is alive. Raises LeaseLost when it no longer matters."""
        if not self._path.parent.is_dir():
            self.check()
        with _locked(self._path):
            self.check()
            self._write(released=False)

    def release(self) -> None:
        """Give the lease back; harmless when it was lost."""
        if not self._path.parent.is_dir():
            return
        with _locked(self._path):
            held = _read(self._path)
            if held is not None and held["generation"] == self._generation:
                self._write(released=True)

    def _write(self, *, released: bool) -> None:
        write_json(
            self._path,
            {
                "owner": asdict(self._owner),
                "generation": self._generation,
                "heartbeat": time.time(),
                "released": released,
            },
        )


def _read(path: Path) -> dict[str, Any] | None:
    """The lease, or None when there is none. Raises RunBusy when it cannot be read: its owner may be alive."""
    try:
        held: dict[str, Any] = read_json(path)
        Owner(**held["owner"])
        float(held["heartbeat"]), int(held["generation"]), bool(held["released"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RunBusy(
            f"{path} is damaged ({error!r}), so nobody knows who works on this run. When no process does, remove it."
        ) from error
    return held


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only for the moment of reading and rewriting: the lock does not outlive a process, the lease does."""
    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/<pid>/stat (clock ticks since boot), or None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
