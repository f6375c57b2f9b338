"""Random layouts of random models: back and forth is the identity, and attention stays what it was."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.compare import compare_paths
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.errors import LayoutError
from trainium.checkpoint.formats import Form
from trainium.checkpoint.huggingface import open_weights
from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.checkpoint.merge import merge
from trainium.checkpoint.split import split
from trainium.checkpoint.verify import verify_nxd

State = Callable[..., dict[str, Tensor]]


@st.composite
def models(draw: st.DrawFn) -> tuple[Architecture, Layout]:
    """Any model and layout that fit, in every way of storing q, k and v."""
    family: InstanceFamily = draw(st.sampled_from(["trn1", "trn2"]))
    qkv: Qkv = draw(st.sampled_from(["fused", "split", "coalesced", "plain"]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    group = 1 if qkv == "coalesced" else draw(st.sampled_from([1, 2, 3, 4, 6]))
    copies = 1
    if qkv in ("fused", "split"):
        copies = draw(st.sampled_from([m for m in range(1, group + 1) if group % m == 0]))
        divided = family == "trn2" and copies == 1
        tp = draw(_divisors(kv_heads)) if divided else kv_heads * copies
    else:
        tp = draw(_divisors(kv_heads))
    pp, virtual_pp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    model_type = draw(st.sampled_from(["llama", "llama", "qwen2", "qwen3"]))
    arch = Architecture(
        layers=pp * virtual_pp + draw(st.integers(0, 5)),
        hidden=draw(st.sampled_from([5, 8])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        intermediate=tp * draw(st.integers(1, 3)),
        vocab=tp * draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        model_type=model_type,
    )
    return arch, Layout(tp=tp, pp=pp, kv_replicator=copies, qkv=qkv, virtual_pp=virtual_pp, instance_family=family)


def _divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.booleans())
def test_merge_undoes_split(
    random_state: State, model: tuple[Architecture, Layout], dtype: torch.dtype, extra: bool
) -> None:
    arch, layout = model
    state = random_state(arch, dtype, extra=extra)
    shards = {rank: split(state, arch, layout, *rank) for rank in layout.ranks}
    merged = merge(lambda tp, pp: shards[tp, pp], arch, layout)
    expected = state | ({"lm_head.weight": state["model.embed_tokens.weight"]} if arch.tied else {})
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@settings(max_examples=40, deadline=None)
@given(models(), st.data())
def test_attention_of_the_ranks_is_attention_of_the_model(
    random_state: State, model: tuple[Architecture, Layout], data: st.DataObject
) -> None:
    arch, layout = model
    state = random_state(arch, torch.float32)
    layer = data.draw(st.integers(0, arch.layers - 1))
    stage = layout.pipeline_rank(layer, arch.layers)
    shards = {tp: split(state, arch, layout, tp, stage) for tp in range(layout.tp)}
    x = torch.randn(7, arch.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(ranks_attention(shards, arch, layout, layer, x), model_attention(state, arch, layer, x))


@settings(max_examples=25, deadline=None)
@given(models(), st.sampled_from(["inline", "per-tensor"]), st.integers(64, 4096))
def test_files_come_back_as_they_were(
    random_state: State, model: tuple[Architecture, Layout], form: Form, max_shard_bytes: int
) -> None:
    arch, layout = model
    config = {
        "model_type": arch.model_type,
        "hidden_size": arch.hidden,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate,
        "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied,
    }
    state = random_state(arch, extra=True)
    with TemporaryDirectory() as folder:
        source, nxd, back = (Path(folder) / name for name in ("hf", "nxd", "back"))
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        save_file(state, source / "model.safetensors")
        report = to_nxd(source, nxd, layout, form=form)
        assert report.untied == arch.tied
        assert verify_nxd(source, nxd, layout).ok
        assert compare_paths(source, nxd, config=None, names_only=False).equal
        to_hf(nxd, back, config, replace(layout, qkv="auto"), max_shard_bytes=max_shard_bytes)
        result = open_weights(back)
        assert set(result) == set(state) | {"lm_head.weight"}
        assert all(torch.equal(result[name], tensor) for name, tensor in state.items())
        assert torch.equal(
            result["lm_head.weight"], state["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
        )


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 13), st.integers(1, 4))
def test_a_layout_that_passes_the_check_keeps_attention_and_others_are_refused(
    random_state: State, model: tuple[Architecture, Layout], tp: int, copies: int
) -> None:
    arch, layout = model
    layout = replace(layout, tp=tp, kv_replicator=copies)
    try:
        layout.check(arch)
    except LayoutError:
        with pytest.raises(LayoutError):
            split(random_state(arch), arch, layout, 0, 0)
        return
    state = random_state(arch, torch.float32)
    stage = layout.pipeline_rank(0, arch.layers)
    shards = {rank: split(state, arch, layout, rank, stage) for rank in range(layout.tp)}
    x = torch.eye(arch.hidden, dtype=torch.float64)
    torch.testing.assert_close(ranks_attention(shards, arch, layout, 0, x), model_attention(state, arch, 0, x))


def model_attention(state: Mapping[str, Tensor], arch: Architecture, layer: int, x: Tensor) -> Tensor:
    """Causal attention of one layer (no rotary embedding: it turns each head alone)."""
    prefix = f"model.layers.{layer}.self_attn."
    own = {name.removeprefix(prefix): t.double() for name, t in state.items() if name.startswith(prefix)}
    q, k, v = (x @ own[f"{part}_proj.weight"].T + own.get(f"{part}_proj.bias", 0) for part in "qkv")
    return _attend(q, k, v, arch.head_dim, own) @ own["o_proj.weight"].T


def ranks_attention(
    shards: Mapping[int, Mapping[str, Tensor]], arch: Architecture, layout: Layout, layer: int, x: Tensor
) -> Tensor:
    """The same as the ranks compute it: each attends with the heads it holds, and the outputs are added."""
    total = torch.zeros_like(x)
    prefix = f"model.layers.{layer}.self_attn."
    for shard in shards.values():
        own = {name.removeprefix(prefix): t.double() for name, t in shard.items() if name.startswith(prefix)}
        weights = _rank_qkv(own, "weight", arch, layout)
        biases = _rank_qkv(own, "bias", arch, layout) if arch.qkv_bias else (torch.zeros(1, dtype=x.dtype),) * 3
        q, k, v = (x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True))
        total += _attend(q, k, v, arch.head_dim, own) @ own["o_proj.weight"].T
    return total


def _rank_qkv(own: Mapping[str, Tensor], kind: str, arch: Architecture, layout: Layout) -> tuple[Tensor, ...]:
    """The rank's q, k and v, weights or biases, however they are stored."""
    if layout.qkv == "split":
        return tuple(own[f"qkv_proj.{kind}_{part}"] for part in "qkv")
    if layout.qkv == "plain":
        return tuple(own[f"{part}_proj.{kind}"] for part in "qkv")
    fused = own[f"qkv_proj.{kind}_qkv" if layout.qkv == "fused" else f"qkv_proj.{kind}"]
    q_rows = arch.heads // layout.tp * arch.head_dim
    kv_rows = (len(fused) - q_rows) // 2
    return torch.split(fused, [q_rows, kv_rows, kv_rows])


def _attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int, norms: Mapping[str, Tensor]) -> Tensor:
    q, k, v = (part.reshape(len(part), -1, head_dim).transpose(0, 1) for part in (q, k, v))
    q, k = (_normalized(part, norms.get(f"{name}_norm.weight")) for name, part in (("q", q), ("k", k)))
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).flatten(1)


def _normalized(part: Tensor, weight: Tensor | None) -> Tensor:
    """Qwen3's RMS norm of each head."""
    return part if weight is None else part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * weight
