"""`python -m trainium.model.export`: what training leaves behind becomes a verified folder, or none does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.shards import read_shard, write_shard
from trainium.checkpoint.weights import TensorInfo
from trainium.files import read_json
from trainium.model import export
from trainium.model.host import available_memory
from trainium.model.loading import load_model, load_tokenizer

LAYOUT = Layout(tp=4, kv_replicator=2, pp=2)
FLAGS = ("--tp", "4", "--pp", "2", "--kv-replicator", "2")
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"


def train(base: Path, folder: Path, *, delta: float = 0.05, step: int = 20) -> Path:
    """A training checkpoint as the trainer leaves it: fp32, per-tensor form, untied, every weight moved a little."""
    checkpoint = folder / f"tiny--step={step}-consumed_samples={step * 8}.0.ckpt"
    moved = folder / "moved"
    shutil.copytree(base, moved)
    state = load_file(base / "model.safetensors")
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
    torch.manual_seed(1)
    trained = {name: tensor.float() + delta * torch.randn(tensor.shape) for name, tensor in state.items()}
    save_file(trained, moved / "model.safetensors", metadata={"format": "pt"})
    config = read_json(base / "config.json")
    (moved / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    to_nxd(moved, checkpoint, LAYOUT, form="per-tensor")
    for marker in ("checkpoint", "done"):
        (checkpoint / marker).write_text("1")
    return checkpoint


@pytest.fixture(scope="module")
def trained(tied_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tied_base, tmp_path_factory.mktemp("trained"))


@dataclass(frozen=True)
class Outcome:
    code: int
    out: Path
    report: dict[str, Any]
    stdout: str
    stderr: str

    def check(self, name: str) -> dict[str, str]:
        return next(item for item in self.report["checks"] if item["check"] == name)


Run = Callable[..., Outcome]


@pytest.fixture
def run(tied_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(checkpoint: Path, *more: object, base: Path = tied_base, flags: tuple[str, ...] = FLAGS) -> Outcome:
        report, out = tmp_path / "report.json", tmp_path / "export"
        report.unlink(missing_ok=True)
        command = ["--checkpoint", checkpoint, "--base", base, "--out", out, "--report", report, *flags, *more]
        code = export.main([str(word) for word in command])
        captured = capsys.readouterr()
        return Outcome(code, out, read_json(report) if report.exists() else {}, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "card.json"
    path.write_text(json.dumps({"base": "acme/tiny", "recipe": "rehearsal", "steps": 20, "rehearsal": True}))
    return path


def test_a_tied_model_is_exported_verified_and_described(
    run: Run, trained: Path, tied_base: Path, card: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE + "\n")
    result = run(trained, "--single-file", "--chat-template", template, "--model-card-data", card)
    assert result.code == 0, result.stderr
    assert {check["result"] for check in result.report["checks"]} == {"passed"}
    names = {path.name for path in result.out.iterdir()}
    companions = {"config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    ours = {"README.md", "trainium_export.json", "checkpoint.pt", "model.safetensors", "generation_config.json"}
    assert names == companions | ours

    config = read_json(result.out / "config.json")
    assert config == read_json(tied_base / "config.json") | {"tie_word_embeddings": False}
    assert (result.out / "tokenizer.json").read_bytes() == (tied_base / "tokenizer.json").read_bytes()
    assert load_tokenizer(result.out).chat_template == TEMPLATE

    state, base = load_file(result.out / "model.safetensors"), load_file(tied_base / "model.safetensors")
    assert set(state) == set(base) | {"lm_head.weight"}
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    moved = load_file(trained.parent / "moved/model.safetensors")
    assert all(torch.equal(state[name], moved[name].bfloat16()) for name in state)
    single = torch.load(result.out / "checkpoint.pt", weights_only=True)
    assert set(single) == set(state)
    assert all(torch.equal(single[name], state[name]) for name in state)

    card_text = (result.out / "README.md").read_text()
    assert "acme/tiny" in card_text
    assert "**Rehearsal.**" in card_text
    assert "| copies across ranks | passed |" in card_text
    report = result.report
    assert report["step"] == 20
    assert report["verified"][0] == "names: the base's 20 and lm_head.weight (tied embeddings untied)"
    assert report["table"] == report["checks"]
    assert report["trained_dtypes"] == ["float32"]
    assert report["changed_tensors"] == len(base)
    assert report["bytes"] == sum(path.stat().st_size for path in result.out.iterdir())
    assert [change["key"] for change in report["changes"]] == ["tie_word_embeddings", "chat_template"]
    record = (result.out / "trainium_export.json").read_text()
    assert str(tmp_path) not in record
    assert "names: passed, the base's 20 and lm_head.weight (tied embeddings untied)" in result.stdout


def test_an_untied_model_keeps_config_and_names(
    run: Run, untied_base: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = train(untied_base, tmp_path_factory.mktemp("trained"))
    result = run(checkpoint / "model", base=untied_base)
    assert result.code == 0, result.stderr
    assert (result.out / "config.json").read_bytes() == (untied_base / "config.json").read_bytes()
    assert result.check("names")["detail"] == "the base's 21"
    assert "chat template" not in {check["check"] for check in result.report["checks"]}
    assert result.report["notes"] == []
    assert not (result.out / "checkpoint.pt").exists()


def test_another_dtype_is_written_and_recorded(run: Run, trained: Path) -> None:
    result = run(trained, "--dtype", "float32")
    assert result.code == 0, result.stderr
    assert read_json(result.out / "config.json")["torch_dtype"] == "float32"
    assert next(iter(load_model(result.out).parameters())).dtype == torch.float32
    assert "float32 in all 21, cast from the base's in 20" in result.check("dtypes")["detail"]


@pytest.fixture(scope="module")
def merged(trained: Path, tied_base: Path) -> Path:
    """What the toolchain's converter makes of the trained checkpoint."""
    folder = trained.parent / "merged"
    to_hf(trained, folder, tied_base / "config.json", LAYOUT, single_file=True)
    return folder / "checkpoint.pt"


