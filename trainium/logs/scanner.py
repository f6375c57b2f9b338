"""One pass over a log: what the rules find in it, counted, with bounded memory."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from trainium.logs.matcher import Hit, matcher_for
from trainium.logs.redact import redact
from trainium.logs.rules import Context, Rule, RuleClass
from trainium.logs.tail import LineBuffer, Piece, decode
from trainium.logs.tracebacks import PythonError, Tracebacks

STARTED_AGAIN = "job-started-again"
_EVIDENCE = 3
_MOST_FINDINGS = 500
_WIDTH = 600

# Neuron's runtime, libneuronxla and NxD (ISO with dots or commas before the milliseconds), in the order of trial.
_TIME = re.compile(r"\d{4}-(?:\d{2}|[A-Z][a-z]{2})-\d{2}[ T]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?")
_RANK = re.compile(r"^\s*(\d+): |\[\d+,(\d+)\]<std|\[(?:rank|default)?(\d+)\]:|\brank[_ :=]+(\d+)")


@dataclass(frozen=True)
class Sighting:
    """One line in which a rule was found. `line` counts from 1, by `\\n`; `text` is redacted."""

    line: int
    rank: int | None
    text: str
    time: str | None


@dataclass
class Finding:
    """The lines of one rule (of one exception, for tracebacks), counted; the first few are kept."""

    rule: Rule
    detail: str
    error: PythonError | None
    sightings: list[Sighting] = field(default_factory=list)
    count: int = 0
    last_time: str | None = None

    @property
    def line(self) -> int:
        """Where it was first seen."""
        return self.sightings[0].line


@dataclass(frozen=True)
class Marker:
    """A fact in a line: the rule's id, the whole line (not redacted) and where in it the marker starts and ends."""

    rule: str
    text: str
    start: int
    end: int

    @property
    def time(self) -> datetime | None:
        """The time that the line prints before the marker."""
        printed = _TIME.findall(self.text[: self.start][-400:])
        return parse_time(printed[-1]) if printed else None


class Scanner:
    """Reads a log in pieces of any size; the findings do not depend on the sizes.

    The findings are those of the job's latest start: a requeued job goes on in the same log.

    Args:
        context: which rules hold.
        on_marker: told of every marker, in the order of the lines.
    """

    def __init__(self, context: Context, on_marker: Callable[[Marker], None] | None = None) -> None:
        self.findings: dict[tuple[str, str], Finding] = {}
        self._matcher = matcher_for(context)
        self._on_marker = on_marker
        self._lines = LineBuffer()
        self._tracebacks = Tracebacks()
        self._line_number = 1

    @property
    def unfinished(self) -> str:
        """The last line while it has no end yet, as a progress bar's mostly has not."""
        return decode(self._lines.rest)

    def feed(self, data: bytes) -> None:
        """Scan what came; a line without end waits for the rest."""
        for piece in self._lines.feed(data):
            self._scan(piece)

    def close(self) -> None:
        """Scan the last line too, when the file has ended without a line end."""
        for piece in self._lines.close():
            self._scan(piece)

    def _scan(self, piece: Piece) -> None:
        raw = piece.data
        block = raw.replace(b"\r", b"\n")
        position = counted = 0
        while position < len(block):
            if self._tracebacks:
                start = position
            else:
                found = self._matcher.next(block, position)
                if found is None:
                    break
                start = block.rfind(b"\n", 0, found) + 1
            end = block.find(b"\n", start)
            end = len(block) if end < 0 else end
            self._line_number += raw.count(b"\n", counted, start)
            counted = start
            self._line(block[start:end], piece.seen if start == 0 else 0)
            position = end + 1
        self._line_number += raw.count(b"\n", counted)

    def _line(self, line: bytes, seen: int) -> None:
        error = self._tracebacks.line(line)
        noted: set[str] = set()
        for hit in self._matcher.hits(line, exceptions=error is not None):
            if hit.end <= seen:
                continue
            if hit.rule.id == STARTED_AGAIN:
                self.findings.clear()
            if hit.rule.cls is RuleClass.MARKER:
                if self._on_marker:
                    self._on_marker(_marker(hit, line))
            elif hit.rule.id not in noted:
                noted.add(hit.rule.id)
                self._note(hit, line, error)

    def _note(self, hit: Hit, line: bytes, error: PythonError | None) -> None:
        key = (hit.rule.id, f"{error.type} {error.frame}" if error and hit.rule.scope == "exception" else "")
        finding = self.findings.get(key)
        if finding is None:
            if len(self.findings) >= _MOST_FINDINGS:
                return
            finding = self.findings[key] = Finding(hit.rule, redact(hit.detail), None)
        finding.error = finding.error or error
        finding.count += 1
        sighting = _sighting(line, hit, self._line_number)
        finding.last_time = sighting.time or finding.last_time
        if len(finding.sightings) < _EVIDENCE:
            finding.sightings.append(sighting)


def _marker(hit: Hit, line: bytes) -> Marker:
    before, text = decode(line[: hit.start]), decode(line[hit.start : hit.end])
    return Marker(hit.rule.id, before + text + decode(line[hit.end :]), len(before), len(before) + len(text))


def parse_time(printed: str) -> datetime | None:
    """A time as logs print it, without its fraction of a second (libneuronxla prints milliseconds as microseconds)."""
    whole = re.split(r"[.,]", printed.replace("T", " "))[0]
    for form in ("%Y-%m-%d %H:%M:%S", "%Y-%b-%d %H:%M:%S"):
        try:
            return datetime.strptime(whole, form)
        except ValueError:
            continue
    return None


def _sighting(line: bytes, hit: Hit, number: int) -> Sighting:
    # A window around the hit: a line may be a mebibyte of compiler dots.
    start = max(0, hit.start - 20_000)
    text = decode(line[start : hit.end + 20_000])
    if start:
        text = text.partition(" ")[2]  # half a word could be half a token, which redact() would not know
    before = decode(line[start : hit.start])
    times = _TIME.findall(before[-400:]) or _TIME.findall(text)[:1]
    rank = _RANK.search(text)
    shown = redact(text).strip()
    if len(shown) > _WIDTH:
        middle = max(0, shown.find(redact(decode(line[hit.start : hit.end]))[:40]) - 120)
        shown = ("… " if middle else "") + shown[middle : middle + _WIDTH] + " …"
    return Sighting(
        line=number,
        rank=int(next(group for group in rank.groups() if group is not None)) if rank else None,
        text=shown,
        time=times[-1] if times else None,
    )
