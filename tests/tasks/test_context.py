"""One watcher per cluster, so that its queue is asked once for all runs of a process."""

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from blocks import LocalCluster, SlurmCluster
from slurm.folder import JobFolder, JobRecord
from tasks.context import watcher_of


async def test_runs_on_one_cluster_share_a_watcher(tmp_path: Path) -> None:
    first = watcher_of(LocalCluster(runs=tmp_path))
    assert watcher_of(LocalCluster(runs=tmp_path)) is first
    assert watcher_of(LocalCluster(runs=tmp_path / "elsewhere")) is not first
    slurm = watcher_of(SlurmCluster(runs=tmp_path))
    assert watcher_of(SlurmCluster(runs=tmp_path / "elsewhere")) is slurm
    assert watcher_of(SlurmCluster(runs=tmp_path, slurm_conf=Path("/another/slurm.conf"))) is not slurm


def test_another_event_loop_has_its_own(tmp_path: Path) -> None:
    async def mine() -> int:
        return id(watcher_of(LocalCluster(runs=tmp_path)))

    async def both() -> tuple[int, int]:
        watcher = watcher_of(LocalCluster(runs=tmp_path))
        return id(watcher), await asyncio.to_thread(asyncio.run, mine())

    here, there = asyncio.run(both())
    assert here != there


async def test_processes_share_what_they_asked_beside_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\n")  # no job is in the queue any more
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    folder = JobFolder(tmp_path / "runs" / "first" / "jobs" / "train-1")
    folder.write(folder.job, JobRecord("7", "n", now := datetime.now(UTC)))
    record = {"job_id": "7", "restart_count": 0, "node": "n1", "nodes": "n1", "code": 0, "signal": None}
    folder.exit.write_text(json.dumps(record | {"started": now.isoformat(), "ended": now.isoformat()}))
    watcher = watcher_of(SlurmCluster(runs=tmp_path / "runs"))
    assert (await watcher.wait(folder, lambda status: None)).succeeded
    assert len(list((tmp_path / "runs").glob(".scheduler-*/queue"))) == 1
