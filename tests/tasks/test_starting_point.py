"""Where attempts at training start, also when the flow that submitted one has died."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm.folder import Intent, JobFolder
from tasks.starting_point import DECISION, began_at, note_divergence, position_after, starting_point
from trainium.config.nxdt import ResumePoint
from trainium.files import read_json

GOLDEN = Path(__file__).parents[1] / "golden" / "gqa-trn1-tp8-kv4-fused" / "trained"
SHARDS = 8


def save(run: Path, step: int) -> Path:
    path = run / "experiment" / "checkpoints" / f"r--step={step}-consumed_samples={step * 8}.0.ckpt"
    shutil.copytree(next(GOLDEN.glob("*.ckpt")), path)
    return path


def start(tmp_path: Path, attempt: int) -> tuple[str, ResumePoint | None]:
    return starting_point(
        tmp_path / "jobs" / f"train-{attempt}", tmp_path / "experiment" / "checkpoints", shards=SHARDS, max_steps=100
    )


def submit(tmp_path: Path, attempt: int) -> None:
    folder, now = JobFolder(tmp_path / "jobs" / f"train-{attempt}"), datetime.now(UTC)
    folder.write(folder.intent, Intent("name", now, now))


def test_the_first_attempt_starts_from_the_converted_weights_whatever_there_is(tmp_path: Path) -> None:
    save(tmp_path, 50)
    assert start(tmp_path, 1) == ("train", None)


def test_a_later_attempt_goes_on_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    assert start(tmp_path, 2) == ("train-again-1", None)
    first, second = save(tmp_path, 20), save(tmp_path, 50)
    assert start(tmp_path, 3) == ("train-resume-2", ResumePoint(second))
    (second / "done").unlink()
    assert start(tmp_path, 3) == ("train-resume-2", ResumePoint(first))
    assert not second.exists()
    assert (
        tmp_path / "experiment" / "set-aside" / "train-3" / second.name / "checkpoint"
    ).exists()  # moved, not deleted


def test_a_checkpoint_of_the_last_step_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    save(tmp_path, 100)
    assert start(tmp_path, 2) == ("train-again-1", None)
    before = save(tmp_path, 50)
    assert start(tmp_path, 2) == ("train-resume-1", ResumePoint(before))


def test_what_was_saved_after_the_loss_was_lost_is_not_gone_on_from(tmp_path: Path) -> None:
    sound = save(tmp_path, 20)
    save(tmp_path, 50)
    losses = [(0, 5.0), (10, 4.0), (20, 3.0), (30, float("nan")), (40, float("nan"))]
    note_divergence(tmp_path / "jobs" / "train-1", losses)
    assert start(tmp_path, 2) == ("train-resume-1", ResumePoint(sound))
    note_divergence(tmp_path / "jobs" / "train-2", [(20, float("inf"))])
    assert start(tmp_path, 3) == ("train-again-2", None)


@pytest.mark.parametrize("before", [(), (20,)])
def test_an_attempt_that_is_adopted_is_described_as_it_was_submitted(tmp_path: Path, before: tuple[int, ...]) -> None:
    for step in before:
        save(tmp_path, step)
    submitted = start(tmp_path, 2)
    submit(tmp_path, 2)
    newest = save(tmp_path, 50)  # by the job itself, while nobody watched
    assert start(tmp_path, 2) == submitted
    assert start(tmp_path, 3) == ("train-resume-2", ResumePoint(newest))


def test_a_checkpoint_that_cannot_be_read_is_set_aside_with_the_reason(tmp_path: Path) -> None:
    first, second = save(tmp_path, 20), save(tmp_path, 50)
    shard = second / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert start(tmp_path, 2) == ("train-resume-1", ResumePoint(first))
    decision = read_json(tmp_path / "jobs" / "train-2" / DECISION)
    assert (decision["step"], list(decision["set_aside"])) == (20, [second.name])
    assert shard.name in decision["set_aside"][second.name]
    assert (tmp_path / "experiment" / "set-aside" / "train-2" / second.name / "done").exists()


def test_where_an_attempt_began_and_where_the_next_one_would(tmp_path: Path) -> None:
    jobs, checkpoints = tmp_path / "jobs", tmp_path / "experiment" / "checkpoints"

    def after(attempt: int) -> int:
        return position_after(jobs / f"train-{attempt}", checkpoints, shards=SHARDS, max_steps=100)

    assert (began_at(jobs / "train-1"), after(1)) == (0, 0)
    save(tmp_path, 20)
    incomplete = save(tmp_path, 50)
    (incomplete / "done").unlink()
    assert after(1) == 20
    assert incomplete.exists()  # asking moves nothing
    start(tmp_path, 2)
    assert began_at(jobs / "train-2") == 20
