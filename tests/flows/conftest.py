"""One registered surface and one run of a deployment, shared by the tests that look at them from different sides."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from pydantic import SecretStr

from blocks import HuggingFaceHub, NeuronToolchain, S3Storage
from deployments.automations import CANCELLED, CRASHED
from tests.flows.surface import Process, Worker, command, flow_run, reference, start, watched_processes
from trainium.run.folder import RunFolder

# Each one unmistakable in any file: the whole text is looked for, not a pattern of tokens.
ENVIRONMENT_SECRETS = {
    "HF_TOKEN": "hf_environmentTokenOfTheWorker01",
    "HUGGING_FACE_HUB_TOKEN": "hf_olderNameOfTheSameVariable02",
    "AWS_ACCESS_KEY_ID": "AKIAENVIRONMENTKEYID",
    "AWS_SECRET_ACCESS_KEY": "environment/Secret+Access/Key03",
    "AWS_SESSION_TOKEN": "environmentSessionToken04==",
}
BLOCK_SECRETS = {
    "hub token": "hf_tokenOfTheHubBlock05",
    "S3 key id": "AKIABLOCKKEYID06",
    "S3 secret": "block/Secret+Access/Key07",
    "S3 session": "blockSessionToken08==",
}
HOSTILE = {
    "SURFACE_QUOTES": 'it\'s "quoted" `and` \\ back\\slashed',
    "SURFACE_SHELL": "$(touch surface-was-run) ${HOME} $HOME; touch surface-was-run & | > < * ? ~ !! #",
    "SURFACE_LINES": "first\nsecond\ttab\r\n@EXPORTS@\n\nlast ",
    "SURFACE_DASH": "--option=-x",
    "SURFACE_UNICODE": "Gewichte ü 重み 🦝",
    "SURFACE_EMPTY": "",
}


@dataclass(frozen=True)
class Surface:
    """A server that knows what `deployments.register` and `prefect deploy --all` tell it."""

    runs: Path
    deployed: str  # what `prefect deploy` printed


@dataclass(frozen=True)
class DeployedRun:
    """A flow run of finetune/rehearsal that a worker has run to its end."""

    flow_run: FlowRun
    folder: RunFolder
    worker_log: str
    seen: Mapping[tuple[int, tuple[str, ...]], Process]


@pytest.fixture(scope="session")
def surface(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Surface:
    """Everything as the README has it, from a shell. The second deployment's blocks do not exist: it deploys anyway."""
    runs = tmp_path_factory.mktemp("surface") / "runs"
    command("deployments.register", "--runs", str(runs))
    # They would start killed flows again and put flows of their own into the worker; test_interruptions has them.
    with get_client(sync_client=True) as client:
        for name in (CRASHED, CANCELLED):
            (automation,) = client.read_automations_by_name(name)
            client.pause_automation(automation.id)
    return Surface(runs, command("prefect", "--no-prompt", "deploy", "--all"))


@pytest.fixture(scope="session")
def deployed_run(surface: Surface, tmp_path_factory: pytest.TempPathFactory) -> DeployedRun:
    """One nested value overridden, secrets wherever they can be, hostile values in the toolchain's environment."""
    toolchain = NeuronToolchain.stand_in()
    toolchain.environment |= HOSTILE
    toolchain.save("hostile")
    token, key_id, key, session = map(SecretStr, BLOCK_SECRETS.values())
    HuggingFaceHub(endpoint="https://hub.invalid", token=token).save("secret")
    S3Storage(region="us-east-1", access_key_id=key_id, secret_access_key=key, session_token=session).save("secret")
    run_id = start(
        "finetune/rehearsal",
        run_name="deployed",
        overrides={"training": {"max_steps": 25}},
        toolchain=reference("neuron-toolchain/hostile"),
        hub=reference("hugging-face-hub/secret"),
        storage=reference("s3-storage/secret"),
    )
    log = tmp_path_factory.mktemp("worker") / "once.log"
    with watched_processes() as seen, Worker(log, ENVIRONMENT_SECRETS, once=True) as worker:
        worker.process.wait(240)
        text = worker.text()
    return DeployedRun(flow_run(run_id), RunFolder(surface.runs / "deployed"), text, seen)
