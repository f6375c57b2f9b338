"""When a task is worth another try by itself: a network that hiccuped, never a wrong input or a failed job."""

from typing import Any

from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from trainium.errors import TransientError


async def is_transient(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry_condition_fn."""
    return isinstance(await state.aresult(raise_on_failure=False), TransientError)


TRANSIENT: Any = {"retries": 4, "retry_delay_seconds": [5, 15, 60, 180], "retry_condition_fn": is_transient}
