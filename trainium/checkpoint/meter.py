"""Progress of long work, as lines of a job's log or as one line that a terminal redraws."""

import sys
import time


class Meter:
    """Call it with bytes done and bytes in all: at most every second it prints bytes, rate and time left."""

    def __init__(self, verb: str) -> None:
        self._verb, self._start = verb, time.monotonic()
        self._next = self._start + 1
        self._end = "\r" if sys.stdout.isatty() else "\n"

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1
        rate = done / (now - self._start)
        left = f"{(total - done) / rate:.0f} s left" if rate else "starting"
        line = f"{self._verb} {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, {left}"
        print(f"{line:<79}" if self._end == "\r" else line, end=self._end, flush=True)
