"""A job is submitted once, whatever dies in between.

The intent (a unique name and the time) is on disk before the submission. Whoever finds an intent without a job record
does not know whether there is a job, looks the name up, and submits again only when nobody has heard of the name for
the grace period.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from slurm.errors import AmbiguousJob, InvalidJobSpec, SlurmError, SubmitRejected, SubmitUncertain
from slurm.folder import Intent, JobFolder, JobRecord, write_atomic
from slurm.scheduler import Scheduler
from slurm.spec import JobSpec, check_name

logger = logging.getLogger(__name__)

Record = TypeVar("Record", Intent, JobRecord)

_MAX_TRIES = 3
# The clocks of the nodes, which date start.json, may be behind the one that dated the intent.
_SKEW = timedelta(seconds=60)
_SECOND_LOOK = timedelta(seconds=5)


def ensure_submitted(
    scheduler: Scheduler,
    spec: JobSpec,
    folder: JobFolder,
    name: str,
    *,
    guard: Callable[[], None],
    grace: timedelta,
) -> JobRecord:
    """The one job of this folder, submitted now or before. Blocks for up to `grace` after an interrupted submission.

    `guard` is called before anything is written and again right before the submission; what it raises (a lost lease)
    goes to the caller with nothing submitted. Raises InvalidJobSpec, SubmitRejected (no job, the folder may be used
    again), SubmitUncertain (after three submissions nobody has heard of), AmbiguousJob, SchedulerUnreachable (call
    again later).
    """
    check_name(name)
    if spec.array is not None:
        rule = "a job folder holds one outcome, and an array has many"
        raise InvalidJobSpec("array", spec.array, rule, "one job per folder")
    if record := folder.read_job():
        return _same_name(folder, record, name)
    script = scheduler.render(spec, folder, name)
    uncertain: SubmitUncertain | None = None
    while True:
        intent = folder.read_intent()
        if intent is not None:
            _same_name(folder, intent, name)
            if found := _look_up(scheduler, folder, intent, grace):
                guard()
                logger.warning("adopted job %s, which an interrupted submission of %s left behind", found, name)
                return _record(folder, JobRecord(found, name, intent.first, adopted=True))
            if uncertain and intent.tries >= _MAX_TRIES:
                raise uncertain
        guard()
        write_atomic(folder.script, script)
        submitted = datetime.now(UTC)
        first, tries = (intent.first, intent.tries + 1) if intent else (submitted, 1)
        folder.write(folder.intent, Intent(name, first, submitted, tries))
        guard()
        try:
            job_id = scheduler.submit(folder.script, name)
        except SubmitRejected:
            folder.intent.unlink(missing_ok=True)  # no job exists: the next call need not look for one
            raise
        except SubmitUncertain as error:
            logger.warning("%s; looking for %s in the queue", error, name)
            uncertain = error
            continue
        return _settle(scheduler, folder, JobRecord(job_id, name, submitted), guard)


def cancel(scheduler: Scheduler, folder: JobFolder) -> None:
    """End the folder's job, and remember first that it was this project that asked for it.

    Nothing happens when there is no job record. Raises SchedulerUnreachable: the wish is recorded, the job lives.
    """
    if (record := folder.read_job()) is None:
        return
    if record.cancel_requested is None:
        folder.write(folder.job, replace(record, cancel_requested=datetime.now(UTC)))
    scheduler.cancel([record.job_id])


def _settle(scheduler: Scheduler, folder: JobFolder, made: JobRecord, guard: Callable[[], None]) -> JobRecord:
    """Record the job, unless this process was stopped after its guard and another has made the folder's job since."""
    record = folder.read_job()
    if record is None:
        return _record(folder, made)
    if record.job_id != made.job_id:
        scheduler.cancel([made.job_id])
        guard()
        raise AmbiguousJob(
            f"{folder.path} has got the job {record.job_id} while {made.job_id} was submitted, which is cancelled again"
        )
    return record


def _look_up(scheduler: Scheduler, folder: JobFolder, intent: Intent, grace: timedelta) -> str | None:
    """The id of the job that the intent may have led to. None: nobody has heard of it for the whole grace period."""
    # A controller that was frozen works off what piled up: its first answer may be older than the submission in its
    # queue. So an intent of long ago is looked up twice as well.
    deadline = max(intent.latest + grace, datetime.now(UTC) + min(grace, _SECOND_LOOK))
    while True:
        ids = {row.job_id for row in scheduler.find(intent.name, intent.first)}
        start = folder.read_start()
        if start and start.job_id and start.started >= intent.first - _SKEW:
            ids.add(start.job_id)
        if len(ids) > 1:
            raise AmbiguousJob(
                f"several jobs are called {intent.name}: {', '.join(sorted(ids))}. One submission made them; cancel "
                f"all but one (scancel <id>), write the id of that one into {folder.job} or remove {folder.intent}"
            )
        if ids:
            return ids.pop()
        left = (deadline - datetime.now(UTC)).total_seconds()
        if left <= 0:
            return None
        time.sleep(min(left, 1.0))


def _same_name(folder: JobFolder, record: Record, name: str) -> Record:
    if record.name != name:
        raise SlurmError(f"{folder.path} belongs to the job {record.name}, not to {name}: give {name} its own folder")
    return record


def _record(folder: JobFolder, record: JobRecord) -> JobRecord:
    folder.write(folder.job, record)
    return record
