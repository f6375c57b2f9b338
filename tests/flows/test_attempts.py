"""A training that is interrupted goes on by itself, and ends with what an undisturbed one ends with, bit for bit.

Only one test needs the whole flow; the others go no further than the training, and need no Prefect.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blocks import LocalCluster, NeuronToolchain
from flows.finetune import finetune
from slurm.folder import JobFolder
from tasks.context import Run
from tasks.convert import convert
from tasks.dataset import prepare_dataset
from tasks.jobspecs import Site
from tasks.model import fetch_model
from tasks.train import train
from tests.flows.surface import job_processes, until
from trainium.config.recipe import load_recipe
from trainium.errors import StageFailed
from trainium.files import read_json
from trainium.run.folder import RunFolder

SMALL = [
    "training.max_steps=8",
    "training.checkpoint_every=2",
    "training.warmup_steps=1",
    "training.log_every=1",
    "compile.mode=jit",
    "evaluate.rows=4",
    "evaluate.samples=1",
]
PATIENCE = 120.0  # seconds


def toolchain(fault: str = "") -> NeuronToolchain:
    made = NeuronToolchain.stand_in()
    made.environment["REHEARSAL_FAULT"] = fault
    return made


async def start(runs: Path, name: str, fault: str = "", *overrides: str) -> RunFolder:
    """A start of the run, as far as the training."""
    folder = RunFolder.named(runs, name)
    recipe = load_recipe("rehearsal", [*SMALL, *overrides])
    lease = folder.start("", {}, lambda _: [])
    run = Run(Site(recipe, folder, LocalCluster(runs=runs), toolchain(fault)), lease)
    try:
        for stage in (fetch_model, prepare_dataset, convert, train):
            await stage.fn(run)
    finally:
        lease.release()
    return folder


def training(folder: RunFolder) -> Mapping[str, Any]:
    record = folder.record("train")
    assert record is not None
    return record.facts


def weights(folder: RunFolder) -> dict[str, bytes]:
    """Every file of the last checkpoint's weights and optimizer."""
    checkpoint = Path(training(folder)["checkpoint"])
    files = [path for part in ("model", "optim") for path in (checkpoint / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


def decisions(folder: RunFolder) -> list[bool | None]:
    return [(entry.get("then") or {}).get("again") for entry in folder.ended_attempts("train")]


async def until_step(job: JobFolder, step: int) -> None:
    """Until the job's log has come to this step."""
    text = f"global_step={step}."
    await asyncio.to_thread(until, text, lambda: job.log.exists() and text in job.log.read_text(), PATIENCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return asyncio.run(start(tmp_path_factory.mktemp("runs"), "undisturbed"))


async def test_a_trainer_that_is_killed_resumes_by_itself(
    undisturbed: RunFolder, prefect_server: str, tmp_path: Path
) -> None:
    cluster, broken = LocalCluster(runs=tmp_path), toolchain("train:kill@5")
    await finetune("rehearsal", SMALL, run_name="killed", cluster=cluster, toolchain=broken)
    folder = RunFolder.named(tmp_path, "killed")
    assert decisions(folder) == [True, None]
    facts = training(folder)
    assert [step for step, _ in facts["losses"]] == list(range(8))
    assert facts["losses"] == training(undisturbed)["losses"]
    assert weights(folder) == weights(undisturbed)
    assert (facts["attempts"], facts["repeated_steps"]) == (2, 1)  # the step after the checkpoint of step 4
    assert training(undisturbed)["attempts"] == 1

    resumed = (folder.config / "train-resume-1.yaml").read_text()
    assert "--step=4-" in resumed
    assert "weight_init_only: false" in resumed
    report = folder.report.read_text()
    assert "2 attempts; steps that were trained more than once, by the logs: 1" in report
    assert "## Attempts that failed" in report


async def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_gone_on_from(
    undisturbed: RunFolder, tmp_path: Path
) -> None:
    """Whoever looks only at the marker `done` would load the newest."""
    with pytest.raises(StageFailed):
        await start(tmp_path, "damaged", "train:exit@5", "attempts.ambiguous=0")
    folder = RunFolder.named(tmp_path, "damaged")
    newest = next((folder.path / "experiment" / "checkpoints").glob("*--step=4-*"))
    shard = next((newest / "optim").rglob("tensor_3.pt"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    folder = await start(tmp_path, "damaged")
    assert read_json(folder.job("train", 2) / "starting-point.json")["step"] == 2
    assert (folder.path / "experiment" / "set-aside" / "train-2" / newest.name / "done").exists()
    assert training(folder)["losses"] == training(undisturbed)["losses"]
    assert weights(folder) == weights(undisturbed)
    assert training(folder)["repeated_steps"] == 3


async def test_the_notice_before_the_time_limit_costs_no_step(undisturbed: RunFolder, tmp_path: Path) -> None:
    """The signal itself is sent by hand here: when a time limit is near depends on how fast this machine is."""
    waiting = asyncio.create_task(start(tmp_path, "noticed", "train:slow=0.5"))
    folder = RunFolder.named(tmp_path, "noticed")
    job = JobFolder(folder.job("train", 1))
    await until_step(job, 2)
    script = min(process.pid for process in job_processes(folder.uid) if process.argv[-1] == str(job.script))
    os.kill(script, signal.SIGUSR1)
    await waiting
    ended = job.read_exit()
    assert ended is not None
    assert (ended.code, ended.signal) == (1, signal.SIGUSR1)
    assert decisions(folder) == [True, None]
    assert "time" in folder.ended_attempts("train")[0]["then"]["why"]
    assert training(folder)["losses"] == training(undisturbed)["losses"]
    assert weights(folder) == weights(undisturbed)
    assert (training(folder)["attempts"], training(folder)["repeated_steps"]) == (2, 0)


async def test_a_time_limit_without_a_checkpoint_stops(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="before it had saved a checkpoint after step 0"):
        await start(tmp_path, "slow", "train:slow=600", "resources.train.time=00:00:04")
    assert decisions(RunFolder.named(tmp_path, "slow")) == [False]


async def test_a_failure_that_would_come_again_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="no new attempt by itself: the same would happen again") as failure:
        await start(tmp_path, "broken", "train:nonsense")
    assert "'train:nonsense' is no fault" in str(failure.value)
    folder = RunFolder.named(tmp_path, "broken")
    assert decisions(folder) == [False]
    assert "the same would happen again" in folder.report.read_text()


async def test_a_training_cancelled_from_outside_goes_on_when_the_run_is_started_again(
    undisturbed: RunFolder, tmp_path: Path
) -> None:
    starting = asyncio.create_task(start(tmp_path, "cancelled", "train:slow=0.5"))
    folder = RunFolder.named(tmp_path, "cancelled")
    job = JobFolder(folder.job("train", 1))
    await until_step(job, 3)
    record = job.read_job()
    assert record is not None
    await asyncio.to_thread(LocalCluster(runs=tmp_path).scheduler().cancel, [record.job_id])
    with pytest.raises(StageFailed, match="cancelled from outside, which is somebody's decision"):
        await starting
    assert folder.attempts("train") == (1,)
    folder = await start(tmp_path, "cancelled")
    assert folder.attempts("train") == (1, 2)
    assert read_json(folder.job("train", 2) / "starting-point.json")["step"] == 2
    assert training(folder)["losses"] == training(undisturbed)["losses"]
    assert weights(folder) == weights(undisturbed)
