"""Did the compile stage succeed?

The exit code does not tell: it is the number of failed graphs modulo 256, and 0 in some crashes of workers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainium.logs.compile_report import Graph, merge, module_of, neff_sizes, parse_report_line, read_reports
from trainium.logs.diagnose import Diagnosis, diagnosis_of, root_first
from trainium.logs.rules import BY_ID, Context, Role, RuleClass, Scope
from trainium.logs.scanner import Marker, Scanner
from trainium.logs.tail import Tail
from trainium.text import some

_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True)
class CompileVerdict:
    """What the compile stage produced.

    Attributes:
        ok: everything compiled, and all of it is proven.
        graphs: one row per graph, as far as reports or the cache name them.
        total, failed: of the reports, or of the summaries in the log.
        cached: nothing had to be compiled, and the compiled graphs are in the cache.
        findings: why it is not ok, root cause first; hints last.
        summary: one sentence.
    """

    ok: bool
    graphs: tuple[Graph, ...]
    total: int
    failed: int
    cached: bool
    findings: tuple[Diagnosis, ...]
    summary: str

    @property
    def seconds(self) -> float:
        """Compile time of all graphs together; they are compiled in parallel."""
        return sum(graph.seconds or 0.0 for graph in self.graphs)


@dataclass
class _Told:
    """What the logs say."""

    totals: list[int] = field(default_factory=list)
    successful: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    nothing_to_do: int = 0
    reports: list[tuple[Graph, ...]] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)

    @property
    def summaries(self) -> int:
        """Complete summaries: lines of several nodes interleave, so they are counted, not paired."""
        return min(len(self.totals), len(self.successful), len(self.failed))

    def take(self, marker: Marker) -> None:
        text = marker.text[marker.start : marker.end]
        number = _NUMBER.search(text)
        match marker.rule:
            case "job-started-again":  # what an earlier start compiled is in the cache, if it was whole
                vars(self).update(vars(_Told()))
            case "compile-total-graphs" if number:
                self.totals.append(int(number[0]))
            case "compile-total-successful" if number:
                self.successful.append(int(number[0]))
            case "compile-total-failed" if number:
                self.failed.append(int(number[0]))
            case "compile-nothing-to-do":
                self.nothing_to_do += 1
            case "compile-report":
                if (graphs := parse_report_line(marker.text)) is not None:
                    self.reports.append(graphs)
            case "compile-graph-cached" | "compile-graph-extracted":
                if module := module_of(text):
                    self.modules.add(module)


def compile_gate(
    logs: Path | Sequence[Path],
    *,
    nodes: int = 1,
    results: Path | None = None,
    cache: Path | None = None,
) -> CompileVerdict:
    """Judge a compile job that ended with code 0 by everything it left behind.

    Args:
        logs: the log of the job, or one per node.
        nodes: how many nodes compiled; each prints its own summary, with its own number of graphs.
        results: the folder with the dumped `*neuron_parallel_compile_results_*.json` (the job's working directory).
        cache: the compile cache as seen from here; None when it cannot be seen, then no `.neff` is asked for.
    """
    told = _Told()
    found: list[Diagnosis] = []
    for path in [logs] if isinstance(logs, Path) else logs:
        found += _scan(path, nodes, told)
    dumped = read_reports(results) if results is not None else []
    graphs = merge(dumped or told.reports)
    found += _check_counts(told, nodes, max(told.summaries + told.nothing_to_do, len(dumped)), graphs)
    cached = told.nothing_to_do > 0 and not told.totals and not graphs
    if cache is not None:
        neffs = neff_sizes(cache)
        found += _check_neffs(told, graphs, neffs, cache)
        rows = graphs or {name: Graph(name, True, None) for name in sorted(told.modules or (neffs if cached else ()))}
        graphs = {name: replace(graph, neff_bytes=neffs.get(name)) for name, graph in rows.items()}
    elif cached:
        found.append(_finding("cache-not-visible", RuleClass.CONFIG, *_CACHE_NOT_VISIBLE))
    return _verdict(told, graphs, cached, root_first(found))


_CACHE_NOT_VISIBLE = (
    "nothing was left to compile, but the compile cache cannot be seen from here: everything was cached, or nothing was"
    " extracted",
    "put the compile cache on a filesystem that this machine sees",
)


def _verdict(told: _Told, graphs: dict[str, Graph], cached: bool, found: tuple[Diagnosis, ...]) -> CompileVerdict:
    # A traceback alone is no verdict, since programs print tracebacks of what they then survive; it explains a failure.
    failing = [d for d in found if d.role is not Role.HINT and not _only_explains(d)]
    ok = not failing
    total = len(graphs) or sum(told.totals)
    failed = sum(not graph.ok for graph in graphs.values()) if graphs else sum(told.failed)
    if not ok:
        more = f" (and {len(failing) - 1} more findings)" if len(failing) > 1 else ""
        summary = f"compilation failed: {found[0].summary}{more}"
    elif cached:
        summary = f"everything was cached: {total} compiled graphs, nothing left to do"
    else:
        seconds = sum(graph.seconds or 0.0 for graph in graphs.values())
        summary = f"{total} graphs compiled, none failed" + (f", {seconds:.0f} s of compiling" if seconds else "")
    return CompileVerdict(
        ok=ok,
        graphs=tuple(graphs.values()),
        total=total,
        failed=failed,
        cached=cached and ok,
        findings=found if not ok else tuple(d for d in found if d.role is Role.HINT),
        summary=summary,
    )


def _only_explains(diagnosis: Diagnosis) -> bool:
    rule = BY_ID.get(diagnosis.rule)
    return rule is not None and rule.scope is Scope.EXCEPTION


def _scan(path: Path, nodes: int, told: _Told) -> list[Diagnosis]:
    if not path.exists():
        summary = f"the log {path} of an expected node is missing"
        return [_finding("log-missing", RuleClass.AMBIGUOUS, summary, "see how the job ended on that node")]
    scanner = Scanner(Context("compile", nodes), told.take)
    for block in Tail(path).read():
        scanner.feed(block)
    scanner.close()
    return [diagnosis_of(finding, path, "compile") for finding in scanner.findings.values()]


def _check_counts(told: _Told, nodes: int, heard: int, graphs: dict[str, Graph]) -> list[Diagnosis]:
    found = []
    if heard < nodes:
        found.append(
            _finding(
                "summary-missing",
                RuleClass.AMBIGUOUS,
                f"{heard} of {nodes} nodes printed a compile summary",
                "look for the first failure on a node without one; a lost output has no other sign",
                role=Role.CONSEQUENCE,
            )
        )
    if 0 in told.totals:
        found.append(
            _finding(
                "nothing-extracted",
                RuleClass.CONFIG,
                "a node reports 0 graphs: the trial run met none",
                "check that COMPILE=1 is set, that the config is the one of the training and that there is data",
            )
        )
    if bad := [graph.module for graph in graphs.values() if not graph.ok]:
        found.append(
            _finding(
                "graphs-failed",
                RuleClass.DETERMINISTIC,
                f"{len(bad)} of {len(graphs)} graphs failed to compile: {some(bad)}",
                "read the compiler's messages; model.log in the folder of each MODULE_ has them",
                role=Role.CONSEQUENCE,
            )
        )
    return found


def _check_neffs(told: _Told, graphs: dict[str, Graph], neffs: dict[str, int], cache: Path) -> list[Diagnosis]:
    failed = {graph.module for graph in graphs.values() if not graph.ok}
    named = (set(graphs) | told.modules) - failed
    if absent := sorted(named - set(neffs)):
        return [
            _finding(
                "neff-missing",
                RuleClass.CACHE,
                f"{len(absent)} of {len(named)} graphs have no compiled .neff in {cache}: {some(absent)}",
                "check that the job wrote to this cache (--cache_dir in NEURON_CC_FLAGS beats NEURON_COMPILE_CACHE_URL,"
                " and some versions of train_setup.sh set the latter), then compile again",
            )
        ]
    expected = max(told.totals, default=1 if told.nothing_to_do else 0)
    if named or failed or len(neffs) >= expected:
        return []
    if told.nothing_to_do and not told.totals:
        return [
            _finding(
                "nothing-extracted",
                RuleClass.CONFIG,
                f"nothing was left to compile and {cache} has no compiled graph: the trial run extracted none",
                "check that COMPILE=1 is set, that the config is the one of the training and that there is data",
            )
        ]
    return [
        _finding(
            "neff-missing",
            RuleClass.CACHE,
            f"{expected} graphs are reported, and {cache} has {len(neffs)} compiled ones",
            "check that the job wrote to this cache, then compile again",
        )
    ]


def _finding(rule: str, cls: RuleClass, summary: str, action: str, *, role: Role = Role.CAUSE) -> Diagnosis:
    return Diagnosis(
        rule=rule,
        cls=cls,
        stage="compile",
        summary=summary,
        evidence=(),
        count=1,
        action=action,
        role=role,
        silent=True,
    )
