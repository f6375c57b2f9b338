"""report.md stays a table whatever its cells hold."""

import re

from hypothesis import given
from hypothesis import strategies as st

from trainium.run.records import JobNote, Output, StageRecord
from trainium.run.report import render_report, table
from trainium.text import duration, size

JOB = JobNote(id="42", attempt=2, state="COMPLETED", exit_code=0, nodes="n1", log="/runs/r/jobs/train-2/output.log")
TRAIN = StageRecord(
    stage="train",
    inputs="k",
    started="a",
    ended="b",
    seconds=3723.0,
    outputs=(Output("/runs/r/x.ckpt", 3, 1_500_000),),
    jobs=(JOB,),
    verified=("loss fell",),
    notes=("slow",),
    table=tuple({"step": n} for n in range(20)),
)


def test_every_stage_job_duration_and_proof_is_there() -> None:
    text = render_report("r", "rehearsal", [TRAIN], rehearsal=True)
    assert "| train | 42 | 2 | 1 h 02 min | loss fell |" in text
    assert "This was a rehearsal" in text
    assert "`/runs/r/x.ckpt`: 3 files, 1.5 MB" in text
    assert JOB.log in text
    assert "… and 8 more rows" in text
    assert "rehearsal.**" not in render_report("r", "rehearsal", [TRAIN], rehearsal=False)


@given(st.lists(st.fixed_dictionaries({"a": st.text(), "b": st.text()}), min_size=1, max_size=5))
def test_cells_cannot_break_out_of_their_table(rows: list[dict[str, str]]) -> None:
    lines = table(rows)
    assert len(lines) == len(rows) + 2
    for line in lines:
        assert "\n" not in line
        assert "<" not in line
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


def test_units() -> None:
    assert [duration(s) for s in (0.04, 59.9, 61, 3600)] == ["0.0 s", "59.9 s", "1 min 01 s", "1 h 00 min"]
    assert [size(b) for b in (0, 999, 1000, 1_234_567, 15.5e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "15.5 GB",
        "2.00 TB",
    ]
