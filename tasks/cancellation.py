"""Telling a cancelled run from an interrupted one.

Only a cancelled run takes its jobs with it. A flow that dies for any other reason (a worker stopped, a reboot, Ctrl-C)
leaves them running for the next attempt to adopt.
"""

import asyncio

from prefect import get_client, runtime
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings
from prefect.states import Running

from blocks import recall
from slurm.folder import JobFolder, JobRecord
from slurm.scheduler import Scheduler
from slurm.submission import cancel
from tasks.stage import log
from trainium.run.folder import RunFolder

WATCH_EVERY = 3.0  # seconds between two looks at the state of our own flow run
API_TIMEOUT = 10.0  # seconds that an answer may take which somebody waits for

CANCELLED = (StateType.CANCELLING, StateType.CANCELLED)
# What others say of a run whose heartbeats they missed, or that they tried to start a second time.
DECLARED_DEAD = (StateType.CRASHED, StateType.FAILED, StateType.SCHEDULED)


def cancelling_now() -> bool:
    """Whether the flow run is being cancelled, by the API's word.

    Synchronous on purpose: a TaskGroup may cancel the task a second time while it cleans up. An API that does not
    answer at once means no: a hiccup must not kill a job of days.
    """
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return False
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": API_TIMEOUT}) as client,
        ):
            state = client.read_flow_run(flow_run_id).state
    except Exception:  # whatever the client raises, the answer is the same
        return False
    return state is not None and state.type in CANCELLED


async def watch_own_state(main: "asyncio.Task[object]") -> None:
    """Cancel `main` once its flow run is cancelled: nobody signals a run that is inside another process's event loop.

    A run that is declared dead while it lives says that it does. After an outage of Prefect's server, say: its clock
    has run on, the heartbeats have not arrived.
    """
    while True:
        await asyncio.sleep(WATCH_EVERY)
        state = await _own_state()
        if state is None:
            continue
        if state.type in CANCELLED:
            main.cancel("the flow run was cancelled")
            return
        if state.type in DECLARED_DEAD:
            await _say_alive(state)


async def _own_state() -> State | None:
    """None while nobody knows. Through the flow's own client: making one every few seconds costs more than asking."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return None
    try:
        async with asyncio.timeout(API_TIMEOUT), get_client() as client:
            return (await client.read_flow_run(flow_run_id)).state
    except Exception:  # away, restarting, or with an empty database: the run goes on
        return None


async def _say_alive(declared: State) -> None:
    log(f"this flow run was declared {declared.name} while it lives (its heartbeats were not heard): Running again")
    flow_run_id = runtime.flow_run.id
    message = f"Declared {declared.name}, but the process lives."
    try:
        async with asyncio.timeout(API_TIMEOUT), get_client() as client:
            await client.set_flow_run_state(flow_run_id, Running(message=message), force=True)
    except Exception as error:  # the next look tries again
        log(f"Prefect was not told: {error}")
        return
    if get_current_settings().flows.heartbeat_frequency is not None:
        # Silence counts after a heartbeat only: should this process die before its next one, nobody would notice.
        emit_event("prefect.flow-run.heartbeat", resource={"prefect.resource.id": f"prefect.flow-run.{flow_run_id}"})


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
