"""From one attempt at a stage's job to the next: what the ledger keeps, what is decided, when the next may begin."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from slurm.ending import ENDING_SIGNALS, Cause
from slurm.errors import BadHostList
from slurm.folder import JobFolder
from slurm.hostlist import expand
from slurm.spec import JobSpec
from slurm.verdict import Outcome
from tasks.context import Run
from tasks.report import write_report_file
from tasks.stage import log
from trainium.config.fields import as_timedelta
from trainium.config.schema import Recipe
from trainium.logs.diagnose import Diagnosis
from trainium.logs.tail import last_lines
from trainium.run.attempts import Again, Budgets, Ended, Stop, classes_of, decide
from trainium.run.records import JobNote
from trainium.text import duration

_LINES_OF_SRUN = 200
# srun names the node of every task that ended badly; the others are told to end because of the first.
_BAD_TASK = re.compile(r"srun: error: (?:Node failure on )?([\w.-]+)(?:: tasks? [\d,-]+: (?!Terminated)|$)")


@dataclass(frozen=True)
class Resumption:
    """A stage whose attempts go on from one another. Both are given an attempt's folder and answer with a global step.

    began: where it began. after: from where an attempt after it would go on; reads checkpoints, so it may take a while.
    """

    began: Callable[[Path], int]
    after: Callable[[Path], int]


def next_attempt(run: Run, stage: str) -> int:
    """The last attempt unless it is known to have failed; then one more."""
    last = max(run.folder.attempts(stage), default=0)
    if last == 0 or run.folder.attempt_failed(stage, last):
        return last + 1
    return last


async def its_turn(run: Run, stage: str, attempt: int) -> tuple[str, ...]:
    """Wait until the attempt may begin, and return the nodes that it is to avoid.

    The moment is in the ledger, so a flow that was killed while it waited waits for the rest only.
    """
    then = _decided(run, stage, attempt - 1)
    if not then.get("again"):
        return ()
    if JobFolder(run.folder.job(stage, attempt)).read_intent() is None:
        left = datetime.fromisoformat(then["not_before"]) - datetime.now(UTC)
        seconds = min(left.total_seconds(), float(then["delay"]))  # whatever was done to the clock since
        if seconds > 0:
            text = f"attempt {attempt} begins in {duration(seconds)}: {then['why']}"
            run.progress(stage, text)
            log(f"{stage}: {text}")
            await asyncio.sleep(seconds)
    return tuple(then["exclude"])


def avoiding(spec: JobSpec, nodes: Sequence[str]) -> JobSpec:
    """The job on other nodes than these, as far as it does not ask for one of them by name."""
    wanted = hosts_of(spec.nodelist)
    names = [*([spec.exclude] if spec.exclude else []), *(node for node in nodes if node not in wanted)]
    return replace(spec, exclude=",".join(names) or None)


async def conclude(
    run: Run,
    stage: str,
    folder: JobFolder,
    note: JobNote,
    outcome: Outcome,
    findings: Sequence[Diagnosis],
    resumption: Resumption | None,
    gave_up: str | None = None,
) -> Again | Stop:
    """Decide what comes after an attempt that did not succeed, and write both into the ledger and the report."""
    position = await asyncio.to_thread(resumption.after, folder.path) if resumption else None
    ended = Ended(
        cause=str(outcome.cause),
        classes=_classes(outcome, findings),
        nodes=_suspects(hosts_of(outcome.nodes), folder.log),
        position=position,
    )
    decision = decide([*_history(run, stage, before=note.attempt), ended], budgets_of(run.recipe))
    if gave_up is not None:
        decision = _after_giving_up(run, stage, note.attempt, gave_up)
    then = _then(decision)
    run.folder.end_attempt(stage, note, succeeded=False, details={"ended": ended.to_json(), "then": then})
    log(f"{stage}: attempt {note.attempt} ended, {describe(decision)}", logging.WARNING)
    await asyncio.to_thread(write_report_file, run)
    return decision


async def set_down(run: Run, stage: str, folder: JobFolder, note: JobNote, resumption: Resumption | None) -> None:
    """Write an attempt that this run cancelled into the ledger: nothing is decided, the next start goes on."""
    position = await asyncio.to_thread(resumption.after, folder.path) if resumption else None
    ended = Ended(cause=str(Cause.CANCELLED_BY_US), position=position)
    run.folder.end_attempt(stage, note, succeeded=False, details={"ended": ended.to_json()})


def describe(decision: Again | Stop) -> str:
    """The decision in words, without a full stop."""
    if isinstance(decision, Stop):
        return f"no new attempt by itself: {decision.why}"
    when = f"in {duration(decision.delay.total_seconds())}" if decision.delay else "at once"
    return f"a new attempt {when}: {decision.why}"


def budgets_of(recipe: Recipe) -> Budgets:
    """The recipe's section `attempts`."""
    attempts = recipe.attempts
    return Budgets(
        hardware=attempts.hardware,
        preemption=attempts.preemption,
        time_limit=attempts.time_limit,
        capacity=attempts.capacity,
        transient=attempts.transient,
        ambiguous=attempts.ambiguous,
        capacity_delay=as_timedelta(attempts.capacity_delay),
        transient_delay=as_timedelta(attempts.transient_delay),
    )


def hosts_of(text: str | None) -> tuple[str, ...]:
    """The nodes of a host list; none where Slurm shows something else, such as `(null)`."""
    try:
        return expand(text or "")
    except BadHostList:
        return ()


def _classes(outcome: Outcome, findings: Sequence[Diagnosis]) -> tuple[str, ...]:
    """Told to end by nobody knows whom: it may have been somebody's decision, whatever the log shows of it."""
    told = ("interrupted",) if outcome.cause is Cause.UNKNOWN and outcome.signal in ENDING_SIGNALS else ()
    return (*told, *classes_of(findings))


def _suspects(hosts: Sequence[str], output: Path) -> tuple[str, ...]:
    """The nodes that can have been at fault: the only one, or the one whose task was the first to end badly."""
    if len(hosts) <= 1:
        return tuple(hosts)
    lines: Iterable[str] = last_lines(output, _LINES_OF_SRUN)
    named = (match[1] for line in lines for match in _BAD_TASK.finditer(line))
    return tuple(node for node in named if node in hosts)[:1]


def _history(run: Run, stage: str, *, before: int) -> list[Ended]:
    entries = run.folder.ended_attempts(stage)
    return [Ended.from_json(entry["ended"]) for entry in entries if entry["attempt"] < before and "ended" in entry]


def _decided(run: Run, stage: str, attempt: int) -> Mapping[str, Any]:
    """What was decided after an attempt; nothing where there was nothing to decide."""
    entries = run.folder.ended_attempts(stage)
    return next((entry.get("then") or {} for entry in entries if entry["attempt"] == attempt), {})


def _after_giving_up(run: Run, stage: str, attempt: int, why: str) -> Again | Stop:
    """No node was left for the job: perhaps because the only ones are those that it had to avoid."""
    avoided = _decided(run, stage, attempt - 1).get("exclude")
    if avoided:
        return Again(timedelta(), (), f"{why}; it had to avoid {', '.join(avoided)}, and now it need not")
    return Stop(why)


def _then(decision: Again | Stop) -> dict[str, Any]:
    if isinstance(decision, Stop):
        return {"again": False, "why": decision.why}
    not_before = datetime.now(UTC) + decision.delay
    return {
        "again": True,
        "not_before": not_before.isoformat(),
        "delay": decision.delay.total_seconds(),
        "exclude": list(decision.exclude),
        "why": decision.why,
    }
