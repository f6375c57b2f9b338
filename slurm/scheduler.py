"""What the rest of the project needs from a scheduler; Slurm and this machine both provide it."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from slurm.folder import JobFolder
from slurm.spec import JobSpec
from slurm.states import JobState


@dataclass(frozen=True)
class QueueRow:
    """What the queue shows of one job. `exit_status` is a raw wait status; None where the queue shows none yet."""

    job_id: str
    state: JobState
    reason: str | None
    nodes: str
    name: str
    restarts: int
    submitted: datetime | None
    exit_status: int | None = None


@dataclass(frozen=True)
class AccountingRow:
    """What accounting shows of one job. sacct masks exit codes with 0x7f: 255 is shown as 127.

    `cancelled_by`: the user id behind `CANCELLED by 1000`; empty where nobody cancelled it.
    """

    job_id: str
    state: JobState
    exit_code: int
    signal: int
    derived_exit_code: int
    nodes: str
    name: str
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    cancelled_by: str = ""


@dataclass(frozen=True)
class Timing:
    """How a watcher paces itself on this scheduler; all in seconds.

    exit_scan: between looks at the exit files. queue: between two queue queries while nothing happens. early: the
    least time between two queue queries when an exit file asks for one. accounting: the least time between two
    accounting queries. confirm: how far apart two looks must be that agree on an end without an exit file. lost: how
    long a job may be known to nobody before it is given up. settle: how long after an exit file the queue is worth
    asking, because the scheduler notices an end a moment later. calls: the most queries in any 60 seconds, of all who
    share their answers (None: any number).
    """

    exit_scan: float
    queue: float
    early: float
    accounting: float
    confirm: float
    lost: float
    settle: float = 0.0
    calls: int | None = None


class Scheduler(Protocol):
    """All methods block; call them in a thread. All but `render` may raise SchedulerUnreachable."""

    @property
    def timing(self) -> Timing:
        """The pace that suits this scheduler."""

    @property
    def identity(self) -> str | None:
        """Names its queue for all machines, fit for a file name; None when asking it costs nothing worth sharing."""

    def submit(self, script: Path, name: str) -> str:
        """Hand the script over; the job id. Raises SubmitRejected (final) or SubmitUncertain (look the name up)."""

    def find(self, name: str, since: datetime) -> list[QueueRow]:
        """This user's jobs of exactly this name that were submitted after `since`, ended ones included."""

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        """These jobs, or all of this user's (None), in one query; a missing one is not in the queue (any more)."""

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        """What accounting knows of jobs submitted after `since`; None where there is no accounting."""

    def cancel(self, job_ids: Collection[str]) -> None:
        """Ask for the end of the jobs; an ended or unknown one is no error."""

    def render(self, spec: JobSpec, folder: JobFolder, name: str) -> str:
        """The job script as this scheduler runs it. Raises InvalidJobSpec for what it cannot do."""
