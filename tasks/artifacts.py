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

MAX_ROWS = 500  # the UI has no limit of its own and slows down with thousands


async def show_record(record: StageRecord) -> None:
    """The stage's table, and what was verified as its description."""
    if not _in_a_run():
        return
    description = "\n".join(
        [f"**{record.stage}** in {record.seconds:.1f} s"] + [f"- {line}" for line in record.verified]
    )
    rows = [dict(row) for row in record.table[:MAX_ROWS]] or [{"stage": record.stage, "seconds": record.seconds}]
    await acreate_table_artifact(table=rows, key=f"{record.stage}-table", description=description)


async def show_markdown(key: str, text: str) -> None:
    if _in_a_run():
        await acreate_markdown_artifact(markdown=text, key=key)


class Progress:
    """One progress bar in the UI, made at its first update and moved in place after that."""

    def __init__(self, key: str, description: str) -> None:
        self._key = key
        self._description = description
        self._id: UUID | None = None

    async def update(self, fraction: float) -> None:
        if not _in_a_run():
            return
        percent = round(100 * min(max(fraction, 0.0), 1.0), 1)
        if self._id is None:
            self._id = await acreate_progress_artifact(percent, key=self._key, description=self._description)
        else:
            await aupdate_progress_artifact(self._id, percent)


def loss_curve(points: Sequence[tuple[int, float]]) -> str:
    """Markdown with the curve as an embedded PNG: (global step, loss) pairs."""
    from matplotlib.figure import Figure  # a second of import that only this needs

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step for step, _ in points], [loss for _, loss in points], linewidth=1.2)
    axes.set(xlabel="global step", ylabel="reduced_train_loss", title="Training loss")
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
