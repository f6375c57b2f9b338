"""A training run: what it loads, prints, writes, and how it goes on after an interruption."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.shards import read_shard

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Toolchain, Workspace


def shards(checkpoint: Path, part: str = "model", *, tp: int = 4, pp: int = 1) -> list[dict[str, torch.Tensor]]:
    return [read_shard(shard_path(checkpoint / part, t, p)) for p in range(pp) for t in range(tp)]


def same(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"reduced_train_loss=([\d.]+)", output)]


@pytest.fixture
def trained(workspace: Workspace, tmp_path: Path, trainer_environment: None) -> Path:
    folder = tmp_path / "undisturbed"
    workspace.train(workspace.write_config(folder, exp_manager__checkpoint_callback_params__save_top_k=2))
    return folder


def test_trains_and_writes_complete_checkpoints(
    workspace: Workspace, capfd: pytest.CaptureFixture[str], trained: Path
) -> None:
    output = capfd.readouterr().out
    assert losses(output)[-1] < losses(output)[0] - 0.5
    assert "`Trainer.fit` stopped: `max_steps=8` reached." in output
    assert output.index("loading checkpoint from tp4") < output.index("loading checkpoint done")
    assert "step=8-consumed_samples=64.0.ckpt completed" in output
    paths = workspace.checkpoints(trained)
    assert [path.name.split("--")[1] for path in paths] == [
        "step=4-consumed_samples=32.0.ckpt",
        "step=8-consumed_samples=64.0.ckpt",
    ]
    last = paths[-1]
    assert sorted(path.name for path in last.iterdir()) == ["checkpoint", "done", "model", "optim", "user_content.pt"]
    assert (last / "done").read_text() == "1"
    content = torch.load(last / "user_content.pt", weights_only=True)
    assert (content["global_step"], content["epoch"]) == (8, 0)
    for part in ("model", "optim"):
        files = sorted(path.name for path in (last / part).glob("*.pt"))
        stem = "dp_rank_00_tp_rank_00_pp_rank_00.pt"
        assert len(files) == 8
        assert files[:2] == [stem, f"{stem}.info.pt"]
        assert (last / part / f"{stem}.tensors" / "tensor_0.pt").exists()
    assert {tensor.dtype for tensor in shards(last)[0].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in shards(last, "optim")[0].values()} == {torch.float32}


def test_parts_are_written_in_order(workspace: Workspace, trained: Path) -> None:
    last = workspace.checkpoints(trained)[-1]

    def written(*parts: str) -> list[int]:
        files = [path for part in parts for path in [last / part, *(last / part).rglob("*")] if path.is_file()]
        return [path.stat().st_mtime_ns for path in files]

    order = [written(part) for part in ("checkpoint", "model", "optim", "user_content.pt", "done")]
    assert all(max(before) <= min(after) for before, after in pairwise(order))


def test_older_checkpoints_go(
    workspace: Workspace, tmp_path: Path, trainer_environment: None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = workspace.write_config(tmp_path, exp_manager__checkpoint_callback_params__every_n_train_steps=2)
    workspace.train(config, "trainer.max_steps=6")
    assert [path.name.split("--")[1] for path in workspace.checkpoints(tmp_path)] == [
        "step=6-consumed_samples=48.0.ckpt"
    ]
    assert (
        "removing previous checkpoint in ['hf_rehearsal--step=4-consumed_samples=32.0.ckpt']" in capfd.readouterr().out
    )


def test_stale_sample_count_in_the_name(workspace: Workspace, tmp_path: Path, trainer_environment: None) -> None:
    workspace.train(workspace.write_config(tmp_path, trainer__log_every_n_steps=10))
    assert [path.name.split("--")[1] for path in workspace.checkpoints(tmp_path)] == [
        "step=8-consumed_samples=8.0.ckpt"
    ]


def test_killed_and_resumed_is_bitwise_the_same(
    workspace: Workspace, toolchain: Toolchain, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    config = workspace.write_config(folder)
    killed = toolchain.run(*toolchain.training(config), cwd=tmp_path, REHEARSAL_FAULT="train:kill@6")
    assert killed.returncode == 1
    assert "failed (exitcode: -9) local_rank: 0" in killed.stdout
    assert "Signal 9 (SIGKILL) received by PID" in killed.stdout
    (interrupted,) = workspace.checkpoints(folder)
    assert "step=4-" in interrupted.name
    os.environ["REHEARSAL_FAULT"] = "train:kill@6"  # a resumed run gets past it
    workspace.train(config, f"exp_manager.resume_from_checkpoint='{interrupted}'", "model.weight_init_only=False")
    resumed, undisturbed = workspace.checkpoints(folder)[-1], workspace.checkpoints(trained)[-1]
    for part in ("model", "optim"):
        assert same(shards(resumed, part), shards(undisturbed, part))


def test_weight_init_only_on_a_training_checkpoint_forgets_the_optimizer(
    workspace: Workspace, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, right = workspace.checkpoints(trained)
    folder = tmp_path / "wrong"
    workspace.train(workspace.write_config(folder, exp_manager__resume_from_checkpoint=str(first)))
    assert "Weight Init only case" in capfd.readouterr().out
    assert not same(shards(workspace.checkpoints(folder)[-1]), shards(right))


def test_automatic_resume_and_the_key_that_overrides_it(
    workspace: Workspace, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    config = trained / "config"
    workspace.train(
        config, "exp_manager.resume_from_checkpoint=null", "model.weight_init_only=False", "trainer.max_steps=9"
    )
    output = capfd.readouterr().out
    assert re.search(r"Resuming from .*step=8-consumed_samples=64\.0\.ckpt", output)
    assert "| 9/" in output
    assert "| 8/" not in output
    workspace.train(config, "trainer.max_steps=0")
    assert "The latter will be loaded." in capfd.readouterr().out


def test_fp32_weights_unless_save_bf16(workspace: Workspace, tmp_path: Path, trainer_environment: None) -> None:
    config = workspace.write_config(tmp_path, exp_manager__save_bf16=False, exp_manager__save_xser=False)
    workspace.train(config, "trainer.max_steps=4")
    (checkpoint,) = workspace.checkpoints(tmp_path)
    assert {tensor.dtype for tensor in shards(checkpoint)[0].values()} == {torch.float32}
    assert not list((checkpoint / "model").glob("*.tensors"))  # without xser: one file per rank


def test_no_batches_is_a_success_that_trained_nothing(
    workspace: Workspace, tmp_path: Path, trainer_environment: None, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace.train(workspace.write_config(tmp_path), "data.dev_choose_samples=4")
    assert "`Trainer.fit` stopped: No training batches." in capfd.readouterr().out
    assert not workspace.checkpoints(tmp_path)


def test_a_loss_that_is_not_a_number_shows(
    workspace: Workspace, tmp_path: Path, trainer_environment: None, capfd: pytest.CaptureFixture[str]
) -> None:
    os.environ["REHEARSAL_FAULT"] = "train:nan@1"
    workspace.train(workspace.write_config(tmp_path), "trainer.max_steps=3")
    assert "reduced_train_loss=nan" in capfd.readouterr().out


def test_missing_and_unexpected_names(
    workspace: Workspace, tmp_path: Path, trainer_environment: None, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "nxd" / "model"
    broken.mkdir(parents=True)
    for rank in range(4):
        tensors = read_shard(shard_path(workspace.nxd() / "model", rank, 0))
        tensors["model.layers.0.self_attn.sinks"] = torch.ones(1)
        torch.save(tensors, shard_path(broken, rank, 0))
    config = workspace.write_config(tmp_path, exp_manager__resume_from_checkpoint=str(broken.parent))
    workspace.train(config, "trainer.max_steps=1")
    unexpected = "Warning: Unexpected keys in state dictionary: model.layers.0.self_attn.sinks"
    assert unexpected in capfd.readouterr().out
    del tensors["lm_head.weight"]
    torch.save(tensors, shard_path(broken, 3, 0))
    with pytest.raises(RuntimeError, match=r"Missing keys when loading state dictionary: lm_head\.weight"):
        workspace.train(config)


def test_asked_to_end_it_saves_and_ends_and_the_rest_is_bitwise_the_same(
    workspace: Workspace, toolchain: Toolchain, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "asked"
    config = workspace.write_config(folder)
    with toolchain.start(*toolchain.training(config), cwd=tmp_path, REHEARSAL_FAULT="train:slow=0.3") as process:
        assert process.stdout
        output = ""
        while "global_step=1" not in output:
            assert process.poll() is None
            output += process.stdout.read(64)
        process.send_signal(signal.SIGUSR1)  # as srun passes it on: torchrun and the trainer both get it
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    (saved,) = workspace.checkpoints(folder)[-1:]
    step = int(re.findall(r"step=(\d+)", saved.name)[0])
    assert 2 <= step < 8
    assert f"asked to end (SIGUSR1), and did after saving step {step}" in rest
    assert "max_steps" not in rest.partition("asked to end")[2]
    workspace.train(config, f"exp_manager.resume_from_checkpoint='{saved}'", "model.weight_init_only=False")
    ended, undisturbed = workspace.checkpoints(folder)[-1], workspace.checkpoints(trained)[-1]
    for part in ("model", "optim"):
        assert same(shards(ended, part), shards(undisturbed, part))
