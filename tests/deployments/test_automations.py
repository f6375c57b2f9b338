"""What the automations listen to, and that registering them again leaves them as somebody edited them."""

import argparse
from datetime import timedelta
from uuid import uuid4

import pytest
from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from deployments.automations import CANCELLED, CRASHED, MAINTENANCE, SILENT, automations
from deployments.register import _window, register
from tests.deployments.test_prefect_yaml import DEPLOYMENTS

REAP, RECOVER = uuid4(), uuid4()


def trigger_of(automation: AutomationCore) -> EventTrigger:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger


@pytest.fixture
def made() -> dict[str, AutomationCore]:
    return {automation.name: automation for automation in automations(REAP, RECOVER, timedelta(seconds=75))}


def test_they_see_the_runs_of_the_parent_flow_alone(made: dict[str, AutomationCore]) -> None:
    assert made.keys() == {SILENT, CRASHED, CANCELLED}
    for automation in made.values():
        related = trigger_of(automation).match_related
        assert isinstance(related, ResourceSpecification)
        assert related.model_dump() == {"prefect.resource.role": "flow", "prefect.resource.name": ["finetune"]}
        assert trigger_of(automation).for_each == {"prefect.resource.id"}


def test_silence_is_a_crash_unless_the_run_said_goodbye(made: dict[str, AutomationCore]) -> None:
    trigger = trigger_of(made[SILENT])
    assert trigger.posture is Posture.Proactive
    assert trigger.within == timedelta(seconds=75)
    assert trigger.after == {"prefect.flow-run.heartbeat"}
    # Without Cancelling a cancelled run without a worker would crash, and be started again.
    last_words = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelling", "Cancelled", "Crashed")}
    assert last_words | trigger.after <= trigger.expect
    (action,) = made[SILENT].actions
    assert isinstance(action, ChangeFlowRunState)
    assert action.state is StateType.CRASHED
    assert "75 s" in str(action.message)


@pytest.mark.parametrize(
    ("name", "deployment", "events"),
    [
        (CRASHED, RECOVER, {"Crashed"}),
        (CANCELLED, REAP, {"Cancelling", "Cancelled"}),
    ],
)
def test_the_others_start_a_maintenance_flow_with_the_runs_id(
    name: str, deployment: object, events: set[str], made: dict[str, AutomationCore]
) -> None:
    assert trigger_of(made[name]).expect == {f"prefect.flow-run.{event}" for event in events}
    (action,) = made[name].actions
    assert isinstance(action, RunDeployment)
    assert action.deployment_id == deployment
    (flow,) = [flow for flow in MAINTENANCE if (flow.name == "recover") is (name == CRASHED)]
    assert action.parameters is not None
    assert set(flow.parameters.required) <= action.parameters.keys() <= set(flow.parameters.properties)


def test_three_heartbeats_have_to_be_missing_by_default() -> None:
    (silent,) = [automation for automation in automations(REAP, RECOVER) if automation.name == SILENT]
    for deployment in DEPLOYMENTS.values():
        frequency = int(deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert trigger_of(silent).within >= timedelta(seconds=3 * frequency)


@pytest.mark.parametrize("text", ["9", "-90", "nan", "inf", "soon", ""])
def test_a_window_that_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number of seconds from 10"):
        _window(text)


async def test_registering_again_keeps_what_was_edited(prefect_server: str) -> None:
    await register([])
    async with get_client() as client:
        before = {name: await client.read_automations_by_name(name) for name in (SILENT, CRASHED, CANCELLED)}
        assert [len(found) for found in before.values()] == [1, 1, 1]
        await client.pause_automation(before[CRASHED][0].id)
        (edited,) = await client.read_automations_by_name(CRASHED)
        assert not edited.enabled
        deployments = {
            flow.name: await client.read_deployment_by_name(f"{flow.name}/maintenance") for flow in MAINTENANCE
        }
        assert await register([]) == []
        assert await client.read_automations_by_name(CRASHED) == [edited]
        for name, found in deployments.items():
            assert (await client.read_deployment_by_name(f"{name}/maintenance")).id == found.id
        # Other tests use this server, and their killed flows are not to be started again.
        (cancelled,) = await client.read_automations_by_name(CANCELLED)
        await client.pause_automation(cancelled.id)
