"""The converter script, the monitors, and the embedded model and data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from trainium.rehearsal import converter
from trainium.rehearsal.devices import INSTANCES, Use, uses, using
from trainium.rehearsal.model import write_dataset, write_model
from trainium.rehearsal.neuron_ls import devices
from trainium.rehearsal.neuron_monitor import report

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Toolchain, Workspace


def options(workspace: Workspace, output: Path, **more: str | Path) -> list[str]:
    """The tutorial's options, less those of `more` that are empty."""
    layout = {"tp_size": "4", "pp_size": "2", "n_layers": "2", "kv_size_multiplier": "1"}
    flags = {"qkv_linear": "True", "fuse_qkv": "True", "hw_backend": "trn1", "model_style": "hf"}
    paths = {"config": workspace.base / "config.json", "output_dir": output}
    merged: dict[str, str | Path] = {**layout, **flags, **paths, **more}
    return [word for key, value in merged.items() if value for word in (f"--{key}", str(value))]


def test_converter_there_and_back(workspace: Workspace, tmp_path: Path) -> None:
    state = load_file(workspace.base / "model.safetensors")
    torch.save(state, tmp_path / "full.pt")
    there = options(workspace, tmp_path / "nxd", input_dir=tmp_path / "full.pt", save_xser="True")
    converter.main([*there, "--convert_from_full_state"])
    assert len(list((tmp_path / "nxd" / "model").glob("dp_rank_00_tp_rank_*_pp_rank_*.pt"))) == 8
    back = options(workspace, tmp_path / "hf", input_dir=tmp_path / "nxd" / "model", load_xser="True")
    converter.main([*back, "--convert_to_full_state"])
    merged = torch.load(tmp_path / "hf" / "checkpoint.pt", weights_only=True)
    assert merged.keys() == state.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in state.items())


def test_converter_refusals(workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="Exactly one"):
        converter.main(options(workspace, tmp_path, input_dir="x"))
    with pytest.raises(EOFError, match="token"):
        converter.main([*options(workspace, tmp_path, hf_model_name="some/model"), "--convert_from_full_state"])
    with pytest.raises(IsADirectoryError):
        converter.main([*options(workspace, tmp_path, input_dir=workspace.base), "--convert_from_full_state"])
    wrong = options(workspace, tmp_path, input_dir=workspace.base, kv_size_multiplier="4")
    with pytest.raises(ValueError, match="must equal tp=4"):
        converter.main([*wrong, "--convert_from_full_state"])
    with pytest.raises(SystemExit):
        converter.main([*options(workspace, tmp_path, hw_backend=""), "--convert_from_full_state"])
    assert "--hw_backend" in capsys.readouterr().err


def test_neuron_ls(toolchain: Toolchain, tmp_path: Path) -> None:
    result = toolchain.run("neuron-ls", "-j", cwd=tmp_path, REHEARSAL_INSTANCE_TYPE="trn1.32xlarge")
    found = json.loads(result.stdout)
    assert len(found) == 16
    assert (found[15]["nc_count"], found[15]["neuroncore_ids"]) == (2, [30, 31])
    assert found[0]["memory_size"] == 34359738368
    nothing = toolchain.run("neuron-ls", "-j", cwd=tmp_path, REHEARSAL_INSTANCE_TYPE="none")
    assert (nothing.returncode, nothing.stdout) == (1, "")


def test_neuron_monitor(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "monitor.json").write_text('{"period": "0.05s"}')
    with toolchain.start("neuron-monitor", "-c", "monitor.json", cwd=tmp_path, TMPDIR=str(tmp_path)) as process:
        assert process.stdout
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
    assert lines[0]["neuron_runtime_data"] == []
    assert lines[1]["neuron_hardware_info"]["neuron_device_count"] == 16


def test_monitors_show_a_running_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with using(Use(os.getpid(), 4, 1000, 2000, "training_orchestrator.py")):
        (runtime,) = report(INSTANCES["rehearsal"], uses(), 5.0)["neuron_runtime_data"]
        used = runtime["report"]["memory_used"]["neuron_runtime_used_bytes"]
        assert (runtime["pid"], used["host"], used["neuron_device"]) == (os.getpid(), 1000, 2000)
        assert list(runtime["report"]["neuroncore_counters"]["neuroncores_in_use"]) == ["0", "1", "2", "3"]
        busy = [len(device["neuron_processes"]) for device in devices(INSTANCES["rehearsal"], uses())]
        assert busy == [1, 1] + [0] * 14
    assert uses() == []


def test_compiler_version(toolchain: Toolchain, tmp_path: Path) -> None:
    assert "rehearsal" in toolchain.run("neuronx-cc", "--version", cwd=tmp_path).stdout


def test_the_embedded_model_loads_and_is_always_the_same(workspace: Workspace, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (workspace.base / file.name).read_bytes()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    ids = tokenizer("What is 3 plus 4?", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "What is 3 plus 4?"
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= ids.shape[1] + 3


def test_the_embedded_data_is_split_without_overlap(tmp_path: Path) -> None:
    write_dataset(tmp_path, rows=800, validation_rows=100)
    train, validation = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "validation"))
    assert (len(train), len(validation)) == (800, 100)
    assert len({json.loads(line)["input"] for line in train + validation}) == 900
    with pytest.raises(ValueError, match="more than the 900"):
        write_dataset(tmp_path, rows=900, validation_rows=1)
