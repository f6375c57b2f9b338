"""From what the rules found to one verdict: the root cause first, with evidence and remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainium.logs.rules import STAGES, Context, Role, RuleClass
from trainium.logs.scanner import Finding, Scanner
from trainium.logs.tail import Tail, last_lines

_LAST_LINES = 15
_LAST = "~"  # sorts behind every time and path


@dataclass(frozen=True)
class Evidence:
    """A line of a log, redacted. `line` counts from 1; `rank` as far as the line's prefix or text tells it."""

    file: str
    line: int
    rank: int | None
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong, as one kind of line says it.

    Attributes:
        rule: id in `rules.yaml`, or of a check that looks at more than one line.
        cls: what a retry would bring (`RuleClass`).
        stage: the stage of the job, None when it is not known.
        summary: one sentence, with what the line itself says.
        evidence: the first lines of this kind.
        count: how many there are.
        action: what to do.
        role: cause, consequence, collateral or hint.
        first, last: the times printed in the first and last such line, as printed.
        silent: the job may exit 0 all the same.
    """

    rule: str
    cls: RuleClass
    stage: str | None
    summary: str
    evidence: tuple[Evidence, ...]
    count: int
    action: str
    role: Role = Role.CAUSE
    first: str | None = None
    last: str | None = None
    silent: bool = False

    def __str__(self) -> str:
        lines = [f"{self.summary} [{self.rule}, {self.cls}]"]
        lines += [f"  {place.file}:{place.line}: {place.text}" for place in self.evidence]
        if self.count > len(self.evidence) > 0:
            lines.append(f"  … {self.count} such lines")
        return "\n".join([*lines, f"  What to do: {self.action}"])


def diagnosis_of(finding: Finding, file: Path, stage: str | None) -> Diagnosis:
    """A scanner's finding as it is shown."""
    rule = finding.rule
    told = str(finding.error) if finding.error else finding.detail
    return Diagnosis(
        rule=rule.id,
        cls=rule.cls,
        stage=stage,
        summary=f"{rule.meaning}: {told}" if told else rule.meaning,
        evidence=tuple(Evidence(str(file), seen.line, seen.rank, seen.text) for seen in finding.sightings),
        count=finding.count,
        action=rule.action,
        role=rule.role,
        first=finding.sightings[0].time,
        last=finding.last_time,
        silent=rule.silent,
    )


def root_first(diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Causes before consequences before collateral before hints; among them the earliest first.

    Within a file the order of the lines is the order in time. Lines of different files (nodes) are compared by the
    times they print; one without a time comes after those with one.
    """
    listed = list(diagnoses)
    files = {place.file for diagnosis in listed for place in diagnosis.evidence}

    def key(diagnosis: Diagnosis) -> tuple[int, str, str, int]:
        # What rests on no line (a check of the whole log) explains less than a line does.
        place = diagnosis.evidence[0] if diagnosis.evidence else Evidence(_LAST, 0, None, "")
        time = (diagnosis.first or _LAST) if len(files) > 1 else ""
        return diagnosis.role.order, time, place.file, place.line

    return tuple(sorted(listed, key=key))


def find(paths: Path | Sequence[Path], context: Context) -> tuple[Diagnosis, ...]:
    """Everything the rules find in the logs of one job, root cause first; empty when nothing is wrong.

    Missing files have nothing to say. The text only explains: whether a job succeeded is for its exit files and Slurm
    to say, except for the diagnoses that are `silent`.
    """
    diagnoses: list[Diagnosis] = []
    for path in [paths] if isinstance(paths, Path) else paths:
        scanner = Scanner(context)
        for block in Tail(path).read():
            scanner.feed(block)
        scanner.close()
        diagnoses += [diagnosis_of(finding, path, context.stage) for finding in scanner.findings.values()]
    return root_first(diagnoses)


def diagnose(
    paths: Path | Sequence[Path], stage: str | None, *, nodes: int = 1, expect_resume: bool = False
) -> tuple[Diagnosis, ...]:
    """Why a job failed, root cause first; never empty.

    Args:
        paths: its log, or one log per node.
        stage: `convert`, `compile`, `train`, `export`, `evaluate`, or a job of one such as `convert-verify`; with
            None, or a stage that has no rules of its own, the rules of all stages hold.
        nodes: how many nodes it had (a node without EFA is a fault only where there are several).
        expect_resume: whether it was to continue from a checkpoint.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    base = stage.partition("-")[0] if stage else None
    found = find(files, Context(base if base in STAGES else None, nodes, expect_resume))
    # A hint is no explanation on its own: the last lines stay the first thing to read.
    if any(diagnosis.role is not Role.HINT for diagnosis in found):
        return found
    return (_unrecognised(files, stage), *found)


def _unrecognised(files: Sequence[Path], stage: str | None) -> Diagnosis:
    evidence: list[Evidence] = []
    absent = [str(file) for file in files if not file.exists()]
    for file in files:
        evidence += [Evidence(str(file), 0, None, line) for line in last_lines(file, _LAST_LINES)]
    if evidence:
        summary = "the job failed, and no line of its log is known; its last lines are shown"
    elif absent:
        summary = f"the job failed without a log ({', '.join(absent)})"
    else:
        summary = "the job failed, and its log is empty"
    return Diagnosis(
        rule="unrecognised",
        cls=RuleClass.AMBIGUOUS,
        stage=stage,
        summary=summary,
        evidence=tuple(evidence),
        count=len(evidence),
        action=(
            "read the log from its end, and job.json and exit.json beside it; with neither log nor exit.json the node "
            "or slurmd died: see `sacct -j ID` and the slurmd log of the node"
        ),
    )
