"""Held-out loss and sample answers of a fine-tuned model against its base.

    python -m trainium.model.evaluate --base BASE --tuned TUNED --data validation.jsonl --rows 64 --report FILE

Greedy and without randomness: the same folders and rows give the same report.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainium.checkpoint.huggingface import read_config
from trainium.errors import UserError
from trainium.files import write_json
from trainium.model.heldout import Sample, held_out_loss, read_rows, tokenize

# One forward pass never sees more tokens than this, padding included.
_BATCH_TOKENS = 4096


class EvaluationError(RuntimeError):
    """A model does not load, does not fit or gives a loss that is not a number."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to evaluate; `seq_length` None means the model's max_position_embeddings."""

    base: Path
    tuned: Path
    data: Path
    rows: int
    samples: int
    max_new_tokens: int
    seq_length: int | None = None


@dataclass(frozen=True)
class ModelResult:
    """One model's part: loss in nats per target token, perplexity (None if no float holds it), answers, seconds."""

    path: str
    loss: float
    perplexity: float | None
    answers: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class SampleAnswer:
    """A row's input, the answer in the data, and what both models make of it."""

    input: str
    expected: str
    base: str
    tuned: str


@dataclass(frozen=True)
class Evaluation:
    """The report. `too_long` rows exceed `max_tokens` and were left out; `tokens` carry the loss."""

    data: str
    rows: int
    too_long: int
    tokens: int
    max_tokens: int
    compute_dtype: str
    base: ModelResult
    tuned: ModelResult
    samples: tuple[SampleAnswer, ...]
    seconds: float

    @property
    def improved(self) -> bool:
        """Whether the tuned model's held-out loss is lower."""
        return self.tuned.loss < self.base.loss

    def as_json(self) -> dict[str, Any]:
        """Plain values, `improved` and the loss difference included."""
        return {**asdict(self), "improved": self.improved, "difference": self.tuned.loss - self.base.loss}


def evaluate(settings: Settings, say: Callable[[str], None]) -> Evaluation:
    """Evaluate both models one after the other on the same tokens.

    The base's tokenizer renders the rows, as in training. Both models compute in fp32 if the host's memory allows it,
    otherwise in the dtype they are stored in.

    Raises UserError for what the user must change, EvaluationError for models that fail.
    """
    from trainium.model.loading import LoadError, load_tokenizer, weight_files

    start = time.monotonic()
    max_tokens = _max_tokens(settings)
    for folder in (settings.base, settings.tuned):
        if not weight_files(folder):
            raise UserError(
                f"{folder} has no weights: give a Hugging Face folder with *.safetensors or pytorch_model*.bin"
            )
    rows = read_rows(settings.data, settings.rows)
    try:
        samples, too_long = tokenize(rows, load_tokenizer(settings.base), max_tokens)
    except LoadError as error:
        raise EvaluationError(str(error)) from error
    say(f"{len(samples)} rows of {settings.data}, {sum(s.targets for s in samples)} target tokens, {too_long} too long")
    dtype = _compute_dtype(settings)
    base = _run("base", settings.base, samples, settings, dtype, say)
    tuned = _run("tuned", settings.tuned, samples, settings, dtype, say)
    return Evaluation(
        data=str(settings.data),
        rows=len(samples),
        too_long=too_long,
        tokens=sum(sample.targets for sample in samples),
        max_tokens=max_tokens,
        compute_dtype="as stored" if dtype is None else str(dtype).removeprefix("torch."),
        base=base,
        tuned=tuned,
        samples=tuple(
            SampleAnswer(sample.row.input, sample.row.output, before, after)
            for sample, before, after in zip(samples, base.answers, tuned.answers, strict=False)
        ),
        seconds=time.monotonic() - start,
    )


def _run(
    name: str, folder: Path, samples: list[Sample], settings: Settings, dtype: Any, say: Callable[[str], None]
) -> ModelResult:
    """Load one model, measure it, let it answer; it is gone from memory before the next one is loaded."""
    from trainium.model.loading import LoadError, NotEnoughMemoryError, generate, load_model, load_tokenizer

    start = time.monotonic()
    try:
        model, tokenizer = load_model(folder, dtype), load_tokenizer(folder)
        loss = held_out_loss(model, samples, _BATCH_TOKENS, _progress(name, say))
        if not math.isfinite(loss):
            raise EvaluationError(f"{folder}: the held-out loss is {loss}")
        answers = []
        for number, sample in enumerate(samples[: settings.samples], 1):
            answers.append(generate(model, tokenizer, sample.row.input, settings.max_new_tokens).text)
            say(f"{name}: answer {number} of {min(settings.samples, len(samples))}")
    except (LoadError, NotEnoughMemoryError) as error:
        raise EvaluationError(f"{folder}: {error}") from error
    say(f"{name}: held-out loss {loss:.4f}")
    perplexity = math.exp(loss) if loss < 700 else None  # exp overflows a double above 709
    return ModelResult(str(folder), loss, perplexity, tuple(answers), time.monotonic() - start)


def _progress(name: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says "base: 12 of 64 rows" at most ten times, the last time included."""
    said = 0

    def report(done: int, total: int) -> None:
        nonlocal said
        if done == total or done * 10 // total > said * 10 // total:
            said = done
            say(f"{name}: {done} of {total} rows")

    return report


def _compute_dtype(settings: Settings) -> Any:
    """fp32 where both models fit, one after the other; None (as stored) otherwise.

    Many CPUs compute bf16 more slowly than fp32, and all of them less exactly.
    """
    import torch

    from trainium.model.host import available_memory
    from trainium.model.loading import memory_needed

    needed = max(memory_needed(folder, torch.float32) for folder in (settings.base, settings.tuned))
    return torch.float32 if needed <= available_memory() else None


def _max_tokens(settings: Settings) -> int:
    config = read_config(settings.base)
    longest = config.get("max_position_embeddings")
    limits = [limit for limit in (settings.seq_length, longest) if limit]
    if not limits:
        raise UserError(f"{settings.base}/config.json has no max_position_embeddings: give --seq-length")
    return min(limits)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 evaluated (better or not), 1 a model or the disk failed, 2 the user must change something."""
    parser = argparse.ArgumentParser(prog="python -m trainium.model.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="base model folder")
    parser.add_argument("--tuned", type=Path, required=True, help="fine-tuned model folder")
    parser.add_argument("--data", type=Path, required=True, help="jsonl file with the columns input and output")
    parser.add_argument("--rows", type=_count, default=64, help="rows of the file to use (default 64)")
    parser.add_argument("--samples", type=_count_or_none, default=4, help="sample answers (default 4)")
    parser.add_argument("--max-new-tokens", type=_count, default=64, help="longest answer in tokens (default 64)")
    parser.add_argument("--seq-length", type=_count, help="leave out longer rows (default max_position_embeddings)")
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    values = vars(parser.parse_args(argv))
    report = values.pop("report")
    try:
        result = evaluate(Settings(**values), lambda line: print(line, flush=True))
        write_json(report, result.as_json())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EvaluationError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    change = "lower" if result.improved else "not lower"
    print(f"held-out loss {result.base.loss:.4f} → {result.tuned.loss:.4f} ({change}), {result.seconds:.1f} s")
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


if __name__ == "__main__":
    sys.exit(main())
