"""`python -m trainium.checkpoint to-nxd | to-hf | verify-nxd`: what the convert and export jobs run."""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.options import Meter, add_layout_options, layout_from
from trainium.checkpoint.shards import Form
from trainium.checkpoint.weights import FloatDtype
from trainium.errors import UserError
from trainium.files import write_json
from trainium.text import duration, size


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 when the verification found differences, or 2 with one message when the input is at fault."""
    options = _parser().parse_args(argv)
    _keep_heap_small()
    try:
        return {"to-nxd": _to_nxd, "to-hf": _to_hf, "verify-nxd": _verify_nxd}[options.command](options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _to_nxd(options: argparse.Namespace) -> int:
    layout = _layout(options, options.hf_dir)
    from trainium.checkpoint.convert import to_nxd

    report = to_nxd(
        options.hf_dir, options.out, layout, dtype=options.dtype, form=options.form, progress=Meter("converted")
    )
    return _finish(options, report.to_dict(), options.hf_dir, options.out, report.layout)


def _to_hf(options: argparse.Namespace) -> int:
    layout = _layout(options, options.config)
    if options.verify and options.single_file:
        raise CheckpointError("--verify reads a folder with safetensors and config.json; leave out --single-file")
    from trainium.checkpoint.convert import to_hf

    report = to_hf(
        options.checkpoint,
        options.out,
        options.config,
        layout,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        single_file=options.single_file,
        allow_differing_copies=options.allow_differing_copies,
        progress=Meter("converted"),
    )
    return _finish(options, report.to_dict(), options.out, options.checkpoint, report.layout)


def _verify_nxd(options: argparse.Namespace) -> int:
    """For shards that somebody else wrote: the proof alone, in the report under the same key as a conversion's."""
    ok, verification = _verify(options.hf_dir, options.checkpoint, _layout(options, options.hf_dir), None)
    if options.report:
        write_json(options.report, {"verification": verification})
    counts = f"{verification['tensors']} tensors in {verification['shards']} shards"
    print(f"{verification['checkpoint']}: {counts}, {'verified' if ok else 'VERIFICATION FAILED'}")
    return 0 if ok else 1


def _layout(options: argparse.Namespace, config: Path) -> Layout:
    """The layout, checked before torch is imported."""
    layout = layout_from(options)
    layout.check(Architecture.from_config(read_config(config)))
    return layout


def _finish(options: argparse.Namespace, report: dict[str, Any], hf: Path, nxd: Path, layout: Layout) -> int:
    ok = True
    if options.verify:
        ok, report["verification"] = _verify(hf, nxd, layout, options.dtype)
    if options.report:
        write_json(options.report, report)
    for note in report["notes"]:
        print(f"note: {note}")
    checked = (", verified" if ok else ", VERIFICATION FAILED") if options.verify else ""
    rate = report["file_bytes"] / max(report["seconds"], 1e-3)
    print(
        f"{report['output']}: {len(report['files'])} files, {report['tensors']} tensors, "
        f"{size(report['file_bytes'])} in {duration(report['seconds'])} ({size(rate)}/s){checked}"
    )
    return 0 if ok else 1


def _verify(hf: Path, nxd: Path, layout: Layout, dtype: FloatDtype | None) -> tuple[bool, dict[str, Any]]:
    """Whether every tensor is its slice, and the whole finding for the report; the first problems are printed."""
    from trainium.checkpoint.verify import verify_nxd

    verification = verify_nxd(hf, nxd, layout, dtype=dtype, progress=Meter("verified"))
    for problem in verification.problems[:10]:
        print(f"{problem.where}: {problem.tensor} {problem.problem}", file=sys.stderr)
    return verification.ok, verification.to_dict()


def _keep_heap_small() -> None:
    """Fix glibc's mmap threshold at 1 MiB, so that a freed tensor goes back to the system.

    By default the threshold follows the sizes freed, up to 32 MiB, and the heap then grows with every aligned block:
    measured 16 MB per layer for one rank of 368 MB. Elsewhere than on glibc nothing happens.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 1 << 20)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainium.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to_nxd = commands.add_parser("to-nxd", help="Hugging Face folder → OUT/model/ with one shard per rank")
    to_nxd.add_argument("hf_dir", metavar="HF_DIR", type=Path)
    to_nxd.add_argument("out", metavar="OUT", type=Path)
    to_nxd.add_argument("--form", choices=get_args(Form), default="inline", help="inline: one file per rank")
    to_hf = commands.add_parser("to-hf", help="NxD checkpoint → Hugging Face folder")
    to_hf.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder that holds model/, or model/")
    to_hf.add_argument("out", metavar="OUT", type=Path)
    to_hf.add_argument("--config", metavar="CONFIG.json", type=Path, required=True, help="the base model's")
    to_hf.add_argument("--max-shard-bytes", type=int, default=5_000_000_000)
    to_hf.add_argument("--single-file", action="store_true", help="write checkpoint.pt instead of safetensors")
    to_hf.add_argument(
        "--allow-differing-copies", action="store_true", help="take the first of copies that differ between ranks"
    )
    verify = commands.add_parser("verify-nxd", help="compare every shard of a checkpoint with a Hugging Face folder")
    verify.add_argument("hf_dir", metavar="HF_DIR", type=Path)
    verify.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder that holds model/, or model/")
    for command in (to_nxd, to_hf, verify):
        add_layout_options(command)
        command.add_argument("--report", metavar="FILE.json", type=Path)
    for command in (to_nxd, to_hf):
        command.add_argument("--dtype", choices=get_args(FloatDtype), help="cast; without it dtypes are kept")
        command.add_argument("--verify", action="store_true", help="read all again and compare with the other side")
    return parser


if __name__ == "__main__":
    sys.exit(main())
