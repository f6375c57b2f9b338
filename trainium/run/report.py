"""The run on one page: report.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainium.run.records import Output, StageRecord
from trainium.text import duration, size

ROWS_SHOWN = 12


def render_report(
    name: str, recipe: str, records: Sequence[StageRecord], *, rehearsal: bool, extra: Sequence[str] = ()
) -> str:
    """Markdown from the finished stages' records, in their order. Pure.

    `extra` are sections of Markdown to end with, such as the loss curve.
    """
    lines = [f"# Run {name}", "", f"Recipe `{recipe}`."]
    if rehearsal:
        lines += [
            "",
            "> **This was a rehearsal.** The stand-in toolchain trained on CPUs. Nothing here says anything about",
            "> the speed of a Trainium, or that Neuron's compiler accepts the graphs.",
        ]
    lines += ["", "| stage | job | attempt | duration | verified |", "|---|---|---|---|---|"]
    lines += [_stage_row(record) for record in records]
    for record in records:
        lines += ["", f"## {record.stage.capitalize()}", ""]
        lines += [f"- {cell(line)}" for line in (*record.verified, *record.notes)]
        lines += [_output_line(output) for output in record.outputs]
        lines += [f"- log of job {job.id}: `{job.log}`" for job in record.jobs]
        if record.table:
            lines += ["", *table(record.table[:ROWS_SHOWN])]
            hidden = len(record.table) - ROWS_SHOWN
            lines += ["", f"… and {hidden} more rows, in `stages/{record.stage}.json`"] if hidden > 0 else []
    return "\n".join([*lines, *(line for section in extra for line in ("", section)), ""])


def failed_attempts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A section on the jobs that did not succeed and on what was decided then, from the ledger; or nothing."""
    rows = [
        {
            "stage": entry["stage"],
            "attempt": entry["attempt"],
            "job": entry["id"],
            "state": entry["state"],
            "nodes": entry["nodes"] or "–",
            "then": f"{'a new attempt' if then.get('again') else 'stopped'}: {then['why']}" if then else "–",
        }
        for entry in entries
        if not entry["succeeded"]
        for then in (entry.get("then"),)
    ]
    return ["\n".join(["## Attempts that failed", "", *table(rows)])] if rows else []


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table; the first row's keys are the columns."""
    columns = list(rows[0])
    body = ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]


def cell(value: Any) -> str:
    """Text that stays in its cell, whatever it holds."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\r", " ").replace("\n", " ")


def _stage_row(record: StageRecord) -> str:
    jobs = ", ".join(job.id for job in record.jobs) or "–"
    attempts = ", ".join(str(job.attempt) for job in record.jobs) or "–"
    verified = "; ".join(cell(line) for line in record.verified) or "–"
    return f"| {record.stage} | {jobs} | {attempts} | {duration(record.seconds)} | {verified} |"


def _output_line(output: Output) -> str:
    files = "1 file" if output.files == 1 else f"{output.files} files"
    return f"- `{output.path}`: {files}, {size(output.bytes)}"
