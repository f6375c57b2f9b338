"""report.md, written from the records alone: it can be made again at any time."""

from pathlib import Path

from tasks.artifacts import loss_curve
from tasks.context import Run
from tasks.stage import STAGES
from trainium.files import write_atomic
from trainium.run.report import render_report


def write_report(run: Run) -> Path:
    """Write the run's report and return its path."""
    records = [record for stage in STAGES if (record := run.folder.record(stage))]
    losses = next((record.facts.get("losses", ()) for record in records if record.stage == "train"), ())
    curve = [f"## Loss\n\n{loss_curve([(int(step), float(loss)) for step, loss in losses])}"] if losses else []
    text = render_report(run.folder.name, run.recipe.name, records, rehearsal=run.site.toolchain.rehearsal, extra=curve)
    write_atomic(run.folder.report, text)
    return run.folder.report
