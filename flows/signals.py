"""Signals that end a flow, delivered where its code can clean up.

Prefect raises TerminationSignal wherever the main thread happens to be: in a callback of the event loop it is logged
and lost, in another task it ends that one. SIGHUP it does not handle at all.
"""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

ENDING = (signal.SIGTERM, signal.SIGHUP)


class _Loop:
    """The runs of one event loop: a signal to the process ends all of them."""

    def __init__(self) -> None:
        self.told: dict[asyncio.Task[Any], Told] = {}
        self.before: dict[signal.Signals, Any] = {}

    def end(self, number: signal.Signals) -> None:
        for task, told in self.told.items():
            told.number = number
            task.cancel(f"got {number.name}")


class Told:
    """What a run was told."""

    number: signal.Signals | None = None


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()


@contextmanager
def cancelled_by_signals(task: "asyncio.Task[Any]") -> Iterator[Told]:
    """SIGTERM and SIGHUP cancel `task`, and are remembered. Nothing changes outside the main thread.

    A signal that the process was started to ignore (nohup) stays ignored.
    """
    loop = asyncio.get_running_loop()
    runs = _loops.setdefault(loop, _Loop())
    told = runs.told[task] = Told()
    if len(runs.told) == 1:
        _install(loop, runs)
    try:
        yield told
    finally:
        del runs.told[task]
        if not runs.told:
            _restore(loop, runs)


def _install(loop: asyncio.AbstractEventLoop, runs: _Loop) -> None:
    for number in ENDING:
        before = signal.getsignal(number)
        if before is signal.SIG_IGN:
            continue
        try:
            loop.add_signal_handler(number, runs.end, number)
        except (ValueError, RuntimeError):  # not the main thread: whoever owns that one decides
            return
        runs.before[number] = before


def _restore(loop: asyncio.AbstractEventLoop, runs: _Loop) -> None:
    while runs.before:
        number, before = runs.before.popitem()
        loop.remove_signal_handler(number)
        signal.signal(number, before)


def ends_with_clean_up() -> None:
    """For a program's main thread: SIGTERM and SIGHUP run its `finally` clauses and atexit functions.

    Prefect's temporary server is ended by one of those; a program that just dies would leave it behind.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


class CtrlC:
    """Counts Ctrl-C. The first one cancels the work, the second one also what that does at its end.

    asyncio.run's own way raises KeyboardInterrupt at the second one, wherever the program is. Here the third one does.
    """

    presses = 0

    async def counted(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the work; to be run by asyncio.run in the main thread. Raises CancelledError after Ctrl-C."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None

        def pressed() -> None:
            self.presses += 1
            main.cancel("Ctrl-C")
            if self.presses == 2:
                loop.remove_signal_handler(signal.SIGINT)  # leaves Python's own, which raises KeyboardInterrupt

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, pressed)
        try:
            return await work
        finally:
            if self.presses < 2:
                loop.remove_signal_handler(signal.SIGINT)
