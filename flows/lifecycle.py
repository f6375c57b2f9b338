"""How a flow lives beside its run folder: heartbeats, cancellation, signals, and what is left when it dies."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prefect import get_client, runtime
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.flows import Flow
from prefect.settings import PREFECT_API_URL

from flows.signals import cancelled_by_signals
from tasks.cancellation import API_TIMEOUT, WATCH_EVERY, cancel_jobs, cancelling_now, watch_own_state
from tasks.listening import current_listeners
from tasks.stage import log
from trainium.run.folder import RunFolder
from trainium.run.lease import Lease

LABEL = "trainium.run-folder"
# How long the end of a run waits for a server that is away, to be shown there. The run folder has it all already.
API_PATIENCE = 600.0  # seconds


class InterruptedByApi(Exception):
    """The flow run was cancelled through the API, and what it was doing has been stopped."""


@asynccontextmanager
async def labelled(folder: RunFolder) -> AsyncIterator[None]:
    """Leave the run folder's path on the flow run, for whoever has to clean up after this process.

    A server that is away gets it as soon as it is back.
    """
    again = None if await _label(folder) else asyncio.create_task(_label_until_done(folder))
    try:
        yield
    finally:
        if again is not None:
            again.cancel()


async def _label_until_done(folder: RunFolder) -> None:
    while not await _label(folder):
        await asyncio.sleep(WATCH_EVERY)


async def _label(folder: RunFolder) -> bool:
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return True
    try:
        async with asyncio.timeout(API_TIMEOUT), get_client() as client:
            await client.update_flow_run_labels(flow_run_id, {LABEL: str(folder.path)})
    except Exception as error:  # whatever the client raises
        log(f"Prefect was not told where the run folder is: {error}")
        return False
    return True


async def cancel_left_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook on_cancellation: cancel what the run still has in the queue.

    The worker calls it in a process of its own when the flow's process is dead already.
    """
    async with get_client() as client:
        labels = (await client.read_flow_run(flow_run.id)).labels
    if LABEL not in labels:
        return
    folder = RunFolder(Path(str(labels[LABEL])))
    if folder.is_of(str(flow_run.id)):  # another flow run may have taken the run over, or made its folder again
        await asyncio.to_thread(cancel_jobs, folder)


@asynccontextmanager
async def kept_alive(lease: Lease) -> AsyncIterator[None]:
    """While inside, the lease has a heartbeat, signals end the flow in order, and so does a cancellation by the API.

    Raises LeaseLost when another process took the run over, or somebody deleted its folder; InterruptedByApi;
    TerminationSignal (Prefect's, for its engine) after SIGTERM or SIGHUP to a run that is not being cancelled. What
    ends by itself, well or not, first waits for a server that is away: Prefect would otherwise never hear of the end.
    """
    main = asyncio.current_task()
    assert main is not None

    async def beat() -> None:
        while True:
            await asyncio.sleep(lease.beat_every)
            # The filesystem may answer again before the job ends; the lease is checked at every submission.
            with suppress(OSError):
                await asyncio.to_thread(lease.beat)

    def stop_with_it(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            main.cancel(str(error))

    heart = asyncio.create_task(beat())
    heart.add_done_callback(stop_with_it)
    watch = asyncio.create_task(watch_own_state(main))
    with cancelled_by_signals(main) as told:
        try:
            try:
                yield
            except Exception:
                await _until_the_api_answers()
                raise
            await _until_the_api_answers()
        except asyncio.CancelledError:
            if heart.done() and not heart.cancelled() and (lost := heart.exception()) is not None:
                main.uncancel()
                raise lost from None
            # From here on without awaiting: a worker cancels by SIGTERM just as this run sees for itself that it is
            # cancelled, and the second of the two would end what the first has begun.
            seen = watch.done() and not watch.cancelled() and watch.exception() is None
            if told.number is None and not seen:
                raise  # Ctrl-C, or whoever runs this flow among other things
            main.uncancel()
            if seen or cancelling_now():
                raise InterruptedByApi from None
            assert told.number is not None
            raise TerminationSignal(told.number) from None
        finally:
            heart.cancel()
            watch.cancel()


async def _until_the_api_answers() -> None:
    """Returns at once where there is no server, or only one of this process, which would not come back."""
    if runtime.flow_run.id is None or PREFECT_API_URL.value() is None:
        return
    until = time.monotonic() + API_PATIENCE
    while not await _api_answers():
        if time.monotonic() > until:
            log(f"Prefect's server has been away for {API_PATIENCE:.0f} s: the run ends without it")
            return
        for listener in current_listeners():
            listener.progress("prefect", "waiting for Prefect's server, to tell it of the end", None)
        await asyncio.sleep(WATCH_EVERY)


async def _api_answers() -> bool:
    try:
        async with asyncio.timeout(API_TIMEOUT), get_client() as client:
            return await client.api_healthcheck() is None
    except TimeoutError:
        return False
