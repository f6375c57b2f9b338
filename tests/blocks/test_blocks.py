"""Blocks as the Prefect UI keeps them: register, save, load, pass by reference; and tokens read with care."""

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from pydantic import SecretStr, ValidationError

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage, SlurmCluster, recall, remember
from blocks.sources import TokenFileError
from deployments.register import BLOCK_TYPES, register
from slurm.cluster import SlurmScheduler
from slurm.local import LocalScheduler
from slurm.scheduler import Timing

SECRET = "hf_notForAnybodysEyes"

# Every field away from its default: what is lost on the way to the server and back shows.
EXAMPLES: tuple[Block, ...] = (
    SlurmCluster(
        runs=Path("/fsx/it's runs"),
        python=Path("/fsx/v/bin/python"),
        slurm_conf=Path("/opt/slurm/etc/slurm.conf"),
        adopt_within=timedelta(seconds=90),
        stale_after=timedelta(seconds=45),
        timing=Timing(exit_scan=2, queue=15, early=5, accounting=60, confirm=10, lost=300, settle=1, calls=12),
    ),
    LocalCluster(
        runs=Path("/tmp/runs"),
        python=Path("/usr/bin/python3"),
        adopt_within=timedelta(seconds=5),
        stale_after=timedelta(seconds=7),
    ),
    NeuronToolchain(
        examples=Path("/fsx/nxdt/examples"),
        activate=Path("/fsx/env/bin/activate"),
        environment={"NAME": "a 'value'\n$(with) \"everything\""},
        rehearsal=True,
    ),
    HuggingFaceHub(endpoint="https://hub", token=SecretStr(SECRET), token_file=Path("/home/me/token")),
    S3Storage(
        region="us-east-1",
        endpoint_url="https://s3",
        access_key_id=SecretStr("id"),
        secret_access_key=SecretStr(SECRET),
        session_token=SecretStr("session"),
    ),
)

every_block = pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: type(block).__name__)


@pytest.fixture(scope="module")
def saved(prefect_server: str) -> dict[type[Block], str]:
    """The names under which `register` saved the examples."""
    import asyncio

    name = f"example-{uuid4().hex[:8]}"
    made = asyncio.run(register([(name, block) for block in EXAMPLES]))
    assert made[: len(EXAMPLES)] == [f"{type(block).get_block_type_slug()}/{name}" for block in EXAMPLES]
    return dict.fromkeys(map(type, EXAMPLES), name)


def load(kind: type[Block], name: str) -> Any:
    return kind.load(name)  # typed as if it might be a coroutine


def own(block: Block) -> dict[str, Any]:
    """The block's fields, secrets in the open."""
    values = ((name, getattr(block, name)) for name in type(block).model_fields)
    return {name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in values}


def test_the_examples_are_all_the_types() -> None:
    assert tuple(map(type, EXAMPLES)) == BLOCK_TYPES
    for block in EXAMPLES:
        assert all(value is not None for value in own(block).values())


@every_block
def test_a_saved_block_comes_back_equal(saved: dict[type[Block], str], block: Block) -> None:
    assert own(load(type(block), saved[type(block)])) == own(block)


@every_block
def test_a_block_is_passed_by_reference(saved: dict[type[Block], str], block: Block) -> None:
    kind: Any = type(block)

    def take(block: Any) -> None: ...

    take.__annotations__["block"] = kind
    slug = f"{kind.get_block_type_slug()}/{saved[kind]}"
    given = flow(take).validate_parameters({"block": {"$ref": {"block_document_slug": slug}}})["block"]
    assert type(given) is kind
    assert own(given) == own(block)


@every_block
def test_a_required_field_keeps_references_working(block: Block) -> None:
    """prefect 3.9.1 cannot pass a block by reference when every field of it has a default."""
    assert any(field.is_required() for field in type(block).model_fields.values())


@every_block
def test_the_form_explains_the_block_and_each_field(block: Block) -> None:
    assert type(block)._description
    for field in type(block).model_fields.values():
        assert field.description
        assert field.description.endswith(".")


async def test_what_somebody_edited_in_the_ui_stays(saved: dict[type[Block], str]) -> None:
    name = f"edited-{uuid4().hex[:8]}"
    assert await register([(name, LocalCluster(runs=Path("/mine")))]) == [f"local-cluster/{name}"]
    assert await register([(name, LocalCluster(runs=Path("/theirs")))]) == []
    kept: Any = await LocalCluster.aload(name)
    assert kept.runs == Path("/mine")
    async with get_client() as client:
        assert (await client.read_work_pool("trainium")).type == "process"


