"""What the Prefect UI shows of a stage. Keys are the same in every run, so the UI keeps their history."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.context import get_run_context
from prefect.exceptions import MissingContextError
from prefect.logging.loggers import get_logger

from trainium.run.records import StageRecord
from trainium.run.report import cell
from trainium.text import duration

# How long the API may take. Prefect tries again for a minute when its server is away; meanwhile nobody would submit the
# next job, or look whether the one behind a bar has ended. report.md has what is not shown.
PATIENCE, PATIENCE_WITH_A_BAR = 10.0, 5.0  # seconds
MAX_ROWS = 500  # the UI has no limit of its own and slows down with thousands


async def show_record(record: StageRecord) -> None:
    """The stage's table, and what was verified as its description."""
    description = "\n".join(
        [
            f"**{record.stage}** in {duration(record.seconds)}",
            *(f"- {cell(line)}" for line in (*record.verified, *record.notes)),
            *(f"- `{output.path}`" for output in record.outputs),
            *(f"- log of job {job.id}: `{job.log}`" for job in record.jobs),
        ]
    )
    rows = [dict(row) for row in record.table[:MAX_ROWS]] or [{"stage": record.stage, "seconds": record.seconds}]
    await _show(lambda: acreate_table_artifact(table=rows, key=f"{record.stage}-table", description=description))


async def show_failure(stage: str, error: Exception) -> None:
    """The message with its lines: run page and log of the UI run them together."""
    text = "".join(f"    {line}\n" for line in str(error).splitlines())  # indented: no fence that a log line could end
    await show_markdown(f"{stage}-failed", text, f"**{stage}** failed")


async def show_markdown(key: str, text: str, description: str) -> None:
    await _show(lambda: acreate_markdown_artifact(markdown=text, key=key, description=description))


class Progress:
    """One progress bar in the UI, made at its first update and moved in place after that."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: UUID | None = None

    async def update(self, fraction: float, text: str) -> None:
        percent = round(100 * min(max(fraction, 0.0), 1.0), 1)
        made = self._id
        if made is None:
            self._id = await _show(
                lambda: acreate_progress_artifact(percent, key=self._key, description=text), PATIENCE_WITH_A_BAR
            )
        else:
            await _show(lambda: aupdate_progress_artifact(made, percent, description=text), PATIENCE_WITH_A_BAR)


def loss_curve(points: Sequence[tuple[int, float]]) -> str:
    """Markdown with the curve as an embedded PNG: (global step, loss) pairs."""
    from matplotlib.figure import Figure  # a second of import that only this needs
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step for step, _ in points], [loss for _, loss in points], linewidth=1.2)
    axes.set(xlabel="global step", ylabel="reduced_train_loss", title="Training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    image = base64.b64encode(buffer.getvalue()).decode()
    return f"![Training loss](data:image/png;base64,{image})"


async def _show(make: Callable[[], Awaitable[UUID]], patience: float = PATIENCE) -> UUID | None:
    """The artifact's id; None where there is nothing to show it in, and when the API does not take it."""
    try:
        get_run_context()
    except MissingContextError:  # stages can run outside Prefect, in tests and by hand
        return None
    try:
        async with asyncio.timeout(patience):
            return await make()
    except Exception as error:  # whatever the client raises: a server that restarts must not end a training of days
        get_logger("trainium").warning("not shown in the UI: %s", str(error) or "no answer")
        return None
