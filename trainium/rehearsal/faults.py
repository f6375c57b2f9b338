"""Failures on demand, for tests: the one place that reads `REHEARSAL_FAULT`.

A comma-separated list of:

| value | what happens |
|---|---|
| `compile:graph-fails` | the first graph of an empty cache fails to compile, and the failure stays in the cache |
| `train:exit@N` | the trainer raises before step N (0-based) |
| `train:kill@N` | the trainer is killed with SIGKILL before step N, as by the out-of-memory killer |
| `train:hang@N` | no progress from step N on |
| `train:nan@N` | the loss of step N is not a number |
| `train:slow=S` | every step takes S seconds more |

`exit`, `kill` and `hang` strike only a trainer that began at step 0: one that resumed from a checkpoint gets past them.
"""

import math
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

VARIABLE = "REHEARSAL_FAULT"
_FAULT = re.compile(
    r"(?:compile:graph-fails|train:(?P<what>exit|kill|hang|nan)@(?P<step>\d+)|train:slow=(?P<seconds>[\d.]+))"
)


@dataclass(frozen=True)
class Faults:
    """The faults asked for; the default is none."""

    graph_fails: bool = False
    at: Mapping[int, str] = field(default_factory=dict)
    seconds_per_step: float = 0.0

    def before_step(self, step: int, *, resumed: bool) -> None:
        """Slow down, raise, die or hang, if that is what this step is for."""
        if self.seconds_per_step:
            time.sleep(self.seconds_per_step)
        what = self.at.get(step)
        if resumed or what in (None, "nan"):
            return
        if what == "exit":
            raise RuntimeError(f"{VARIABLE}: train:exit@{step}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(3600)

    def loss_factor(self, step: int) -> float:
        """What to multiply the loss of this step with: 1, or not a number."""
        return math.nan if self.at.get(step) == "nan" else 1.0


def parse_faults(text: str) -> Faults:
    """Raises ValueError naming the part that is no fault."""
    at: dict[int, str] = {}
    graph_fails, seconds = False, 0.0
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FAULT.fullmatch(part)
        if not match:
            raise ValueError(f"{VARIABLE}: {part!r} is no fault; known ones are listed in trainium/rehearsal/faults.py")
        if match["what"]:
            at[int(match["step"])] = match["what"]
        elif match["seconds"]:
            seconds = float(match["seconds"])
        else:
            graph_fails = True
    return Faults(graph_fails, at, seconds)


def faults() -> Faults:
    """The faults of this process's environment."""
    return parse_faults(os.environ.get(VARIABLE, ""))
