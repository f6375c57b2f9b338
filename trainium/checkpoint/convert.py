"""Conversion of whole checkpoints, streamed: never more than one tensor in memory beside mapped files."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError, LayoutError
from trainium.checkpoint.formats import FloatDtype, Form
from trainium.checkpoint.huggingface import open_weights, plan_files, read_config, write_index, write_safetensors
from trainium.checkpoint.layout import BYTES_PER_RECORD, Layout
from trainium.checkpoint.merge import CopyDifference, checkpoint_sources, gather, refuse_differences
from trainium.checkpoint.paths import find_shards, model_folder, shard_path
from trainium.checkpoint.plan import EMBEDDING, HEAD, Placement, Shape, placements, rank_targets, source_shapes
from trainium.checkpoint.shards import open_shard, write_shard
from trainium.checkpoint.split import cut
from trainium.checkpoint.staging import staged
from trainium.checkpoint.weights import TensorInfo, Weights, check_dtype, torch_dtype

Progress = Callable[[int, int], None]  # bytes of tensors written, bytes in all

_MODEL_FOLDER = re.compile(r"(dp_rank_\d+_)?tp_rank_\d+_pp_rank_\d+(\.pt)?(\.tensors|\.info\.pt)?")
_WEIGHT_FOLDER = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|checkpoint\.pt|config\.json"
)


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a conversion read and wrote. bytes: of tensors; file_bytes: of files (apparent)."""

    source: str
    output: str
    layout: Layout
    files: tuple[str, ...]
    tensors: int
    bytes: int
    file_bytes: int
    dtypes: tuple[str, ...]
    untied: bool
    notes: tuple[str, ...]
    seconds: float
    differing_copies: tuple[CopyDifference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def to_nxd(
    hf_dir: Path,
    out: Path,
    layout: Layout,
    *,
    dtype: FloatDtype | None = None,
    form: Form = "inline",
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Write `out/model/` with one shard per rank from a Hugging Face folder.

    dtype: cast floating-point tensors; None keeps them. An earlier `out/model` is replaced in one step. Raises
    ArchitectureError, LayoutError or CheckpointError before anything is written when it cannot be right.
    """
    started = time.monotonic()
    check_dtype(dtype)
    arch = Architecture.from_config(read_config(hf_dir))
    layout = layout.resolve(arch)
    layout.check(arch)
    weights = open_weights(hf_dir)
    sources = source_shapes(weights.shapes, arch, str(weights.where))
    untied = HEAD not in weights
    ranks = {rank: rank_targets(sources, arch, layout, *rank, untie=untied) for rank in layout.ranks}
    infos = {
        rank: {t.name: TensorInfo(weights.info[t.cuts[0].source].dtype, t.shape(sources)).cast(dtype) for t in targets}
        for rank, targets in ranks.items()
    }
    total = sum(item.bytes for info in infos.values() for item in info.values())
    tensors = sum(len(info) for info in infos.values())
    count = _Counter(total, progress)
    with staged(out / "model", _MODEL_FOLDER, total + tensors * BYTES_PER_RECORD) as folder:
        for rank, targets in ranks.items():
            pieces = (_cast(cut(weights, target), infos[rank][target.name]) for target in targets)
            write_shard(shard_path(folder, *rank), infos[rank], pieces, form, count.add)
    return ConversionReport(
        source=str(hf_dir),
        output=str(out),
        layout=layout,
        files=tuple(str(shard_path(out / "model", *rank)) for rank in layout.ranks),
        tensors=tensors,
        bytes=total,
        file_bytes=sum(path.stat().st_size for path in (out / "model").rglob("*") if path.is_file()),
        dtypes=_dtypes(infos.values()),
        untied=untied,
        notes=(*arch.notes, *_layout_notes(layout, untied)),
        seconds=round(time.monotonic() - started, 3),
    )


def to_hf(
    checkpoint: Path,
    out: Path,
    config: Architecture | Mapping[str, Any] | Path,
    layout: Layout,
    *,
    dtype: FloatDtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    single_file: bool = False,
    allow_differing_copies: bool = False,
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Write a Hugging Face folder `out` from an NxD checkpoint (the folder that holds `model/`, or that folder).

    config: the base model's config.json (path or content), which is copied beside the weights with the keys changed
    that are no longer true (tie_word_embeddings, dtype), or only its sizes. single_file: one `checkpoint.pt` instead
    of safetensors. Copies that should be equal between ranks and are not raise CheckpointError, unless
    `allow_differing_copies`: then the first counts and the report lists the others.
    """
    started = time.monotonic()
    check_dtype(dtype)
    config = read_config(config) if isinstance(config, Path) else config
    arch = config if isinstance(config, Architecture) else Architecture.from_config(config)
    read, layout = open_ranks(checkpoint, layout)
    sources, layout = checkpoint_sources(read, arch, layout)
    where = placements(sources, arch, layout)
    info = {name: _stored_info(name, where[name], read, sources).cast(dtype) for name in sorted(sources, key=_natural)}
    total = sum(item.bytes for item in info.values())
    count = _Counter(total, progress)
    differing: list[CopyDifference] = []

    def load(name: str) -> Tensor:
        whole, differences = gather(name, sources[name], where[name], read)
        if not allow_differing_copies:
            refuse_differences(differences, layout)
        differing.extend(differences)
        return _cast(whole, info[name])

    files = [("checkpoint.pt", list(info))] if single_file else plan_files(info, max_shard_bytes)
    with staged(out, _WEIGHT_FOLDER, total + len(info) * BYTES_PER_RECORD) as folder:
        for file, names in files:
            part = {name: info[name] for name in names}
            if single_file:
                write_shard(folder / file, part, map(load, names), written=count.add)
            else:
                write_safetensors(folder / file, part, load, count.add)
        if len(files) > 1:
            write_index(folder, info, files)
        if not isinstance(config, Architecture):
            changed = json.dumps(_output_config(config, info), indent=2, ensure_ascii=False)
            (folder / "config.json").write_text(changed + "\n")
    untied = arch.tied and HEAD in sources
    return ConversionReport(
        source=str(checkpoint),
        output=str(out),
        layout=layout,
        files=tuple(str(out / file) for file, _ in files),
        tensors=len(info),
        bytes=total,
        file_bytes=sum((out / file).stat().st_size for file, _ in files),
        dtypes=_dtypes([info]),
        untied=untied,
        notes=(*arch.notes, *_layout_notes(layout, untied)),
        seconds=round(time.monotonic() - started, 3),
        differing_copies=tuple(differing),
    )


def open_ranks(checkpoint: Path, layout: Layout) -> tuple[Callable[[int, int], Weights], Layout]:
    """A reader of single ranks. Raises LayoutError when the files are of another tp or pp, or some are missing."""
    shards = find_shards(model_folder(checkpoint))
    lost = [shard_path(shards.folder, *rank).name for rank in layout.ranks if rank not in shards.files]
    if lost or len(shards.files) > layout.shard_count:
        raise LayoutError(
            f"tp={layout.tp} pp={layout.pp} means {layout.shard_count} shards; {shards.folder} has "
            f"{len(shards.files)}, of tp={shards.tp} pp={shards.pp}"
            + (f"; missing: {', '.join(lost[:3])}{' …' if len(lost) > 3 else ''}" if lost else "")
        )

    @lru_cache(maxsize=max(64, 2 * layout.tp))  # an open file each: enough for two stages, not for any checkpoint
    def read(tp_rank: int, pp_rank: int) -> Weights:
        return open_shard(shards.files[tp_rank, pp_rank])

    return read, layout


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        progress(0, total)

    def add(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)


def _cast(tensor: Tensor, info: TensorInfo) -> Tensor:
    return tensor.to(torch_dtype(info.dtype))


def _dtypes(infos: Iterable[Mapping[str, TensorInfo]]) -> tuple[str, ...]:
    return tuple(sorted({item.dtype for info in infos for item in info.values()}))


def _stored_info(
    name: str, pieces: Sequence[Placement], read: Callable[[int, int], Weights], sources: Mapping[str, Shape]
) -> TensorInfo:
    for piece in pieces:
        rank = read(piece.tp_rank, piece.pp_rank)
        if piece.target in rank:
            return TensorInfo(rank.info[piece.target].dtype, sources[name])
    raise CheckpointError(f"{name} is in no rank of the pipeline stage that has its layer")


def _natural(name: str) -> list[Any]:
    """Layer 2 before layer 10, so that neighbouring layers share a file."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _layout_notes(layout: Layout, untied: bool) -> list[str]:
    notes = []
    if untied:
        notes.append(
            "The model's embeddings are tied; NxDT needs both, so lm_head.weight is a tensor of its own from here on "
            "(training lets the two diverge) and config.json must say tie_word_embeddings: false."
        )
    if layout.instance_family == "trn2" and layout.kv_replicator > 1:
        notes.append(
            "Key/value copies lie on adjacent ranks, as NxD's model on trn2 groups them; the reference converter "
            "tiles them as on trn1, so its checkpoints of this layout are not interchangeable with these."
        )
    return notes


def _output_config(config: Mapping[str, Any], info: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The base's config with what the weights made untrue changed; its own spelling of every key is kept."""
    changed = dict(config)
    if HEAD in info and changed.get("tie_word_embeddings"):
        changed["tie_word_embeddings"] = False
    for key in ("dtype", "torch_dtype"):
        if key in changed:
            changed[key] = info[EMBEDDING].dtype
    return changed
