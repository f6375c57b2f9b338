"""Signals end every flow of the event loop where it waits, and leave everything as it was before."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from flows.signals import ENDING, CtrlC, cancelled_by_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's own at the start, whatever started pytest (nohup ignores one); put back at the end."""
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGINT)}
    for number in before:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def _run(inside: asyncio.Event, ended: list[signal.Signals | None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    with cancelled_by_signals(task) as told:
        inside.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(told.number)


@pytest.mark.parametrize("number", ENDING)
async def test_a_signal_cancels_every_run_of_the_loop_and_says_which_it_was(number: signal.Signals) -> None:
    before = [signal.getsignal(known) for known in ENDING]
    ended: list[signal.Signals | None] = []
    flags = [asyncio.Event() for _ in range(3)]
    first, second, other = [asyncio.create_task(_run(flag, ended)) for flag in flags]
    for flag in flags:
        await flag.wait()
    other.cancel()  # for a reason of its own; the handlers stay for the two that are left
    await asyncio.wait({other})
    os.kill(os.getpid(), number)
    await asyncio.wait({first, second}, timeout=20)
    assert first.cancelled()
    assert second.cancelled()
    assert ended == [None, number, number]
    assert [signal.getsignal(known) for known in ENDING] == before


async def test_what_the_process_was_started_to_ignore_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    task = asyncio.current_task()
    assert task is not None
    with cancelled_by_signals(task) as told:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert told.number is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_outside_the_main_thread_nothing_is_touched() -> None:
    before = [signal.getsignal(known) for known in ENDING]

    async def elsewhere() -> list[object]:
        task = asyncio.current_task()
        assert task is not None
        with cancelled_by_signals(task):
            return [signal.getsignal(known) for known in ENDING]

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == before


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_is_counted_also_while_the_work_ends(presses: int) -> None:
    ctrl_c = CtrlC()

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            if presses == 2:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)  # such as a report to a server that does not answer

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ctrl_c.counted(work()))
    assert ctrl_c.presses == presses
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
