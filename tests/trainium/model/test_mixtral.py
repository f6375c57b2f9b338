"""Mixtral through NxDT's converter, for which a script with the same options stands in: it cuts nothing."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainium.checkpoint.__main__ import main

CONVERTER = """
import json, os, sys, torch
words = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
with open(os.environ["SEEN"], "a") as seen:
    seen.write(json.dumps(sys.argv[1:]) + "\\n")
if "FAIL" in os.environ:
    sys.exit(3)
if "--convert_from_full_state" in words:
    os.makedirs(words["--output_dir"] + "/model")
    torch.save(torch.load(words["--input_dir"]), words["--output_dir"] + "/model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
else:
    state = torch.load(words["--input_dir"] + "/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    torch.save(state, words["--output_dir"] + "/checkpoint.pt")
"""
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NxDT's examples folder and environment."""
    script = tmp_path / "examples" / "checkpoint_converter_scripts" / "hf_nxdt_mixtral_ckpt_converter.py"
    script.parent.mkdir(parents=True)
    script.write_text(CONVERTER)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "examples"


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {EXPERT: torch.arange(6.0).reshape(2, 3), "lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors"
    )
    return folder


def seen(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]


def test_there_and_back(mixtral: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tp", "8", "--pp", "2", "--kv-replicator", "2", "--examples", str(examples)]
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *layout]) == 0
    config = ["--config", str(mixtral / "config.json")]
    assert main(["to-hf", str(tmp_path / "nxd"), str(tmp_path / "back"), *config, *layout]) == 0
    there, back = seen(tmp_path)
    text = " ".join(there)
    for words in ("--tp_size 8", "--pp_size 2", "--kv_size_multiplier 2", "--n_layers 1", "--fuse_qkv True"):
        assert words in text
    assert there[-1] == "--convert_from_full_state"
    assert back[-1] == "--convert_to_full_state"
    assert "xser" not in text
    before, after = (load_file(folder / "model.safetensors") for folder in (mixtral, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert capsys.readouterr().out.count("how it stacks the experts was not checked here") == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_per_tensor_form_and_single_file(mixtral: Path, examples: Path, tmp_path: Path) -> None:
    options = ["--tp", "1", "--examples", str(examples)]
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options, "--form", "per-tensor"]) == 0
    config = ["--config", str(mixtral / "config.json"), "--single-file"]
    assert main(["to-hf", str(tmp_path / "nxd"), str(tmp_path / "back"), *config, *options]) == 0
    assert "--save_xser True" in " ".join(seen(tmp_path)[0])
    assert EXPERT in torch.load(tmp_path / "back" / "checkpoint.pt")


def test_a_failed_conversion_leaves_what_was_there(
    mixtral: Path, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tp", "1", "--examples", str(examples)]
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options]) == 0
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("FAIL", "1")
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options]) == 2
    assert "ended with code 3" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--examples"),
        (["--examples", "nowhere"], "does not exist"),
        (["--examples", ".", "--dtype", "float32"], "no --dtype"),
        (["--examples", ".", "--share", "1/2"], "no --share"),
    ],
)
def test_what_cannot_be_is_refused(
    mixtral: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), "--tp", "1", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "nxd").exists()


def test_other_models_do_not_go_there(mixtral: Path, examples: Path, tmp_path: Path) -> None:
    (mixtral / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), "--tp", "1", "--examples", str(examples)]) == 2
    assert not (tmp_path / "seen").exists()


def test_what_somebody_else_keeps_in_the_output_is_not_lost(mixtral: Path, examples: Path, tmp_path: Path) -> None:
    options = ["--tp", "1", "--examples", str(examples)]
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options]) == 0
    (tmp_path / "nxd" / "model" / "thesis.txt").write_text("mine")
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options]) == 2
    assert (tmp_path / "nxd" / "model" / "thesis.txt").read_text() == "mine"
    (tmp_path / "nxd" / "model" / "thesis.txt").unlink()
    config = ["--config", str(mixtral)]
    assert main(["to-hf", str(tmp_path / "nxd"), str(mixtral), *config, *options]) == 2
    assert EXPERT in load_file(mixtral / "model.safetensors")


def test_an_earlier_output_is_replaced_as_a_whole(mixtral: Path, examples: Path, tmp_path: Path) -> None:
    options = ["--tp", "1", "--examples", str(examples), "--config", str(mixtral)]
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), *options[:-2]]) == 0
    back = tmp_path / "back"
    assert main(["to-hf", str(tmp_path / "nxd"), str(back), *options, "--max-shard-bytes", "1"]) == 0
    assert (back / "model.safetensors.index.json").exists()
    assert main(["to-hf", str(tmp_path / "nxd"), str(back), *options]) == 0
    assert {path.name for path in back.iterdir()} == {"config.json", "model.safetensors"}


def test_a_config_without_layers_is_refused(
    mixtral: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mixtral / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    assert main(["to-nxd", str(mixtral), str(tmp_path / "nxd"), "--tp", "1", "--examples", str(examples)]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err
    assert not (tmp_path / "nxd" / "model").exists()
