"""What an export is asked to do, and everything about it that can be wrong before anything is written."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.placement import EMBEDDING, source_shapes
from trainium.checkpoint.training import missing_parts
from trainium.checkpoint.weights import TensorInfo, float_dtype
from trainium.errors import UserError
from trainium.model import loading
from trainium.model.companions import read_chat_template
from trainium.model.model_card import ModelCardData
from trainium.text import some

RECORD = "trainium_export.json"  # in OUT: what was verified, and the mark by which an earlier export is known


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to export.

    checkpoint: a training checkpoint (`*.ckpt`) or a folder of shards. full_state: the `checkpoint.pt` that the
    toolchain's converter merged from it; None to merge here. dtype: of the weights; None for the base's.
    """

    checkpoint: Path
    base: Path
    out: Path
    layout: Layout
    full_state: Path | None = None
    dtype: FloatDtype | None = None
    single_file: bool = False
    chat_template: Path | None = None
    card: ModelCardData = field(default_factory=ModelCardData)


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request that has been looked at: paths absolute, everything the user can have got wrong checked.

    dtype: of the exported weights; `dtype_changed` says that the base's are of another. bytes: of what will be written.
    """

    request: Request
    config: dict[str, Any]
    arch: Architecture
    dtype: FloatDtype
    dtype_changed: bool
    template: str | None
    bytes: int


def check_request(request: Request) -> CheckedRequest:
    """Look at everything that costs little. Raises UserError (LayoutError, CheckpointError, …) for what must change."""
    paths = {key: getattr(request, key).absolute() for key in ("checkpoint", "base", "out")}
    request = replace(request, **paths)
    _check_paths(request)
    config = read_config(request.base)
    arch = Architecture.from_config(config)
    request.layout.check(arch)
    base = open_weights(request.base)
    source_shapes(base.shapes, arch, str(request.base))
    own = base.info[EMBEDDING].dtype
    dtype = float_dtype(request.dtype or own)
    template = None if request.chat_template is None else read_chat_template(request.chat_template)
    if template is not None:
        try:
            loading.check_chat_template(loading.load_tokenizer(request.base), template)
        except loading.LoadError as error:
            raise UserError(f"base model: {error}") from error
    shapes = arch.tensor_shapes().values()
    size = sum(TensorInfo(dtype, shape).bytes for shape in shapes) * (2 if request.single_file else 1)
    return CheckedRequest(
        request=request,
        config=config,
        arch=arch,
        dtype=dtype,
        dtype_changed=dtype != own,
        template=template,
        bytes=size,
    )


def _check_paths(request: Request) -> None:
    checkpoint, base, out = request.checkpoint, request.base, request.out
    if not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is no folder. Give a *.ckpt folder that training wrote.")
    _check_complete(checkpoint)
    if request.full_state is not None and not request.full_state.is_file():
        raise UserError(f"full state {request.full_state} does not exist: the toolchain's converter has not written it")
    for source in (checkpoint, base):
        if out.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(out.resolve()):
            raise UserError(f"output {out} and input {source} are one inside the other. Give another output folder.")
    for folder in (out, failed_folder(out)):
        if folder.is_symlink() or (folder.exists() and not _is_ours(folder)):
            raise UserError(
                f"{folder} exists and is no earlier export (it has no {RECORD}). Move it away or give another --out."
            )


def _check_complete(checkpoint: Path) -> None:
    """A training checkpoint, or its `model` folder, must be whole; other folders carry no mark to look for."""
    folder = checkpoint.parent if checkpoint.name == "model" else checkpoint
    missing = missing_parts(folder) if folder.suffix == ".ckpt" else ()
    if missing:
        raise UserError(
            f"checkpoint {folder} is incomplete: {some(missing)} missing. The training job died while "
            "writing it, or is still writing it. Export an earlier one."
        )


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and ((folder / RECORD).is_file() or not any(folder.iterdir()))


def failed_folder(out: Path) -> Path:
    """Where an export is kept whose verification failed."""
    return out.with_name(f"{out.name}.failed")
