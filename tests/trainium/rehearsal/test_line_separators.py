"""Rows are lines that end with a newline; whatever else Unicode calls a line's end is text."""

import json
from pathlib import Path

from trainium.rehearsal.data import read_rows


def test_a_row_may_hold_every_separator_that_json_leaves_alone(tmp_path: Path) -> None:
    rows = [{"input": f"before{mark}after", "output": "x"} for mark in "\u2028\u2029\x85\x7f\xa0\ufeff"]
    file = tmp_path / "train.jsonl"
    for end in ("\n", "\r\n"):
        file.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + end for row in rows), encoding="utf-8", newline=""
        )
        assert read_rows(file) == rows
