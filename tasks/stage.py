"""The frame around every stage: skip what is done, record what was proved, show it."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.logging.loggers import get_logger

from tasks.artifacts import show_failure, show_record
from tasks.context import Run
from trainium.run.folder import now
from trainium.run.records import JobNote, Output, StageRecord, digest

# What has to be the same for a stage's record to stand: its own inputs and the results of these.
AFTER: Mapping[str, tuple[str, ...]] = {
    "plan": (),
    "model": (),
    "dataset": ("model",),
    "convert": ("model",),
    "compile": ("convert", "dataset"),
    "train": ("convert", "dataset", "compile"),
    "export": ("model", "train"),
    "evaluate": ("dataset", "export"),
}
STAGES: tuple[str, ...] = tuple(AFTER)


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What the work of a stage hands over to its record; see StageRecord for the fields."""

    outputs: tuple[Output, ...] = ()
    jobs: tuple[JobNote, ...] = ()
    verified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()


async def run_stage(
    run: Run, stage: str, inputs: Mapping[str, Any], work: Callable[[], Awaitable[StageResult]]
) -> StageRecord:
    """Do the work, or return the record of the time it was done with equal inputs."""
    key = digest({"stage": stage, "inputs": inputs, "after": [_key_of(run, before) for before in AFTER[stage]]})
    run.lease.check()  # the folder may have been made again by another run
    done = run.folder.finished(stage, key)
    if done:
        _tell(run, done, skipped=True)
        await show_record(done)
        return done
    if fallen := run.folder.record(stage):
        run.folder.retire(fallen)
    for listener in run.listeners:
        listener.started(stage)
    began, clock = now(), time.monotonic()
    try:
        result = await work()
    except BaseException as error:
        for listener in run.listeners:
            listener.failed(stage, error)
        if isinstance(error, Exception):
            await show_failure(stage, error)
        raise
    record = StageRecord(
        stage=stage,
        inputs=key,
        started=began,
        ended=now(),
        # A job that was adopted has worked longer than this process has watched it.
        seconds=round(max(time.monotonic() - clock, sum(job.seconds or 0.0 for job in result.jobs)), 1),
        outputs=result.outputs,
        jobs=result.jobs,
        verified=result.verified,
        notes=result.notes,
        facts=result.facts,
        table=result.table,
    )
    run.lease.check()
    run.folder.finish(record)
    _tell(run, record, skipped=False)
    await show_record(record)
    return record


def _key_of(run: Run, stage: str) -> str | None:
    record = run.folder.record(stage)
    return record.inputs if record else None


def _tell(run: Run, record: StageRecord, *, skipped: bool) -> None:
    for listener in run.listeners:
        listener.finished(record, skipped=skipped)
    text = "was finished before" if skipped else f"finished in {record.seconds:.1f} s"
    log(f"{record.stage} {text}: {'; '.join(record.verified) or 'nothing to verify'}")


def log(message: str, level: int = logging.INFO) -> None:
    """To the Prefect run's log, or to Python's where there is no run."""
    try:
        get_run_logger().log(level, message)
    except MissingContextError:
        get_logger("trainium").log(level, message)