def test_the_toolchain_converters_single_file_is_a_source_too(run: Run, trained: Path, merged: Path) -> None:
    result = run(trained, "--full-state", merged)
    assert result.code == 0, result.stderr
    assert "is its slice of the merged model" in result.check("copies across ranks")["detail"]
    assert result.report["step"] == 20
    assert result.report["trained_dtypes"] == ["float32"]
    state = load_file(result.out / "model.safetensors")
    moved = load_file(trained.parent / "moved/model.safetensors")
    assert all(torch.equal(state[name], moved[name].bfloat16()) for name in moved)


def test_a_wrong_merge_of_the_toolchain_is_found(run: Run, trained: Path, merged: Path, tmp_path: Path) -> None:
    state = torch.load(merged, weights_only=True)
    swapped = {
        name: tensor.flip(0) if name.endswith("1.self_attn.q_proj.weight") else tensor for name, tensor in state.items()
    }
    torch.save({name: tensor.contiguous() for name, tensor in swapped.items()}, tmp_path / "wrong.pt")
    result = run(trained, "--full-state", tmp_path / "wrong.pt")
    assert result.code == 1
    assert "model.layers.1.self_attn.qkv_proj.weight_qkv differs" in result.check("copies across ranks")["detail"]


def test_the_bases_own_weights_are_no_result(run: Run, tied_base: Path, tmp_path: Path) -> None:
    result = run(train(tied_base, tmp_path, delta=0.0))
    assert result.code == 1
    assert result.check("changed")["result"] == "failed"
    assert "failed: changed: 0 of 20 tensors differ" in result.stderr
    assert not result.out.exists()
    assert (tmp_path / "export.failed/model.safetensors").exists()


