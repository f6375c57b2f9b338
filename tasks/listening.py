"""Who is told what happens, while it happens: the terminal, the Prefect log, a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from trainium.run.records import StageRecord


class Listener(Protocol):
    """Hears of a run's stages. Must return at once and raise nothing."""

    def started(self, stage: str) -> None: ...

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        """`fraction` is between 0 and 1, or None when nobody knows the end."""

    def finished(self, record: StageRecord, *, skipped: bool) -> None: ...

    def failed(self, stage: str, error: BaseException) -> None: ...


# A context variable and not a flow parameter: parameters are stored and sent, a terminal cannot be.
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Flows that start inside tell this listener."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def current_listeners() -> tuple[Listener, ...]:
    return _listeners.get()
