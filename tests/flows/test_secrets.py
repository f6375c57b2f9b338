"""No token where others can read it: after a whole run with secrets in the worker's environment and in blocks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from pydantic import SecretStr

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage
from flows.finetune import finetune
from tests.flows.conftest import BLOCK_SECRETS, ENVIRONMENT_SECRETS, HOSTILE, DeployedRun
from tests.flows.surface import Process, api
from trainium.errors import UserError

SECRETS = {**ENVIRONMENT_SECRETS, **BLOCK_SECRETS}


def leaks(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


@pytest.fixture
def job_processes(deployed_run: DeployedRun) -> list[Process]:
    uid = deployed_run.folder.uid
    found = [process for process in deployed_run.seen.values() if process.job_name.startswith(f"{uid}-")]
    stages = {process.job_name.split("-")[1] for process in found}
    assert stages == {"convert", "compile", "train", "export", "evaluate"}
    return found


def test_the_secrets_were_there_to_be_leaked(deployed_run: DeployedRun) -> None:
    """Otherwise every other test here would pass by looking at the wrong thing."""
    engines = [process for process in deployed_run.seen.values() if process.argv[1:] == ("-m", "prefect.engine")]
    assert any(ENVIRONMENT_SECRETS.items() <= process.environment.items() for process in engines)
    hub: Any = HuggingFaceHub.load("secret")
    assert hub.read_token() == BLOCK_SECRETS["hub token"]


def test_no_file_of_the_runs_folder_has_one(deployed_run: DeployedRun) -> None:
    """Scripts, logs, records, configs, and what the local scheduler keeps beside the run."""
    everything = [path for path in deployed_run.folder.path.parent.rglob("*") if path.is_file()]
    names = {path.name for path in everything}
    assert {"script.sh", "launch.sh", "output.log", "run.json", "report.md", "state.json", "train.yaml"} <= names
    assert {path: found for path in everything if (found := leaks(path.read_bytes().decode("latin-1")))} == {}


def test_no_process_was_told_one_on_its_command_line(deployed_run: DeployedRun) -> None:
    assert [process.argv for process in deployed_run.seen.values() if leaks("\0".join(process.argv))] == []


def test_no_process_of_a_job_has_one_in_its_environment(job_processes: list[Process]) -> None:
    for process in job_processes:
        assert leaks("\0".join(process.environment.values())) == [], process.argv
        assert not process.environment.keys() & ENVIRONMENT_SECRETS.keys(), process.argv


def api_texts(deployed_run: DeployedRun) -> Iterator[tuple[str, str]]:
    run = deployed_run.flow_run
    with api() as client:
        yield "flow run", run.model_dump_json()
        for task in client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))):
            yield f"task run {task.name}", task.model_dump_json()
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        for artifact in client.read_artifacts(artifact_filter=wanted):
            yield f"artifact {artifact.key}", artifact.model_dump_json()
        for entry in client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200):
            yield "log", entry.message


def test_the_server_shows_none(deployed_run: DeployedRun) -> None:
    texts = list(api_texts(deployed_run))
    assert {title.split()[0] for title, _ in texts} == {"flow", "task", "artifact", "log"}
    assert [(title, found) for title, text in texts if (found := leaks(text))] == []
    assert leaks(deployed_run.worker_log) == []


async def test_blocks_given_as_objects_are_stored_without_their_secrets(
    prefect_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flow called as a function stores its parameters too; this one is refused at once."""
    token, key_id, key, session = map(SecretStr, BLOCK_SECRETS.values())
    with pytest.raises(UserError, match=r"parallelism\.tensor"):
        await finetune(
            "rehearsal",
            overrides=["parallelism.tensor=3"],
            run_name="refused",
            cluster=LocalCluster(runs=tmp_path),
            toolchain=NeuronToolchain.stand_in(),
            hub=HuggingFaceHub(endpoint="https://hub.invalid", token=token),
            storage=S3Storage(region="r", access_key_id=key_id, secret_access_key=key, session_token=session),
        )
    with api() as client:
        stored = [run for run in client.read_flow_runs() if run.parameters.get("run_name") == "refused"]
        assert len(stored) == 1
        assert "hub.invalid" in json.dumps(stored[0].parameters)
        assert leaks(stored[0].model_dump_json()) == []
    assert "parallelism.tensor" in caplog.text
    assert leaks(caplog.text) == []
    assert {path for path in tmp_path.rglob("*") if path.is_file() and leaks(path.read_text())} == set()


def test_hostile_values_reach_compiling_and_training_unchanged(job_processes: list[Process]) -> None:
    trainers = [
        process for process in job_processes if any("training_orchestrator.py" in word for word in process.argv)
    ]
    for stage in ("compile", "train"):
        found = [process for process in trainers if process.job_name.split("-")[1] == stage]
        assert found, stage
        for process in found:
            assert {name: process.environment.get(name) for name in HOSTILE} == HOSTILE


def test_nothing_of_a_hostile_value_was_run(deployed_run: DeployedRun) -> None:
    assert not list(deployed_run.folder.path.parent.rglob("surface-was-run"))
    assert not Path("surface-was-run").exists()
