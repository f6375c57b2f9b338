"""Proof by reading again: every tensor of every shard is its slice of the source."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.assembly import rows_of, slice_of
from trainium.checkpoint.convert import open_ranks
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.inventory import TensorProblem
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.meter import Progress
from trainium.checkpoint.paths import model_folder
from trainium.checkpoint.placement import HEAD, Target, rank_targets, source_shapes
from trainium.checkpoint.statistics import largest_difference, same_bits
from trainium.checkpoint.weights import Raw, TensorInfo, Weights, as_raw, as_tensor, torch_dtype
from trainium.checkpoint.workers import available_cores

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Shards against their source. copies: tensors that repeat numbers of another rank, compared like all others."""

    source: str
    checkpoint: str
    shards: int
    tensors: int
    bytes: int
    copies: int
    problems: tuple[TensorProblem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok} | asdict(self)


def verify_nxd(
    hf_dir: Path,
    checkpoint: Path,
    layout: Layout,
    *,
    dtype: FloatDtype | None = None,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Every tensor of every shard against its slice of the source, bit by bit, on all cores.

    dtype: what the conversion cast to, in either direction: both sides are compared as that. Raises LayoutError and
    CheckpointError when they cannot be compared at all (other tp or pp, missing or damaged files).
    """
    arch = Architecture.from_config(read_config(hf_dir))
    layout = layout.resolve(arch)
    layout.check(arch)
    weights = open_weights(hf_dir)
    sources = source_shapes(weights.shapes, arch, str(weights.where))
    read, layout = open_ranks(checkpoint, layout)
    ranks = {rank: rank_targets(sources, arch, layout, *rank, untie=HEAD not in weights) for rank in layout.ranks}
    expected = {
        rank: [TensorInfo(weights.info[target.cuts[0].source].dtype, target.shape(sources)) for target in targets]
        for rank, targets in ranks.items()
    }
    total = sum(info.bytes for infos in expected.values() for info in infos)
    problems: list[TensorProblem] = []
    done = 0
    with ThreadPoolExecutor(available_cores()) as pool:
        for rank, targets in ranks.items():
            shard = read(*rank)
            problems += _strangers(shard, targets)
            found = pool.map(partial(_problem, weights, shard, dtype), targets, expected[rank])
            for target, info, problem in zip(targets, expected[rank], found, strict=True):
                if problem:
                    problems.append(TensorProblem(shard.where.name, target.name, problem))
                done += info.bytes
                progress(done, total)
    every = [target for targets in ranks.values() for target in targets]
    return Verification(
        source=str(hf_dir),
        checkpoint=str(model_folder(checkpoint)),
        shards=layout.shard_count,
        tensors=len(every),
        bytes=total,
        copies=len(every) - len(set(every)),
        problems=tuple(problems),
    )


def _strangers(shard: Weights, targets: list[Target]) -> Iterator[TensorProblem]:
    expected = {target.name for target in targets}
    for name in shard:
        if name not in expected:
            yield TensorProblem(shard.where.name, name, "should not be here")


def _problem(
    weights: Weights, shard: Weights, dtype: FloatDtype | None, target: Target, source: TensorInfo
) -> str | None:
    if target.name not in shard:
        return "is missing"
    stored = shard.info[target.name]
    found, expected = stored.cast(dtype), source.cast(dtype)
    if found != expected:
        return f"is {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    off, same = 0.0, True
    for wanted, held in _blocks(weights, shard, target):
        x, y = _as(wanted, source.dtype, expected.dtype), _as(held, stored.dtype, expected.dtype)
        if not same_bits(x, y):
            off, same = max(off, largest_difference(x, y, expected.dtype)), False
    return None if same else f"differs from its slice of the source by up to {off:.3g}"


def _blocks(weights: Weights, shard: Weights, target: Target) -> Iterator[tuple[Raw, Raw]]:
    """Blocks of the source's slices, and what the shard holds in their place."""
    held, offset = shard.raw(target.name), 0
    for cut in target.cuts:
        source = weights.raw(cut.source)
        wanted, part = slice_of(source, cut), rows_of(held, offset, cut, source.shape)
        offset += cut.stop - cut.start if cut.dim == 0 else 0
        if not wanted.ndim:
            yield wanted, part
            continue
        step = max(1, _BLOCK_BYTES // max(1, wanted[:1].nbytes))
        for row in range(0, len(wanted), step):
            yield wanted[row : row + step], part[row : row + step]


def _as(raw: Raw, stored: str, wanted: str) -> Raw:
    return raw if stored == wanted else as_raw(as_tensor(raw, stored).to(torch_dtype(wanted)))
