"""A stage that is started again: work that is lost is done again, work that stands is not, and a job runs once."""

import json
from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain
from slurm.spec import JobSpec
from tasks.context import Run
from tasks.jobs import output, run_job
from tasks.jobspecs import RESULT, Site
from tasks.stage import StageResult, run_stage
from trainium.config.recipe import load_recipe
from trainium.errors import StageFailed
from trainium.run.folder import RunFolder
from trainium.run.records import StageRecord


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = RunFolder.named(tmp_path, "r")
    lease = folder.start("", {}, lambda _: [])
    site = Site(load_recipe("rehearsal"), folder, LocalCluster(runs=tmp_path), NeuronToolchain.stand_in())
    return Run(site, lease)


async def convert(run: Run, shell: str = "mkdir -p made && echo weights > made/shard") -> StageRecord:
    """A stage of one job, which writes two files in the run folder: what it made, and its report."""

    async def work() -> StageResult:
        command = f"cd {run.folder.path} && {shell} && echo '{{}}' > \"$OLDPWD\"/{RESULT}"
        job = await run_job(
            run,
            "convert",
            lambda path: JobSpec(payload=("bash", "-c", command), environment="project", cwd=str(path)),
        )
        facts = job.report()
        return StageResult(outputs=(output(run.folder.path / "made", (job,)),), jobs=(job.note,), facts=facts)

    return await run_stage(run, "convert", {}, work)


async def test_work_that_stands_is_not_done_again(run: Run) -> None:
    assert (await convert(run)).jobs == (await convert(run)).jobs
    assert run.folder.attempts("convert") == (1,)


@pytest.mark.parametrize("damage", ["deleted", "shortened", "one more"])
async def test_an_output_that_is_lost_or_changed_is_made_again_by_a_new_job(run: Run, damage: str) -> None:
    first, shard = await convert(run), run.folder.path / "made" / "shard"
    if damage == "deleted":
        shard.unlink()
        shard.parent.rmdir()
    elif damage == "shortened":
        shard.write_text("we")
    else:
        (shard.parent / "stray").touch()
    second = await convert(run)
    assert shard.read_text() == "weights\n"
    assert [job.attempt for job in second.jobs] == [2]
    assert first.jobs[0].id != second.jobs[0].id
    assert (await convert(run)).jobs == second.jobs  # and stands again


async def test_a_damaged_record_is_written_again_from_the_job_that_did_the_work(run: Run) -> None:
    first = await convert(run)
    for damage in ("", "{", '"text"', "[]", "{}", "\0" * 100, '{"stage": "convert", "outputs": 3}'):
        (run.folder.path / "stages" / "convert.json").write_text(damage)
        again = await convert(run)
        assert again.jobs == first.jobs
        assert json.loads((run.folder.path / "stages" / "convert.json").read_text())["inputs"] == first.inputs
    assert run.folder.attempts("convert") == (1,)


@pytest.mark.parametrize("lost", ["made", "result"])
async def test_work_lost_before_its_record_was_written_fails_once_and_is_then_done_again(run: Run, lost: str) -> None:
    await convert(run)
    (run.folder.path / "stages" / "convert.json").unlink()
    if lost == "made":
        (run.folder.path / "made" / "shard").unlink()
        (run.folder.path / "made").rmdir()
    else:
        (run.folder.job("convert", 1) / RESULT).write_text("")
    with pytest.raises(StageFailed, match=r"is missing or damaged\. Starting the run again does the work again"):
        await convert(run)
    assert [job.attempt for job in (await convert(run)).jobs] == [2]
