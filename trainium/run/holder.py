"""Who has a lease, and whether that process can be known to be dead."""

import json
import os
import pwd
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One flow of one process.

    Pids are reused, so the time at which the process started belongs to it; one process may run two flows, so each has
    a token. Two machines, or two containers of one, may have the same host name: `machine` is one boot and the set of
    pids that is seen from there. After `stale_after` seconds without a sign of life others may take the lease over.
    `run` is the folder of the run that the lease is for; `flow_run` is Prefect's id of the flow run, or empty.
    """

    user: str
    host: str
    machine: str
    pid: int
    process_started: str
    token: str
    stale_after: float
    run: str
    flow_run: str

    @classmethod
    def me(cls, stale_after: float, run: str, flow_run: str = "") -> "Holder":
        """This process, with a new token."""
        return cls(
            user=user_name(os.geteuid()),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_started=_living(os.getpid()) or "",
            token=secrets.token_hex(8),
            stale_after=stale_after,
            run=run,
            flow_run=flow_run,
        )

    @classmethod
    def parse(cls, text: bytes) -> "Holder | None":
        """None when it is damaged: somebody has the lease, and nobody knows who."""
        try:
            holder = cls(**json.loads(text))
            float(holder.stale_after), int(holder.pid)
        except (ValueError, TypeError):
            return None
        return holder

    def render(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()

    def known_dead(self) -> bool:
        """True only when it can be known: the process belonged to this machine and is gone."""
        return self.machine == _machine() and _living(self.pid) != self.process_started

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid})"


def user_name(number: int) -> str:
    """Of the system, not of the environment; the number itself where the system knows no name for it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(8)}"  # nobody can be known to be dead


def _living(pid: int) -> str | None:
    """When the process started (clock ticks since boot), or None when there is none, or only what its parent reads."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
