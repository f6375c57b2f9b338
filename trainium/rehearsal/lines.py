"""The log formats of the real toolchain, so that whatever reads its logs can be rehearsed."""

import os
import time
from collections.abc import Mapping
from datetime import datetime

BANNER = "REHEARSAL: a CPU stand-in for the Neuron toolchain; the numbers of this log say nothing about Trainium."


def say(text: str) -> None:
    """One line on standard output, at once."""
    print(text, flush=True)


def nemo(message: str, *, level: str = "I", where: str = "exp_manager:207") -> None:
    """NeMo's format, e.g. `[NeMo I 2025-06-25 01:18:26 nlp_overrides:940] …`."""
    say(f"[NeMo {level} {datetime.now():%Y-%m-%d %H:%M:%S} {where}] {message}")


def nxd(message: str, *, where: str) -> None:
    """NxD's format, e.g. `[2025-06-30 08:47:34.316: I neuronx_distributed/trainer/checkpoint.py:887] …`."""
    now = datetime.now()
    say(f"[{now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d}: I neuronx_distributed/{where}] {message}")


def neuron(message: str, *, tag: str, level: str = "INFO") -> None:
    """libneuronxla's format; its sub-second field is "000" and the milliseconds."""
    say(f"{_neuron_time()}: {os.getpid()} {level} ||{tag}||: {message}")


def compiler(message: str) -> None:
    """The newer format of neuronx-cc's own lines."""
    say(f"{_neuron_time()}: {os.getpid()} [INFO]: {message}")


def _neuron_time() -> str:
    now = datetime.now()
    return f"{now:%Y-%m-%d %H:%M:%S}.000{now.microsecond // 1000:03d}"


def format_interval(seconds: float) -> str:
    """`MM:SS` or `H:MM:SS`, as tqdm writes them."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:d}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def format_number(value: float) -> str:
    """Three significant digits, five characters or more, as Lightning's bar: `6.790`, `5.45e-5`, `188.0`, `nan`."""
    short = f"{value:.3g}".replace("e+0", "e+").replace("e-0", "e-")
    text = short if len(short) < len(str(value)) else str(value)
    if "e" in text or text in ("nan", "inf", "-inf"):
        return text
    if "." not in text and len(text) < 5:
        text += "."
    return text.ljust(5, "0")


class ProgressBar:
    """Lightning's training bar: one `\\r` line per batch, with the metrics at its end in the order of their first."""

    def __init__(self, epoch: int, total: int, done: int = 0) -> None:
        """`done`: batches of this epoch that an earlier run has seen."""
        self._epoch, self._total, self._done, self._first = epoch, total, done, done
        self._start = time.monotonic()

    def update(self, metrics: Mapping[str, float | str]) -> None:
        """One more batch is done."""
        self._done += 1
        elapsed = time.monotonic() - self._start
        rate = (self._done - self._first) / elapsed if elapsed > 0 else 0.0
        left = format_interval((self._total - self._done) / rate) if rate else "?"
        share = self._done / self._total
        bar = ("█" * int(10 * share)).ljust(10)
        postfix = ", ".join(f"{key}={v if isinstance(v, str) else format_number(v)}" for key, v in metrics.items())
        text = f"Epoch {self._epoch}: {share:4.0%}|{bar}| {self._done}/{self._total}"
        print(f"\r{text} [{format_interval(elapsed)}<{left}, {rate:5.2f}it/s, {postfix}]", end="", flush=True)

    @staticmethod
    def close() -> None:
        """Leave the bar's line."""
        print(flush=True)
