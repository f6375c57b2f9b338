"""Work spread over processes that share everything their parent has planned.

The processes are forked: nothing is planned, opened or imported again, and they start in a millisecond. They talk to
their parent only; when it dies, the next word fails and they end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from trainium.checkpoint.errors import CheckpointError

_SAID_BYTES = 1 << 22  # progress is not worth a message per small tensor

T = TypeVar("T")
R = TypeVar("R")
Moved = Callable[[int], None]


@dataclass(frozen=True)
class Work(Generic[T, R]):
    """What a process does with one item; `settle` may take long and runs while the next item is worked on."""

    do: Callable[[T, Moved], R]
    settle: Callable[[T], None]


def available_cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def spread(
    work: Work[T, R], items: Sequence[T], workers: int, *, moved: Moved, finished: Callable[[T, R], None]
) -> None:
    """Do all items, each in one of `workers` processes; in this one where one is enough.

    moved: told bytes of progress. finished: told each item's result, in the order in which they settle. What a worker
    raises is raised here, and the other workers are stopped.
    """
    if min(workers, len(items)) <= 1:
        for item in items:
            result = work.do(item, moved)
            work.settle(item)
            finished(item, result)
        return
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(min(workers, len(items)))]
    processes = []
    for number in range(len(pipes)):
        # daemon: stopped with this process; the arguments are not pickled
        process = context.Process(target=_serve, args=(work, items, pipes, number), daemon=True)
        process.start()
        processes.append(process)
    for _, theirs in pipes:
        theirs.close()
    try:
        _serve_them(
            {ours: process for (ours, _), process in zip(pipes, processes, strict=True)}, items, moved, finished
        )
    finally:
        for (ours, _), process in zip(pipes, processes, strict=True):
            ours.close()  # whoever is waiting for an item ends; whoever is at work is stopped
            process.terminate()
            process.join()


def _serve_them(
    processes: dict[Connection, Any], items: Sequence[T], moved: Moved, finished: Callable[[T, R], None]
) -> None:
    left = iter(range(len(items)))
    unfinished = len(items)
    while unfinished:
        for ready in wait(list(processes)):
            assert isinstance(ready, Connection)
            try:
                kind, *values = ready.recv()
            except (EOFError, OSError):
                process = processes.pop(ready)
                process.join()
                if process.exitcode:
                    raise CheckpointError(_death(process.exitcode)) from None
                continue
            if kind == "moved":
                moved(values[0])
            elif kind == "next":
                ready.send(next(left, None))
            elif kind == "finished":
                finished(items[values[0]], values[1])
                unfinished -= 1
            else:
                raise values[0]


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return (
            "a worker process was killed (signal 9), as the kernel and Slurm do when memory runs out: use fewer "
            "--workers or ask for more memory"
        )
    return f"a worker process ended with code {code}"


def _serve(work: Work[T, R], items: Sequence[T], pipes: Sequence[tuple[Connection, Connection]], number: int) -> None:
    """A worker's life. The other ends of all pipes are closed, so that the parent's death is an end of file here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent decides
    parent = pipes[number][1]
    for index, (ours, theirs) in enumerate(pipes):
        ours.close()
        if index != number:
            theirs.close()
    _limit_threads()
    try:
        with ThreadPoolExecutor(1) as background:
            _work(work, items, parent, background)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # nobody is there to tell
    except BaseException as error:
        parent.send(("raised", error))


def _work(work: Work[T, R], items: Sequence[T], parent: Connection, background: ThreadPoolExecutor) -> None:
    unsaid = 0

    def moved(size: int) -> None:
        nonlocal unsaid
        unsaid += size
        if abs(unsaid) >= _SAID_BYTES:
            parent.send(("moved", unsaid))
            unsaid = 0

    settling: Future[None] | None = None
    last: tuple[int, R] | None = None
    while True:
        parent.send(("next",))
        index = parent.recv()
        result = None if index is None else work.do(items[index], moved)
        if settling is not None:
            settling.result()
            parent.send(("finished", *last))  # type: ignore[misc]  # set together with settling
        if index is None:
            return
        settling, last = background.submit(work.settle, items[index]), (index, result)  # type: ignore[assignment]


def _limit_threads() -> None:
    """One thread of torch, where a cast needs it: its pool does not survive a fork, and every core has a process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
