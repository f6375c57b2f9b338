"""prefect.yaml, because Prefect takes a mistake in it without a word and does something else.

(prefect 3.9.1: unknown keys, parameters and job variables are dropped or stored; nobody looks whether a block exists.)
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

# Private, but the only list of the keys that this version of Prefect reads.
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.workers.process import ProcessVariables
from pydantic import BaseModel

from deployments.register import BLOCK_TYPES, WORK_POOL, documents
from trainium.config.overrides import RecipeOverrides
from trainium.config.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FILE = ROOT / "prefect.yaml"


class _Strict(yaml.SafeLoader):
    """YAML that refuses a key given twice; the plain loader keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.value != "<<"]
        doubled = {key for key in keys if keys.count(key) > 1}
        assert not doubled, f"{node.start_mark}: {doubled} more than once"
        return super().construct_mapping(node, deep)


CONFIG: dict[str, Any] = yaml.load(FILE.read_text(), _Strict)
DEPLOYMENTS: dict[str, dict[str, Any]] = {item["name"]: item for item in CONFIG["deployments"]}


def keys(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def flow_of(deployment: Mapping[str, Any]) -> Flow[..., Any]:
    path, _, name = deployment["entrypoint"].partition(":")
    assert (ROOT / path).is_file()
    flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(flow, Flow)
    return flow


def references(value: Any) -> Iterator[str]:
    """Slugs of the blocks that a value refers to, however deep."""
    if isinstance(value, dict):
        if "$ref" in value:
            assert value.keys() == {"$ref"}
            assert value["$ref"].keys() == {"block_document_slug"}
            yield value["$ref"]["block_document_slug"]
        else:
            for item in value.values():
                yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


every_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=list(DEPLOYMENTS))


def test_the_deployments_of_the_readme_are_there() -> None:
    assert {f"{flow_of(item).name}/{name}" for name, item in DEPLOYMENTS.items()} == {
        "finetune/rehearsal",
        "finetune/tanuki-8b-sft",
    }
    assert len(CONFIG["deployments"]) == len(DEPLOYMENTS)


def test_prefect_reads_every_key_at_the_top() -> None:
    definitions = {"definitions"}  # holds anchors; Prefect does not read it, and need not
    assert CONFIG.keys() - definitions <= keys(PrefectYamlModel)
    PrefectYamlModel.model_validate(CONFIG)


def test_the_version_is_the_pinned_one() -> None:
    pinned = re.search(r"^prefect==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert CONFIG["prefect-version"] == pinned[1]


@every_deployment
def test_prefect_reads_every_key_of_a_deployment(deployment: dict[str, Any]) -> None:
    assert deployment.keys() <= keys(DeploymentConfig)
    assert deployment["work_pool"].keys() <= keys(WorkPoolConfig)
    assert deployment["work_pool"].get("job_variables", {}).keys() <= keys(ProcessVariables)
    assert "schedule" not in deployment, "one way to write schedules: the list"
    for schedule in deployment.get("schedules", ()):
        assert schedule.keys() <= keys(RawScheduleConfig)
    limit = deployment.get("concurrency_limit")
    assert not isinstance(limit, dict) or limit.keys() <= keys(ConcurrencyLimitSpec)


@every_deployment
def test_the_pool_is_the_registered_one_and_job_variables_have_the_right_types(deployment: dict[str, Any]) -> None:
    assert deployment["work_pool"]["name"] == WORK_POOL
    variables = deployment["work_pool"]["job_variables"]
    ProcessVariables.model_validate(variables, strict=True)
    # Otherwise a worker that is stopped takes the flow with it at its next line of log.
    assert variables["stream_output"] is False
    # Prefect refuses less than 30 s; without heartbeats nobody ever notices a dead flow.
    assert int(variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) >= 30


@every_deployment
def test_the_flow_takes_every_parameter(deployment: dict[str, Any]) -> None:
    schema = flow_of(deployment).parameters
    assert deployment["parameters"].keys() <= schema.properties.keys()
    assert set(schema.required) <= deployment["parameters"].keys()


@every_deployment
def test_the_recipe_exists_and_takes_the_overrides(deployment: dict[str, Any]) -> None:
    overrides = deployment["parameters"].get("overrides") or []
    dotlist = RecipeOverrides.model_validate(overrides).as_dotlist() if isinstance(overrides, dict) else overrides
    load_recipe(deployment["parameters"]["recipe"], dotlist)


@every_deployment
def test_every_block_is_one_that_register_makes(deployment: dict[str, Any]) -> None:
    some = Path("/somewhere")
    made = documents(some, slurm_runs=some, nxdt_examples=some, nxdt_activate=some)
    known = {f"{block.get_block_type_slug()}/{name}" for name, block in made}
    assert set(references(deployment["parameters"])) <= known


@every_deployment
def test_every_block_is_of_a_type_that_its_parameter_takes(deployment: dict[str, Any]) -> None:
    properties = flow_of(deployment).parameters.properties
    titles = {block.get_block_type_slug(): block.__name__ for block in BLOCK_TYPES}
    for name, value in deployment["parameters"].items():
        for slug in references(value):
            assert f"/{titles[slug.partition('/')[0]]}'" in str(properties[name]), (name, slug)


@every_deployment
def test_nothing_but_references_to_blocks_is_resolved_when_deploying(deployment: dict[str, Any]) -> None:
    """`{{ prefect.blocks… }}` would store the block's secrets in plain text, `{{ prefect.variables… }}` may be ''."""
    (step,) = deployment["build"]
    looked_up = set(step["deployments.references.look_up"]) - {"id"}
    resolved = re.findall(r"\{\{(.*?)\}\}", str(deployment))
    assert {text.strip() for text in resolved} == {f"blocks.{name}" for name in looked_up}


@every_deployment
def test_a_deployment_can_be_told_from_others(deployment: dict[str, Any]) -> None:
    assert "trainium" in deployment["tags"]
    assert deployment["description"]


def test_the_cluster_run_has_a_weekly_schedule_that_is_not_active() -> None:
    (schedule,) = DEPLOYMENTS["tanuki-8b-sft"]["schedules"]
    assert schedule["active"] is False
    assert schedule["slug"] == "weekly"
    cron = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
    minute, hour, day, month, weekday = cron.cron.split()
    assert minute.isdigit()
    assert hour.isdigit()
    assert (day, month) == ("*", "*")
    assert weekday.isdigit()
    assert "schedules" not in DEPLOYMENTS["rehearsal"]
