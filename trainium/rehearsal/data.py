"""NxDT's SFT data module: rows → tokens → packed or padded samples → the batches of every data-parallel rank.

Behaviour from NxDT `model_alignment_data_module.py`, `ConcatDataset.py`, `PaddedDataset.py` and `data/utils.py`, its
oddities included: packing labels the prompts too and drops records longer than seq_length - 1; padding always
adds at least one token, so that a record of exactly seq_length becomes twice as long and stops the run.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainium.rehearsal.lines import format_interval, say

IGNORED = -100
PAD = 0  # NxDT sets pad_token_id = pad_token_type_id, which is 0
Encode = Callable[[list[str], int], list[list[int]]]  # texts, longest length → token ids


@dataclass(frozen=True)
class Record:
    """One row: bos + input, then output + eos."""

    prompt: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Sample:
    """What one row of a batch is made of."""

    ids: list[int]
    labels: list[int]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl or .json file. Raises ValueError for another suffix, no JSON and no rows."""
    if file.suffix.lower() not in (".jsonl", ".json"):
        raise ValueError(f"Path should have .jsonl/.json/.arrow, but got path='{file}'")
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        rows: list[dict[str, Any]] = json.loads(text)
    else:
        # Not splitlines(): it breaks at U+2028 and others too, which JSON texts may hold.
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not rows:
        raise ValueError(f"{file}: the dataset has no rows")
    return rows


def tokenize(
    rows: Sequence[dict[str, Any]], encode: Encode, bos: int | None, eos: int | None, seq_length: int
) -> list[Record]:
    """Both columns, each cut to seq_length by itself.

    Raises KeyError for a missing column, TypeError for a null in one, and for a tokenizer without bos or eos.
    """
    start = time.monotonic()
    texts = [(row["input"], row["output"]) for row in rows]
    prompts = encode([text for text, _ in texts], seq_length)
    answers = encode([text for _, text in texts], seq_length)
    if bos is None or eos is None:
        raise TypeError(
            f"the tokenizer has no {'bos' if bos is None else 'eos'} token, which every record begins or ends with"
        )
    seconds = time.monotonic() - start
    speed = len(rows) / seconds if seconds else 0.0
    say(f"Map: 100%|██████████| {len(rows)}/{len(rows)} [{format_interval(seconds)}<00:00, {speed:.2f} examples/s]")
    return [Record([bos, *prompt], [*answer, eos]) for prompt, answer in zip(prompts, answers, strict=True)]


def pack(records: Sequence[Record], seq_length: int, eos: int) -> list[Sample]:
    """Consecutive records in one sample while they fit, an eos after each; any over seq_length - 1 is dropped."""
    samples, index = [], 0
    while index < len(records):
        ids: list[int] = []
        labels: list[int] = []
        while index < len(records) and len(ids) + len(records[index].ids) < seq_length:
            ids += [*records[index].ids, eos]
            labels += [*records[index].ids, IGNORED]
            index += 1
        if index < len(records) and len(records[index].ids) > seq_length - 1:
            index += 1
        if ids:
            missing = seq_length - len(ids)
            samples.append(Sample(ids + [PAD] * missing, labels + [IGNORED] * missing))
    return samples


def pad(records: Sequence[Record], seq_length: int) -> list[Sample]:
    """One record per sample, prompts not labelled, padded to the next multiple of seq_length that is longer."""
    samples = []
    for record in records:
        missing = seq_length - len(record.ids) % seq_length
        labels = [IGNORED] * len(record.prompt) + record.answer
        samples.append(Sample(record.ids + [PAD] * missing, labels + [IGNORED] * missing))
    return samples


@dataclass(frozen=True)
class Batches:
    """The training batches of all data-parallel ranks, in an order that only the epoch decides.

    Every rank takes every dp-th sample of a permutation and cuts it into batches of global_batch / dp; what is left
    over is dropped, on both levels (torch's DistributedSampler and DataLoader, drop_last=True).
    """

    samples: Sequence[Sample]
    dp: int
    micro_batch: int
    global_batch: int

    def __post_init__(self) -> None:
        if self.rank_batch < 1 or self.micro_batches < 1:
            raise ValueError(
                f"batch_size should be a positive integer value: global_batch_size={self.global_batch} is less than "
                f"micro_batch_size={self.micro_batch} × data parallel size={self.dp}"
            )

    @property
    def rank_batch(self) -> int:
        """Samples of one rank and step."""
        return self.global_batch // self.dp

    @property
    def micro_batches(self) -> int:
        """Micro batches of one rank and step; rounded down, as the real trainer does without saying so."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def samples_per_step(self) -> int:
        """Samples that are really trained on in one step."""
        return self.dp * self.micro_batch * self.micro_batches

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.samples) // self.dp // self.rank_batch

    def micro_batch_indices(self, step: int) -> list[list[int]]:
        """Sample numbers of every micro batch of a step (counted from the start of training), rank after rank."""
        epoch, batch = divmod(step, len(self))
        generator = torch.Generator().manual_seed(epoch)
        order: list[int] = torch.randperm(len(self.samples), generator=generator).tolist()
        order = order[: len(order) // self.dp * self.dp]
        units = []
        for rank in range(self.dp):
            mine = order[rank :: self.dp][batch * self.rank_batch : (batch + 1) * self.rank_batch]
            units += [mine[i * self.micro_batch : (i + 1) * self.micro_batch] for i in range(self.micro_batches)]
        return units

    def tensors(self, indices: Sequence[int], sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels), int64 [micro batch, sequence]. Raises AssertionError for samples of another length."""
        longest = max(len(self.samples[index].ids) for index in indices)
        if longest != sequence:
            raise AssertionError(f"Mismatch in input data {longest} and sequence length {sequence}")
        chosen = [self.samples[index] for index in indices]
        return torch.tensor([s.ids for s in chosen]), torch.tensor([s.labels for s in chosen])