def altered(
    checkpoint: Path, folder: Path, rank: tuple[int, int], name: str, change: Callable[[torch.Tensor], Any]
) -> Path:
    """A copy of a checkpoint with one tensor of one rank changed."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    path = shard_path(copy / "model", *rank)
    state = read_shard(path)
    change(state[name])
    shutil.rmtree(path.with_name(f"{path.name}.tensors"))
    info = {
        key: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in state.items()
    }
    write_shard(path, info, state.values(), "per-tensor")
    return copy


def test_norms_that_drifted_apart_fail_and_keep_the_earlier_export(run: Run, trained: Path, tmp_path: Path) -> None:
    first = run(trained)
    assert first.code == 0
    before = first.report["digest"]
    broken = altered(trained, tmp_path, (3, 1), "model.norm.weight", lambda norm: norm.add_(1))
    result = run(broken)
    assert result.code == 1
    detail = result.check("copies across ranks")["detail"]
    assert "1 copies differ" in detail
    assert "model.norm.weight in tp rank 3, pp rank 1" in detail
    assert result.report["folder"] == str(tmp_path / "export.failed")
    assert read_json(result.out / "trainium_export.json")["ok"] is True
    again = run(trained)
    assert again.code == 0
    assert again.report["digest"] == before
    assert not (tmp_path / "export.failed").exists()


def test_a_number_that_is_none_fails(run: Run, trained: Path, tmp_path: Path) -> None:
    broken = altered(trained, tmp_path, (0, 1), "lm_head.weight", lambda head: head[0].fill_(float("nan")))
    result = run(broken)
    assert result.code == 1
    assert "lm_head.weight (32 NaN, 0 infinite)" in result.check("finite")["detail"]
    assert "not finite" in result.check("loads and generates")["detail"]


def test_an_export_replaces_an_earlier_one_and_nothing_else(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export/precious.txt").write_text("mine")
    result = run(trained)
    assert result.code == 2
    assert "is no earlier export" in result.stderr
    assert (tmp_path / "export/precious.txt").read_text() == "mine"


def test_nothing_is_left_beside_the_export(run: Run, trained: Path, tmp_path: Path) -> None:
    assert run(trained).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"export", "report.json"}


def test_a_model_beyond_memory_is_reported_as_not_loaded(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainium.model.loading.available_memory", lambda: 1_000_000_000)
    result = run(trained)
    assert result.code == 0
    assert result.check("loads and generates")["result"] == "skipped"
    assert "has 1.0 GB" in result.check("loads and generates")["detail"]
    assert any("not loaded: needs" in note for note in result.report["notes"])


def test_available_memory_is_within_the_machines() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < available_memory() <= int(total.split()[1]) * 1024


def refuse(result: Outcome, message: str) -> None:
    assert result.code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.out.exists()
    assert not result.report


def test_user_errors_exit_2_before_anything_is_written(
    run: Run, trained: Path, tied_base: Path, tmp_path: Path
) -> None:
    refuse(run(tmp_path / "none.ckpt"), "is no folder")
    refuse(run(trained, "--full-state", tmp_path / "none.pt"), "none.pt does not exist")
    refuse(run(trained, flags=("--tp", "2")), "tp=2")
    refuse(run(trained, flags=("--tp", "3")), "tp=3 must divide num_attention_heads=4")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(run(trained, base=empty), "config.json does not exist")
    refuse(run(trained, "--chat-template", tmp_path / "none"), "cannot be read")
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for message in messages %}")
    refuse(run(trained, "--chat-template", bad), "the chat template does not render")
    refuse(run(trained, "--model-card-data", bad), "is not JSON")
    refuse(run(trained, base=tied_base, flags=(*FLAGS, "--out", str(tied_base / "export"))), "one inside the other")


def test_a_report_that_cannot_be_written_is_a_failure_without_a_traceback(
    run: Run, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = run(trained, "--report", tmp_path / "file" / "report.json")
    assert result.code == 1
    assert result.stderr.startswith("failed: ")


def test_an_incomplete_checkpoint_is_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / trained.name
    shutil.copytree(trained, copy)
    (copy / "done").unlink()
    refuse(run(copy), "is incomplete: done missing")
    refuse(run(copy / "model"), "is incomplete: done missing")
    (copy / "done").write_text("1")
    shard_path(copy / "model", 2, 0).unlink()
    refuse(run(copy), "dp_rank_00_tp_rank_02_pp_rank_00.pt missing")
