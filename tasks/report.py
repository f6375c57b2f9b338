"""report.md, written from the records alone: it can be made again at any time."""

import asyncio
from pathlib import Path

from tasks.artifacts import loss_curve, show_markdown
from tasks.context import Run
from tasks.stage import STAGES
from trainium.files import write_atomic
from trainium.run.report import render_report


async def write_report(run: Run) -> Path:
    """Write the run's report, show it with the flow run, and return its path."""
    text = await asyncio.to_thread(_render, run)
    write_atomic(run.folder.report, text)
    await show_markdown("report", text, f"`{run.folder.report}`")
    return run.folder.report


def _render(run: Run) -> str:
    records = [record for stage in STAGES if (record := run.folder.record(stage))]
    losses = next((record.facts.get("losses", ()) for record in records if record.stage == "train"), ())
    curve = [f"## Loss\n\n{loss_curve([(int(step), float(loss)) for step, loss in losses])}"] if losses else []
    return render_report(run.folder.name, run.recipe.name, records, rehearsal=run.site.toolchain.rehearsal, extra=curve)
