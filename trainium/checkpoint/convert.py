"""Conversion of whole checkpoints, streamed: files are mapped, and nothing larger than a block of them is copied."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError, LayoutError
from trainium.checkpoint.formats import FloatDtype, Form
from trainium.checkpoint.huggingface import (
    open_weights,
    plan_files,
    read_config,
    write_index,
    write_object,
)
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.merge import CopyDifference, checkpoint_sources, gather, refuse_differences
from trainium.checkpoint.meter import Progress
from trainium.checkpoint.paths import find_shards, model_folder, shard_path
from trainium.checkpoint.placement import (
    EMBEDDING,
    HEAD,
    Placement,
    Shape,
    placements,
    rank_targets,
    source_shapes,
)
from trainium.checkpoint.portions import close_all, file_portions, identity, rank_portion, sizes, write_all
from trainium.checkpoint.replacing import MODEL_FOLDER, WEIGHT_FOLDER, refuse_losses, refuse_training
from trainium.checkpoint.stored_layout import rank_reader
from trainium.checkpoint.transfer import Loaded, Portion
from trainium.checkpoint.weights import TensorInfo, Weights, float_dtype
from trainium.checkpoint.workspace import Share, workspace
from trainium.text import some

_MAX_RANKS = 16  # written together, so that a tensor that is cut along its columns is read once for them


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
    workers: int = 1,
    share: Share | None = None,
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Write `out/model/` with one shard per rank from a Hugging Face folder.

    dtype: cast floating-point tensors; None keeps them. An earlier `out/model` is replaced in one step. share: write
    only these ranks, beside `out/model`, and leave the rest, the replacing included, to a call without it. Raises
    ArchitectureError, LayoutError or CheckpointError before anything is written when it cannot be right.
    """
    started = time.monotonic()
    dtype = float_dtype(dtype) if dtype else None
    refuse_training(out)
    arch = Architecture.from_config(read_config(hf_dir))
    layout = layout.resolve(arch)
    layout.check(arch)
    weights = open_weights(hf_dir)
    sources = source_shapes(weights.shapes, arch, str(weights.where))
    untied = HEAD not in weights
    portions: list[Portion] = []
    infos = []
    groups: dict[int, list[Portion]] = {}
    asked: set[str] = set()
    for rank in layout.ranks if share is None else share.of(layout.ranks):
        targets = rank_targets(sources, arch, layout, *rank, untie=untied)
        info = {t.name: weights.info[t.cuts[0].source].cast(dtype).reshaped(t.shape(sources)) for t in targets}
        infos.append(info)
        portions.append(rank_portion(weights, targets, info, shard_path(Path(), *rank).name, form, asked))
        groups.setdefault(rank[1], []).append(portions[-1])
    conversion = {"layout": asdict(layout), "dtype": dtype, "form": form, "input": identity(weights.files)}
    count = _Counter(sum(portion.bytes for portion in portions), progress)
    with workspace(out / "model", MODEL_FOLDER, conversion, sizes(portions), share) as space:
        size = min(_MAX_RANKS, -(-len(portions) // (2 * workers)))
        items = [group[first : first + size] for group in groups.values() for first in range(0, len(group), size)]
        write_all(space, items, workers, count.add)
    return ConversionReport(
        source=str(hf_dir),
        output=str(out),
        layout=layout,
        files=tuple(str(out / "model" / portion.key) for portion in portions),
        tensors=sum(len(info) for info in infos),
        bytes=count.total,
        file_bytes=sum(sizes(portions).values()),
        dtypes=_dtypes(infos),
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
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> ConversionReport:
    """Write a Hugging Face folder `out` from an NxD checkpoint (the folder that holds `model/`, or that folder).

    config: the base model's config.json (path or content), which is copied beside the weights with the keys changed
    that are no longer true (tie_word_embeddings, dtype), or only its sizes. single_file: one `checkpoint.pt` instead
    of safetensors. Copies that should be equal between ranks and are not raise CheckpointError, unless
    `allow_differing_copies`: then the first counts and the report lists the others.
    """
    started = time.monotonic()
    dtype = float_dtype(dtype) if dtype else None
    refuse_losses(out, checkpoint, config)
    config = read_config(config) if isinstance(config, Path) else config
    arch = config if isinstance(config, Architecture) else Architecture.from_config(config)
    read, layout = open_ranks(checkpoint, layout)
    sources, layout = checkpoint_sources(read, arch, layout)
    where = placements(sources, arch, layout)
    info = {name: _stored_info(name, where[name], read, sources).cast(dtype) for name in sorted(sources, key=_natural)}

    def load(name: str) -> Loaded:
        found = gather(name, sources[name], where[name], read)
        if not allow_differing_copies:
            refuse_differences(found.differences, layout)
        blocks = found.assembly.blocks(found.dtype, info[name].dtype)
        return Loaded(blocks, tuple(astuple(difference) for difference in found.differences))

    def ahead(name: str) -> None:
        for place in where[name]:
            rank = read(place.tp_rank, place.pp_rank)
            if place.target in rank:
                rank.ahead(place.target)

    files = [("checkpoint.pt", list(info))] if single_file else plan_files(info, max_shard_bytes)
    portions = [part for file, names in files for part in file_portions(file, {n: info[n] for n in names}, load, ahead)]
    read_files = [path for rank in layout.ranks for path in read(*rank).files]
    conversion = {"layout": asdict(layout), "dtype": dtype, "input": identity(read_files), "files": files}
    count = _Counter(sum(portion.bytes for portion in portions), progress)
    with workspace(out, WEIGHT_FOLDER, conversion, sizes(portions), None) as space:
        done = write_all(space, [[portion] for portion in portions], workers, count.add)
        close_all(space.folder, portions, done)
        if len(files) > 1:
            write_index(space.folder, info, files)
        if not isinstance(config, Architecture):
            write_object(space.folder / "config.json", _output_config(config, info))
    untied = arch.tied and HEAD in sources
    return ConversionReport(
        source=str(checkpoint),
        output=str(out),
        layout=layout,
        files=tuple(str(out / file) for file, _ in files),
        tensors=len(info),
        bytes=count.total,
        file_bytes=sum(sizes(portions).values()),
        dtypes=_dtypes([info]),
        untied=untied,
        notes=(*arch.notes, *_layout_notes(layout, untied)),
        seconds=round(time.monotonic() - started, 3),
        differing_copies=tuple(CopyDifference(*note) for portion in portions for note in done[portion.key].notes),
    )


def open_ranks(checkpoint: Path, layout: Layout) -> tuple[Callable[[int, int], Weights], Layout]:
    """A reader of single ranks. Raises LayoutError when the files are of another tp or pp, or some are missing."""
    shards = find_shards(model_folder(checkpoint))
    lost = [shard_path(shards.folder, *rank).name for rank in layout.ranks if rank not in shards.files]
    if lost or len(shards.files) > layout.shard_count:
        raise LayoutError(
            f"tp={layout.tp} pp={layout.pp} means {layout.shard_count} shards; {shards.folder} has "
            f"{len(shards.files)}, of tp={shards.tp} pp={shards.pp}" + (f"; missing: {some(lost)}" if lost else "")
        )

    return rank_reader(shards), layout


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self._done, self._progress = total, 0, progress
        progress(0, total)

    def add(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self.total)


def _dtypes(infos: Iterable[Mapping[str, TensorInfo]]) -> tuple[str, ...]:
    return tuple(sorted({item.dtype for info in infos for item in info.values()}))


def _stored_info(
    name: str, pieces: Sequence[Placement], read: Callable[[int, int], Weights], sources: Mapping[str, Shape]
) -> TensorInfo:
    for piece in pieces:
        rank = read(piece.tp_rank, piece.pp_rank)
        if piece.target in rank:
            return rank.info[piece.target].reshaped(sources[name])
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
