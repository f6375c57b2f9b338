"""Proofs that find what is wrong, and say nothing about what is right."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainium.checkpoint.compare import compare_hf
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.shards import read_shard
from trainium.checkpoint.verify import verify_nxd

MakeModel = Callable[..., Path]
LAYOUT = Layout(tp=4, kv_replicator=2)


def test_a_good_checkpoint_verifies_and_counts(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    report = to_nxd(source, tmp_path / "nxd", LAYOUT)
    verification = verify_nxd(source, tmp_path / "nxd", LAYOUT)
    assert verification.ok
    assert (verification.shards, verification.tensors, verification.bytes) == (4, report.tensors, report.bytes)
    assert verification.copies == 3 * 5  # norms of two layers and the last, in all but the first rank
    assert json.loads(json.dumps(verification.to_dict()))["ok"] is True


def test_a_changed_lost_or_added_tensor_is_found(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    to_nxd(source, tmp_path / "nxd", LAYOUT)
    path = tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    shard = read_shard(path)
    shard["model.norm.weight"][3] += 1
    del shard["lm_head.weight"]
    shard["extra"] = torch.ones(1)
    shard["model.layers.0.mlp.down_proj.weight"] = shard["model.layers.0.mlp.down_proj.weight"].float()
    torch.save(shard, path)
    verification = verify_nxd(source, tmp_path / "nxd", LAYOUT)
    found = {(problem.where, problem.tensor): problem.problem for problem in verification.problems}
    assert found == {
        (path.name, "model.norm.weight"): "differs from its slice of the source by up to 1",
        (path.name, "lm_head.weight"): "is missing",
        (path.name, "extra"): "should not be here",
        (path.name, "model.layers.0.mlp.down_proj.weight"): "is float32 [16, 6] instead of bfloat16 [16, 6]",
    }


def test_copies_that_drifted_apart_stop_the_export_unless_allowed(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    to_nxd(source, tmp_path / "nxd", LAYOUT)
    path = tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    shard = read_shard(path)
    shard["model.norm.weight"] += 0.5
    torch.save(shard, path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight differs between ranks.*tp rank 2, pp rank 0"):
        to_hf(tmp_path / "nxd", tmp_path / "out", source / "config.json", LAYOUT)
    report = to_hf(tmp_path / "nxd", tmp_path / "out", source / "config.json", LAYOUT, allow_differing_copies=True)
    assert [(copy.tensor, copy.tp_rank) for copy in report.differing_copies] == [("model.norm.weight", 2)]
    assert compare_hf(source, tmp_path / "out").equal


def test_nan_is_equal_to_itself_bit_by_bit(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    state = load_file(source / "model.safetensors")
    state["model.norm.weight"][:] = float("nan")
    save_file(state, source / "model.safetensors")
    to_nxd(source, tmp_path / "nxd", LAYOUT)
    assert verify_nxd(source, tmp_path / "nxd", LAYOUT).ok


def test_models_are_compared_tensor_by_tensor(make_model: MakeModel) -> None:
    first, second = make_model("a"), make_model("b")
    state = load_file(second / "model.safetensors")
    state["model.norm.weight"][0] += 2
    state["model.layers.0.input_layernorm.weight"][1] = float("nan")
    state["model.layers.0.input_layernorm.weight"][2] = float("inf")
    state["lm_head.weight"] = state["lm_head.weight"].float()
    state["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, dtype=torch.bfloat16)
    del state["model.layers.1.mlp.down_proj.weight"]
    state["new"] = torch.ones(1)
    save_file(state, second / "model.safetensors")
    comparison = compare_hf(first, second)
    assert comparison.only_in_a == ("model.layers.1.mlp.down_proj.weight",)
    assert comparison.only_in_b == ("new",)
    assert [item.tensor for item in comparison.shape_differences] == ["model.layers.1.mlp.up_proj.weight"]
    assert [item.problem for item in comparison.dtype_differences] == ["float32 instead of bfloat16"]
    by_name = {item.name: item for item in comparison.tensors}
    assert by_name["model.norm.weight"].max_difference == pytest.approx(2, abs=0.02)
    assert by_name["model.norm.weight"].mean_difference == pytest.approx(2 / 16, abs=0.002)
    norm = by_name["model.layers.0.input_layernorm.weight"]
    assert (norm.nan, norm.inf) == (1, 1)
    assert by_name["lm_head.weight"].max_difference == 0
    assert not by_name["lm_head.weight"].unchanged
    assert comparison.unchanged == len(comparison.tensors) - 3
    assert not comparison.finite
    assert not comparison.equal
    assert json.loads(json.dumps(comparison.to_dict()))["unchanged"] == comparison.unchanged
    assert compare_hf(first, first).equal
