"""The training and validation files of a run, and what the trainer will make of them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainium.dataset.rows import DatasetError, Problem, Problems, Row, read_rows
from trainium.dataset.tokens import Lengths, LengthStats, Packing, load_counter
from trainium.files import sync_folder

_BATCH = 1000


@dataclass(frozen=True)
class SplitReport:
    """One file as it was written."""

    path: Path
    rows: int
    bytes: int
    sha256: str
    lengths: LengthStats
    dropped: int  # rows of seq_length tokens or more, which NxDT's packing leaves out silently
    samples: int  # sequences of seq_length tokens per epoch


@dataclass(frozen=True)
class DatasetReport:
    """What will be trained on. `digest` changes with any byte of either file, and with nothing else."""

    train: SplitReport
    validation: SplitReport | None
    packing: bool
    seq_length: int
    global_batch_size: int
    digest: str
    notes: tuple[str, ...]  # what the user should know, in sentences

    @property
    def steps_per_epoch(self) -> int:
        """NxDT drops the last incomplete global batch."""
        return self.train.samples // self.global_batch_size


def prepare(
    train: Sequence[Path],
    validation: Sequence[Path],
    out: Path,
    *,
    prompt_field: str = "input",
    response_field: str = "output",
    seq_length: int,
    tokenizer_folder: Path,
    global_batch_size: int,
    packing: bool,
    progress: Callable[[int], None] | None = None,
) -> DatasetReport:
    """Write `out`/train.jsonl and, if there are sources for it, `out`/validation.jsonl: exactly `input` and `output`.

    Streams: memory does not grow with the number of rows. `progress` gets the number of rows read so far. Nothing is
    written unless every row is usable. Raises DatasetError with all problems at once: bad rows (at most five examples
    per kind), rows that would kill a run without packing, fewer samples than one global batch; and, before any row is
    read, for a tokenizer without bos or eos.
    """
    count = load_counter(tokenizer_folder, seq_length)
    out.mkdir(parents=True, exist_ok=True)
    problems = Problems()
    reading = _Reading(prompt_field, response_field, seq_length, packing, count, problems, progress)
    temporary = {name: out / f".{name}.jsonl.part" for name in ("train", "validation")}
    try:
        splits = {
            name: reading.write(sources, temporary[name], out / f"{name}.jsonl")
            for name, sources in (("train", train), ("validation", validation))
            if sources or name == "train"
        }
        faults = _faults(problems, splits, global_batch_size, packing)
        if faults:
            raise DatasetError("The dataset cannot be used:\n" + "\n".join(faults))
        for name in temporary:
            if name in splits:
                temporary[name].replace(out / f"{name}.jsonl")
            else:
                (out / f"{name}.jsonl").unlink(missing_ok=True)
        sync_folder(out)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    reports = {name: split for name, split in splits.items() if split is not None}
    digest = hashlib.sha256("".join(f"{name} {split.sha256}\n" for name, split in reports.items()).encode()).hexdigest()
    return DatasetReport(
        reports["train"],
        reports.get("validation"),
        packing,
        seq_length,
        global_batch_size,
        digest,
        tuple(_notes(reports, seq_length, global_batch_size, packing)),
    )


@dataclass
class _Reading:
    """What all splits share."""

    prompt_field: str
    response_field: str
    seq_length: int
    packing: bool
    count: Callable[[Sequence[Row]], list[int]]
    problems: Problems
    progress: Callable[[int], None] | None
    seen: int = 0

    def write(self, sources: Sequence[Path], temporary: Path, final: Path) -> SplitReport | None:
        """The report of the file at `final`, still at `temporary`; None when there was no usable row."""
        lengths, packed, digest = Lengths(), Packing(self.seq_length), hashlib.sha256()
        rows = size = 0
        with temporary.open("wb") as file:
            for batch in _batches(self._rows(sources)):
                for row, length in zip(batch, self.count(batch), strict=True):
                    line = json.dumps({"input": row.input, "output": row.output}, ensure_ascii=False).encode() + b"\n"
                    file.write(line)
                    digest.update(line)
                    size += len(line)
                    rows += 1
                    lengths.add(length)
                    packed.add(length)
                    if length >= self.seq_length and not self.packing:
                        self.problems.add(Problem("too long", row.file, row.row, f"{length} tokens with bos and eos"))
            file.flush()
            os.fsync(file.fileno())
        if not rows:
            return None
        dropped, samples = (packed.dropped, packed.samples) if self.packing else (0, rows)
        return SplitReport(final, rows, size, digest.hexdigest(), lengths.stats(), dropped, samples)

    def _rows(self, sources: Sequence[Path]) -> Iterator[Row]:
        for source in sources:
            for row in read_rows(source, self.prompt_field, self.response_field):
                self.seen += 1
                if self.progress is not None and self.seen % _BATCH == 0:
                    self.progress(self.seen)
                if isinstance(row, Problem):
                    self.problems.add(row)
                else:
                    yield row


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _faults(
    problems: Problems, splits: dict[str, SplitReport | None], global_batch_size: int, packing: bool
) -> list[str]:
    faults = []
    if problems.counts:
        faults.append(str(problems))
    if problems.counts["missing column"]:
        faults.append("- Set dataset.prompt_field and dataset.response_field to the columns of prompt and answer.")
    if problems.counts["too long"]:
        faults.append(
            "- Without packing, NxDT pads a row of seq_length tokens or more to a multiple of it and the run dies. "
            "Raise training.seq_length, shorten or remove these rows, or set training.packing=true."
        )
    faults += [f"- the {name} files hold no usable row" for name, split in splits.items() if split is None]
    train = splits["train"]
    if train is not None and train.samples < global_batch_size:
        made = f"packed into {train.samples} samples" if packing else f"{train.samples} samples"
        left = f" ({train.dropped} too long for seq_length and dropped)" if train.dropped else ""
        faults.append(
            f"- {train.rows} training rows, {made}{left}, are less than one global batch of {global_batch_size}: NxDT "
            "would train zero steps and report success. Lower "
            f"training.global_batch_size{', or training.seq_length' if packing else ''}, or give more rows."
        )
    return faults


def _notes(splits: dict[str, SplitReport], seq_length: int, global_batch_size: int, packing: bool) -> Iterator[str]:
    if packing:
        yield "Packing trains on the prompts too: NxDT takes the labels from the token ids and masks nothing."
    for name, split in splits.items():
        if split.dropped:
            yield (
                f"{split.dropped} of {split.rows} {name} rows have {seq_length} tokens or more (the longest "
                f"{split.lengths.max}): packing drops them silently."
            )
    validation = splits.get("validation")
    if validation is not None and validation.samples < global_batch_size:
        yield (
            f"The {validation.samples} validation samples are less than one global batch of {global_batch_size}: the "
            "trainer's own validation would see no batch."
        )
