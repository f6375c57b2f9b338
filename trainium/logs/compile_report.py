"""What neuron_parallel_compile reports: its dumped JSON, the same JSON in the log, and the cache folder it filled."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODULE = re.compile(r"MODULE_[A-Za-z0-9_]+(?:\+[A-Za-z0-9]+)?")
_TOTAL = "total_neuron_parallel_compile_results_"
_SINGLE = "neuron_parallel_compile_results_"


@dataclass(frozen=True)
class Graph:
    """One graph of a model.

    Attributes:
        module: `MODULE_<hlo>+<flags>`, its folder in the compile cache.
        ok: whether it compiled.
        seconds: compile time; None in reports of an older format.
        neff_bytes: size of its compiled file; None when there is none, or when the cache was not looked at.
    """

    module: str
    ok: bool
    seconds: float | None
    neff_bytes: int | None = None


def module_of(path: str) -> str | None:
    """The `MODULE_<hlo>+<flags>` in a path of the compile cache."""
    match = _MODULE.search(path)
    return match.group() if match else None


def parse_report(report: Any) -> tuple[Graph, ...] | None:
    """The graphs of one report; None when it is no such report."""
    if not isinstance(report, Mapping) or not isinstance(report.get("compilation_report"), Mapping):
        return None
    graphs = []
    for path, entry in report["compilation_report"].items():
        entry = entry if isinstance(entry, Mapping) else {"status": entry}
        seconds = entry.get("compile_time")
        graphs.append(
            Graph(
                module=module_of(path) or Path(path).parent.name or path,
                ok=entry.get("status") is True,
                seconds=float(seconds) if isinstance(seconds, int | float) else None,
            )
        )
    return tuple(graphs)


def parse_report_line(text: str) -> tuple[Graph, ...] | None:
    """The report within a line of a log, whatever stands before and behind it."""
    start = text.find('{"compilation_summary"')
    if start < 0:
        return None
    try:
        return parse_report(json.JSONDecoder().raw_decode(text[start:])[0])
    except json.JSONDecodeError:
        return None


def read_reports(folder: Path) -> list[tuple[Graph, ...]]:
    """The dumped reports in a folder, oldest first; the totals where there are any, else the single ones.

    A file that is no report (half-written, another program's) is left out.
    """
    for prefix in (_TOTAL, _SINGLE):
        found = []
        for path in sorted(folder.glob(f"{prefix}*.json"), key=lambda path: (path.stat().st_mtime, path.name)):
            try:
                graphs = parse_report(json.loads(path.read_text(encoding="utf-8", errors="replace")))
            except json.JSONDecodeError:
                continue
            if graphs is not None:
                found.append(graphs)
        if found:
            return found
    return []


def merge(reports: Iterable[Sequence[Graph]]) -> dict[str, Graph]:
    """One graph per module; a later report replaces an earlier one."""
    return {graph.module: graph for report in reports for graph in report}


def neff_sizes(cache: Path) -> dict[str, int]:
    """Size in bytes of each compiled graph of a cache; empty files are no graphs.

    Layout: `<cache>/neuronxcc-<version>+<hash>/MODULE_<hlo>+<flags>/model.neff`; `cache` may also be the folder of a
    version.
    """
    sizes: dict[str, int] = {}
    for pattern in ("MODULE_*/model.neff", "neuronxcc-*/MODULE_*/model.neff"):
        for path in sorted(cache.glob(pattern)):
            if size := path.stat().st_size:
                sizes[path.parent.name] = size
    return sizes
