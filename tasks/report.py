"""report.md, written from the records alone: it can be made again at any time."""

import asyncio
from pathlib import Path

from tasks.artifacts import loss_curve, show_markdown
from tasks.context import Run
from tasks.stage import STAGES
from trainium.files import write_atomic
from trainium.run.report import failed_attempts, render_report


async def write_report(run: Run) -> Path:
    """Write the run's report, show it with the flow run, and return its path."""
    text = await asyncio.to_thread(write_report_file, run)
    await show_markdown("report", text, f"`{run.folder.report}`")
    return run.folder.report


def write_report_file(run: Run) -> str:
    """Write the report as far as the run has come, and return its text."""
    text = _render(run)
    write_atomic(run.folder.report, text)
    return text


def _render(run: Run) -> str:
    records = [record for stage in STAGES if (record := run.folder.record(stage))]
    losses = next((record.facts.get("losses", ()) for record in records if record.stage == "train"), ())
    curve = [f"## Loss\n\n{loss_curve([(int(step), float(loss)) for step, loss in losses])}"] if losses else []
    attempts = failed_attempts(run.folder.ended_attempts())
    extra = (*attempts, *curve)
    return render_report(run.folder.name, run.recipe.name, records, rehearsal=run.site.toolchain.rehearsal, extra=extra)
