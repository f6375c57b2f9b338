"""From a training checkpoint to a verified Hugging Face folder.

    python -m trainium.model.export --checkpoint X.ckpt --base BASE --out OUT --tp 32 --kv-replicator 4 --report FILE

OUT is made beside itself under a temporary name, compared with the base model, and takes its place only if every check
passed. If one failed, what was made is kept as `OUT.failed` to look at (the next export removes it), and an earlier OUT
stays as it was. An OUT that holds anything but an earlier export is never replaced.
"""

import argparse
import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from trainium.checkpoint.comparison import Comparison
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.meter import Meter, Progress
from trainium.checkpoint.staging import staged
from trainium.errors import UserError
from trainium.files import write_atomic, write_json
from trainium.model import export_weights, verification
from trainium.model.companions import Change, config_changes, write_companions
from trainium.model.export_request import RECORD, CheckedRequest, Request, check_request, failed_folder
from trainium.model.export_weights import WrittenWeights
from trainium.model.layout_options import add_layout_options, layout_from
from trainium.model.manifest import FileEntry, digest, manifest
from trainium.model.model_card import ModelCardData, base_front_matter, load_card_data, render_card
from trainium.model.verification import Check
from trainium.text import duration, size

Say = Callable[[str], None]
_LARGEST = 10  # tensors listed with their differences
# The record inside OUT travels with the model: no paths of this cluster, nothing that its own writing would change.
_NOT_IN_RECORD = frozenset({"checkpoint", "base", "folder", "files", "bytes", "digest", "seconds"})


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was made and what was found. `folder` is OUT, or OUT.failed; `bytes` of all files; `digest` over them."""

    ok: bool
    rehearsal: bool
    checkpoint: str
    step: int | None
    base: str
    folder: str
    dtype: str
    trained_dtypes: tuple[str, ...]
    untied: bool
    checks: tuple[Check, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    tensors: int
    changed_tensors: int
    max_difference: float
    largest_differences: dict[str, float]
    files: tuple[FileEntry, ...] = ()
    bytes: int = 0
    digest: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not hold."""
        return tuple(check for check in self.checks if check.result == "failed")

    def as_json(self) -> dict[str, Any]:
        """Plain values; with the passed checks as sentences (`verified`) and all of them as a `table`."""
        return asdict(self) | {
            "verified": [f"{check.check}: {check.detail}" for check in self.checks if check.result == "passed"],
            "table": [asdict(check) for check in self.checks],
        }


class _VerificationFailedError(Exception):
    """Leaves the block that would put the folder in its place."""


def export(request: Request, say: Say) -> ExportReport:
    """Make, verify and place the folder; see the module's docstring for what becomes of OUT.

    Raises UserError for anything the user must change; a failed verification is a report whose `ok` is False.
    """
    started = time.monotonic()
    checked = check_request(request)
    out, failed = checked.request.out, failed_folder(checked.request.out)
    if failed.exists():
        shutil.rmtree(failed)
    report = None
    with contextlib.suppress(_VerificationFailedError), staged(out, re.compile(".*"), checked.bytes) as work:
        report = _make(checked, work, say, started)
        if not report.ok:
            work.rename(failed)
            raise _VerificationFailedError
    assert report is not None
    return report


def _make(checked: CheckedRequest, work: Path, say: Say, started: float) -> ExportReport:
    request = checked.request
    weights = _write_weights(checked, work, Meter("weights: written", say))
    if weights.trained != (checked.dtype,):
        say(f"weights: trained in {', '.join(weights.trained)}, written as {checked.dtype}")
    dtype = checked.dtype if checked.dtype_changed else None
    changes = config_changes(checked.config, untied=weights.untied, dtype=dtype)
    changes = write_companions(request.base, work, changes, checked.template)
    checks, comparison = _verify(checked, work, weights, changes, say)
    if request.single_file:
        export_weights.write_single_file(work)
    rows = [(check.check, check.result, check.detail) for check in checks]
    card = render_card(request.card, request.out.name, base_front_matter(request.base), rows, checked.dtype)
    write_atomic(work / "README.md", card)
    ok = all(check.result != "failed" for check in checks)
    report = ExportReport(
        ok=ok,
        rehearsal=request.card.rehearsal,
        checkpoint=str(request.checkpoint),
        step=_step(request.checkpoint),
        base=str(request.base),
        folder=str(request.out if ok else failed_folder(request.out)),
        dtype=checked.dtype,
        trained_dtypes=weights.trained,
        untied=weights.untied,
        checks=checks,
        changes=changes,
        notes=(*weights.notes, *(f"{check.check}: {check.detail}" for check in checks if check.result == "skipped")),
        tensors=weights.tensors,
        changed_tensors=sum(tensor.max_difference > 0 for tensor in comparison.tensors),
        max_difference=comparison.max_difference,
        largest_differences=_largest(comparison),
    )
    record = {key: value for key, value in asdict(report).items() if key not in _NOT_IN_RECORD}
    write_json(work / RECORD, record)
    files = manifest(work)
    return replace(
        report,
        files=files,
        bytes=sum(file.bytes for file in files),
        digest=digest(files),
        seconds=round(time.monotonic() - started, 3),
    )


