"""The data module's rules: what is packed, padded, masked, dropped, and in which order it comes."""

from pathlib import Path

import pytest

from trainium.rehearsal.data import IGNORED, PAD, Batches, Record, Sample, pack, pad, read_rows, tokenize

BOS, EOS = 1, 2


def record(length: int, prompt: int = 2) -> Record:
    return Record([BOS, *range(10, 9 + prompt)], [*range(20, 20 + length - prompt - 1), EOS])


def test_packing_concatenates_and_does_not_mask_prompts() -> None:
    (sample,) = pack([record(4), record(5)], 12, EOS)
    ids = [*record(4).ids, EOS, *record(5).ids, EOS]
    assert sample.ids == [*ids, PAD]
    assert sample.labels == [*record(4).ids, IGNORED, *record(5).ids, IGNORED, IGNORED]


def test_packing_drops_what_is_longer_than_the_sequence_less_one() -> None:
    samples = pack([record(4), record(8), record(7), record(20)], 8, EOS)
    assert [sample.ids for sample in samples] == [[*record(4).ids, EOS, PAD, PAD, PAD], [*record(7).ids, EOS]]


def test_padding_masks_the_prompt() -> None:
    (sample,) = pad([record(5)], 8)
    assert sample.ids == [*record(5).ids, PAD, PAD, PAD]
    assert sample.labels == [IGNORED, IGNORED, *record(5).answer, IGNORED, IGNORED, IGNORED]


def test_padding_a_record_of_exactly_the_sequence_stops_the_run() -> None:
    (sample,) = pad([record(8)], 8)
    with pytest.raises(AssertionError, match="Mismatch in input data 16 and sequence length 8"):
        Batches([sample], 1, 1, 1).tensors([0], 8)


def test_both_columns_are_cut_to_the_sequence() -> None:
    rows = [{"input": "a" * 9, "output": "b" * 9, "category": "ignored"}]
    (found,) = tokenize(rows, lambda texts, n: [[ord(c) for c in text][:n] for text in texts], BOS, EOS, 4)
    assert found == Record([BOS, *b"aaaa"], [*b"bbbb", EOS])


def test_rows_without_the_columns_or_a_tokenizer_without_bos() -> None:
    with pytest.raises(KeyError, match="input"):
        tokenize([{"prompt": "a", "output": "b"}], lambda texts, n: [[1]], BOS, EOS, 4)
    with pytest.raises(TypeError, match="no bos token"):
        tokenize([{"input": "a", "output": "b"}], lambda texts, n: [[1]], None, EOS, 4)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "x", "output": "y"}\n\n{"input": "z", "output": "w"}\n')
    (tmp_path / "a.json").write_text('[{"input": "x", "output": "y"}]')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert [len(read_rows(tmp_path / name)) for name in ("a.jsonl", "a.json")] == [2, 1]
    with pytest.raises(ValueError, match="no rows"):
        read_rows(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="Path should have"):
        read_rows(tmp_path / "a.csv")


def samples(count: int) -> list[Sample]:
    return [Sample([number], [number]) for number in range(count)]


def test_every_sample_once_an_epoch_and_in_another_order_in_the_next() -> None:
    batches = Batches(samples(24), dp=2, micro_batch=2, global_batch=8)
    assert (len(batches), batches.micro_batches, batches.samples_per_step) == (3, 2, 8)
    epochs = [[batches.micro_batch_indices(3 * epoch + step) for step in range(3)] for epoch in (0, 1)]
    flat = [[index for step in epoch for unit in step for index in unit] for epoch in epochs]
    assert [sorted(epoch) for epoch in flat] == [list(range(24))] * 2
    assert flat[0] != flat[1]
    assert all(len(step) == 4 and all(len(unit) == 2 for unit in step) for epoch in epochs for step in epoch)


def test_what_is_left_over_is_dropped_on_both_levels() -> None:
    assert len(Batches(samples(23), dp=2, micro_batch=1, global_batch=8)) == 2
    assert len(Batches(samples(7), dp=1, micro_batch=1, global_batch=8)) == 0


def test_a_global_batch_that_does_not_divide_is_rounded_down() -> None:
    batches = Batches(samples(24), dp=1, micro_batch=3, global_batch=8)
    assert (batches.micro_batches, batches.samples_per_step) == (2, 6)
    with pytest.raises(ValueError, match="positive integer"):
        Batches(samples(24), dp=16, micro_batch=1, global_batch=8)
