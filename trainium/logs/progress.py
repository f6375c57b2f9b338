"""The progress bar of NxDT, read as data."""

import math
import re
from collections import deque
from dataclasses import dataclass

# …| 4/62 [03:24<49:27,  0.02it/s, v_num=8-06, reduced_train_loss=6.790, …, global_step=3.000]
_BAR = re.compile(r"\d+(?:/(?:\d+|\?)|it) \[(?:(\d+) days?, )?((?:\d+:)?\d{1,2}:\d{2})[<,]")
_PAIR = re.compile(r"\b([A-Za-z_][\w.]*)=([^\s,\]]+)")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf)$", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """The metrics of one step, NaN and infinity included; None where the bar does not show a value.

    Attributes:
        step: global step.
        loss: `reduced_train_loss`, the loss over all ranks (`loss` beside it belongs to one rank and may be NaN).
        elapsed: seconds since the bar began.
        throughput: samples per second, as printed.
    """

    step: int
    loss: float | None = None
    lr: float | None = None
    elapsed: float | None = None
    throughput: float | None = None
    parameter_norm: float | None = None
    gradient_norm: float | None = None
    consumed_samples: int | None = None


def seconds(clock: str) -> int:
    """`MM:SS` or `H:MM:SS` in seconds."""
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return total


def parse_point(line: str, at: int) -> Point | None:
    """The refresh of the bar that has its `global_step` at position `at`; None when that is no number.

    Several refreshes may be glued into one line, so only the text from the bar before `at` to the bracket behind it
    counts.
    """
    bar = next(iter(deque(_BAR.finditer(line, 0, at), maxlen=1)), None)
    postfix = line[bar.end() if bar else 0 : at] + line[at:].partition("]")[0]
    values = {name: float(value) for name, value in _PAIR.findall(postfix) if _NUMBER.match(value)}
    step = values.get("global_step")
    if step is None or not math.isfinite(step):
        return None
    samples = values.get("consumed_samples")
    return Point(
        step=round(step),
        loss=values.get("reduced_train_loss"),
        lr=values.get("lr"),
        elapsed=float(86400 * int(bar[1] or 0) + seconds(bar[2])) if bar else None,
        throughput=values.get("throughput"),
        parameter_norm=values.get("parameter_norm"),
        gradient_norm=values.get("gradient_norm"),
        consumed_samples=round(samples) if samples is not None and math.isfinite(samples) else None,
    )
