"""Progress of long work, as lines of a job's log or as one line that a terminal redraws."""

import sys
import time

_WIDTH = 79


class Meter:
    """Call it with bytes done and bytes in all: at most every second it prints bytes, rate and time left."""

    def __init__(self, verb: str) -> None:
        self._verb, self._start = verb, time.monotonic()
        self._next = self._start + 1
        self._redraws, self._shown = sys.stdout.isatty(), False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total and self._redraws and self._shown:
            print(" " * _WIDTH, end="\r", flush=True)
            self._shown = False
        if now < self._next or done >= total:
            return
        self._next = now + 1
        rate = done / (now - self._start)
        left = f"{(total - done) / rate:.0f} s left" if rate else "starting"
        line = f"{self._verb} {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, {left}"
        print(f"{line:<{_WIDTH}}" if self._redraws else line, end="\r" if self._redraws else "\n", flush=True)
        self._shown = True
