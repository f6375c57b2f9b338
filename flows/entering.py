"""How a flow comes to have its run: at once, when another start is done with it, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flows.lifecycle import InterruptedByApi
from tasks.cancellation import cancelling_now
from tasks.listening import current_listeners
from tasks.stage import log
from trainium.run.lease import Contest, Lease, RunBusy, Standing


@asynccontextmanager
async def entered(start: Callable[[], Lease], contest: Contest, *, wait: bool) -> AsyncIterator[Lease]:
    """The run's lease, for as long as the block runs.

    While another living process has it: RunBusy, or with `wait` until that one is done or dead. One that has been
    silent is first watched for the stale time. Raises InterruptedByApi when the flow run is cancelled meanwhile.
    """
    lease = await entered_lease(start, contest, wait=wait)
    try:
        yield lease
    finally:
        lease.release()  # one file, and nothing to await: a second cancellation would leave the lease behind


async def entered_lease(start: Callable[[], Lease], contest: Contest, *, wait: bool) -> Lease:
    said = ""
    while True:
        try:
            return start()
        except RunBusy as busy:
            if busy.seen.standing is Standing.ALIVE and not wait:
                raise
            who = busy.seen.holder or "somebody"
        if await asyncio.to_thread(cancelling_now):
            raise InterruptedByApi
        text = f"{who} works on this run; waiting until it is done or dead" if wait else f"looking whether {who} lives"
        if text != said:
            said = text
            log(text)
            for listener in current_listeners():
                listener.progress("run", text, None)
        await asyncio.sleep(contest.look_every)
