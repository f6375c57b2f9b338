"""Rows of a JSON or JSON Lines file as pairs of prompt and response, one at a time, and what is wrong with others."""

import codecs
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from trainium.errors import UserError

EXAMPLES = 5
SUFFIXES = (".jsonl", ".json")  # what NxDT's data module loads, besides Arrow
_CHUNK = 1 << 20  # characters
_BLANKS = re.compile(r"[ \t\n\r]*")
_MAX_ITEM = 64 << 20  # characters; an array element that is longer is a missing quote or bracket


class DatasetError(UserError):
    """The dataset cannot be trained on; the message counts the problems by kind and shows the first of each."""


class Row(NamedTuple):
    """One training example, under the only column names that NxDT's SFT data module reads, and where it was found."""

    input: str
    output: str
    file: Path
    row: int


@dataclass(frozen=True)
class Problem:
    """A row that cannot be used. `row` counts lines (.jsonl) or elements (an array in .json) from 1."""

    kind: str
    file: Path
    row: int
    detail: str


def read_rows(path: Path, prompt_field: str, response_field: str) -> Iterator[Row | Problem]:
    """Every row in file order, in memory one at a time. Empty lines are no rows.

    Raises DatasetError for another suffix or a missing file; everything inside the file is a Problem.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DatasetError(
            f"dataset file {path}: the trainer reads {' and '.join(SUFFIXES)}. Convert it to JSON Lines."
        )
    if not path.is_file():
        raise DatasetError(f"dataset file {path} does not exist.")
    for number, value in _array(path) if _is_array(path) else _lines(path):
        if isinstance(value, Problem):
            yield value
        else:
            yield _checked(path, number, value, prompt_field, response_field)


def _checked(path: Path, number: int, value: Any, prompt_field: str, response_field: str) -> Row | Problem:
    if not isinstance(value, dict):
        return Problem("not an object", path, number, f"a row is an object with columns, this is {_kind(value)}")
    texts = []
    for field in (prompt_field, response_field):
        if field not in value:
            columns = ", ".join(map(repr, value)) or "none"
            return Problem("missing column", path, number, f"no column {field!r}; the columns are {columns}")
        text = value[field]
        if text is None:
            return Problem("null", path, number, f"{field!r} is null")
        if not isinstance(text, str):
            return Problem("not text", path, number, f"{field!r} is {_kind(text)}")
        if not text.strip():
            return Problem("empty", path, number, f"{field!r} is empty")
        if not _is_unicode(text):
            return Problem(
                "not Unicode", path, number, f"{field!r} holds half of a surrogate pair, which no file can store"
            )
        texts.append(text)
    return Row(texts[0], texts[1], path, number)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_array(path: Path) -> bool:
    """A .json file may hold an array, or lines like a .jsonl: `datasets`, which NxDT loads with, takes both."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return path.suffix.lower() == ".json" and start.startswith(b"[")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace() or not line:
                continue
            try:
                yield number, json.loads(line.rstrip(b"\r\n").decode())
            except UnicodeDecodeError as error:
                detail = f"byte {error.start + 1} of the line is {line[error.start]:#04x}"
                yield number, Problem("not UTF-8", path, number, detail)
            except json.JSONDecodeError as error:
                yield number, Problem("broken JSON", path, number, f"{error.msg} at column {error.pos + 1}")
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets a thousand deep
                yield number, Problem("broken JSON", path, number, str(error))


def _array(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array, holding one element and one chunk in memory. Ends at the first broken element."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, value in enumerate(_elements(file), start=1):
                yield number, value
        return
    except UnicodeDecodeError as error:
        kind, detail = "not UTF-8", error.reason
    except json.JSONDecodeError as error:
        kind, detail = "broken JSON", f"{error.msg} at character {error.pos + 1} of the element"
    except (ValueError, RecursionError) as error:
        kind, detail = "broken JSON", str(error)
    yield number + 1, Problem(kind, path, number + 1, f"{detail}; the rest of the file was not read")


def _elements(file: TextIO) -> Iterator[Any]:
    decoder, buffer, position = json.JSONDecoder(), "", 0
    opened = begun = ended = False
    while True:
        position = _after_blanks(buffer, position)
        if not opened and position < len(buffer):
            opened, position = True, _after_blanks(buffer, position + 1)
        if opened and not begun and buffer[position : position + 1] == "]":
            return
        failure, value, end = None, None, len(buffer)
        if opened:
            try:
                value, end = decoder.raw_decode(buffer, position)
                end = _after_blanks(buffer, end)
            except json.JSONDecodeError as error:
                failure = json.JSONDecodeError(error.msg, "", error.pos - position)
        # What ends with the buffer may go on in the next chunk, and so may what cannot be read yet.
        if (failure or end == len(buffer)) and not ended and len(buffer) - position < _MAX_ITEM:
            chunk = file.read(max(_CHUNK, len(buffer) - position))
            buffer, position, ended = buffer[position:] + chunk, 0, not chunk
            continue
        if failure:
            raise failure
        begun = True
        yield value
        if buffer[end : end + 1] == "]":
            return
        if buffer[end : end + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' or ']' before this element", "", 0)
        position = end + 1


def _after_blanks(text: str, position: int) -> int:
    found = _BLANKS.match(text, position)
    return found.end() if found else position


class Problems:
    """Counts problems by kind and keeps the first few of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[Problem]] = defaultdict(list)

    def add(self, problem: Problem) -> None:
        self.counts[problem.kind] += 1
        if len(self._examples[problem.kind]) < EXAMPLES:
            self._examples[problem.kind].append(problem)

    def examples(self, kind: str) -> tuple[Problem, ...]:
        return tuple(self._examples[kind])

    def __str__(self) -> str:
        lines = []
        for kind, count in self.counts.most_common():
            lines.append(f"- {kind}: {count} row{'s' if count > 1 else ''}")
            lines += [f"    row {p.row} of {p.file.name}: {p.detail}" for p in self._examples[kind]]
            if count > EXAMPLES:
                lines.append(f"    and {count - EXAMPLES} more")
        return "\n".join(lines)
