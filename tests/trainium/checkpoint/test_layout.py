"""The rules, and messages that say what would work."""

from typing import Any

import pytest

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import ArchitectureError, LayoutError
from trainium.checkpoint.layout import Layout

TANUKI = Architecture(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=65024)
SMOLLM2 = Architecture(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True
)
LLAMA_70B = Architecture(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=128256)
LLAMA_7B = Architecture(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=32000)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        (TANUKI, Layout(tp=32, kv_replicator=4)),
        (TANUKI, Layout(tp=8)),
        (TANUKI, Layout(tp=4, qkv="split", instance_family="trn2")),
        (TANUKI, Layout(tp=32, kv_replicator=4, instance_family="trn2")),
        (SMOLLM2, Layout(tp=3, pp=2)),
        (LLAMA_70B, Layout(tp=32, pp=8, kv_replicator=4)),
        (LLAMA_7B, Layout(tp=8)),
        (LLAMA_7B, Layout(tp=32, qkv="plain")),
        (LLAMA_7B, Layout(tp=32, qkv="fused")),
    ],
)
def test_layouts_that_fit(arch: Architecture, layout: Layout) -> None:
    layout.check(arch)


@pytest.mark.parametrize(
    ("arch", "layout", "parts"),
    [
        (
            TANUKI,
            Layout(tp=5),
            ["tp=5 must divide num_attention_heads=32", "vocab_size=65024", "tp=32 kv_replicator=4"],
        ),
        (TANUKI, Layout(tp=32), ["num_key_value_heads=8 × kv_replicator=1 must equal tp=32", "tp=8 kv_replicator=1"]),
        (TANUKI, Layout(tp=16, kv_replicator=4), ["kv_replicator=4 must equal tp=16", "tp=16 kv_replicator=2"]),
        (TANUKI, Layout(tp=4), ["must equal tp=4"]),
        (TANUKI, Layout(tp=8, qkv="coalesced"), ["qkv=coalesced", "multi-head", "fused or split"]),
        (TANUKI, Layout(tp=16, qkv="plain"), ["tp=16 must divide num_key_value_heads=8"]),
        (TANUKI, Layout(tp=16, instance_family="trn2"), ["tp=16 must divide num_key_value_heads=8 × kv_replicator=1"]),
        (LLAMA_7B, Layout(tp=32, kv_replicator=2), ["kv_replicator=2 must be 1 with qkv=coalesced"]),
        (LLAMA_7B, Layout(tp=64), ["tp=64 must divide num_attention_heads=32", "tp=32 kv_replicator=1"]),
        (SMOLLM2, Layout(tp=4), ["num_attention_heads=9", "tp=3 kv_replicator=1; pp up to 30"]),
        (SMOLLM2, Layout(tp=3, pp=8, virtual_pp=4), ["pp=8 × virtual_pp=4 needs at least 32", "num_hidden_layers=30"]),
    ],
)
def test_layouts_that_do_not_fit_say_what_would(arch: Architecture, layout: Layout, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check(arch)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"tp": True}, {"tp": 2, "pp": -1}, {"tp": 2, "qkv": "fuse"}])
def test_impossible_values_are_named(wrong: dict[str, Any]) -> None:
    key = list(wrong)[-1]
    with pytest.raises(LayoutError, match=f"{key}={wrong[key]!r}"):
        Layout(**wrong)


def test_heads_of_the_tutorials_layout() -> None:
    """tp 32, 8 kv heads, 4 copies: K0..K7, K0..K7, …, and each rank's one query head belongs to its kv head's group."""
    layout = Layout(tp=32, kv_replicator=4)
    assert [layout.kv_heads(TANUKI, rank).start for rank in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert [layout.query_heads(TANUKI, rank).start for rank in range(10)] == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]


def test_trn2_keeps_copies_on_adjacent_ranks() -> None:
    layout = Layout(tp=32, kv_replicator=4, instance_family="trn2")
    assert [layout.kv_heads(TANUKI, rank).start for rank in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert [layout.query_heads(TANUKI, rank).start for rank in range(9)] == list(range(9))


@pytest.mark.parametrize(
    ("layers", "pp", "virtual_pp", "expected"),
    [
        (10, 4, 1, [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]),
        (5, 3, 1, [0, 1, 1, 2, 2]),
        (4, 2, 2, [0, 1, 0, 1]),
        (30, 2, 1, [0] * 15 + [1] * 15),
    ],
)
def test_layers_go_to_pipeline_ranks(layers: int, pp: int, virtual_pp: int, expected: list[int]) -> None:
    layout = Layout(tp=1, pp=pp, virtual_pp=virtual_pp)
    assert [layout.pipeline_rank(layer, layers) for layer in range(layers)] == expected


def test_the_tutorials_checkpoint_is_predicted_at_15_5_gib() -> None:
    assert Layout(tp=32, kv_replicator=4).predicted_bytes(TANUKI, 2) / 2**30 == pytest.approx(15.5, abs=0.05)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
}


def test_config_of_transformers_4_and_5_say_the_same() -> None:
    four = CONFIG | {"torch_dtype": "bfloat16", "rope_theta": 1e4, "tie_word_embeddings": True}
    five = CONFIG | {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 1e4},
        "tie_word_embeddings": True,
        "head_dim": 8,
    }
    assert Architecture.from_config(four) == Architecture.from_config(five)
    assert Architecture.from_config(four).tied


def test_defaults_and_explicit_head_dim() -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert Architecture.from_config(plain).multi_head
    assert not Architecture.from_config(plain).tied
    wide = Architecture.from_config(CONFIG | {"head_dim": 16, "model_type": "mistral"})
    assert wide.head_dim == 16
    assert any("head_dim=16" in note for note in wide.notes)
    assert any("Mistral" in note for note in wide.notes)
    assert Architecture.from_config(CONFIG | {"model_type": "mistral", "head_dim": None}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, r"'mixtral' cannot be converted: .*hf_nxdt_mixtral_ckpt_converter\.py"),
        ({"model_type": "qwen3_moe"}, "experts"),
        ({"model_type": "new"}, "Known: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "96"}, "vocab_size='96'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads=3"),
        ({"hidden_size": 65}, "hidden_size=65"),
    ],
)
def test_what_the_llama_layout_has_no_place_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        Architecture.from_config(CONFIG | changes)


@pytest.mark.parametrize(
    ("changes", "shapes", "reason"),
    [
        ({"model_type": "qwen2"}, {"q_proj.bias": (64,), "k_proj.bias": (16,), "v_proj.bias": (16,)}, "have biases"),
        ({"model_type": "qwen3", "head_dim": 16}, {"q_norm.weight": (16,), "k_norm.weight": (16,)}, "q_norm, k_norm"),
    ],
)
def test_what_converts_but_cannot_be_trained_says_so(
    changes: dict[str, Any], shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    arch = Architecture.from_config(CONFIG | changes)
    for name, shape in shapes.items():
        assert arch.tensor_shapes()[f"model.layers.1.self_attn.{name}"] == shape
    assert reason in arch.untrainable["model-family"]
    assert any("NxDT cannot train this model" in note and reason in note for note in arch.notes)
    assert ("head-dim" in arch.untrainable) == ("head_dim" in changes)
    assert Architecture.from_config(CONFIG).untrainable == {}
