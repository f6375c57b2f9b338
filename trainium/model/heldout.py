"""Held-out rows as the trainer sees them: bos + input + output + eos, the loss over output and eos.

From NxDT's SFT data module: input and output are tokenized separately, without special tokens, and the label of every
position up to the last input token is -100.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainium.errors import UserError


class HeldOutError(UserError):
    """The validation file cannot be evaluated."""


@dataclass(frozen=True)
class Row:
    """One record of the validation file."""

    input: str
    output: str


@dataclass(frozen=True)
class Sample:
    """A tokenized row: `ids` are all tokens, the first `prompt` of them (bos + input) carry no loss."""

    row: Row
    ids: tuple[int, ...]
    prompt: int

    @property
    def targets(self) -> int:
        """Tokens that carry loss: the output's and eos."""
        return len(self.ids) - self.prompt


def read_rows(path: Path, count: int) -> list[Row]:
    """The first `count` records (fewer if the file has fewer), blank lines skipped.

    Raises HeldOutError naming file, line and fault.
    """
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(rows) == count:
                    break
                if line.strip():
                    rows.append(_row(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise HeldOutError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise HeldOutError(f"{path} has no rows: give a .jsonl file with the columns input and output")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise HeldOutError(f"{where}: not JSON ({error})") from None
    match record:
        case {"input": str(text), "output": str(answer)}:
            return Row(text, answer)
    raise HeldOutError(f"{where}: needs the columns input and output, both text")


def tokenize(rows: Sequence[Row], tokenizer: Any, max_tokens: int) -> tuple[list[Sample], int]:
    """Samples of at most `max_tokens` tokens and the number of rows left out because they are longer.

    Raises HeldOutError if the tokenizer lacks bos or eos (the trainer cannot render a row either), or no row fits.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None or eos is None:
        missing = "bos_token" if bos is None else "eos_token"
        raise HeldOutError(f"the tokenizer has no {missing}; the trainer renders bos + input + output + eos. Set it.")
    samples = []
    for row in rows:
        prompt = [bos, *_encode(tokenizer, row.input)]
        samples.append(Sample(row, (*prompt, *_encode(tokenizer, row.output), eos), len(prompt)))
    kept = [sample for sample in samples if len(sample.ids) <= max_tokens]
    if not kept:
        raise HeldOutError(f"every row is longer than {max_tokens} tokens: nothing to evaluate")
    return kept, len(samples) - len(kept)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def batches(samples: Sequence[Sample], max_padded_tokens: int) -> Iterator[tuple[Sample, ...]]:
    """Samples sorted by length, cut so that batch size × longest stays within the bound (one sample always fits)."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda item: len(item.ids)):
        if batch and (len(batch) + 1) * len(sample.ids) > max_padded_tokens:
            yield tuple(batch)
            batch = []
        batch.append(sample)
    if batch:
        yield tuple(batch)


def loss_sum(model: Any, batch: Sequence[Sample]) -> float:
    """Sum of the negative log-likelihood, in nats, of all target tokens of a batch."""
    import torch

    longest = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(batch):
        length = len(sample.ids)
        ids[row, :length] = torch.tensor(sample.ids)
        mask[row, :length] = 1
        labels[row, sample.prompt : length] = ids[row, sample.prompt : length]
    with torch.inference_mode():
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        wanted = labels[:, 1:] != -100
        # Only the target positions are cast: batch × length × vocabulary in fp32 would be gigabytes.
        loss = torch.nn.functional.cross_entropy(logits[wanted].float(), labels[:, 1:][wanted], reduction="sum")
    return float(loss)


def held_out_loss(
    model: Any, samples: Sequence[Sample], max_padded_tokens: int, progress: Callable[[int, int], None]
) -> float:
    """Token-weighted mean loss in nats; `progress` is called with samples done and all samples."""
    total, done = 0.0, 0
    for batch in batches(samples, max_padded_tokens):
        total += loss_sum(model, batch)
        done += len(batch)
        progress(done, len(samples))
    return total / sum(sample.targets for sample in samples)
