"""`python -m trainium.checkpoint to-nxd | to-hf | verify-nxd`: what the convert and export jobs run."""

import argparse
import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import FloatDtype, Form
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.errors import UserError
from trainium.files import write_json


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
        options.hf_dir, options.out, layout, dtype=options.dtype, form=options.form, progress=_Meter("converted")
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
        progress=_Meter("converted"),
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
    layout = Layout(
        tp=options.tp,
        pp=options.pp,
        kv_replicator=options.kv_replicator,
        qkv=options.qkv,
        virtual_pp=options.virtual_pp,
        instance_family=options.instance_family,
    )
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
    rate = report["file_bytes"] / max(report["seconds"], 1e-3) / 1e6
    print(
        f"{report['output']}: {len(report['files'])} files, {report['tensors']} tensors, "
        f"{report['file_bytes'] / 1e9:.3f} GB in {report['seconds']:.1f} s ({rate:.0f} MB/s){checked}"
    )
    return 0 if ok else 1


def _verify(hf: Path, nxd: Path, layout: Layout, dtype: FloatDtype | None) -> tuple[bool, dict[str, Any]]:
    """Whether every tensor is its slice, and the whole finding for the report; the first problems are printed."""
    from trainium.checkpoint.verify import verify_nxd

    verification = verify_nxd(hf, nxd, layout, dtype=dtype, progress=_Meter("verified"))
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


class _Meter:
    """A line at most every second."""

    def __init__(self, verb: str) -> None:
        self._verb, self._start = verb, time.monotonic()
        self._next = self._start + 1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1
        rate = done / (now - self._start)
        left = (total - done) / rate if rate else float("inf")
        print(
            f"{self._verb} {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
            flush=True,
        )


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
        command.add_argument("--tp", type=int, required=True, help="tensor parallel degree")
        command.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
        command.add_argument("--kv-replicator", type=int, default=1, help="copies of each key/value head")
        command.add_argument("--virtual-pp", type=int, default=1, help="pipeline stages per pipeline rank")
        command.add_argument("--qkv", choices=get_args(Qkv), default="auto", help="how q, k and v are stored")
        command.add_argument("--instance-family", choices=get_args(InstanceFamily), default="trn1")
        command.add_argument("--report", metavar="FILE.json", type=Path)
    for command in (to_nxd, to_hf):
        command.add_argument("--dtype", choices=get_args(FloatDtype), help="cast; without it dtypes are kept")
        command.add_argument("--verify", action="store_true", help="read all again and compare with the other side")
    return parser


if __name__ == "__main__":
    sys.exit(main())
