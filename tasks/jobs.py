"""One job of a stage: submitted once, watched to its end, adopted when somebody else submitted it, tried again."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurm.errors import SchedulerUnreachable, SubmitRejected
from slurm.folder import JobFolder, JobRecord
from slurm.spec import JobSpec
from slurm.submission import cancel, ensure_submitted
from slurm.verdict import Outcome
from tasks.attempts import Resumption, avoiding, conclude, describe, its_turn, next_attempt, set_down
from tasks.cancellation import cancelling_now
from tasks.context import Run
from tasks.jobspecs import RESULT
from tasks.stage import log
from tasks.watching import Tick, watch
from trainium.errors import StageFailed
from trainium.files import read_json, write_json
from trainium.logs.diagnose import Diagnosis, diagnose
from trainium.logs.tail import last_lines
from trainium.run.attempts import Again, Stop
from trainium.run.folder import RunFolder
from trainium.run.records import JobNote, Output

DIAGNOSIS = "diagnosis.json"
ASK_AGAIN = 10.0  # seconds between two tries to submit while the scheduler does not answer
LINES_SHOWN = 20

T = TypeVar("T")


@dataclass(frozen=True)
class FinishedJob:
    """A job that ended with code 0."""

    run: RunFolder
    stage: str
    folder: JobFolder
    note: JobNote

    def report(self) -> dict[str, Any]:
        """What the job wrote down about its work. Raises StageFailed when that cannot be read."""
        path = self.folder.path / RESULT
        try:
            result: dict[str, Any] = read_json(path)
        except (FileNotFoundError, ValueError) as error:
            raise _unusable((self,), path) from error
        return result


def output(path: Path, jobs: Sequence[FinishedJob], *, shared: bool = False) -> Output:
    """What these jobs made together. Raises StageFailed when it is not there (any more)."""
    try:
        return Output.of(path, shared=shared)
    except FileNotFoundError as error:
        raise _unusable(jobs, path) from error


def _unusable(jobs: Sequence[FinishedJob], path: Path) -> StageFailed:
    """Only the ledger keeps the next start from adopting jobs that ended well, and from failing like this one."""
    for job in jobs:
        job.run.end_attempt(job.stage, job.note, succeeded=False)
    last = jobs[-1]
    return StageFailed(
        f"{last.stage}: job {last.note.id} ended with code 0, but {path} is missing or damaged. Starting the run again "
        f"does the work again.\n  log: {last.note.log}"
    )


async def run_job(
    run: Run,
    stage: str,
    describe_job: Callable[[Path], JobSpec],
    on_tick: Tick | None = None,
    resumption: Resumption | None = None,
) -> FinishedJob:
    """Submit (or adopt) the stage's job and wait for it, attempt after attempt while the recipe's budgets allow it.

    `describe_job` is given an attempt's folder, writes there what the job needs, and returns its description. It is
    called again for an attempt that is adopted, so it must do the same again. `on_tick` is called every second while
    the job may be running, and once after its end. `resumption`: of a stage that goes on where its last attempt was.
    Raises StageFailed when no attempt succeeded and none is left, with the reason.
    """
    while True:
        attempt = await _after_cancelled(run, stage, resumption)
        avoid = await its_turn(run, stage, attempt)
        folder = JobFolder(run.folder.job(stage, attempt))
        run.lease.check()  # before anything is written, and again after the long wait
        spec = describe_job(folder.path)
        record = await _submit_avoiding(run, stage, folder, spec, attempt, avoid)
        log(f"{stage}: job {record.job_id}, log {folder.log}")
        try:
            watched = await watch(run, stage, folder, on_tick)
        except asyncio.CancelledError:
            _cancel_if_cancelling(run, folder)
            raise
        run.lease.check()
        outcome, note = watched.outcome, _note(folder, attempt, watched.outcome)
        if outcome.succeeded:
            run.folder.end_attempt(stage, note, succeeded=True)
            return FinishedJob(run.folder, stage, folder, note)
        findings = await asyncio.to_thread(_diagnose, stage, folder, spec.nodes, resumption)
        decision = await conclude(run, stage, folder, note, outcome, findings, resumption, watched.gave_up)
        text = failure_text(stage, folder, outcome, findings, decision)
        if isinstance(decision, Stop):
            raise StageFailed(text)
        log(text, logging.WARNING)


async def _after_cancelled(run: Run, stage: str, resumption: Resumption | None) -> int:
    """The next attempt; one that an earlier start cancelled is over, once its job is, and not adopted.

    Cancelling waits for nothing, so its job may still be writing where the next one would.
    """
    attempt = next_attempt(run, stage)
    folder = JobFolder(run.folder.job(stage, attempt))
    record = folder.read_job()
    if record is None or record.cancel_requested is None:
        return attempt
    outcome = (await watch(run, stage, folder)).outcome
    if outcome.succeeded:  # the cancellation came too late
        return attempt
    await set_down(run, stage, folder, _note(folder, attempt, outcome), resumption)
    return attempt + 1


def _note(folder: JobFolder, attempt: int, outcome: Outcome) -> JobNote:
    return JobNote(
        id=outcome.job_id,
        attempt=attempt,
        state=str(outcome.state),
        exit_code=outcome.exit_code,
        nodes=outcome.nodes,
        log=str(folder.log),
        seconds=(outcome.ended - outcome.started).total_seconds() if outcome.started and outcome.ended else None,
    )


def _diagnose(stage: str, folder: JobFolder, nodes: int, resumption: Resumption | None) -> tuple[Diagnosis, ...]:
    """Why the job failed; all of it is in its diagnosis.json, for machines."""
    resumed = resumption is not None and resumption.began(folder.path) > 0
    findings = diagnose(folder.log, stage, nodes=nodes, expect_resume=resumed)
    write_json(folder.path / DIAGNOSIS, [asdict(finding) for finding in findings])
    return findings


def failure_text(
    stage: str, folder: JobFolder, outcome: Outcome, findings: Sequence[Diagnosis], decision: Again | Stop
) -> str:
    """Everything somebody needs who was not there."""
    lines = [f"{stage} failed: job {outcome.job_id} {outcome.detail}"]
    lines += [f"  on {outcome.nodes}"] if outcome.nodes else []
    lines += [f"  {finding.summary} ({finding.cls}). {finding.action}" for finding in findings[:3]]
    lines += [f"  {describe(decision)}"]
    return "\n".join([*lines, f"  log: {folder.log}", *failure_lines(folder)])


def failure_lines(folder: JobFolder) -> list[str]:
    """The end of a job's log, redacted, as it stands in a message."""
    shown = last_lines(folder.log, LINES_SHOWN) if folder.log.exists() else ["(no log was written)"]
    return ["  its last lines:", *(f"  | {line}" for line in shown)]


