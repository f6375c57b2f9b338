"""What the Prefect UI shows of a stage. Keys are the same in every run, so the UI keeps their history."""

import base64
from collections.abc import Sequence
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

from trainium.run.records import StageRecord
from trainium.run.report import cell
from trainium.text import duration

MAX_ROWS = 500  # the UI has no limit of its own and slows down with thousands


async def show_record(record: StageRecord) -> None:
    """The stage's table, and what was verified as its description."""
    if not _in_a_run():
        return
    description = "\n".join(
        [
            f"**{record.stage}** in {duration(record.seconds)}",
            *(f"- {cell(line)}" for line in (*record.verified, *record.notes)),
            *(f"- `{output.path}`" for output in record.outputs),
            *(f"- log of job {job.id}: `{job.log}`" for job in record.jobs),
        ]
    )
    rows = [dict(row) for row in record.table[:MAX_ROWS]] or [{"stage": record.stage, "seconds": record.seconds}]
    await acreate_table_artifact(table=rows, key=f"{record.stage}-table", description=description)


async def show_failure(stage: str, error: Exception) -> None:
    """The message with its lines: run page and log of the UI run them together."""
    text = "".join(f"    {line}\n" for line in str(error).splitlines())  # indented: no fence that a log line could end
    await show_markdown(f"{stage}-failed", text, f"**{stage}** failed")


async def show_markdown(key: str, text: str, description: str) -> None:
    if _in_a_run():
        await acreate_markdown_artifact(markdown=text, key=key, description=description)


class Progress:
    """One progress bar in the UI, made at its first update and moved in place after that."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: UUID | None = None

    async def update(self, fraction: float, text: str) -> None:
        if not _in_a_run():
            return
        percent = round(100 * min(max(fraction, 0.0), 1.0), 1)
        if self._id is None:
            self._id = await acreate_progress_artifact(percent, key=self._key, description=text)
        else:
            await aupdate_progress_artifact(self._id, percent, description=text)


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


def _in_a_run() -> bool:
    """Stages can run outside Prefect (in tests, by hand): then there is nothing to show them in."""
    try:
        get_run_context()
    except MissingContextError:
        return False
    return True
