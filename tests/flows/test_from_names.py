"""The promise in one run: a model's name and a dataset's address in, a verified model out."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from pydantic import SecretStr

from blocks import HuggingFaceHub, LocalCluster, S3Storage
from flows.finetune import finetune
from tests.hub_server import Hub, serving
from trainium.errors import UserError
from trainium.rehearsal.model import write_dataset, write_model
from trainium.run.folder import RunFolder

TOKEN, KEY_ID, KEY = "hf_theOneThatMayReadIt", "AKIATHEONE", "theSecretOfTheOne"
BUCKET = "the-bucket"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_model(tmp_path / "model")
    with serving() as hub:
        hub.readers.add(TOKEN)
        files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        hub.add("acme/tiny-llama", files, gated=True)
        yield hub


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[S3Storage]:
    write_dataset(tmp_path / "rows")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    block = S3Storage(
        region="us-east-1",
        endpoint_url=f"http://{host}:{port}",
        access_key_id=SecretStr(KEY_ID),
        secret_access_key=SecretStr(KEY),
    )
    client = boto3.client(
        "s3",
        region_name=block.region,
        endpoint_url=block.endpoint_url,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=KEY,
    )
    client.create_bucket(Bucket=BUCKET)
    for name in ("train.jsonl", "validation.jsonl"):
        client.upload_file(str(tmp_path / "rows" / name), BUCKET, f"sft/{name}")
    yield block
    server.stop()


def overrides() -> list[str]:
    return [
        "model.source=acme/tiny-llama",
        f"dataset.source=s3://{BUCKET}/sft/",
        "training.max_steps=4",
        "training.checkpoint_every=2",
        "training.warmup_steps=1",
        "training.log_every=1",
        "evaluate.rows=4",
        "evaluate.samples=1",
    ]


async def test_a_gated_model_and_a_private_dataset_become_a_verified_model(
    hub: Hub, storage: S3Storage, tmp_path: Path, prefect_server: str
) -> None:
    block = HuggingFaceHub(endpoint=hub.endpoint, token=SecretStr(TOKEN))
    cluster = LocalCluster(runs=tmp_path / "runs")
    await finetune("rehearsal", overrides(), run_name="r", cluster=cluster, hub=block, storage=storage)
    folder = RunFolder.named(cluster.runs, "r")
    model, dataset, export = (folder.record(stage) for stage in ("model", "dataset", "export"))
    assert model is not None
    assert dataset is not None
    assert export is not None
    commit = hub.repositories["acme/tiny-llama"].revisions["main"]
    assert model.facts["commit"] == commit
    assert f"acme/tiny-llama at {commit[:12]} equal to the hub's digests" in model.verified[0]
    assert "train.jsonl compared by md5" in dataset.verified
    assert export.outputs[0].path == str(folder.path / "export")
    secrets = [TOKEN.encode(), KEY_ID.encode(), KEY.encode()]
    for path in folder.path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(secret in content for secret in secrets), path


async def test_without_the_token_it_is_refused_before_anything_is_submitted(
    hub: Hub, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    block, cluster = HuggingFaceHub(endpoint=hub.endpoint), LocalCluster(runs=tmp_path / "runs")
    with pytest.raises(UserError, match="acme/tiny-llama"):
        await finetune("rehearsal", overrides(), run_name="r", cluster=cluster, hub=block)
    assert not list(RunFolder.named(cluster.runs, "r").jobs.glob("*"))
