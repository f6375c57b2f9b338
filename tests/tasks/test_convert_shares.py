"""A conversion that several jobs share: each a part of the ranks, one more for the whole."""

from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain
from slurm.folder import JobFolder
from tasks.context import Run
from tasks.convert import convert
from tasks.jobspecs import RESULT, Site
from trainium.config.recipe import load_recipe
from trainium.errors import StageFailed
from trainium.files import read_json
from trainium.rehearsal.model import write_model
from trainium.run.folder import RunFolder

SHARES = ("convert-share-1", "convert-share-2", "convert-share-3")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    base = tmp_path / "base"
    write_model(base, num_attention_heads=4, num_key_value_heads=4)
    overrides = [f"model.source={base}", "parallelism.tensor=4", "convert.array=3", "convert.workers=2"]
    folder = RunFolder.named(tmp_path / "runs", "r")
    lease = folder.start("", {}, lambda _: [])
    site = Site(
        load_recipe("rehearsal", overrides), folder, LocalCluster(runs=tmp_path / "runs"), NeuronToolchain.stand_in()
    )
    return Run(site, lease)


async def test_every_job_writes_its_ranks_and_the_last_one_proves_and_publishes_the_whole(run: Run) -> None:
    record = await convert.fn(run)
    assert sorted(path.name for path in run.folder.jobs.iterdir()) == ["convert-1", *(f"{s}-1" for s in SHARES)]
    reports = [read_json(run.folder.job(name, 1) / RESULT) for name in (*SHARES, "convert")]
    assert [len(report["files"]) for report in reports] == [1, 1, 2, 4]
    assert record.verified[0].startswith("4 shards, ")
    assert record.facts["verification"]["ok"] is True
    assert len(record.jobs) == 4
    assert [path.name for path in run.places.nxd.iterdir()] == ["model"]
    # Nothing was written twice: the shards are older than the job that published them.
    started = JobFolder(run.folder.job("convert", 1)).read_start()
    assert started is not None
    for shard in (run.places.nxd / "model").iterdir():
        assert shard.stat().st_mtime < started.started.timestamp()


async def test_a_share_that_failed_is_done_again_and_the_others_are_kept(run: Run) -> None:
    run.places.nxd.parent.mkdir(parents=True, exist_ok=True)
    run.places.nxd.write_text("in the way")
    with pytest.raises(StageFailed, match="convert-share-1 failed"):
        await convert.fn(run)
    run.places.nxd.unlink()
    record = await convert.fn(run)
    assert record.facts["verification"]["ok"] is True
    for share in SHARES:
        assert run.folder.attempts(share) == (1, 2)
    assert run.folder.attempts("convert") == (1,)
