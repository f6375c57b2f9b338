"""Telling a cancelled run from an interrupted one.

Only a cancelled run takes its jobs with it. A flow that dies for any other reason (a worker stopped, a reboot, Ctrl-C)
leaves them running for the next attempt to adopt.
"""

import asyncio

from prefect import get_client, runtime
from prefect.client.schemas.objects import StateType

from blocks import recall
from slurm.folder import JobFolder, JobRecord
from slurm.scheduler import Scheduler
from slurm.submission import cancel
from trainium.run.folder import RunFolder

WATCH_EVERY = 3.0  # seconds between two looks at the state of our own flow run


def cancelling_now() -> bool:
    """Whether the flow run is being cancelled, by the API's word.

    Synchronous on purpose: a TaskGroup may cancel the task a second time while it cleans up. An API that does not
    answer means no: a hiccup must not kill a job of days.
    """
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
    except Exception:  # whatever the client raises, the answer is the same
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


async def interrupt_when_cancelled(main: "asyncio.Task[object]") -> None:
    """Nobody signals a run inside another process's event loop when it is cancelled through the API: look for it."""
    while True:
        await asyncio.sleep(WATCH_EVERY)
        if await asyncio.to_thread(cancelling_now):
            main.cancel("the flow run was cancelled")
            return


def cancel_jobs(run: RunFolder) -> list[str]:
    """Cancel whatever this run still has in the queue, and return the ids. Harmless when repeated.

    Works from the run folder alone, so also when the flow process and Prefect's database are gone.
    """
    if not run.cluster.exists():
        return []
    scheduler = recall(run.cluster).scheduler()
    cancelled = []
    for path in sorted(run.jobs.glob("*/intent.json")):
        folder = JobFolder(path.parent)
        record = folder.read_job() or _unrecorded(scheduler, folder)
        if record is not None and folder.read_exit() is None:
            cancel(scheduler, folder)
            cancelled.append(record.job_id)
    return cancelled


def _unrecorded(scheduler: Scheduler, folder: JobFolder) -> JobRecord | None:
    """The job of a flow that died between submitting it and writing down its id, found by its name; now recorded."""
    intent = folder.read_intent()
    rows = scheduler.find(intent.name, intent.first) if intent else []
    alive = [row for row in rows if not row.state.is_final]
    if intent is None or not alive:
        return None
    record = JobRecord(alive[0].job_id, intent.name, intent.first, adopted=True)
    folder.write(folder.job, record)
    return record
