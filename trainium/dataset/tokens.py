"""How long the examples are in tokens, and what NxDT's data module makes of them.

Source: NxDT's lightning_modules/data/{model_alignment_data_module,utils}.py and datasets/ConcatDataset.py: an example
is bos + tokens(input) + tokens(output) + eos, both encoded without special tokens and each cut at seq_length.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainium.dataset.rows import DatasetError, Row

_BINS = 12


@dataclass(frozen=True)
class Bin:
    """Examples of `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class LengthStats:
    """Lengths in tokens, bos and eos included."""

    rows: int
    total: int
    min: int
    mean: float
    p95: int
    max: int
    histogram: tuple[Bin, ...]


class Lengths:
    """Exact statistics in memory that grows with the longest example, not with their number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self._counts[length] += 1

    def stats(self) -> LengthStats:
        lengths = sorted(self._counts)
        rows, total = self._counts.total(), sum(length * count for length, count in self._counts.items())
        rank, seen, p95 = math.ceil(0.95 * rows), 0, lengths[-1]
        for length in lengths:
            seen += self._counts[length]
            if seen >= rank:
                p95 = length
                break
        return LengthStats(
            rows, total, lengths[0], total / rows, p95, lengths[-1], self._histogram(lengths[0], lengths[-1])
        )

    def _histogram(self, low: int, high: int) -> tuple[Bin, ...]:
        width = max(1, math.ceil((high - low + 1) / _BINS))
        bins = Counter({(length - low) // width: 0 for length in range(low, high + 1, width)})
        for length, count in self._counts.items():
            bins[(length - low) // width] += count
        return tuple(
            Bin(low + i * width, min(high, low + (i + 1) * width - 1), count) for i, count in sorted(bins.items())
        )


@dataclass
class Packing:
    """Counts the samples that ConcatDataset makes of examples in file order, without the tokens.

    Each packed example is followed by one more eos. One of seq_length tokens or more is dropped, and ends the sample
    before it.
    """

    seq_length: int
    samples: int = 0
    dropped: int = 0
    _filled: int = 0

    def add(self, length: int) -> None:
        if length >= self.seq_length:
            self.dropped += 1
            self._filled = 0
        elif self._filled and self._filled + length < self.seq_length:
            self._filled += length + 1
        else:
            self.samples += 1
            self._filled = length + 1


def load_counter(folder: Path, seq_length: int) -> Callable[[Sequence[Row]], list[int]]:
    """A function from a batch of rows to their lengths as the trainer will see them. Raises DatasetError.

    tokenizer.json is read by the `tokenizers` library on all cores; only a folder without it needs transformers.
    """
    if not (folder / "tokenizer.json").is_file():
        return _slow_counter(folder, seq_length)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise DatasetError(
            f"{folder / 'tokenizer.json'} cannot be read: {error}. Download or copy it again."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = _ends(folder)
    if ends is None:
        _check_ends(folder, _transformers_tokenizer(folder))
    else:
        for name, token in ends.items():
            if token is None or tokenizer.token_to_id(token) is None:
                raise _no_end(folder, name, token)

    def count(rows: Sequence[Row]) -> list[int]:
        prompts = tokenizer.encode_batch_fast([row.input for row in rows], add_special_tokens=False)
        responses = tokenizer.encode_batch_fast([row.output for row in rows], add_special_tokens=False)
        return [_length(len(p), len(r), seq_length) for p, r in zip(prompts, responses, strict=True)]

    return count


def _length(prompt: int, response: int, seq_length: int) -> int:
    return min(prompt, seq_length) + min(response, seq_length) + 2


def _slow_counter(folder: Path, seq_length: int) -> Callable[[Sequence[Row]], list[int]]:
    tokenizer = _transformers_tokenizer(folder)
    _check_ends(folder, tokenizer)

    def count(rows: Sequence[Row]) -> list[int]:
        prompts = tokenizer([row.input for row in rows], add_special_tokens=False)["input_ids"]
        responses = tokenizer([row.output for row in rows], add_special_tokens=False)["input_ids"]
        return [_length(len(p), len(r), seq_length) for p, r in zip(prompts, responses, strict=True)]

    return count


def _transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken or missing file leads to
        raise DatasetError(f"{folder} has no tokenizer that transformers can load: {error}") from error


def _ends(folder: Path) -> dict[str, str | None] | None:
    """bos and eos as the tokenizer's files state them; None when a file leaves them to the tokenizer's class."""
    stated: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                stated |= json.loads((folder / name).read_bytes())
            except (ValueError, TypeError) as error:
                raise DatasetError(f"{folder / name} cannot be read: {error}. Download or copy it again.") from error
    if not {"bos_token", "eos_token"} <= stated.keys():
        return None
    tokens = {name: stated[f"{name}_token"] for name in ("bos", "eos")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _check_ends(folder: Path, tokenizer: Any) -> None:
    for name in ("bos", "eos"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise _no_end(folder, name, getattr(tokenizer, f"{name}_token"))


def _no_end(folder: Path, name: str, token: str | None) -> DatasetError:
    has = f"{name}_token {token!r} is not in the vocabulary" if token else f"there is no {name}_token"
    return DatasetError(
        f"tokenizer of {folder}: {has}. NxDT puts bos before and eos behind every example and fails on None. "
        f'Set "{name}_token" in tokenizer_config.json to a token of the vocabulary that the model knows.'
    )
