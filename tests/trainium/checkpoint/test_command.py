"""`python -m trainium.checkpoint` as the jobs call it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainium.checkpoint.__main__ import main
from trainium.checkpoint.compare import compare_hf
from trainium.checkpoint.staging import take_place

MakeModel = Callable[..., Path]
LAYOUT = ["--tp", "4", "--kv-replicator", "2"]


def test_there_and_back_with_reports(make_model: MakeModel, tmp_path: Path) -> None:
    source, nxd, back, report = make_model(), tmp_path / "nxd", tmp_path / "back", tmp_path / "report.json"
    command = [sys.executable, "-m", "trainium.checkpoint"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*command, "to-nxd", source, nxd, *LAYOUT, "--verify", "--report", report],
        cwd=root, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"{nxd}: 4 files, 60 tensors, ")
    assert done.stdout.endswith(", verified\n")
    content = json.loads(report.read_text())
    assert content["layout"] == {
        "tp": 4, "pp": 1, "kv_replicator": 2, "qkv": "fused", "virtual_pp": 1, "instance_family": "trn1",
    }  # fmt: skip
    assert content["verification"]["ok"] is True
    assert content["file_bytes"] == sum(path.stat().st_size for path in (nxd / "model").iterdir())
    assert main(
        ["to-hf", str(nxd / "model"), str(back), "--config", str(source / "config.json"), *LAYOUT, "--verify"]
    ) == 0  # fmt: skip
    assert compare_hf(source, back).equal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp=3 must divide num_attention_heads=4"),
        (["--tp", "0"], "tp=0"),
        (["--tp", "4"], "× kv_replicator=1 must equal tp=4"),
    ],
)
def test_bad_layouts_are_one_message_and_exit_code_2_before_torch_is_loaded(
    make_model: MakeModel, tmp_path: Path, arguments: list[str], message: str
) -> None:
    script = (
        "import sys; from trainium.checkpoint.__main__ import main; code = main(); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "to-nxd", make_model(), tmp_path / "nxd", *arguments],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "nxd").exists()


def test_bad_inputs_are_one_message_and_exit_code_2(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_model()
    config = ["--config", str(source / "config.json"), *LAYOUT]
    for arguments, message in (
        (["to-nxd", str(tmp_path / "nowhere"), str(tmp_path / "nxd"), *LAYOUT], "nowhere does not exist"),
        (["to-hf", str(source), str(tmp_path / "out"), *config], "holds no shards"),
        (["to-hf", str(source), str(tmp_path / "out"), *config, "--single-file", "--verify"], "--single-file"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_failed_verification_is_exit_code_1(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives back other bytes than were written: here one byte of a shard, between writing and proof."""
    from trainium.checkpoint import convert

    source, out = make_model(), tmp_path / "nxd"
    real = convert.to_nxd

    def then_damage(*arguments: object, **options: object) -> convert.ConversionReport:
        report = real(*arguments, **options)  # type: ignore[arg-type]
        shard = bytearray(Path(report.files[0]).read_bytes())
        norm = load_file(source / "model.safetensors")["model.norm.weight"]
        shard[shard.index(norm.view(torch.uint8).numpy().tobytes())] ^= 0xFF
        Path(report.files[0]).write_bytes(shard)
        return report

    monkeypatch.setattr(convert, "to_nxd", then_damage)
    assert main(["to-nxd", str(source), str(out), *LAYOUT, "--verify"]) == 1
    printed = capsys.readouterr()
    assert "VERIFICATION FAILED" in printed.out
    assert "differs from its slice of the source" in printed.err


def test_shards_that_something_else_wrote_are_verified_alone(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, nxd, report = make_model(), tmp_path / "nxd", tmp_path / "report.json"
    assert main(["to-nxd", str(source), str(nxd), *LAYOUT]) == 0
    verify = ["verify-nxd", str(source), str(nxd), *LAYOUT, "--report", str(report)]
    assert main(verify) == 0
    assert capsys.readouterr().out.endswith("60 tensors in 4 shards, verified\n")
    found = json.loads(report.read_text())["verification"]
    assert (found["ok"], found["shards"], found["tensors"], found["problems"]) == (True, 4, 60, [])
    assert found["bytes"] > 0

    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, source / "model.safetensors")
    assert main(verify) == 1
    printed = capsys.readouterr()
    assert "VERIFICATION FAILED" in printed.out
    assert "differs from its slice of the source" in printed.err
    assert json.loads(report.read_text())["verification"]["ok"] is False
    assert main(["verify-nxd", str(source), str(tmp_path / "nowhere"), *LAYOUT]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_weights_that_are_no_earlier_output_are_not_replaced(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, elsewhere, nxd, out = make_model("base"), tmp_path / "c.json", tmp_path / "nxd", tmp_path / "out"
    elsewhere.write_bytes((base / "config.json").read_bytes())
    before = (base / "model.safetensors").read_bytes()
    assert main(["to-nxd", str(base), str(nxd), *LAYOUT]) == 0
    assert main(["to-hf", str(nxd), str(base), "--config", str(base / "config.json")]) == 2
    assert "config.json lies in" in capsys.readouterr().err
    assert main(["to-hf", str(nxd), str(base), "--config", str(elsewhere)]) == 2
    assert "no earlier output (model.safetensors)" in capsys.readouterr().err
    assert (base / "model.safetensors").read_bytes() == before
    for _ in range(2):
        assert main(["to-hf", str(nxd), str(out), "--config", str(elsewhere)]) == 0
        assert main(["to-nxd", str(base), str(nxd), *LAYOUT]) == 0
    (nxd / "optim").mkdir()
    assert main(["to-nxd", str(base), str(nxd), *LAYOUT]) == 2
    assert "checkpoint of a training (optim beside model/)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/dev/shm", "/dev/shm is a mount"),
        ("x/..", "has no name of its own"),
        (".", "has no name of its own"),
        ("", "has no name of its own"),
        ("link", "is a symbolic link, which cannot be replaced; give "),
        ("file", "file exists and is no folder"),
        ("file/deeper", "file exists and is no folder"),
    ],
)
def test_an_output_that_cannot_be_renamed_is_refused_before_anything_is_written(
    make_model: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    message: str,
) -> None:
    source = make_model()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == "/dev/shm")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("elsewhere")
    assert main(["to-nxd", str(source), "nxd", *LAYOUT]) == 0
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["to-hf", "nxd", output, "--config", str(source / "config.json")]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_earlier_output_is_put_back_when_the_new_cannot_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    with pytest.raises(FileNotFoundError):
        take_place(tmp_path / "lost", tmp_path / "old")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["old", "old/file"]


def test_a_link_to_nowhere_is_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 16, "vocab_size": 8}))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert main(["to-nxd", str(tmp_path), str(tmp_path / "out"), "--tp", "1"]) == 2
    assert "holds no weights" in capsys.readouterr().err
