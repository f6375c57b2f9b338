"""Models as transformers builds them: what is converted there and back computes what it did."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainium.checkpoint.__main__ import main
from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.errors import ArchitectureError, CheckpointError
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import BYTES_PER_RECORD, Layout
from trainium.checkpoint.shards import read_shard

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
}
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A model with random weights, biases and norms, saved by transformers."""

    def make(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | changes)), dtype=dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path / model_type)
        return tmp_path / model_type

    return make


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(20).reshape(2, 10)).logits
    return result


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, kv_replicator=2),
        Layout(tp=4, kv_replicator=2, qkv="split", pp=3),
        Layout(tp=8, kv_replicator=4, instance_family="trn2"),
        Layout(tp=2, qkv="plain"),
    ],
)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 16, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_there_and_back_computes_the_same(
    build: Build, tmp_path: Path, model_type: str, changes: dict[str, Any], layout: Layout
) -> None:
    source = build(model_type, **changes)
    to_nxd(source, tmp_path / "nxd", layout)
    assert main(["verify", str(source), str(tmp_path / "nxd")]) == 0
    to_hf(tmp_path / "nxd", tmp_path / "back", source / "config.json", layout)
    assert torch.equal(logits(tmp_path / "back"), logits(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_multi_head_biases_are_coalesced(build: Build, tmp_path: Path, dtype: torch.dtype) -> None:
    source = build("qwen2", dtype, num_key_value_heads=8)
    to_nxd(source, tmp_path / "nxd", Layout(tp=2))
    shard = read_shard(tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt")
    bias = shard["model.layers.0.self_attn.qkv_proj.bias"]
    assert (bias.shape, bias.dtype) == ((48,), dtype)
    to_hf(tmp_path / "nxd", tmp_path / "back", source / "config.json", Layout(tp=2))
    assert main(["verify", str(source), str(tmp_path / "back")]) == 0


@pytest.mark.parametrize(
    ("qkv", "names"),
    [
        ("fused", {"qkv_proj.bias_qkv"}),
        ("split", {"qkv_proj.bias_q", "qkv_proj.bias_k", "qkv_proj.bias_v"}),
        ("plain", {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
    ],
)
def test_biases_have_the_names_that_nxd_gives_them(build: Build, tmp_path: Path, qkv: Any, names: set[str]) -> None:
    to_nxd(build("qwen2"), tmp_path / "nxd", Layout(tp=2, qkv=qkv))
    shard = read_shard(tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    prefix = "model.layers.2.self_attn."
    assert {name.removeprefix(prefix) for name in shard if name.startswith(prefix) and "bias" in name} == names


def test_the_predicted_size_counts_biases_and_norms(build: Build, tmp_path: Path) -> None:
    for model_type in ("qwen2", "qwen3"):
        source, layout = build(model_type), Layout(tp=4, kv_replicator=2, qkv="split")
        report = to_nxd(source, tmp_path / f"{model_type}-nxd", layout)
        arch = Architecture.from_config(read_config(source))
        assert layout.predicted_bytes(arch, 4) == report.bytes + report.tensors * BYTES_PER_RECORD
        assert any("NxDT cannot train this model" in note for note in report.notes)


def test_experts_are_refused_with_the_way_to_go(build: Build, tmp_path: Path) -> None:
    source = build("mixtral", num_local_experts=2)
    with pytest.raises(ArchitectureError, match=r"upstream engine.*hf_nxdt_mixtral_ckpt_converter\.py"):
        to_nxd(source, tmp_path / "nxd", Layout(tp=2))
    assert not (tmp_path / "nxd").exists()


def test_a_checkpoint_with_biases_is_not_read_as_a_llama(build: Build, tmp_path: Path) -> None:
    """Its biases would be lost, or taken for tensors that every rank repeats."""
    config = read_config(build("qwen2")) | {"model_type": "llama"}
    for qkv in ("fused", "plain"):
        to_nxd(tmp_path / "qwen2", tmp_path / qkv, Layout(tp=2, qkv=qkv))
        with pytest.raises(CheckpointError, match="bias"):
            to_hf(tmp_path / qkv, tmp_path / "back", config, Layout(tp=2, qkv=qkv))
