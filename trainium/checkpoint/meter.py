"""Progress of long work, as lines of a job's log or as one line that a terminal redraws."""

import sys
import time
from collections.abc import Callable

from trainium.text import duration, size

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_WIDTH = 79


class Meter:
    """Call it with bytes done and bytes in all: at most every second it tells bytes, rate and time left.

    tell: takes each line; without it they are printed, and a terminal redraws one.
    """

    def __init__(self, verb: str, tell: Callable[[str], None] | None = None) -> None:
        self._verb, self._start = verb, time.monotonic()
        self._next = self._start + 1
        self._redraws, self._shown = tell is None and sys.stdout.isatty(), False
        self._tell = tell or self._print

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total and self._redraws and self._shown:
            print(" " * _WIDTH, end="\r", flush=True)
            self._shown = False
        if now < self._next or done >= total:
            return
        self._next = now + 1
        rate = done / (now - self._start)
        left = f"{duration((total - done) / rate)} left" if rate else "starting"
        self._tell(f"{self._verb} {size(done)} of {size(total)}, {size(rate)}/s, {left}")

    def _print(self, line: str) -> None:
        print(f"{line:<{_WIDTH}}" if self._redraws else line, end="\r" if self._redraws else "\n", flush=True)
        self._shown = True
