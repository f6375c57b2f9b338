"""The same rehearsal through a real Slurm: nothing but the cluster differs."""

from pathlib import Path

import pytest

from blocks import SlurmCluster
from flows.finetune import finetune
from slurm.folder import JobFolder
from tasks.stage import STAGES
from tests.slurm_lab.lab import SlurmLab
from trainium.run.folder import RunFolder

SMALL = [
    "training.max_steps=6",
    "training.checkpoint_every=3",
    "training.warmup_steps=1",
    "training.log_every=1",
    "evaluate.rows=4",
    "evaluate.samples=1",
    "resources.compile.cpus_per_task=128",
    "resources.train.cpus_per_task=128",
]


async def rehearse(lab: SlurmLab, runs: Path, *overrides: str) -> RunFolder:
    cluster = SlurmCluster(runs=runs, slurm_conf=lab.conf)
    await finetune("rehearsal", [*SMALL, *overrides], run_name="r", cluster=cluster)
    return RunFolder.named(runs, "r")


def check(folder: RunFolder) -> None:
    for stage in STAGES:
        record = folder.record(stage)
        assert record is not None
        for note in record.jobs:
            ended = JobFolder(folder.job(stage, note.attempt)).read_exit()
            assert ended is not None
            assert (ended.job_id, ended.code) == (note.id, 0)
    train = folder.record("train")
    assert train is not None
    losses = [loss for _, loss in train.facts["losses"]]
    assert losses[-1] < losses[0]


@pytest.mark.slurm
async def test_two_nodes_train_in_step_without_accounting(slurm: SlurmLab, tmp_path: Path, prefect_server: str) -> None:
    folder = await rehearse(slurm, tmp_path, "resources.nodes=2")
    check(folder)
    started = JobFolder(folder.job("train", 1)).read_start()
    assert started is not None
    assert started.nodes == "n[1-2]"
    log = JobFolder(folder.job("train", 1)).log.read_text()
    assert "node 0 of 2" in log
    assert "node 1 of 2" in log


@pytest.mark.slurm
async def test_one_node_with_accounting(slurm_with_accounting: SlurmLab, tmp_path: Path, prefect_server: str) -> None:
    folder = await rehearse(slurm_with_accounting, tmp_path)
    check(folder)
    ids = [note.id for stage in STAGES for note in (folder.record(stage) or pytest.fail(stage)).jobs]
    rows = slurm_with_accounting.run("sacct", "-n", "-X", "-P", "-o", "jobid,state,ncpus", check=True).stdout.split()
    states = {row.split("|")[0]: row.split("|")[1] for row in rows}
    assert {states[job_id] for job_id in ids} == {"COMPLETED"}
