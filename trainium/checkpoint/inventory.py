"""What the ranks of a checkpoint hold, piece by piece, and what they lack. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.placement import Cut, rank_targets
from trainium.checkpoint.rows import Held, Piece, Rows
from trainium.checkpoint.stored_layout import Read
from trainium.checkpoint.weights import TensorInfo, Weights


@dataclass(frozen=True)
class TensorProblem:
    """A tensor that is not what it should be, and where."""

    where: str
    tensor: str
    problem: str


@dataclass(frozen=True)
class Holder:
    """A rank's tensor that holds a piece, from row `offset` on."""

    rank: tuple[int, int]
    target: str
    offset: int


@dataclass(frozen=True)
class Inventory:
    """info: the tensors that are whole. pieces: of every tensor, with the ranks that hold each (more than one: copies).

    problems: tensors that only some ranks have, or in another shape or dtype.
    """

    read: Read
    info: Mapping[str, TensorInfo]
    pieces: Mapping[str, Mapping[Cut, tuple[Holder, ...]]]
    problems: tuple[TensorProblem, ...]

    @property
    def copies(self) -> int:
        return sum(len(holders) - 1 for name in self.info for holders in self.pieces[name].values())

    def rows(self, name: str) -> Rows:
        """A tensor, its files mapped."""
        return Rows(tuple(self._piece(cut, holders) for cut, holders in self.pieces[name].items()))

    def _piece(self, cut: Cut, holders: tuple[Holder, ...]) -> Piece:
        return Piece(cut.dim, cut.start, cut.stop, tuple(self._held(cut, holder) for holder in holders))

    def _held(self, cut: Cut, holder: Holder) -> Held:
        shard = self.read(*holder.rank)
        raw = shard.raw(holder.target)
        if cut.dim == 0:
            raw = raw[holder.offset : holder.offset + cut.stop - cut.start]
        return Held(raw, shard.info[holder.target].dtype, shard.where.name, holder.rank)


def take_inventory(read: Read, arch: Architecture, layout: Layout) -> Inventory:
    """Look through the headers of all ranks. What they lack is no error here; unknown tensors are taken whole."""
    counter = _Counter(arch, layout)
    for rank in layout.ranks:
        counter.add(rank, read(*rank))
    problems = tuple(counter.all_problems())
    wrong = {problem.tensor for problem in problems}
    info = {name: counter.info[name] for name in sorted(counter.info) if name not in wrong}
    pieces = {name: {cut: tuple(found) for cut, found in cuts.items()} for name, cuts in counter.pieces.items()}
    return Inventory(read, info, pieces, problems)


class _Counter:
    def __init__(self, arch: Architecture, layout: Layout) -> None:
        self._arch, self._layout = arch, layout
        self._sources = arch.tensor_shapes()
        self._problems: list[TensorProblem] = []
        self._missing: list[TensorProblem] = []
        self.info: dict[str, TensorInfo] = {}
        self.pieces: dict[str, dict[Cut, list[Holder]]] = {}

    def add(self, rank: tuple[int, int], shard: Weights) -> None:
        unknown = set(shard)
        for target in rank_targets(self._sources, self._arch, self._layout, *rank):
            unknown.discard(target.name)
            shape, offset = target.shape(self._sources), 0
            found = shard.info.get(target.name)
            for cut in target.cuts:
                if found is None:
                    self._missing.append(TensorProblem(shard.where.name, cut.source, f"is missing ({target.name})"))
                elif found.shape != shape:
                    problem = f"is {list(found.shape)} ({target.name}) instead of {list(shape)}"
                    self._problems.append(TensorProblem(shard.where.name, cut.source, problem))
                else:
                    info = TensorInfo(found.dtype, self._sources[cut.source])
                    self._hold(shard, cut, info, Holder(rank, target.name, offset))
                offset += cut.stop - cut.start
        for name in sorted(unknown):
            self._hold(shard, Cut(name), shard.info[name], Holder(rank, name, 0))

    def all_problems(self) -> list[TensorProblem]:
        """What every rank lacks is not in the model: a name less, and no problem of a rank."""
        return self._problems + [problem for problem in self._missing if problem.tensor in self.info]

    def _hold(self, shard: Weights, cut: Cut, info: TensorInfo, holder: Holder) -> None:
        before = self.info.setdefault(cut.source, info)
        if before != info:
            here, there = (f"{item.dtype} {list(item.shape)}" for item in (info, before))
            problem = f"is {here} here and {there} in an earlier rank"
            self._problems.append(TensorProblem(shard.where.name, cut.source, problem))
        self.pieces.setdefault(cut.source, {}).setdefault(cut, []).append(holder)