def _verify(
    checked: CheckedRequest, work: Path, weights: WrittenWeights, changes: tuple[Change, ...], say: Say
) -> tuple[tuple[Check, ...], Comparison]:
    base = checked.request.base
    on_weights, comparison = verification.check_weights(base, work, untied=weights.untied, dtype=checked.dtype)
    for check in on_weights:
        verification.say_check(check, say)
    others = [
        partial(_check_ranks, checked, work, weights),
        partial(verification.check_companions, base, work, changes),
        partial(verification.check_loads, work),
    ]
    if checked.template is not None:
        others.append(partial(verification.check_chat_template, work, checked.template))
    return on_weights + verification.run_all(others, say), comparison


def _check_ranks(checked: CheckedRequest, work: Path, weights: WrittenWeights) -> Check:
    if weights.copies is not None:
        return verification.check_copies(weights.copies)
    return verification.check_slices(work, checked.request.checkpoint, checked.request.layout, checked.dtype)


def _write_weights(checked: CheckedRequest, work: Path, progress: Progress) -> WrittenWeights:
    request = checked.request
    if request.full_state is not None:
        return export_weights.from_full_state(request.full_state, work, checked.arch, checked.dtype, progress)
    return export_weights.from_shards(request.checkpoint, work, checked.arch, request.layout, checked.dtype, progress)


def _step(checkpoint: Path) -> int | None:
    """The global step in a training checkpoint's name, which is exact (consumed_samples beside it can be stale)."""
    match = re.search(r"--step=(\d+)", str(checkpoint))
    return int(match[1]) if match else None


def _largest(comparison: Comparison) -> dict[str, float]:
    order = sorted(comparison.tensors, key=lambda tensor: -tensor.max_difference)
    return {tensor.name: tensor.max_difference for tensor in order[:_LARGEST]}


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 verified, 1 verification (listed) or the file system failed, 2 the user must change something."""
    options = _parser().parse_args(argv)
    try:
        report = export(_request(options), lambda line: print(line, flush=True))
        if options.report:
            write_json(options.report, report.as_json())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    for note in report.notes:
        print(f"note: {note}")
    if not report.ok:
        for check in report.failures:
            print(f"failed: {check.check}: {check.detail}", file=sys.stderr)
        print(f"not exported; what was made is kept in {report.folder}", file=sys.stderr)
        return 1
    made = "rehearsal export" if report.rehearsal else "export"
    print(f"{made} {report.folder}: {report.tensors} tensors, {size(report.bytes)}, {duration(report.seconds)}")
    return 0


def _request(options: argparse.Namespace) -> Request:
    return Request(
        checkpoint=options.checkpoint,
        base=options.base,
        out=options.out,
        layout=layout_from(options),
        full_state=options.full_state,
        dtype=options.dtype,
        single_file=options.single_file,
        chat_template=options.chat_template,
        card=load_card_data(options.model_card_data) if options.model_card_data else ModelCardData(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainium.model.export", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="*.ckpt folder, or a folder of shards")
    add("--base", type=Path, required=True, help="Hugging Face folder that training started from")
    add("--out", type=Path, required=True, help="folder to make")
    add("--full-state", type=Path, metavar="FILE", help="checkpoint.pt that the toolchain's converter merged from it")
    add_layout_options(parser)
    add("--dtype", choices=get_args(FloatDtype), help="dtype of the weights (default: the base's)")
    add("--single-file", action="store_true", help="write checkpoint.pt beside the safetensors")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template for tokenizer_config.json")
    add("--model-card-data", type=Path, metavar="FILE.json", help="what the model card says about the run")
    add("--report", type=Path, metavar="FILE.json", help="where to write the report")
    return parser


if __name__ == "__main__":
    sys.exit(main())
