"""Where jobs run."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from prefect.blocks.core import Block
from pydantic import Field

from blocks.paths import AbsolutePath
from slurm.cluster import SlurmScheduler
from slurm.local import LocalScheduler
from slurm.scheduler import Scheduler, Timing
from trainium.errors import UserError
from trainium.files import read_json, write_json
from trainium.run import lease


class BrokenClusterFile(UserError):
    """The file that says where a run's jobs are cannot be read."""


_STALE_AFTER: Any = Field(
    default=timedelta(seconds=lease.STALE_AFTER),
    gt=timedelta(0),
    description="How long a run's flow may give no sign of life before another start may take the run over; it gives "
    f"{lease.BEATS} in that time (ISO 8601: PT1M is a minute).",
)


class Cluster(Protocol):
    """What a flow needs to know of a cluster."""

    runs: Path
    python: Path
    adopt_within: timedelta
    stale_after: timedelta

    @property
    def queue(self) -> str:
        """Equal for two blocks whose jobs stand in one queue."""

    def scheduler(self) -> Scheduler: ...


class SlurmCluster(Block):
    """A Slurm cluster whose head node this is, such as one made by AWS ParallelCluster."""

    _block_type_name = "Slurm Cluster"
    _description = "A Slurm cluster reached with sbatch, squeue, sacct and scancel from this machine."

    runs: AbsolutePath = Field(
        description="Folder of the runs, on a filesystem that the compute nodes see too, such as /fsx/runs."
    )
    python: AbsolutePath = Field(
        default=Path(sys.executable),
        description="Interpreter for the jobs that run this project (convert, export, evaluate), on a path that the "
        "compute nodes see. Default: the one that runs the flow.",
    )
    slurm_conf: Path | None = Field(
        default=None, description="Path of slurm.conf, if it is not the one that Slurm finds by itself."
    )
    adopt_within: timedelta = Field(
        default=timedelta(seconds=60),
        description="How long a submission whose answer was lost is looked for before it is made again (ISO 8601: "
        "PT1M is a minute).",
    )
    stale_after: timedelta = _STALE_AFTER
    timing: Timing | None = Field(
        default=None,
        description="How often Slurm and the exit files are looked at, and how long a doubtful end is looked at again, "
        "each in seconds (see slurm.scheduler.Timing). Default: what suits a cluster with many users.",
    )

    @property
    def queue(self) -> str:
        return f"slurm {self.slurm_conf or os.environ.get('SLURM_CONF', '')}"

    def scheduler(self) -> Scheduler:
        return SlurmScheduler(conf=self.slurm_conf, timing=self.timing)


class LocalCluster(Block):
    """This machine: jobs are processes of their own that outlive the flow. For rehearsals and tests."""

    _block_type_name = "Local Cluster"
    _description = "Jobs as detached processes on this machine, with the job scripts and rules of Slurm."

    runs: AbsolutePath = Field(description="Folder of the runs.")
    python: AbsolutePath = Field(
        default=Path(sys.executable), description="Interpreter for the jobs that run this project."
    )
    adopt_within: timedelta = Field(
        default=timedelta(seconds=2),
        description="How long a submission whose answer was lost is looked for before it is made again (ISO 8601: "
        "PT2S is two seconds).",
    )
    stale_after: timedelta = _STALE_AFTER

    @property
    def queue(self) -> str:
        return f"local {self.runs}"

    def scheduler(self) -> Scheduler:
        return LocalScheduler(self.runs / ".local-jobs")


def remember(cluster: "SlurmCluster | LocalCluster", path: Path) -> None:
    """Write down where a run's jobs are, for those who must find them when the flow is gone."""
    write_json(path, {"kind": type(cluster).__name__, **cluster.model_dump(mode="json", include=_own_fields(cluster))})


def recall(path: Path) -> "SlurmCluster | LocalCluster":
    """The cluster that `remember` wrote. Raises FileNotFoundError, and BrokenClusterFile when it is damaged."""
    kinds: dict[str, type[SlurmCluster] | type[LocalCluster]] = {k.__name__: k for k in (SlurmCluster, LocalCluster)}
    try:
        values: dict[str, Any] = dict(read_json(path))
        return kinds[values.pop("kind")](**values)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenClusterFile(
            f"{path} is damaged, so the jobs of its run cannot be found through it. Starting the run again writes it "
            "anew; on Slurm, `squeue --me` shows the jobs and scancel ends them."
        ) from error


def _own_fields(cluster: Block) -> set[str]:
    return set(type(cluster).model_fields)