@every_block
def test_no_secret_in_what_a_block_shows(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").warning("%s %r %s", block, block, block.model_dump())
    shown = f"{block} {block!r} {block.model_dump()} {block.model_dump_json()} {caplog.text}"
    assert SECRET not in shown


def test_a_loaded_token_is_as_secret_as_a_given_one(saved: dict[type[Block], str]) -> None:
    hub = load(HuggingFaceHub, saved[HuggingFaceHub])
    assert isinstance(hub.token, SecretStr)
    assert SECRET not in f"{hub} {hub!r} {hub.model_dump_json()}"


# The toolchain


def test_the_stand_in_ships_with_the_project() -> None:
    block = NeuronToolchain.stand_in()
    assert block.rehearsal
    assert block.activate is not None
    assert block.activate.is_file()
    converter = Path("checkpoint_converter_scripts") / "checkpoint_converter.py"
    for name in ("train_setup.sh", "train.sh", "training_orchestrator.py", converter):
        assert (block.examples / name).is_file(), name
    for name in ("torchrun", "neuron_parallel_compile", "neuron-monitor", "neuron-ls", "neuronx-cc", "python"):
        assert os.access(block.activate.parent / "bin" / name, os.X_OK), name
    assert block.environment == {"REHEARSAL_PYTHON": sys.executable}


def test_the_installed_toolchain_is_where_the_tutorial_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    block = NeuronToolchain.installed()
    assert block.examples == Path("/home/me/neuronx-distributed-training/examples")
    assert block.activate == Path("/home/me/env/bin/activate")
    assert not block.rehearsal


def test_paths_are_the_ones_seen_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in another folder, and a worker has its own."""
    monkeypatch.chdir(tmp_path)
    toolchain = NeuronToolchain(examples=Path("examples"), activate=Path("bin/activate"))
    assert (toolchain.examples, toolchain.activate) == (tmp_path / "examples", tmp_path / "bin" / "activate")
    for cluster in (LocalCluster(runs=Path("runs")), SlurmCluster(runs=Path("runs"))):
        assert cluster.runs == tmp_path / "runs"
        assert cluster.python == Path(sys.executable)


def test_the_environment_is_text() -> None:
    with pytest.raises(ValidationError, match="environment"):
        NeuronToolchain.model_validate({"examples": "/e", "environment": {"LIST": ["no"]}})


# Clusters


def test_each_cluster_has_its_scheduler(tmp_path: Path) -> None:
    assert isinstance(SlurmCluster(runs=tmp_path).scheduler(), SlurmScheduler)
    assert isinstance(LocalCluster(runs=tmp_path).scheduler(), LocalScheduler)


@pytest.mark.parametrize("cluster", EXAMPLES[:2], ids=lambda block: type(block).__name__)
def test_a_cluster_is_found_again_from_the_run_folder_alone(
    cluster: SlurmCluster | LocalCluster, tmp_path: Path
) -> None:
    remember(cluster, tmp_path / "cluster.json")
    found = recall(tmp_path / "cluster.json")
    assert type(found) is type(cluster)
    assert own(found) == own(cluster)


# The hub's token


def hub(path: Path) -> HuggingFaceHub:
    return HuggingFaceHub(endpoint="https://hub", token_file=path)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_a_private_token_file_is_read_when_it_is_needed(token_file: Path) -> None:
    block = hub(token_file)
    assert block.read_token() == SECRET
    token_file.write_text("another\n")
    assert block.read_token() == "another"
    assert SECRET not in repr(block)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_token_file_that_others_can_reach_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(TokenFileError, match=f"chmod 600 {token_file}") as refused:
        hub(token_file).read_token()
    assert SECRET not in str(refused.value)


def test_a_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=f"{tmp_path}/none cannot be read"):
        hub(tmp_path / "none").read_token()


def test_a_folder_is_no_token_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(TokenFileError, match="cannot be read"):
        hub(tmp_path).read_token()


def test_without_a_file_the_token_is_the_blocks_or_none() -> None:
    assert HuggingFaceHub(endpoint="https://hub", token=SecretStr(SECRET)).read_token() == SECRET
    assert HuggingFaceHub(endpoint="https://hub").read_token() is None
