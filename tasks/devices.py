"""Whether the cores work and how much memory they hold, from the newest sample of every node's neuron-monitor."""

import time
from pathlib import Path

from trainium.launch import MONITOR_SAMPLE
from trainium.monitor.neuron_monitor import CoreUse, core_use, parse_neuron_monitor

LOOK_EVERY = 5.0  # seconds, as neuron-monitor prints


class CoreWatch:
    """Remembers the fullest moment that it has seen."""

    def __init__(self) -> None:
        self.peak: CoreUse | None = None
        self._looked = float("-inf")

    def look(self, job: Path) -> None:
        """Read the samples in a job's folder, at most every few seconds."""
        if time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        texts = [path.read_bytes() for path in sorted(job.glob(MONITOR_SAMPLE.format("*")))]
        samples = [sample for text in texts if (sample := parse_neuron_monitor(text))]
        use = core_use(samples)
        if use.in_use and (self.peak is None or _fullness(use) > _fullness(self.peak)):
            self.peak = use


def _fullness(use: CoreUse) -> tuple[int, int]:
    return use.in_use, use.busiest_bytes or 0
