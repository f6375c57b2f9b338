"""A checkpoint's layout, read from its files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from trainium.checkpoint.__main__ import main
from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.compare import compare_hf
from trainium.checkpoint.convert import to_nxd
from trainium.checkpoint.errors import CheckpointError, LayoutError
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.stored_layout import GivenLayout, read_layout

MakeModel = Callable[..., Path]
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 9,
    "intermediate_size": 24,
    "vocab_size": 36,
}


@pytest.mark.parametrize("form", ["inline", "per-tensor"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, qkv="fused"),
        Layout(tp=4, kv_replicator=2, qkv="fused"),
        Layout(tp=4, kv_replicator=2, qkv="split", instance_family="trn2"),
        Layout(tp=1, qkv="split", instance_family="trn2"),
        Layout(tp=12, kv_replicator=6, qkv="fused", instance_family="trn2"),
        Layout(tp=12, kv_replicator=6, qkv="split"),
        Layout(tp=2, qkv="plain"),
        Layout(tp=1, pp=4, qkv="plain"),
        Layout(tp=2, pp=2, qkv="fused", virtual_pp=2),
        Layout(tp=2, pp=2, qkv="split", virtual_pp=4),
    ],
)
def test_what_was_written_is_read(make_model: MakeModel, tmp_path: Path, layout: Layout, form: Any) -> None:
    source = make_model(**SIZES)
    to_nxd(source, tmp_path / "nxd", layout, form=form)
    arch = Architecture.from_config(read_config(source))
    assert read_layout(tmp_path / "nxd", arch) == layout
    assert read_layout(tmp_path / "nxd" / "model", arch, GivenLayout(tp=layout.tp, qkv=layout.qkv)) == layout
    read_layout(tmp_path / "nxd", arch, headers_only=True).check(arch)


def test_multi_head_attention_is_coalesced(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(num_key_value_heads=4)
    to_nxd(source, tmp_path / "nxd", Layout(tp=2))
    found = read_layout(tmp_path / "nxd", Architecture.from_config(read_config(source)))
    assert found == Layout(tp=2, qkv="coalesced")


def test_what_is_given_is_checked(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    to_nxd(source, tmp_path / "nxd", Layout(tp=4, kv_replicator=2))
    arch = Architecture.from_config(read_config(source))
    given = GivenLayout(tp=2, pp=2, kv_replicator=1, virtual_pp=3, qkv="split")
    with pytest.raises(LayoutError) as caught:
        read_layout(tmp_path / "nxd", arch, given)
    for part in ("tp=2 was given, but the files have tp=4", "pp=2", "kv_replicator=1", "virtual_pp=3", "qkv=split"):
        assert part in str(caught.value)


def test_another_model_or_a_lost_shard_is_said(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(num_hidden_layers=6)
    to_nxd(source, tmp_path / "nxd", Layout(tp=2, pp=2))
    arch = Architecture.from_config(read_config(source))
    with pytest.raises(CheckpointError, match="another model"):
        read_layout(tmp_path / "nxd", replace(arch, head_dim=3))
    with pytest.raises(CheckpointError, match="11 layers"):
        read_layout(tmp_path / "nxd", replace(arch, layers=11))
    (tmp_path / "nxd" / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks dp_rank_00_tp_rank_00_pp_rank_01"):
        read_layout(tmp_path / "nxd", arch)


@pytest.mark.parametrize("equal_layers", [1, 2])
def test_equal_key_heads_do_not_tell_the_family(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], equal_layers: int
) -> None:
    source, nxd, back = make_model(), tmp_path / "nxd", tmp_path / "back"
    state = load_file(source / "model.safetensors")
    for layer in range(equal_layers):
        keys = state[f"model.layers.{layer}.self_attn.k_proj.weight"]
        keys[4:] = keys[:4]
    save_file(state, source / "model.safetensors")
    to_nxd(source, nxd, Layout(tp=4, kv_replicator=2, instance_family="trn2"))
    family = ["--instance-family", "trn2"] if equal_layers == 2 else []
    for command in (
        ["to-hf", str(nxd), str(back), "--config", str(source / "config.json")],
        ["verify", str(source), str(nxd)],
    ):
        if family:
            assert main(command) == 2
            assert "say where it was trained with --instance-family" in capsys.readouterr().err
        assert main([*command, *family]) == 0
    assert compare_hf(source, back).equal


def test_stages_of_a_single_pipeline_rank_make_no_difference(make_model: MakeModel, tmp_path: Path) -> None:
    source, nxd, back = make_model(), tmp_path / "nxd", tmp_path / "back"
    options = ["--tp", "2", "--virtual-pp", "2"]
    assert main(["to-nxd", str(source), str(nxd), *options]) == 0
    assert main(["to-hf", str(nxd), str(back), "--config", str(source / "config.json"), *options]) == 0
    assert compare_hf(source, back).equal
