"""Which of the checkpoints that training left are complete."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainium.checkpoint.paths import find_shards
from trainium.checkpoint.training import TrainingCheckpoint, last_complete, list_checkpoints, unreadable_parts

NAME = "golden--step=20-consumed_samples=88.0.ckpt"


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """Steps 20 and 100, both complete, and things that are no checkpoints."""
    for name in (NAME, "golden--step=100-consumed_samples=440.ckpt"):
        shutil.copytree(golden / "gqa-trn1-tp8-kv4-fused" / "trained" / NAME, tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "other.ckpt").mkdir()
    return tmp_path


def test_checkpoints_are_listed_by_step(folder: Path) -> None:
    first, second = list_checkpoints(folder, 8)
    assert first == TrainingCheckpoint(folder / NAME, 20, 88.0, True, ())
    assert (second.step, second.consumed_samples, second.complete) == (100, 440.0, True)
    assert last_complete(folder, 8) == second
    assert list_checkpoints(folder / "nowhere") == []
    assert last_complete(folder / "other.ckpt") is None


def _without_done(path: Path) -> None:
    (path / "done").unlink()


def _without_shard(path: Path) -> None:
    (path / "model" / "dp_rank_00_tp_rank_03_pp_rank_00.pt").unlink()


def _without_tensor(path: Path) -> None:
    (path / "model" / "dp_rank_00_tp_rank_05_pp_rank_00.pt.tensors" / "tensor_4.pt").unlink()


def _empty_tensor(path: Path) -> None:
    (path / "model" / "dp_rank_00_tp_rank_05_pp_rank_00.pt.tensors" / "tensor_4.pt").write_bytes(b"")


def _damaged_shard(path: Path) -> None:
    (path / "model" / "dp_rank_00_tp_rank_06_pp_rank_00.pt").write_bytes(b"PK")


def _without_last_shard(path: Path) -> None:
    (path / "model" / "dp_rank_00_tp_rank_07_pp_rank_00.pt").unlink()


def _without_model(path: Path) -> None:
    shutil.rmtree(path / "model")


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (_without_done, "done"),
        (_without_shard, "model/dp_rank_00_tp_rank_03_pp_rank_00.pt"),
        (_without_tensor, "model/dp_rank_00_tp_rank_05_pp_rank_00.pt.tensors/tensor_4.pt"),
        (_empty_tensor, "model/dp_rank_00_tp_rank_05_pp_rank_00.pt.tensors/tensor_4.pt"),
        (_damaged_shard, "model/dp_rank_00_tp_rank_06_pp_rank_00.pt (/"),
        (_without_last_shard, "model/: 7 shards where the run has 8"),
        (_without_model, "model/"),
    ],
)
def test_an_incomplete_one_is_passed_over_and_what_it_lacks_is_named(
    folder: Path, damage: Callable[[Path], None], missing: str
) -> None:
    damage(list_checkpoints(folder)[-1].path)
    last = list_checkpoints(folder, 8)[-1]
    assert not last.complete
    assert len(last.missing) == 1
    assert last.missing[0].startswith(missing)
    found = last_complete(folder, 8)
    assert found is not None
    assert found.step == 20


def test_the_inline_form_is_complete_without_tensor_files(golden: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run--step=5-consumed_samples=10.0.ckpt"
    shutil.copytree(golden / "gqa-trn1-tp8-kv4-fused-pp3" / "nxd", checkpoint)
    (checkpoint / "done").write_text("1")
    assert list_checkpoints(tmp_path, 24)[0].complete
    shards = find_shards(checkpoint / "model")
    assert (shards.tp, shards.pp, shards.missing) == (8, 3, ())


def test_looking_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from trainium.checkpoint.training import last_complete; "
        "assert last_complete(Path(sys.argv[1]), 8).step == 100; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=Path(__file__).parents[3], check=True)


def _shortened(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _zeros(path: Path) -> None:
    """As after a power cut: the size is there, the content is not."""
    path.write_bytes(bytes(path.stat().st_size))


def _without_its_middle(path: Path) -> None:
    """The directory at the end is whole, what it speaks of is not there any more."""
    content = path.read_bytes()
    path.write_bytes(content[:40] + content[len(content) // 2 :])


@pytest.mark.parametrize("damage", [_shortened, _zeros, _without_its_middle])
@pytest.mark.parametrize(
    "name",
    [
        "model/dp_rank_00_tp_rank_06_pp_rank_00.pt",
        "model/dp_rank_00_tp_rank_05_pp_rank_00.pt.tensors/tensor_4.pt",
        "optim/dp_rank_00_tp_rank_01_pp_rank_00.pt",
        "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt",
        "user_content.pt",
    ],
)
def test_a_part_that_cannot_be_read_is_found_without_reading_weights(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    checkpoint = list_checkpoints(folder, 8)[-1]
    shard = checkpoint.path / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    (checkpoint.path / "optim").mkdir()
    for data in ("00", "01"):  # ZeRO-1: a file for every rank of all replicas
        shutil.copy(shard, checkpoint.path / "optim" / f"dp_rank_{data}_tp_rank_01_pp_rank_00.pt")
    assert unreadable_parts(checkpoint.path) == ()
    damage(checkpoint.path / name)
    (problem,) = unreadable_parts(checkpoint.path)
    assert name.partition(".pt")[0] in problem


def test_an_optimizer_may_hold_more_than_tensors(folder: Path) -> None:
    import torch

    checkpoint = list_checkpoints(folder, 8)[-1].path
    (checkpoint / "optim").mkdir()
    torch.save(
        {"groups": [{"lr": 1.0, "path": Path("x")}]}, checkpoint / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    )
    assert unreadable_parts(checkpoint) == ()
