"""One job of a stage: submitted once, watched to its end, adopted when somebody else submitted it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurm.errors import SchedulerUnreachable
from slurm.folder import JobFolder, JobRecord
from slurm.reasons import explain
from slurm.spec import JobSpec
from slurm.submission import cancel, ensure_submitted
from slurm.verdict import JobStatus, Outcome
from tasks.cancellation import cancelling_now
from tasks.context import Run
from tasks.jobspecs import RESULT
from tasks.stage import log
from trainium.errors import StageFailed
from trainium.files import read_json, write_json
from trainium.logs.diagnose import diagnose
from trainium.logs.tail import last_lines
from trainium.run.folder import RunFolder
from trainium.run.records import JobNote, Output

DIAGNOSIS = "diagnosis.json"
TICK = 1.0  # seconds between two looks into a running job's log
ASK_AGAIN = 10.0  # seconds between two tries to submit while the scheduler does not answer
LINES_SHOWN = 20

T = TypeVar("T")
Tick = Callable[[JobFolder], Awaitable[None]]


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
    run: Run, stage: str, describe: Callable[[Path], JobSpec], on_tick: Tick | None = None
) -> FinishedJob:
    """Submit (or adopt) the stage's job and wait for it; raise StageFailed unless it succeeds.

    `describe` is given the job's folder, writes there what the job needs, and returns its description. It is called
    again for an attempt that is adopted, so it must do the same again. `on_tick` is called every second while the job
    may be running, and once after its end.
    """
    attempt = await _after_cancelled(run, stage)
    folder = JobFolder(run.folder.job(stage, attempt))
    spec = describe(folder.path)
    record = await _submit(run, stage, folder, spec, f"{run.folder.uid}-{stage}-{attempt}")
    log(f"{stage}: job {record.job_id}, log {folder.log}")
    try:
        outcome = await _watch(run, stage, folder, on_tick or _show_last_line(run, stage))
    except asyncio.CancelledError:
        _cancel_if_cancelling(run, folder)
        raise
    note = _note(folder, attempt, outcome)
    run.folder.end_attempt(stage, note, succeeded=outcome.succeeded)
    if not outcome.succeeded:
        raise StageFailed(failure_text(stage, folder, outcome, nodes=spec.nodes))
    return FinishedJob(run.folder, stage, folder, note)


def next_attempt(run: Run, stage: str) -> int:
    """The last attempt unless it is known to have failed; then one more."""
    last = max(run.folder.attempts(stage), default=0)
    if last == 0 or run.folder.attempt_failed(stage, last):
        return last + 1
    return last


async def _after_cancelled(run: Run, stage: str) -> int:
    """The next attempt; one that an earlier start cancelled is over, once its job is, and not adopted.

    Cancelling waits for nothing, so its job may still be writing where the next one would.
    """
    attempt = next_attempt(run, stage)
    folder = JobFolder(run.folder.job(stage, attempt))
    record = folder.read_job()
    if record is None or record.cancel_requested is None:
        return attempt
    outcome = await _watch(run, stage, folder, _show_last_line(run, stage))
    if outcome.succeeded:  # the cancellation came too late
        return attempt
    run.folder.end_attempt(stage, _note(folder, attempt, outcome), succeeded=False)
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


def failure_text(stage: str, folder: JobFolder, outcome: Outcome, *, nodes: int) -> str:
    """Everything somebody needs who was not there; for machines, all findings are in the job's diagnosis.json."""
    findings = diagnose(folder.log, stage, nodes=nodes)
    write_json(folder.path / DIAGNOSIS, [asdict(finding) for finding in findings])
    lines = [f"{stage} failed: job {outcome.job_id} {outcome.detail}"]
    lines += [f"  on {outcome.nodes}"] if outcome.nodes else []
    lines += [f"  {finding.summary} ({finding.cls}). {finding.action}" for finding in findings[:3]]
    return "\n".join([*lines, f"  log: {folder.log}", *failure_lines(folder)])


def failure_lines(folder: JobFolder) -> list[str]:
    """The end of a job's log, redacted, as it stands in a message."""
    shown = last_lines(folder.log, LINES_SHOWN) if folder.log.exists() else ["(no log was written)"]
    return ["  its last lines:", *(f"  | {line}" for line in shown)]


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


async def _watch(run: Run, stage: str, folder: JobFolder, on_tick: Tick) -> Outcome:
    def changed(status: JobStatus) -> None:
        text = f"job {status.job_id} {status.state.lower()}"
        if status.state.is_waiting and status.reason:
            text += f": {explain(status.reason)}"
        run.progress(stage, text)
        log(f"{stage}: {text}")

    waiting = asyncio.ensure_future(run.watcher.wait(folder, changed))
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=TICK)
            await on_tick(folder)
        return await waiting
    finally:
        waiting.cancel()


def _show_last_line(run: Run, stage: str) -> Tick:
    async def tick(folder: JobFolder) -> None:
        lines = last_lines(folder.log, 1) if folder.log.exists() else []
        if lines:
            run.progress(stage, lines[0].strip())

    return tick


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
