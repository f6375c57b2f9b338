"""Every time constant of the runs, shorter than in earnest so that an hour is enough; printed at the start."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from slurm.scheduler import Timing

TIMING = Timing(exit_scan=0.5, queue=5, early=1, accounting=10, confirm=10, lost=30, settle=5)


@dataclass(frozen=True)
class Settings:
    """Seconds unless it says otherwise."""

    timing: Timing = TIMING
    adopt_within: timedelta = timedelta(seconds=5)
    stale_after: timedelta = timedelta(seconds=6)  # with six heartbeats in it
    step: float = 0.12  # of the light training
    save: float = 0.2
    outage: tuple[float, float] = (3.0, 12.0)  # how long something is away, at least and at most
    patience: float = 240.0  # for one start of a flow to end
    cancelled_within: float = 15.0  # from the wish to the last job's end
    most_starts: int = 5
    overrides: tuple[str, ...] = (
        "attempts.capacity_delay='00:00:08'",
        "attempts.transient_delay='00:00:02'",
        "attempts.hopeless_grace='00:00:30'",
    )
    environment: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line per constant."""
        return [f"{name} = {value}" for name, value in asdict(self).items()]
