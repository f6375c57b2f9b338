"""Prefect's side of recovery: who notices that a run's process is gone, and what is done then.

| automation | when | does |
|---|---|---|
| trainium: silent runs crash | a run's heartbeats stop | the run becomes Crashed |
| trainium: crashed runs are recovered | a run crashes | flow `recover` schedules it again, a few times at most |
| trainium: cancelled runs are reaped | a run is cancelled | flow `reap` cancels the jobs it left in the queue |

The two flows run through deployments of the same work pool. What is edited in the UI stays as it is edited.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.utilities.callables import parameter_schema

from flows.finetune import finetune
from flows.maintenance import reap, recover

NAME = "maintenance"  # of both deployments
ROOT = Path(__file__).parents[1]
MAINTENANCE: tuple[Flow[..., Any], ...] = (reap, recover)

SILENT, CRASHED, CANCELLED = (
    "trainium: silent runs crash",
    "trainium: crashed runs are recovered",
    "trainium: cancelled runs are reaped",
)
# A heartbeat is sent every 30 s (prefect.yaml); three in a row have to be missing.
SILENT_AFTER = timedelta(seconds=90)

_RUN_ID = {"__prefect_kind": "jinja", "template": "{{ event.resource.id | replace('prefect.flow-run.', '') }}"}
# A cancelled run that falls silent is not crashed: it would be started again.
_LAST_WORDS = ("Completed", "Failed", "Cancelling", "Cancelled", "Crashed", "Scheduled", "AwaitingRetry", "Paused")


def automations(reap_id: UUID, recover_id: UUID, silent_after: timedelta = SILENT_AFTER) -> list[AutomationCore]:
    """The three of them, for the ids of the two maintenance deployments."""
    heartbeat = "prefect.flow-run.heartbeat"
    return [
        AutomationCore(
            name=SILENT,
            description=f"A {finetune.name} run whose heartbeats stop for {silent_after.total_seconds():.0f} s is "
            "Crashed. A run that lives says so a moment later and is Running again.",
            trigger=EventTrigger(
                after={heartbeat},
                expect={heartbeat, *(f"prefect.flow-run.{word}" for word in _LAST_WORDS)},
                posture=Posture.Proactive,
                within=silent_after,
                **_OUR_RUNS,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED,
                    message=f"No heartbeat for {silent_after.total_seconds():.0f} s: its process is gone.",
                )
            ],
        ),
        AutomationCore(
            name=CRASHED,
            description="Schedules a crashed run again (finished stages are skipped, a running job is adopted). "
            "max_crashes: at this crash it stays Crashed.",
            trigger=EventTrigger(expect={"prefect.flow-run.Crashed"}, posture=Posture.Reactive, **_OUR_RUNS),
            actions=[_run(recover_id, max_crashes=5)],
        ),
        AutomationCore(
            name=CANCELLED,
            description="Cancels the jobs of a cancelled run, also when its process and its worker are gone.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Cancelling", "prefect.flow-run.Cancelled"},
                posture=Posture.Reactive,
                **_OUR_RUNS,
            ),
            actions=[_run(reap_id)],
        ),
    ]


_OUR_RUNS: dict[str, Any] = {
    "match": {"prefect.resource.id": "prefect.flow-run.*"},
    "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": [finetune.name]},
    "for_each": {"prefect.resource.id"},
    "threshold": 1,
}


def _run(deployment_id: UUID, **parameters: Any) -> RunDeployment:
    return RunDeployment(
        source="selected", deployment_id=deployment_id, parameters={"flow_run_id": _RUN_ID, **parameters}
    )


async def deploy_maintenance(client: PrefectClient, work_pool: str) -> tuple[UUID, UUID]:
    """Make or renew the deployments reap/maintenance and recover/maintenance; returns their ids."""
    reap_id, recover_id = [
        await client.create_deployment(
            await client.create_flow_from_name(found.name),
            NAME,
            description=(found.fn.__doc__ or "").partition("\n")[0],
            tags=["trainium", NAME],
            work_pool_name=work_pool,
            entrypoint=f"flows/maintenance.py:{found.name}",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
            parameter_openapi_schema=parameter_schema(found.fn).model_dump(),
            enforce_parameter_schema=True,
            # The same reason as in prefect.yaml: piped output ends a flow whose worker is gone.
            job_variables={"stream_output": False},
        )
        for found in MAINTENANCE
    ]
    return reap_id, recover_id


async def register_automations(client: PrefectClient, wanted: list[AutomationCore]) -> list[str]:
    """Make those that are not there yet, and return their names. Whoever edited one in the UI keeps it."""
    made = []
    for automation in wanted:
        if not await client.read_automations_by_name(automation.name):
            await client.create_automation(automation)
            made.append(automation.name)
    return made
