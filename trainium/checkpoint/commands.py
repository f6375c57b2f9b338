"""The commands that convert and verify, with their options, for `trainium` and for `python -m trainium.checkpoint`.

Nothing heavy is imported before it is known what is asked for. What the user can have got wrong is raised as UserError:
whoever runs the command prints it and exits with 2.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import FloatDtype, Form
from trainium.checkpoint.heap import keep_heap_small
from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.checkpoint.meter import Meter
from trainium.checkpoint.readahead import read_ahead, read_first_ahead
from trainium.text import duration, size

DIFFERENT = 1  # exit code of a verification that found something

_AT_ONCE = 1 << 28  # bytes of input that the disk reads while modules are loaded and the work is planned

_TP = typer.Option("--tp", metavar="T", help="Tensor parallel degree.")
_PP = typer.Option("--pp", metavar="P", help="Pipeline parallel degree.")
_COPIES = typer.Option("--kv-replicator", metavar="M", help="Copies of each key/value head.")
_VIRTUAL = typer.Option("--virtual-pp", metavar="V", help="Pipeline stages per pipeline rank.")
_FAMILY = typer.Option("--instance-family", help="Where it runs: trn1 and trn2 spread copies of key heads differently.")

QkvOption = Annotated[
    Qkv, typer.Option("--qkv", help="How q, k and v are stored; auto: coalesced for MHA, else fused.")
]
DtypeOption = Annotated[FloatDtype | None, typer.Option("--dtype", help="Cast; without it dtypes are kept.")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read all again and compare with the other side.")]
ReportOption = Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write what was done.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; default: all cores there are.")
]
ExamplesOption = Annotated[
    Path | None,
    typer.Option("--examples", metavar="DIR", help="NxDT's examples folder; for a Mixtral, which its converter does."),
]
CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="The folder that holds model/, or that folder itself.")
]


def to_nxd(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and the weights.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Gets model/ with one shard per rank.")],
    tp: Annotated[int, _TP],
    pp: Annotated[int, _PP] = 1,
    kv_replicator: Annotated[int, _COPIES] = 1,
    qkv: QkvOption = "auto",
    virtual_pp: Annotated[int, _VIRTUAL] = 1,
    instance_family: Annotated[InstanceFamily, _FAMILY] = "trn1",
    dtype: DtypeOption = None,
    form: Annotated[Form, typer.Option("--form", help="One file per rank, or one per tensor.")] = "inline",
    workers: WorkersOption = None,
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            metavar="I/N",
            help="Write this part of the ranks beside OUT; a call without it adds what is missing and publishes all.",
        ),
    ] = None,
    verify: VerifyOption = False,
    report: ReportOption = None,
    examples: ExamplesOption = None,
) -> None:
    """Hugging Face folder → NxD shards, as the trainer reads them."""
    if verify and share:
        raise CheckpointError("--verify looks at all ranks; give it to the call without --share that comes last")
    read_first_ahead(sorted(hf_dir.glob("*.safetensors")), _AT_ONCE)
    from trainium.model import mixtral

    if mixtral.asked_for(hf_dir, examples, dtype=dtype, share=share, verify=verify, report=report, workers=workers):
        upstream = mixtral.layout(tp, pp, kv_replicator, qkv, virtual_pp, instance_family)
        mixtral.to_nxd(hf_dir, out, upstream, examples, form=form)
        return
    layout = _layout(hf_dir, tp, pp, kv_replicator, qkv, virtual_pp, instance_family)
    keep_heap_small()
    from trainium.checkpoint import convert
    from trainium.checkpoint.workers import available_cores
    from trainium.checkpoint.workspace import Share

    done = convert.to_nxd(
        hf_dir,
        out,
        layout,
        dtype=dtype,
        form=form,
        workers=workers or available_cores(),
        share=Share.parse(share) if share else None,
        progress=Meter("converted"),
    )
    _finish(done.to_dict(), hf_dir, out, done.layout, dtype, verify, report)


def to_hf(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Gets the weights and config.json.")],
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG.json", help="The base model's.")],
    tp: Annotated[int | None, _TP] = None,
    pp: Annotated[int | None, _PP] = None,
    kv_replicator: Annotated[int | None, _COPIES] = None,
    qkv: QkvOption = "auto",
    virtual_pp: Annotated[int | None, _VIRTUAL] = None,
    instance_family: Annotated[InstanceFamily | None, _FAMILY] = None,
    dtype: DtypeOption = None,
    max_shard_bytes: Annotated[
        int, typer.Option("--max-shard-bytes", metavar="N", min=1, help="Largest file.")
    ] = 5_000_000_000,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Write checkpoint.pt instead of safetensors.")
    ] = False,
    allow_differing_copies: Annotated[
        bool, typer.Option("--allow-differing-copies", help="Take the first of copies that differ between ranks.")
    ] = False,
    workers: WorkersOption = None,
    verify: VerifyOption = False,
    report: ReportOption = None,
    examples: ExamplesOption = None,
) -> None:
    """NxD checkpoint → Hugging Face folder. The layout is read from the checkpoint; what is given is checked."""
    shards = [*checkpoint.glob("model/*.pt"), *checkpoint.glob("*.pt")]
    for shard in shards:
        read_ahead(shard, _AT_ONCE // len(shards))
    from trainium.model import mixtral

    ours = {"dtype": dtype, "verify": verify, "report": report, "allow_differing_copies": allow_differing_copies}
    if mixtral.asked_for(config, examples, workers=workers, **ours):
        upstream = mixtral.layout(tp, pp, kv_replicator, qkv, virtual_pp, instance_family)
        mixtral.to_hf(
            checkpoint, out, config, upstream, examples, max_shard_bytes=max_shard_bytes, single_file=single_file
        )
        return
    from trainium.checkpoint.huggingface import read_config
    from trainium.checkpoint.stored_layout import GivenLayout, read_layout

    if verify and single_file:
        raise CheckpointError("--verify reads a folder with safetensors and config.json; leave out --single-file")
    given = GivenLayout(
        tp=tp,
        pp=pp,
        kv_replicator=kv_replicator,
        qkv=qkv,
        virtual_pp=virtual_pp,
        instance_family=instance_family,
    )
    layout = read_layout(checkpoint, Architecture.from_config(read_config(config)), given)
    keep_heap_small()
    from trainium.checkpoint import convert
    from trainium.checkpoint.workers import available_cores

    done = convert.to_hf(
        checkpoint,
        out,
        config,
        layout,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        single_file=single_file,
        allow_differing_copies=allow_differing_copies,
        workers=workers or available_cores(),
        progress=Meter("converted"),
    )
    _finish(done.to_dict(), out, checkpoint, done.layout, dtype, verify, report)


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="HF folder, NxD checkpoint, or checkpoint.pt.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same, in any of these forms.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="CONFIG.json", help="Of an NxD checkpoint; default: what lies in or beside A or B."
        ),
    ] = None,
    names_only: Annotated[
        bool, typer.Option("--names-only", help="Names, shapes and dtypes; no weights are read.")
    ] = False,
    instance_family: Annotated[InstanceFamily | None, _FAMILY] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything that was found, as JSON.")] = False,
) -> None:
    """Compare two models, whatever their forms: exit 0 equal, 1 different, 2 cannot be read."""
    import json

    from trainium.checkpoint.compare import compare_paths
    from trainium.checkpoint.comparison_text import comparison_text

    progress = (lambda done, total: None) if as_json else Meter("compared")
    try:
        found = compare_paths(a, b, config=config, names_only=names_only, family=instance_family, progress=progress)
    except OSError as error:
        raise CheckpointError(f"{error.filename or f'{a} or {b}'} cannot be read: {error.strerror or error}") from error
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else comparison_text(found))
    _exit_unless(found.equal)


def verify_nxd(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR")],
    checkpoint: CheckpointArgument,
    tp: Annotated[int, _TP],
    pp: Annotated[int, _PP] = 1,
    kv_replicator: Annotated[int, _COPIES] = 1,
    qkv: QkvOption = "auto",
    virtual_pp: Annotated[int, _VIRTUAL] = 1,
    instance_family: Annotated[InstanceFamily, _FAMILY] = "trn1",
    report: ReportOption = None,
) -> None:
    """Prove that shards, whoever wrote them, are a model's in exactly this layout."""
    from trainium.files import write_json

    layout = _layout(hf_dir, tp, pp, kv_replicator, qkv, virtual_pp, instance_family)
    found = _proof(hf_dir, checkpoint, layout, None)
    if report:
        write_json(report, {"verification": found})
    counts = f"{found['tensors']} tensors in {found['shards']} shards"
    print(f"{found['checkpoint']}: {counts}, {'verified' if found['ok'] else 'VERIFICATION FAILED'}")
    _exit_unless(found["ok"])


