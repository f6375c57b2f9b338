"""The toolchain's converter: its command line as in the tutorial, its traps refused, its single-file input."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.layout import Layout
from trainium.errors import UserError
from trainium.model import nxdt_converter
from trainium.model.nxdt_converter import (
    Direction,
    NxdtConverterError,
    converter_argv,
    converter_env,
    prepare,
)

TANUKI = Architecture(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=65024)
TUTORIAL = Layout(tp=32, kv_replicator=4, qkv="fused")
SCRIPT = Path("/fsx/toolchain/examples/checkpoint_converter_scripts/checkpoint_converter.py")


def argv(direction: Direction, layout: Layout = TUTORIAL, arch: Architecture = TANUKI) -> tuple[str, ...]:
    source, config = Path("/fsx/in"), Path("/fsx/base/config.json")
    return converter_argv(SCRIPT, direction, source, Path("/fsx/out"), config, layout, arch)


def options(command: tuple[str, ...]) -> dict[str, str | None]:
    """Option → value; None for a flag."""
    words = command[2:]
    return {
        word: None if after is None or after.startswith("--") else after
        for word, after in zip(words, [*words[1:], None], strict=True)
        if word.startswith("--")
    }


def test_to_nxd_is_the_tutorials_command_with_a_prepared_file_for_the_hub_name() -> None:
    command = argv(Direction.TO_NXD)
    assert command[:2] == ("python3", str(SCRIPT))
    assert options(command) == {
        "--model_style": "hf",
        "--hw_backend": "trn1",
        "--input_dir": "/fsx/in",
        "--output_dir": "/fsx/out",
        "--save_xser": "True",
        "--config": "/fsx/base/config.json",
        "--tp_size": "32",
        "--pp_size": "1",
        "--n_layers": "32",
        "--kv_size_multiplier": "4",
        "--qkv_linear": "True",
        "--fuse_qkv": "True",
        "--convert_from_full_state": None,
    }


def test_to_hf_is_the_tutorials_command() -> None:
    found = options(argv(Direction.TO_HF))
    assert found["--load_xser"] == "True"
    assert "--save_xser" not in found
    assert "--convert_to_full_state" in found
    assert "--convert_from_full_state" not in found


def test_a_flag_that_is_off_is_left_out_never_false() -> None:
    multi_head = replace(TANUKI, kv_heads=32)
    layouts = (TUTORIAL, replace(TUTORIAL, qkv="split"))
    commands = [argv(direction, layout) for direction in Direction for layout in layouts]
    coalesced = Layout(tp=32, qkv="coalesced", pp=2, virtual_pp=2)
    commands += [argv(direction, coalesced, multi_head) for direction in Direction]
    assert all("False" not in command for command in commands)
    assert "--fuse_qkv" not in options(argv(Direction.TO_NXD, replace(TUTORIAL, qkv="split")))
    there, back = commands[-2:]
    assert options(there)["--coalesce_qkv"] == "True"
    assert "--coalesce_qkv" not in back
    assert options(there)["--virtual_pp_size"] == "2"
    assert "--qkv_linear" not in there


@pytest.mark.parametrize(
    ("direction", "layout", "arch", "message"),
    [
        (Direction.TO_NXD, replace(TUTORIAL, instance_family="trn2"), TANUKI, "kv_replicator 4 on trn2"),
        (Direction.TO_HF, Layout(tp=16, kv_replicator=2, qkv="fused"), TANUKI, "three equal parts"),
        (Direction.TO_NXD, TUTORIAL, replace(TANUKI, head_dim=64), "head_dim 64"),
        (Direction.TO_HF, Layout(tp=8, qkv="plain"), replace(TANUKI, kv_heads=32), "cannot merge plain"),
        (Direction.TO_NXD, Layout(tp=8, qkv="plain"), TANUKI, "needs qkv_linear"),
        (Direction.TO_NXD, TUTORIAL, replace(TANUKI, qkv_bias=True, model_type="qwen2"), "KeyError: 'q_proj.bias'"),
    ],
)
def test_what_the_converter_gets_wrong_is_refused(
    direction: Direction, layout: Layout, arch: Architecture, message: str
) -> None:
    with pytest.raises(NxdtConverterError, match=message) as caught:
        argv(direction, layout, arch)
    assert "convert.engine=native" in str(caught.value)


def test_a_layout_that_does_not_fit_is_refused_as_everywhere() -> None:
    with pytest.raises(UserError, match="tp=24 must divide"):
        argv(Direction.TO_NXD, Layout(tp=24, kv_replicator=3, qkv="fused"))


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(NxdtConverterError, match="input path model is relative"):
        converter_argv(SCRIPT, Direction.TO_HF, Path("model"), Path("/o"), Path("/c"), TUTORIAL, TANUKI)


def test_nothing_can_ask_for_a_token() -> None:
    assert converter_env()["HF_HUB_OFFLINE"] == "1"
    assert "--hf_model_name" not in argv(Direction.TO_NXD)


def test_prepare_merges_into_one_file_and_unties(
    tied_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "base.pt"
    assert nxdt_converter.main(["prepare", str(tied_base), str(out)]) == 0
    state = torch.load(out, weights_only=True)
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    assert len(state) == 9 * 2 + 3
    assert [path.name for path in out.parent.iterdir()] == ["base.pt"]
    assert "21 tensors" in capsys.readouterr().out


def test_prepare_keeps_an_untied_head(untied_base: Path, tmp_path: Path) -> None:
    prepare(untied_base, tmp_path / "base.pt")
    state = torch.load(tmp_path / "base.pt", weights_only=True)
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_prepare_refuses_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nxdt_converter.main(["prepare", str(tmp_path), str(tmp_path / "out.pt")]) == 2
    error = capsys.readouterr().err
    assert "config.json does not exist" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out.pt").exists()
