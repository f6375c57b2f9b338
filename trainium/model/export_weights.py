"""Trained weights into a Hugging Face folder, from NxD shards or from the toolchain converter's single file."""

from dataclasses import dataclass
from pathlib import Path

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.convert import open_ranks, to_hf
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.huggingface import open_weights, plan_files, write_index, write_safetensors
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.merge import CopyDifference
from trainium.checkpoint.meter import Progress
from trainium.checkpoint.placement import HEAD, source_shapes
from trainium.checkpoint.shards import write_shard
from trainium.checkpoint.weights import torch_dtype
from trainium.checkpoint.workers import available_cores

MAX_FILE_BYTES = 5_000_000_000  # as transformers splits
SINGLE_FILE = "checkpoint.pt"


@dataclass(frozen=True)
class WrittenWeights:
    """What was written. `trained`: dtypes before the cast. `copies`: those that differed, None if not compared."""

    tensors: int
    bytes: int
    trained: tuple[str, ...]
    untied: bool
    copies: tuple[CopyDifference, ...] | None
    notes: tuple[str, ...]


def from_shards(
    checkpoint: Path, out: Path, arch: Architecture, layout: Layout, dtype: FloatDtype, progress: Progress
) -> WrittenWeights:
    """Merge tp × pp shards. Copies that differ are returned, not raised: they are a row of the verification."""
    read, _ = open_ranks(checkpoint, layout)
    trained = {info.dtype for rank in layout.ranks for info in read(*rank).info.values()}
    report = to_hf(
        checkpoint,
        out,
        arch,
        layout,
        dtype=dtype,
        max_shard_bytes=MAX_FILE_BYTES,
        allow_differing_copies=True,
        workers=available_cores(),
        progress=progress,
    )
    return WrittenWeights(
        report.tensors, report.bytes, tuple(sorted(trained)), report.untied, report.differing_copies, report.notes
    )


def from_full_state(file: Path, out: Path, arch: Architecture, dtype: FloatDtype, progress: Progress) -> WrittenWeights:
    """Take the merged state that the toolchain's converter wrote (`checkpoint.pt`), as safetensors.

    Raises CheckpointError when it is not the whole model that config.json describes.
    """
    weights = open_weights(file)
    source_shapes(weights.shapes, arch, str(file))
    info = {name: item.cast(dtype) for name, item in weights.info.items()}
    total = sum(item.bytes for item in info.values())
    done = 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    files = plan_files(info, MAX_FILE_BYTES)
    for name, names in files:
        part = {tensor: info[tensor] for tensor in names}
        write_safetensors(out / name, part, lambda tensor: weights[tensor].to(torch_dtype(info[tensor].dtype)), written)
    if len(files) > 1:
        write_index(out, info, files)
    trained = tuple(sorted({item.dtype for item in weights.info.values()}))
    return WrittenWeights(len(info), total, trained, arch.tied and HEAD in info, None, ())


def write_single_file(folder: Path) -> None:
    """`checkpoint.pt` beside the safetensors, the form in which the tutorial checks the names."""
    weights = open_weights(folder)
    write_shard(folder / SINGLE_FILE, weights.info, (weights[name] for name in weights.info))
