"""The notice before the time limit: SIGUSR1 asks for a checkpoint and an early end.

This is the rehearsal's own manner. In what was read of NxDT nothing handles the signal; the launch script makes it
harmless there.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDED_EARLY = 75  # EX_TEMPFAIL of sysexits.h: not finished, go on later


class Notice:
    """Whether this node was asked to end."""

    def __init__(self) -> None:
        self.given = False

    def give(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.given = True


@contextmanager
def heeding_notice() -> Iterator[Notice]:
    """Inside, SIGUSR1 only leaves a note."""
    notice = Notice()
    before = signal.signal(signal.SIGUSR1, notice.give)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGUSR1, before)
