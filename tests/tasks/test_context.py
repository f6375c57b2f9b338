"""One watcher per cluster, so that its queue is asked once for all runs of a process."""

import asyncio
from pathlib import Path

from blocks import LocalCluster, SlurmCluster
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
