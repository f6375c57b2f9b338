"""A run as a person at a terminal sees it: a line per stage, and the current one alive below."""

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from trainium.run.records import StageRecord
from trainium.text import duration

QUIET_LINE_EVERY = 15.0  # seconds between progress lines where there is no terminal to redraw


class TerminalListener:
    """Prints to the console; on a real terminal the running stage has a spinner with its progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._last_line = 0.0
        self._last_text = ""

    def started(self, stage: str) -> None:
        self._last_line, self._last_text = time.monotonic(), ""
        if self._console.is_terminal:
            self._status = self._console.status(f"{stage:<9}", spinner="dots")
            self._status.start()

    def progress(self, stage: str, text: str, fraction: float | None) -> None:
        shown = f"{stage:<9} {text}" if fraction is None else f"{stage:<9} {fraction:4.0%}  {text}"
        if self._status is not None:
            self._status.update(escape(shown[: self._console.width - 4]))  # one line, also in a narrow window
            return
        new_kind = fraction is None and text != self._last_text
        if new_kind or time.monotonic() - self._last_line > QUIET_LINE_EVERY:
            self._last_line, self._last_text = time.monotonic(), text
            self._line(f"  … {escape(shown)}")

    def finished(self, record: StageRecord, *, skipped: bool) -> None:
        self._stop()
        verified = record.verified[0] if record.verified else ""
        took = "done before" if skipped else duration(record.seconds)
        job = f" job {record.jobs[-1].id}" if record.jobs and not skipped else ""
        self._line(f"[green]✓[/] {record.stage:<9} {took:>12}  {escape(verified)}[dim]{escape(job)}[/]")
        if not skipped:
            for note in record.notes:
                self._line(f"  [yellow]•[/] {escape(note)}")

    def failed(self, stage: str, error: BaseException) -> None:
        self._stop()
        self._line(f"[red]✗[/] {stage}")

    def _line(self, markup: str) -> None:
        """One line whatever its length: where output goes to a file, rich would break it at 80 columns."""
        self._console.print(markup, highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