async def _submit_avoiding(
    run: Run, stage: str, folder: JobFolder, spec: JobSpec, attempt: int, avoid: Sequence[str]
) -> JobRecord:
    """Without the nodes that failed before, unless the scheduler then has none left to give."""
    name = f"{run.folder.uid}-{stage}-{attempt}"
    if avoid:
        try:
            return await _submit(run, stage, folder, avoiding(spec, avoid), name)
        except SubmitRejected as error:
            log(f"{stage}: {error}; submitting without avoiding {', '.join(avoid)}", logging.WARNING)
    return await _submit(run, stage, folder, spec, name)


async def _submit(run: Run, stage: str, folder: JobFolder, spec: JobSpec, name: str) -> JobRecord:
    """Submit once, however long the scheduler does not answer."""
    grace = run.site.cluster.adopt_within
    while True:
        try:
            return await _to_its_end(
                lambda: ensure_submitted(run.scheduler, spec, folder, name, guard=run.lease.check, grace=grace),
                lambda: _cancel_if_cancelling(run, folder),
            )
        except SchedulerUnreachable as error:
            run.progress(stage, f"{error}; asking again every {ASK_AGAIN:.0f} s")
            log(f"{stage}: {error}")
            await asyncio.sleep(ASK_AGAIN)


async def _to_its_end(work: Callable[[], T], on_cancel: Callable[[], None]) -> T:
    """Run blocking work to its end even when this task is cancelled.

    Half a submission can be neither cancelled nor adopted; it takes seconds at most.
    """
    future = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if future.exception() is None:
            on_cancel()
        raise cancelled
    return future.result()


def _cancel_if_cancelling(run: Run, folder: JobFolder) -> None:
    if cancelling_now():
        run.lease.check()
        cancel(run.scheduler, folder)
