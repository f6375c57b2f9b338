"""A job that fails: the run says what, where and why, keeps what is finished, and goes on from there."""

import subprocess
import sys
from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain
from flows.finetune import finetune
from slurm.folder import JobFolder
from trainium.errors import StageFailed
from trainium.files import read_json
from trainium.run.folder import RunFolder

SMALL = [
    "training.max_steps=4",
    "training.checkpoint_every=2",
    "training.warmup_steps=1",
    "training.log_every=1",
    "evaluate.rows=4",
    "evaluate.samples=1",
]


def broken(fault: str) -> NeuronToolchain:
    toolchain = NeuronToolchain.stand_in()
    toolchain.environment["REHEARSAL_FAULT"] = fault
    return toolchain


async def start(runs: Path, toolchain: NeuronToolchain | None = None, *overrides: str) -> RunFolder:
    values = [*SMALL, *overrides]
    await finetune("rehearsal", values, run_name="r", cluster=LocalCluster(runs=runs), toolchain=toolchain)
    return RunFolder.named(runs, "r")


def job_ids(folder: RunFolder) -> dict[str, str]:
    return {path.parent.name: read_json(path)["job_id"] for path in folder.jobs.glob("*/job.json")}


@pytest.fixture
def folder(tmp_path: Path, prefect_server: str) -> RunFolder:
    return RunFolder.named(tmp_path, "r")


async def test_training_that_dies_goes_on_from_its_last_complete_checkpoint(folder: RunFolder) -> None:
    with pytest.raises(StageFailed) as failure:
        await start(folder.path.parent, broken("train:exit@3"), "attempts.ambiguous=0")
    log = JobFolder(folder.job("train", 1)).log
    message = str(failure.value)
    assert message.startswith(f"train failed: job {job_ids(folder)['train-1']}")
    assert str(log) in message
    assert "train:exit@3" in message  # the exception, out of its last lines
    assert any("train:exit@3" in str(finding) for finding in read_json(folder.job("train", 1) / "diagnosis.json"))
    assert folder.record("train") is None
    before = job_ids(folder)
    assert set(before) == {"convert-1", "compile-1", "train-1"}

    await start(folder.path.parent)
    after = job_ids(folder)
    assert before.items() <= after.items()  # nothing that was finished was done again
    assert set(after) - set(before) == {"train-2", "export-1", "evaluate-1"}
    record = folder.record("train")
    assert record is not None
    assert record.facts["step"] == 4
    resumed = (folder.config / "train-resume-1.yaml").read_text()
    assert "--step=2-" in resumed
    assert "weight_init_only: false" in resumed
    assert [step for step, _ in record.facts["losses"]] == [0, 1, 2, 3]
    assert "| train | " + after["train-2"] in folder.report.read_text()


async def test_a_graph_that_fails_to_compile_stops_the_run_although_its_job_may_exit_well(folder: RunFolder) -> None:
    with pytest.raises(StageFailed, match="compile failed: job") as failure:
        await start(folder.path.parent, broken("compile:graph-fails"))
    assert "log: " in str(failure.value)
    assert "train-1" not in job_ids(folder)
    assert folder.record("compile") is None


def test_the_command_ends_with_1_and_says_everything_in_one_message(folder: RunFolder) -> None:
    broken("compile:graph-fails").save("graph-fails", overwrite=True)
    trainium = Path(sys.executable).with_name("trainium")
    command = [str(trainium), "run", "rehearsal", *SMALL, "--run", "r", "--runs", str(folder.path.parent)]
    done = subprocess.run([*command, "--toolchain", "graph-fails"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("failed: compile failed: job " + job_ids(folder)["compile-1"])
    assert str(JobFolder(folder.job("compile", 1)).log) in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("✓")][-1] == "convert"


async def test_a_loss_that_is_not_a_number_is_a_failure(folder: RunFolder) -> None:
    with pytest.raises(StageFailed, match="train failed"):
        await start(folder.path.parent, broken("train:nan@2"))
    assert folder.record("train") is None
    assert "export-1" not in job_ids(folder)