def _layout(
    config: Path, tp: int, pp: int, kv_replicator: int, qkv: Qkv, virtual_pp: int, family: InstanceFamily
) -> Layout:
    """The layout, checked against the model before anything large is imported."""
    from trainium.checkpoint.huggingface import read_config

    layout = Layout(tp=tp, pp=pp, kv_replicator=kv_replicator, qkv=qkv, virtual_pp=virtual_pp, instance_family=family)
    layout.check(Architecture.from_config(read_config(config)))
    return layout


def _finish(
    report: dict[str, Any],
    hf: Path,
    nxd: Path,
    layout: Layout,
    dtype: FloatDtype | None,
    verify: bool,
    file: Path | None,
) -> None:
    from trainium.files import write_json

    ok = True
    if verify:
        report["verification"] = _proof(hf, nxd, layout, dtype)
        ok = report["verification"]["ok"]
    if file:
        write_json(file, report)
    for note in report["notes"]:
        print(f"note: {note}")
    checked = (", verified" if ok else ", VERIFICATION FAILED") if verify else ""
    rate = report["file_bytes"] / max(report["seconds"], 1e-3)
    print(
        f"{report['output']}: {len(report['files'])} files, {report['tensors']} tensors, "
        f"{size(report['file_bytes'])} in {duration(report['seconds'])} ({size(rate)}/s){checked}"
    )
    _exit_unless(ok)


def _proof(hf: Path, nxd: Path, layout: Layout, dtype: FloatDtype | None) -> dict[str, Any]:
    """Whether every tensor is its slice, for the report; the first problems are printed."""
    from trainium.checkpoint.verify import verify_nxd

    verification = verify_nxd(hf, nxd, layout, dtype=dtype, progress=Meter("verified"))
    for problem in verification.problems[:10]:
        typer.echo(f"{problem.where}: {problem.tensor} {problem.problem}", err=True)
    return verification.to_dict()


def _exit_unless(ok: bool) -> None:
    if not ok:
        raise typer.Exit(DIFFERENT)
