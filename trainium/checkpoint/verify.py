"""Proofs by reading again: shards against their source, and one model against another."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.convert import Progress, open_ranks
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.merge import same_bits
from trainium.checkpoint.paths import model_folder
from trainium.checkpoint.plan import HEAD, rank_targets, source_shapes
from trainium.checkpoint.split import cut
from trainium.checkpoint.weights import TensorInfo, Weights, torch_dtype

_CHUNK = 1 << 22  # elements compared at a time, so that statistics in float64 stay small


@dataclass(frozen=True)
class TensorProblem:
    """A tensor that is not what it should be, and where."""

    where: str
    tensor: str
    problem: str


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


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """Two tensors of one name. Differences are of finite numbers, in float64."""

    name: str
    unchanged: bool
    max_difference: float
    mean_difference: float
    nan: int
    inf: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Model b against model a. nan and inf are counted in b."""

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shape_differences: tuple[TensorProblem, ...]
    dtype_differences: tuple[TensorProblem, ...]
    tensors: tuple[TensorComparison, ...]

    @property
    def unchanged(self) -> int:
        """How many tensors are equal bit by bit."""
        return sum(tensor.unchanged for tensor in self.tensors)

    @property
    def finite(self) -> bool:
        return not any(tensor.nan or tensor.inf for tensor in self.tensors)

    @property
    def max_difference(self) -> float:
        return max((tensor.max_difference for tensor in self.tensors), default=0.0)

    @property
    def equal(self) -> bool:
        """Same names, shapes, dtypes and bits."""
        differ = self.only_in_a or self.only_in_b or self.shape_differences or self.dtype_differences
        return not differ and self.unchanged == len(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        summary = {key: getattr(self, key) for key in ("equal", "finite", "unchanged", "max_difference")}
        return summary | {"compared": len(self.tensors)} | asdict(self)


def verify_nxd(
    hf_dir: Path,
    checkpoint: Path,
    layout: Layout,
    *,
    dtype: FloatDtype | None = None,
    progress: Progress = lambda done, total: None,
) -> Verification:
    """Every tensor of every shard against its slice of the source, bit by bit, one tensor in memory at a time.

    dtype: what the conversion cast to, in either direction: both sides are compared as that. Raises LayoutError and
    CheckpointError when they cannot be compared at all (other tp or pp, missing or damaged files).
    """
    arch = Architecture.from_config(read_config(hf_dir))
    layout = layout.resolve(arch)
    layout.check(arch)
    weights = open_weights(hf_dir)
    sources = source_shapes(weights.shapes, arch, str(weights.where))
    read, layout = open_ranks(checkpoint, layout)
    problems: list[TensorProblem] = []
    done = copies = tensors = 0
    seen: set[object] = set()
    for number, rank in enumerate(layout.ranks):
        shard = read(*rank)
        targets = {t.name: t for t in rank_targets(sources, arch, layout, *rank, untie=HEAD not in weights)}
        problems += [
            TensorProblem(shard.where.name, name, "should not be here") for name in shard if name not in targets
        ]
        for name, target in targets.items():
            expected = TensorInfo(weights.info[target.cuts[0].source].dtype, target.shape(sources))
            problem = _problem(shard, name, expected, dtype, partial(cut, weights, target))
            if problem:
                problems.append(TensorProblem(shard.where.name, name, problem))
            copies += target in seen
            seen.add(target)
            tensors += 1
            done += expected.bytes
            progress(done, done * layout.shard_count // (number + 1))
    return Verification(
        source=str(hf_dir),
        checkpoint=str(model_folder(checkpoint)),
        shards=layout.shard_count,
        tensors=tensors,
        bytes=done,
        copies=copies,
        problems=tuple(problems),
    )


def compare_hf(a: Path, b: Path) -> Comparison:
    """Two models (Hugging Face folders or single files), tensor by tensor, in pieces of a few million numbers."""
    first, second = open_weights(a), open_weights(b)
    both = sorted(first.info.keys() & second.info.keys())
    shapes = [name for name in both if first.info[name].shape != second.info[name].shape]
    return Comparison(
        a=str(a),
        b=str(b),
        only_in_a=tuple(sorted(first.info.keys() - second.info.keys())),
        only_in_b=tuple(sorted(second.info.keys() - first.info.keys())),
        shape_differences=tuple(
            TensorProblem(str(b), name, f"{list(second.info[name].shape)} instead of {list(first.info[name].shape)}")
            for name in shapes
        ),
        dtype_differences=tuple(
            TensorProblem(str(b), name, f"{second.info[name].dtype} instead of {first.info[name].dtype}")
            for name in both
            if first.info[name].dtype != second.info[name].dtype
        ),
        tensors=tuple(compare_tensors(name, first[name], second[name]) for name in both if name not in shapes),
    )


def compare_tensors(name: str, a: Tensor, b: Tensor) -> TensorComparison:
    """Statistics of b against a; shapes are equal."""
    unchanged = same_bits(a, b)
    largest = total = 0.0
    nan = inf = 0
    for x, y in _chunks(a, b):
        y = y.double()
        nan += int(y.isnan().sum())
        inf += int(y.isinf().sum())
        if not unchanged:
            difference = (y - x.double()).abs()
            difference = difference[difference.isfinite()]
            largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
            total += float(difference.sum())
    return TensorComparison(
        name=name,
        unchanged=unchanged,
        max_difference=largest,
        mean_difference=total / max(a.numel(), 1),
        nan=nan,
        inf=inf,
    )


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(a.reshape(-1), _CHUNK), torch.split(b.reshape(-1), _CHUNK), strict=True)


def _problem(
    shard: Weights, name: str, expected: TensorInfo, dtype: FloatDtype | None, make: Callable[[], Tensor]
) -> str | None:
    if name not in shard:
        return "is missing"
    found, expected = shard.info[name].cast(dtype), expected.cast(dtype)
    if found != expected:
        return f"is {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    held, wanted = (tensor.to(torch_dtype(expected.dtype)) for tensor in (shard[name], make()))
    if same_bits(held, wanted):
        return None
    off = float((held.double() - wanted.double()).abs().nan_to_num(float("inf")).max())
    return f"differs from its slice of the source by up to {off:.3g}"
