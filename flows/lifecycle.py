"""How a flow lives beside its run folder: heartbeats, cancellation, and what is left when it dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prefect import get_client, runtime
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from tasks.cancellation import cancel_jobs, interrupt_when_cancelled
from trainium.run.folder import RunFolder
from trainium.run.lease import HEARTBEAT_EVERY, Lease

LABEL = "trainium.run-folder"


class InterruptedByApi(Exception):
    """The flow run was cancelled through the API, and what it was doing has been stopped."""


async def label_run(folder: RunFolder) -> None:
    """Leave the run folder's path on the flow run, for whoever has to clean up after this process."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is not None:
        async with get_client() as client:
            await client.update_flow_run_labels(flow_run_id, {LABEL: str(folder.path)})


async def cancel_left_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook on_cancellation: cancel what the run still has in the queue.

    The worker calls it in a process of its own when the flow's process is dead already.
    """
    async with get_client() as client:
        labels = (await client.read_flow_run(flow_run.id)).labels
    if LABEL in labels:
        await asyncio.to_thread(cancel_jobs, RunFolder(Path(str(labels[LABEL]))))


@asynccontextmanager
async def kept_alive(lease: Lease) -> AsyncIterator[None]:
    """While inside, the lease has a heartbeat, and a cancellation through the API raises InterruptedByApi.

    Raises LeaseLost when another process took the run over, or somebody deleted its folder.
    """
    main = asyncio.current_task()
    assert main is not None

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY)
            # A full disk may have room again before the job ends; the lease is checked at every submission.
            with suppress(OSError):
                await asyncio.to_thread(lease.beat)

    def stop_with_it(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            main.cancel(str(error))

    heart = asyncio.create_task(beat())
    heart.add_done_callback(stop_with_it)
    watch = asyncio.create_task(interrupt_when_cancelled(main))
    try:
        yield
    except asyncio.CancelledError:
        if heart.done() and not heart.cancelled() and (lost := heart.exception()) is not None:
            main.uncancel()
            raise lost from None
        if not watch.done() or watch.exception() is not None:
            raise  # a signal, or whoever runs this flow among other things
        main.uncancel()
        raise InterruptedByApi from None
    finally:
        heart.cancel()
        watch.cancel()
