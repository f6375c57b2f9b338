"""The files of a run, the token lengths, and what NxDT's data module would do with them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from trainium.dataset.prepare import DatasetReport, prepare
from trainium.dataset.rows import DatasetError
from trainium.dataset.tokens import Bin, Lengths, Packing


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One token per word."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "w": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>", "</s>"])
    words.enable_truncation(4)  # as a file may say, and NxDT does not heed
    words.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, *lengths: tuple[int, int], **columns: str) -> Path:
    """Rows of (words of the prompt, words of the response)."""
    names = {"input": "input", "output": "output", **columns}
    rows = [{names["input"]: "w " * p, names["output"]: "w " * r, "category": "x"} for p, r in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(tmp_path: Path, tokenizer: Path, train: Path, validation: Path | None = None, **settings: Any) -> DatasetReport:
    settings = {"seq_length": 16, "global_batch_size": 1, "packing": True, **settings}
    sources = [validation] if validation else []
    return prepare([train], sources, tmp_path / "data", tokenizer_folder=tokenizer, **settings)


def test_both_files_hold_exactly_input_and_output(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", (1, 2), (3, 4), input="question", output="reply")
    validation = write(tmp_path / "v.jsonl", (2, 2), input="question", output="reply")
    report = run(tmp_path, tokenizer, train, validation, prompt_field="question", response_field="reply")
    written = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert written == [{"input": "w ", "output": "w w "}, {"input": "w w w ", "output": "w w w w "}]
    assert report.train.path == tmp_path / "data" / "train.jsonl"
    assert report.train.sha256 == hashlib.sha256(report.train.path.read_bytes()).hexdigest()
    assert report.train.bytes == report.train.path.stat().st_size
    assert report.validation is not None
    assert report.validation.rows == 1
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["train.jsonl", "validation.jsonl"]


def test_lengths_count_bos_and_eos_and_no_truncation_of_the_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", (1, 1), (2, 3), (6, 7))
    lengths = run(tmp_path, tokenizer, train).train.lengths
    assert (lengths.rows, lengths.min, lengths.max, lengths.total) == (3, 4, 15, 26)
    assert lengths.mean == pytest.approx(26 / 3)
    assert lengths.p95 == 15
    assert sum(bin_.count for bin_ in lengths.histogram) == 3


def test_without_tokenizer_json_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({"<s>": 0, "</s>": 1, "w": 2, "Ġ": 3, "Ġw": 4}))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ w\n")
    names = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "t.jsonl").write_text(json.dumps({"input": "w w", "output": "w w w"}) + "\n")
    assert run(tmp_path, folder, tmp_path / "t.jsonl").train.lengths.max == 7


def test_the_digest_follows_the_content_alone(tmp_path: Path, tokenizer: Path) -> None:
    first = run(tmp_path, tokenizer, write(tmp_path / "a.jsonl", (1, 1), (2, 2)))
    again = run(tmp_path, tokenizer, write(tmp_path / "b.jsonl", (1, 1), (2, 2)), seq_length=32)
    other = run(tmp_path, tokenizer, write(tmp_path / "a.jsonl", (1, 1), (2, 3)))
    assert first.digest == again.digest != other.digest


def test_packing_drops_and_counts_what_is_too_long(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", (6, 7), (7, 7), (40, 40), (2, 2), (2, 2))
    report = run(tmp_path, tokenizer, train)
    assert (report.train.rows, report.train.dropped, report.train.samples) == (5, 2, 2)
    notes = " ".join(report.notes)
    assert "trains on the prompts too" in notes
    assert "2 of 5 train rows have 16 tokens or more (the longest 34): packing drops them silently" in notes


def test_padding_refuses_what_would_kill_the_run(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", (6, 7), (7, 7), (1, 1), (40, 40))
    with pytest.raises(DatasetError) as refused:
        run(tmp_path, tokenizer, train, packing=False)
    message = str(refused.value)
    assert "too long: 2 rows" in message
    assert "row 2 of t.jsonl: 16 tokens with bos and eos" in message
    assert "Raise training.seq_length, shorten or remove these rows, or set training.packing=true" in message
    assert list((tmp_path / "data").iterdir()) == []
    report = run(tmp_path, tokenizer, write(tmp_path / "t.jsonl", (6, 7), (1, 1)), packing=False)
    assert (report.train.samples, report.notes) == (2, ())


def test_zero_batches_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", *[(2, 2)] * 6)
    assert run(tmp_path, tokenizer, train, packing=False, global_batch_size=4).steps_per_epoch == 1
    with pytest.raises(DatasetError, match=r"6 training rows, 6 samples, are less than one global batch of 8"):
        run(tmp_path, tokenizer, train, packing=False, global_batch_size=8)
    # Two examples of 6 + 1 tokens fit into 16.
    with pytest.raises(
        DatasetError, match=r"packed into 3 samples, are less than one global batch of 4.*or training.seq_length"
    ):
        run(tmp_path, tokenizer, train, global_batch_size=4)
    small = run(tmp_path, tokenizer, train, write(tmp_path / "v.jsonl", (1, 1)), packing=False, global_batch_size=4)
    assert "validation samples are less than one global batch" in small.notes[0]


def test_all_problems_come_at_once_and_nothing_is_written(tmp_path: Path, tokenizer: Path) -> None:
    train = write(tmp_path / "t.jsonl", (1, 1))
    with train.open("a") as file:
        file.write('{"prompt": "a", "output": "b"}\n{"input": null, "output": "b"}\n')
    validation = tmp_path / "v.jsonl"
    validation.write_text("")
    with pytest.raises(DatasetError) as refused:
        run(tmp_path, tokenizer, train, validation, global_batch_size=8)
    message = str(refused.value)
    assert "row 2 of t.jsonl: no column 'input'; the columns are 'prompt', 'output'" in message
    assert "row 3 of t.jsonl: 'input' is null" in message
    assert "the validation files hold no usable row" in message
    assert "less than one global batch of 8" in message
    assert list((tmp_path / "data").iterdir()) == []


def test_a_refused_dataset_leaves_the_last_good_one(tmp_path: Path, tokenizer: Path) -> None:
    good = run(tmp_path, tokenizer, write(tmp_path / "t.jsonl", (1, 1)))
    with pytest.raises(DatasetError, match="the train files hold no usable row"):
        run(tmp_path, tokenizer, write(tmp_path / "t.jsonl"))
    assert hashlib.sha256(good.train.path.read_bytes()).hexdigest() == good.train.sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bos_token": None}, "there is no bos_token.*fails on None"),
        ({"eos_token": None}, "there is no eos_token"),
        ({"eos_token": "<|end|>"}, "eos_token '<|end|>' is not in the vocabulary"),
    ],
)
def test_a_tokenizer_without_ends_is_refused(
    tmp_path: Path, tokenizer: Path, change: dict[str, str | None], message: str
) -> None:
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | change))
    with pytest.raises(DatasetError) as refused:
        run(tmp_path, tokenizer, write(tmp_path / "t.jsonl", (1, 1)))
    assert message.split(".*")[0] in str(refused.value)
    assert message.split(".*")[-1] in str(refused.value)


def test_ends_that_no_file_states_are_asked_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DatasetError, match="there is no bos_token"):
        run(tmp_path, tokenizer, write(tmp_path / "t.jsonl", (1, 1)))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no tokenizer that transformers can load"):
        run(tmp_path, tmp_path, write(tmp_path / "t.jsonl", (1, 1)))


def pack(lengths: list[int], chunk: int) -> tuple[int, int]:
    """(samples, dropped) of ConcatDataset, worked out by filling one sample after the other."""
    samples, dropped, rest = 0, 0, list(lengths)
    while rest:
        sample = 0
        while rest and sample + rest[0] < chunk:
            sample += rest.pop(0) + 1
        if rest and rest[0] > chunk - 1:
            rest.pop(0)
            dropped += 1
        samples += sample > 0
    return samples, dropped


@given(st.lists(st.integers(2, 40), max_size=60), st.integers(2, 36))
def test_packing_counts_as_the_trainer_packs(lengths: list[int], chunk: int) -> None:
    packing = Packing(chunk)
    for length in lengths:
        packing.add(length)
    assert (packing.samples, packing.dropped) == pack(lengths, chunk)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_statistics_are_exact(values: list[int]) -> None:
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    stats = lengths.stats()
    assert (stats.rows, stats.min, stats.max, stats.total) == (len(values), min(values), max(values), sum(values))
    assert sum(value <= stats.p95 for value in values) >= 0.95 * len(values)
    assert sum(value < stats.p95 for value in values) < 0.95 * len(values)
    assert (stats.histogram[0].low, stats.histogram[-1].high) == (min(values), max(values))
    for bin_ in stats.histogram:
        assert bin_ == Bin(bin_.low, bin_.high, sum(bin_.low <= value <= bin_.high for value in values))
    assert len(stats.histogram) <= 12
