"""What Prefect's automations start when a run's own process is gone: cancel its jobs, or schedule it again.

`python -m deployments.register` makes the deployments and the automations; see deployments/automations.py.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from prefect import flow, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Cancelled

from flows.lifecycle import LABEL
from slurm.errors import SchedulerUnreachable
from tasks.cancellation import CANCELLED, cancel_jobs
from tasks.stage import log
from trainium.run.folder import RunFolder

ALIVE_WITHIN = 10.0  # seconds in which a living flow has said that it lives: it looks at its state every 3 s
# A living flow sees within 3 s that it is cancelled.
CANCELLED_WITHIN = 15.0  # seconds in which it has ended
ASK_AGAIN = 2.0  # seconds between two looks
TRIES = 30  # at a scheduler that does not answer; each call has its own time-outs


@flow(name="reap")
async def reap(flow_run_id: UUID) -> list[str]:
    """Cancel the jobs of a cancelled flow run, whether or not its process and its worker still live.

    Harmless when repeated. A flow run that nobody ends within 15 seconds becomes Cancelled.

    Args:
        flow_run_id: The cancelled flow run. One that is not cancelled is left alone.

    Returns:
        The ids of the jobs that were still there.
    """
    async with get_client() as client:
        run = await client.read_flow_run(flow_run_id)
        if not await _is_cancelled(client, run):
            log(f"flow run {run.name} is {_state(run).name}, not cancelled: its jobs are left alone")
            return []
        found = await _cancel_jobs(run)
        run = await _once_not(client, flow_run_id, StateType.CANCELLING, CANCELLED_WITHIN)
        if _state(run).type is not StateType.CANCELLED and await _is_cancelled(client, run):
            # What the flow may have submitted before it saw that it was cancelled.
            found += [job for job in await _cancel_jobs(run) if job not in found]
            message = "Its process was gone; its jobs are cancelled."
            await client.set_flow_run_state(flow_run_id, Cancelled(message=message), force=True)
    return found


@flow(name="recover")
async def recover(flow_run_id: UUID, max_crashes: int = 5) -> str:
    """Schedule a crashed flow run again: finished stages are skipped then, a running job is adopted.

    Args:
        flow_run_id: The crashed flow run.
        max_crashes: At this crash somebody has to look at it, and it stays Crashed. Starting it by hand (Retry in the
            UI) always works.

    Returns:
        What was done, or why nothing was.
    """
    async with get_client() as client:
        # A flow that was wrongly declared dead says that it lives.
        run = await _once_not(client, flow_run_id, StateType.CRASHED, ALIVE_WITHIN)
        said = await _recover(client, run, max_crashes)
    log(said)
    return said


async def _recover(client: PrefectClient, run: FlowRun, max_crashes: int) -> str:
    if _state(run).type is not StateType.CRASHED:
        return f"{run.name} is {_state(run).name}: nothing to recover."
    if await _is_cancelled(client, run):
        found = await _cancel_jobs(run)
        await client.set_flow_run_state(run.id, Cancelled(message="It died while it was being cancelled."), force=True)
        return f"{run.name} died while it was being cancelled: Cancelled. Its jobs: {', '.join(found) or 'none left'}."
    if run.deployment_id is None:
        return f"{run.name} was not started through a deployment: no worker can start it again. Start it as before."
    crashes = _crashes(await client.read_flow_run_states(run.id))
    if crashes >= max_crashes:
        return (
            f"{run.name} has crashed {crashes} times (max_crashes of the automation: {max_crashes}): it stays Crashed. "
            "Find out why; Retry in the UI then starts it again."
        )
    await client.set_flow_run_state(run.id, AwaitingRetry(message=f"Scheduled again after crash number {crashes}."))
    return f"{run.name} is scheduled again after crash number {crashes} (it may crash {max_crashes} times)."


async def _once_not(client: PrefectClient, flow_run_id: UUID, kind: StateType, within: float) -> FlowRun:
    """The flow run once its state is not of this type any more, or after so many seconds."""
    deadline = time.monotonic() + within
    while True:
        run = await client.read_flow_run(flow_run_id)
        if _state(run).type is not kind or time.monotonic() > deadline:
            return run
        await asyncio.sleep(ASK_AGAIN)


async def _cancel_jobs(run: FlowRun) -> list[str]:
    """Whatever the run has in the queue; a scheduler that does not answer is asked again."""
    label = run.labels.get(LABEL)
    if label is None:
        log(f"{run.name} has no run folder: it submitted nothing")
        return []
    folder = RunFolder(Path(str(label)))
    if not folder.path.is_dir():
        log(f"there is no {folder.path} on this machine: the jobs of {run.name} cannot be found from here")
        return []
    if not folder.is_of(str(run.id)):
        log(f"another flow run has taken over what {run.name} was working on: its jobs are left alone")
        return []
    for _ in range(TRIES):
        try:
            return await asyncio.to_thread(cancel_jobs, folder)
        except SchedulerUnreachable as error:
            log(f"{error}; asking again")
            await asyncio.sleep(ASK_AGAIN)
    return await asyncio.to_thread(cancel_jobs, folder)


async def _is_cancelled(client: PrefectClient, run: FlowRun) -> bool:
    """Whether somebody cancelled the run and nobody started it since; Crashed after that is only how it died."""
    if _state(run).type is not StateType.CRASHED:
        return _state(run).type in CANCELLED
    return _before_the_crash(await client.read_flow_run_states(run.id)) in CANCELLED


def _before_the_crash(states: Sequence[State]) -> StateType | None:
    return next((kind for kind in reversed(_kinds(states)) if kind is not StateType.CRASHED), None)


def _crashes(states: Sequence[State]) -> int:
    """How often the run crashed. One that went on Running at once lived, and had only been declared dead.

    (run_count knows nothing of a flow that dies while it is imported, and counts those that lived.)
    """
    kinds = _kinds(states)
    return sum(
        kind is StateType.CRASHED and following is not StateType.RUNNING
        for kind, following in zip(kinds, [*kinds[1:], None], strict=True)
    )


def _kinds(states: Sequence[State]) -> list[StateType]:
    return [state.type for state in sorted(states, key=lambda state: state.timestamp)]


def _state(run: FlowRun) -> State:
    assert run.state is not None  # only a flow run that was made without one has none
    return run.state
