"""Reading rows: what is taken, and what is said about the rest."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium.dataset import rows as rows_module
from trainium.dataset.rows import DatasetError, Problem, Problems, Row, read_rows


def read(path: Path, content: str | bytes, prompt: str = "input", response: str = "output") -> list[Row | Problem]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path, prompt, response))


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


GOOD = {"input": "a question", "output": "an answer", "category": "qa"}


def test_columns_are_mapped_and_others_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    (row,) = read(file, lines({"text": "問い", "label": "答え", "id": 7}), "text", "label")
    assert row == Row("問い", "答え", file, 1)


def test_empty_lines_a_byte_order_mark_and_a_missing_last_newline_are_no_rows(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", "\ufeff" + lines(GOOD) + "\n  \r\n" + json.dumps(GOOD))
    assert [(type(row), row.row) for row in found] == [(Row, 1), (Row, 4)]


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [
        ('{"text": "a", "label": "b"}', "missing column", "no column 'input'; the columns are 'text', 'label'"),
        ('{"input": "a"}', "missing column", "no column 'output'; the columns are 'input'"),
        ("{}", "missing column", "no column 'input'; the columns are none"),
        ('{"input": null, "output": "b"}', "null", "'input' is null"),
        ('{"input": "a", "output": 3}', "not text", "'output' is a number"),
        ('{"input": ["a"], "output": "b"}', "not text", "'input' is a list"),
        ('{"input": true, "output": "b"}', "not text", "'input' is true or false"),
        ('{"input": "a", "output": " \\n"}', "empty", "'output' is empty"),
        ('{"input": "a", "output": "\\ud83d"}', "not Unicode", "'output' holds half of a surrogate pair"),
        ('["a", "b"]', "not an object", "this is a list"),
        ('{"input": "a", "output": "b"', "broken JSON", "Expecting ',' delimiter at column 29"),
        ("input,output", "broken JSON", "Expecting value at column 1"),
        ("[" * 100_000, "broken JSON", "recursion"),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_by_kind_number_and_reason(tmp_path: Path, line: str, kind: str, detail: str) -> None:
    found = read(tmp_path / "a.jsonl", lines(GOOD) + line + "\n" + lines(GOOD))
    assert [type(row) for row in found] == [Row, Problem, Row]
    problem = found[1]
    assert isinstance(problem, Problem)
    assert (problem.kind, problem.row, problem.file.name) == (kind, 2, "a.jsonl")
    assert detail in problem.detail


def test_a_line_in_another_encoding_is_told(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", lines(GOOD).encode() + '{"input": "é", "output": "b"}\n'.encode("latin-1"))
    assert found[1] == Problem("not UTF-8", tmp_path / "a.jsonl", 2, "byte 12 of the line is 0xe9")


def test_json_may_be_an_array_or_lines(tmp_path: Path) -> None:
    array = read(tmp_path / "a.json", json.dumps([GOOD, {"input": 1}, GOOD], indent=2))
    assert [(type(row), row.row) for row in array] == [(Row, 1), (Problem, 2), (Row, 3)]
    assert [type(row) for row in read(tmp_path / "b.json", lines(GOOD, GOOD))] == [Row, Row]
    assert read(tmp_path / "c.json", " [ ] ") == []


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.lists(st.text()), max_size=3)),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
)
def test_an_array_is_read_alike_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], chunk: int, indent: int | None
) -> None:
    file = tmp_path_factory.mktemp("array") / "a.json"
    file.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_CHUNK", chunk)
        found = list(read_rows(file, "input", "output"))
    assert [row.row for row in found] == list(range(1, len(values) + 1))
    assert not any(isinstance(row, Problem) and row.kind == "broken JSON" for row in found)


@pytest.mark.parametrize(
    "content",
    [
        '[{"input": "a", "output": "b"}, {"input": }]',
        '[{"input": "a", "output": "b"} {}]',
        '[{"input": "a", "output": "b"},',
        '[{"input": "a", "output": "b"}',
        '[{"input": "a", "output": "b"},' + "[" * 100_000,
    ],
)
def test_a_broken_array_ends_at_the_break(tmp_path: Path, content: str) -> None:
    first, problem = read(tmp_path / "a.json", content)
    assert isinstance(first, Row)
    assert isinstance(problem, Problem)
    assert problem.kind == "broken JSON"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    row = json.dumps({"input": "q" * 500, "output": "a" * 500})
    text = "\n".join([row] * 20_000) if name == "a.jsonl" else "[" + ",\n".join([row] * 20_000) + "]"
    (tmp_path / name).write_text(text)
    del text
    tracemalloc.start()
    assert sum(isinstance(row, Row) for row in read_rows(tmp_path / name, "input", "output")) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000  # the file has 20


def test_a_file_that_the_trainer_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"rows.csv: the trainer reads .jsonl and .json"):
        read(tmp_path / "rows.csv", "input,output")
    with pytest.raises(DatasetError, match="does not exist"):
        list(read_rows(tmp_path / "no.jsonl", "input", "output"))


def test_problems_are_counted_and_five_of_a_kind_shown() -> None:
    problems = Problems()
    for row in range(1, 9):
        problems.add(Problem("null", Path("/d/a.jsonl"), row, "'input' is null"))
    problems.add(Problem("empty", Path("/d/b.jsonl"), 3, "'output' is empty"))
    assert problems.counts == {"null": 8, "empty": 1}
    assert str(problems).splitlines() == [
        "- null: 8 rows",
        *(f"    row {row} of a.jsonl: 'input' is null" for row in range(1, 6)),
        "    and 3 more",
        "- empty: 1 row",
        "    row 3 of b.jsonl: 'output' is empty",
    ]
