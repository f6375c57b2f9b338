"""`python -m trainium.model.evaluate`: rows rendered as the trainer does, the loss checked by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainium.files import read_json
from trainium.model import evaluate
from trainium.model.heldout import HeldOutError, batches, read_rows, tokenize
from trainium.model.loading import load_model, load_tokenizer

ROWS = [
    {"input": "what is one plus one ?", "output": "two"},
    {"input": "what is one plus two ?", "output": "three . the"},
    {"input": "Hello", "output": "Hello Hello Hello Hello Hello"},
    {"input": "", "output": "four"},
]


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "validation.jsonl", ROWS)


def test_a_row_is_bos_input_output_eos_with_loss_on_output_and_eos(tied_base: Path, data: Path) -> None:
    samples, too_long = tokenize(read_rows(data, 10), load_tokenizer(tied_base), 64)
    assert samples[0].ids == (1, 12, 11, 4, 10, 4, 13, 5, 2)
    assert (samples[0].prompt, samples[0].targets) == (7, 2)
    assert samples[3].ids == (1, 7, 2)
    assert too_long == 0


def test_rows_longer_than_the_limit_are_left_out_and_counted(tied_base: Path, data: Path) -> None:
    samples, too_long = tokenize(read_rows(data, 10), load_tokenizer(tied_base), 8)
    assert [len(sample.ids) for sample in samples] == [8, 3]
    assert too_long == 2


def test_only_the_first_rows_are_read(data: Path) -> None:
    assert [row.output for row in read_rows(data, 2)] == ["two", "three . the"]


def test_batches_stay_within_the_bound_and_keep_every_sample(tied_base: Path, data: Path) -> None:
    samples, _ = tokenize(read_rows(data, 10), load_tokenizer(tied_base), 64)
    cut = list(batches(samples, 18))
    assert all(len(batch) * max(len(sample.ids) for sample in batch) <= 18 or len(batch) == 1 for batch in cut)
    assert sorted(sample.ids for batch in cut for sample in batch) == sorted(sample.ids for sample in samples)


@pytest.fixture(scope="module")
def tuned(tied_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied base trained for a few steps on the rows, untied as an export is."""
    folder = tmp_path_factory.mktemp("tuned")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tied_base / name).read_bytes())
    config = read_json(tied_base / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = load_model(tied_base, torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        for sample in ([1, 12, 11, 4, 10, 4, 13, 5, 2], [1, 12, 11, 4, 10, 5, 13, 6, 14, 15, 2]):
            optimizer.zero_grad()
            ids = torch.tensor([sample])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loss_by_hand(folder: Path) -> float:
    """One row at a time, from log-probabilities, no padding."""
    model, total, count = load_model(folder, torch.float32), 0.0, 0
    for sample in tokenize(read_rows(folder / "rows", 10), load_tokenizer(folder), 64)[0]:
        with torch.inference_mode():
            probabilities = model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        for position in range(sample.prompt, len(sample.ids)):
            total -= float(probabilities[position - 1, sample.ids[position]])
            count += 1
    return total / count


def run(*arguments: object) -> int:
    return evaluate.main([str(argument) for argument in arguments])


def test_the_report_compares_base_and_tuned(
    tied_base: Path, tuned: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    arguments = ("--base", tied_base, "--tuned", tuned, "--data", data, "--rows", 3, "--samples", 2)
    assert run(*arguments, "--max-new-tokens", 4, "--report", report) == 0
    result = read_json(report)
    assert result["rows"] == 3
    assert result["tokens"] == 2 + 4 + 6
    assert result["improved"] is True
    assert result["tuned"]["loss"] < result["base"]["loss"]
    assert result["base"]["perplexity"] == pytest.approx(math.exp(result["base"]["loss"]))
    assert [sample["expected"] for sample in result["samples"]] == ["two", "three . the"]
    assert result["samples"][0]["tuned"] == "two"
    output = capsys.readouterr().out
    assert "base: 3 of 3 rows" in output
    assert "(lower)" in output


def test_the_loss_is_the_token_weighted_mean(tied_base: Path, data: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run("--base", tied_base, "--tuned", tied_base, "--data", data, "--samples", 0, "--report", report) == 0
    result = read_json(report)
    copy = tmp_path / "base"
    copy.mkdir()
    for file in tied_base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "rows").write_bytes(data.read_bytes())
    assert result["base"]["loss"] == pytest.approx(loss_by_hand(copy), abs=1e-5)
    assert result["difference"] == 0
    assert result["improved"] is False
    assert result["samples"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input": "a"}\n', "line 1: needs the columns input and output"),
        ('{"input": "a", "output": null}\n', "line 1: needs the columns"),
        ('{"input": "a", "output": "b"}\nnot json\n', "line 2: not JSON"),
        ("\n\n", "has no rows"),
    ],
)
def test_bad_data_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(HeldOutError, match=message):
        read_rows(path, 10)


def test_weights_in_torchs_format_are_the_same_model(tied_base: Path, data: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for file in tied_base.iterdir():
        (old / file.name).write_bytes(file.read_bytes())
    (old / "model.safetensors").unlink()
    torch.save(load_file(tied_base / "model.safetensors"), old / "pytorch_model.bin")
    report = tmp_path / "report.json"
    assert run("--base", old, "--tuned", tied_base, "--data", data, "--samples", 0, "--report", report) == 0
    assert read_json(report)["difference"] == 0


def test_what_the_user_must_change_exits_2(
    tied_base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert run("--base", tied_base, "--tuned", tmp_path / "none", "--data", data, "--report", report) == 2
    assert run("--base", tied_base, "--tuned", tied_base, "--data", tmp_path / "none", "--report", report) == 2
    errors = capsys.readouterr().err
    assert "has no weights" in errors
    assert "Traceback" not in errors
    assert not report.exists()


def test_a_model_that_gives_no_number_exits_1(
    tied_base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tied_base.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"] * float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    arguments = ("--base", tied_base, "--tuned", broken, "--data", data, "--samples", 0)
    assert run(*arguments, "--report", tmp_path / "report.json") == 1
    assert "held-out loss is nan" in capsys.readouterr().err
