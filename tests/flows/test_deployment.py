"""finetune/rehearsal as a person with the Prefect UI runs it: real server, real worker, real jobs."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact, TaskRun
from prefect.exceptions import PrefectHTTPStatusError

from flows.lifecycle import LABEL
from tasks.stage import STAGES
from tests.flows.conftest import DeployedRun, Surface
from tests.flows.surface import ROOT, api, command, deployment, start
from trainium.config.recipe import difference, load_recipe

JOBS = ("convert", "compile", "train", "export", "evaluate")


@pytest.fixture(scope="module")
def artifacts(deployed_run: DeployedRun) -> list[Artifact]:
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[deployed_run.flow_run.id]))
    with api() as client:
        return client.read_artifacts(artifact_filter=wanted)


@pytest.fixture(scope="module")
def task_runs(deployed_run: DeployedRun) -> list[TaskRun]:
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[deployed_run.flow_run.id]))
    with api() as client:
        return client.read_task_runs(flow_run_filter=wanted)


def of_key(artifacts: list[Artifact], key: str) -> Any:
    (found,) = [artifact for artifact in artifacts if artifact.key == key]
    return found.data


def test_both_deployments_are_there_whether_or_not_their_blocks_are(surface: Surface) -> None:
    assert "finetune/rehearsal" in surface.deployed
    rehearsal, tanuki = deployment("finetune/rehearsal"), deployment("finetune/tanuki-8b-sft")
    for found in (rehearsal, tanuki):
        assert found.work_pool_name == "trainium"
        assert found.enforce_parameter_schema is True
        # Workers start elsewhere; imports and `deployments/recipes` need the repository.
        assert found.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    assert [(schedule.slug, schedule.active) for schedule in tanuki.schedules] == [("weekly", False)]
    assert rehearsal.schedules == []


def test_the_form_shows_the_blocks_that_are_there_as_chosen(surface: Surface) -> None:
    with api() as client:
        ids = {
            slug: str(client.read_block_document_by_name("rehearsal", slug).id)
            for slug in ("local-cluster", "neuron-toolchain")
        }
    chosen = deployment("finetune/rehearsal").parameters
    assert chosen["cluster"] == {"$ref": {"block_document_id": ids["local-cluster"]}}
    assert chosen["toolchain"] == {"$ref": {"block_document_id": ids["neuron-toolchain"]}}
    later = deployment("finetune/tanuki-8b-sft").parameters  # nobody has registered these
    assert later["cluster"] == {"$ref": {"block_document_slug": "slurm-cluster/main"}}


def test_registering_again_changes_nothing(surface: Surface, tmp_path: Path) -> None:
    told = command("deployments.register", "--runs", str(tmp_path / "elsewhere"))
    assert "nothing new" in told


def test_the_form_shows_every_section_of_the_recipe(surface: Surface) -> None:
    schema = deployment("finetune/rehearsal").parameter_openapi_schema
    sections = schema["definitions"]["RecipeOverrides"]["properties"]
    assert {"model", "parallelism", "dataset", "training", "compile", "convert", "export", "evaluate", "resources"} <= (
        sections.keys()
    )
    assert schema["definitions"]["TrainingOverrides"]["properties"]["max_steps"]["description"]


def test_it_completes(deployed_run: DeployedRun) -> None:
    state = deployed_run.flow_run.state
    assert state is not None
    assert state.is_completed(), f"{state!r}\n{deployed_run.worker_log}"
    assert deployed_run.flow_run.labels[LABEL] == str(deployed_run.folder.path)


def test_the_one_value_changed_and_its_neighbours_kept_the_recipes(deployed_run: DeployedRun) -> None:
    assert difference(load_recipe("rehearsal"), load_recipe(deployed_run.folder.recipe)) == [
        "training.max_steps: 50 → 25"
    ]
    record = deployed_run.folder.record("train")
    assert record is not None
    assert record.facts["step"] == 25


def test_every_stage_left_a_record_and_the_report_names_its_job(deployed_run: DeployedRun) -> None:
    report = deployed_run.folder.report.read_text()
    for stage in STAGES:
        record = deployed_run.folder.record(stage)
        assert record is not None, stage
        assert record.verified
        assert bool(record.jobs) is (stage in JOBS)
        for job in record.jobs:
            assert job.id in report
    assert (deployed_run.folder.path / "export" / "model.safetensors").exists()


def test_one_task_run_per_stage(deployed_run: DeployedRun, task_runs: list[TaskRun]) -> None:
    assert sorted(run.name for run in task_runs) == sorted([*STAGES, "toolchain probe"])
    assert all(run.state is not None and run.state.is_completed() for run in task_runs)


def test_a_table_per_stage_says_what_was_verified(deployed_run: DeployedRun, artifacts: list[Artifact]) -> None:
    for stage in STAGES:
        (artifact,) = [found for found in artifacts if found.key == f"{stage}-table"]
        assert artifact.type == "table"
        rows = json.loads(str(artifact.data))
        assert rows
        assert all(row.keys() == rows[0].keys() for row in rows)
        record = deployed_run.folder.record(stage)
        assert record is not None
        assert record.verified[0] in str(artifact.description)


def test_keys_are_such_as_the_ui_takes(artifacts: list[Artifact]) -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+", artifact.key or "") for artifact in artifacts)


def test_the_bar_of_training_ends_at_the_end(artifacts: list[Artifact]) -> None:
    assert of_key(artifacts, "train-progress") == 100


def test_the_report_and_the_paths_are_in_the_ui(deployed_run: DeployedRun, artifacts: list[Artifact]) -> None:
    assert of_key(artifacts, "report") == deployed_run.folder.report.read_text()
    (export,) = [artifact for artifact in artifacts if artifact.key == "export-table"]
    assert str(deployed_run.folder.path / "export") in str(export.description)


def test_the_loss_curve_is_an_image_inside_the_markdown(artifacts: list[Artifact]) -> None:
    match = re.fullmatch(r"!\[[^]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", of_key(artifacts, "train-loss"))
    assert match is not None
    assert base64.b64decode(match[1]).startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"training": {"max_stepz": 3}}, ("overrides.training", "max_stepz")),
        ({"training": {"max_steps": 0}}, ("overrides.training.max_steps", "minimum of 1")),
        ({"training": {"precision": "fp8"}}, ("overrides.training.precision", "fp8")),
        ({"trainin": {"max_steps": 3}}, ("overrides", "trainin")),
    ],
)
def test_a_wrong_value_is_refused_by_the_api_with_the_fields_name(
    surface: Surface, overrides: dict[str, Any], told: tuple[str, str]
) -> None:
    with pytest.raises(PrefectHTTPStatusError) as refused:
        start("finetune/rehearsal", overrides=overrides)
    assert refused.value.response.status_code == 409
    assert all(word in refused.value.response.text for word in told), refused.value.response.text
