"""One model against another, in any two forms: names, shapes, dtypes, and every number. No torch."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from trainium.checkpoint.comparison import Comparison, DifferingCopy, TensorComparison
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.inventory import TensorProblem
from trainium.checkpoint.layout import InstanceFamily
from trainium.checkpoint.meter import Progress
from trainium.checkpoint.placement import HEAD
from trainium.checkpoint.rows import CopyFound, Rows
from trainium.checkpoint.statistics import Statistics, compare
from trainium.checkpoint.stored_model import StoredModel, open_model, own_config
from trainium.checkpoint.weights import ITEM_BYTES, Raw
from trainium.checkpoint.workers import available_cores

_TASK_BYTES = 1 << 23  # of one side: what a thread takes at a time
_TASKS_AHEAD = 64
_BYTES_AHEAD = 1 << 27
_BLOCK_BYTES = 1 << 19  # of one side: two of them and what is computed from them fit a core's own cache


def compare_paths(
    a: Path,
    b: Path,
    *,
    config: Path | None,
    names_only: bool,
    family: InstanceFamily | None = None,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Two models in any two forms.

    config: the config.json that an NxD checkpoint is read with; without it one that lies in or beside either is taken.
    family: as in `open_model`.
    Where one side ties its embeddings, the other may have them as two tensors. Raises as `open_model`.
    """
    content = read_config(config) if config else own_config(a) or own_config(b)
    first, second, notes = _untie(
        *(open_model(path, content, headers_only=names_only, family=family) for path in (a, b))
    )
    return replace(compare_models(first, second, names_only=names_only, progress=progress), notes=notes)


def compare_hf(a: Path, b: Path) -> Comparison:
    """Two models in Hugging Face's names (folders or single files)."""
    return compare_models(open_model(a), open_model(b))


def compare_models(
    a: StoredModel,
    b: StoredModel,
    *,
    names: Iterable[str] | None = None,
    names_only: bool = False,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Everything about `b` that is not as in `a`; in pieces, with all cores, whatever the model's size.

    names: the tensors whose values are compared, all without it. names_only: no weights are read.
    """
    both = sorted(a.info.keys() & b.info.keys())
    shapes = [name for name in both if a.info[name].shape != b.info[name].shape]
    compared = [name for name in both if name not in shapes and (names is None or name in set(names))]
    tensors, copies = ((), ()) if names_only else _values(a, b, compared, progress)
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        forms=(a.form, b.form),
        common=len(both),
        only_in_a=_only(a, b),
        only_in_b=_only(b, a),
        shape_differences=tuple(
            TensorProblem(str(b.path), name, f"{list(b.info[name].shape)} instead of {list(a.info[name].shape)}")
            for name in shapes
        ),
        dtype_differences=tuple(
            TensorProblem(str(b.path), name, f"{b.info[name].dtype} instead of {a.info[name].dtype}")
            for name in both
            if a.info[name].dtype != b.info[name].dtype
        ),
        names_only=names_only,
        tensors=tuple(tensors),
        problems=tuple(
            replace(problem, where=f"{side}: {problem.where}")
            for side, model in (("A", a), ("B", b))
            for problem in model.problems
        ),
        copies=0 if names_only else a.copies + b.copies,
        differing_copies=tuple(copies),
        bytes=0 if names_only else sum(side.info[name].bytes for side in (a, b) for name in compared),
    )


def _untie(a: StoredModel, b: StoredModel) -> tuple[StoredModel, StoredModel, tuple[str, ...]]:
    """Where one side has an output projection and the other's config.json ties it to the embedding, both have one."""
    notes = []
    sides = []
    for side, other in ((a, b), (b, a)):
        alias = side.tied and HEAD in other.info and HEAD not in side.info
        sides.append(side.untied() if alias else side)
        if alias:
            notes.append(f"{side.path} ties {HEAD} to its embedding, which was compared in its place")
    return sides[0], sides[1], tuple(notes)


def _only(a: StoredModel, b: StoredModel) -> tuple[str, ...]:
    """Names that b does not have, damaged or not."""
    damaged = {problem.tensor for problem in b.problems}
    return tuple(sorted(a.info.keys() - b.info.keys() - damaged))


@dataclass
class _Sum:
    """What the tasks of one tensor have found so far."""

    statistics: Statistics = field(default_factory=Statistics)
    where: str = ""
    copies: dict[tuple[str, str], CopyFound] = field(default_factory=dict)

    def add(self, found: "_Sum") -> None:
        self.statistics += found.statistics
        self.where = self.where or found.where
        for key, copy in found.copies.items():
            if key not in self.copies or copy.largest > self.copies[key].largest:
                self.copies[key] = copy


def _values(
    a: StoredModel, b: StoredModel, names: list[str], progress: Progress
) -> tuple[list[TensorComparison], list[DifferingCopy]]:
    total = sum(side.info[name].bytes for side in (a, b) for name in names)
    sums: dict[str, _Sum] = {name: _Sum() for name in names}
    done = 0
    progress(0, total)
    for task, found in _parallel(_tasks(a, b, names), available_cores()):
        sums[task.name].add(found)
        done += task.bytes
        progress(done, total)
    tensors = [_summary(name, sums[name], prod(a.info[name].shape)) for name in names]
    copies = [
        DifferingCopy(side, name, *copy.rank, copy.file, copy.largest)
        for name in names
        for (side, _), copy in sums[name].copies.items()
    ]
    return tensors, copies


def _summary(name: str, found: _Sum, count: int) -> TensorComparison:
    numbers = found.statistics
    return TensorComparison(
        name=name,
        unchanged=numbers.equal,
        max_difference=numbers.largest,
        mean_difference=numbers.total / max(count, 1),
        a_nan=numbers.nan[0],
        nan=numbers.nan[1],
        a_inf=numbers.inf[0],
        inf=numbers.inf[1],
        where=found.where,
    )


@dataclass(frozen=True)
class _Task:
    """Some rows of two tensors of one name, whose files are mapped."""

    name: str
    sides: tuple[Rows, Rows]
    dtypes: tuple[str, str]
    columns: int
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * self.columns * sum(ITEM_BYTES[dtype] for dtype in self.dtypes)

    def ahead(self) -> None:
        for rows in self.sides:
            rows.ahead(self.start, self.stop)

    def __call__(self) -> _Sum:
        return _compare_rows(self.sides, self.dtypes, self.columns, self.start, self.stop)


def _tasks(a: StoredModel, b: StoredModel, names: list[str]) -> Iterator[_Task]:
    for name in names:
        shape = a.info[name].shape
        rows, columns = shape[0] if shape else 1, prod(shape[1:])
        dtypes = (a.info[name].dtype, b.info[name].dtype)
        sides = (a.rows(name), b.rows(name))
        step = max(1, _TASK_BYTES // max(1, columns * max(ITEM_BYTES[dtype] for dtype in dtypes)))
        for start in range(0, rows, step):
            yield _Task(name, sides, dtypes, columns, start, min(start + step, rows))


def _compare_rows(sides: tuple[Rows, Rows], dtypes: tuple[str, str], columns: int, start: int, stop: int) -> _Sum:
    """Block by block."""
    found = _Sum()
    step = min(stop - start, max(1, _BLOCK_BYTES // max(1, columns * max(ITEM_BYTES[dtype] for dtype in dtypes))))
    buffers: list[Raw] = [np.empty((step, columns), f"<u{ITEM_BYTES[dtype]}") for dtype in dtypes]
    for first in range(start, stop, step):
        last = min(first + step, stop)
        x, y = (rows.read(first, last, buffer[: last - first]) for rows, buffer in zip(sides, buffers, strict=True))
        statistics = compare(x, y, dtypes)
        copies = {
            (s, copy.file): copy for s, rows in zip("AB", sides, strict=True) for copy in rows.copies(first, last)
        }
        where = "" if statistics.equal or found.where or dtypes[0] != dtypes[1] else _where(sides, x, y, first)
        found.add(_Sum(statistics, where, copies))
    return found


def _where(sides: tuple[Rows, Rows], x: Raw, y: Raw, first: int) -> str:
    """The file of the first number that differs, of the side that has its tensors in several."""
    row, column = np.unravel_index(int(np.argmax(x != y)), x.shape)
    divided = sides[1] if len(sides[1].pieces) > 1 or len(sides[0].pieces) == 1 else sides[0]
    return divided.file(first + int(row), int(column))


def _parallel(tasks: Iterator[_Task], threads: int) -> Iterator[tuple[_Task, _Sum]]:
    """Results in order. What one raises is raised here.

    The disk reads what the next tasks need while the threads are at work on the first; not more than that is open.
    """
    running: deque[tuple[_Task, Future[_Sum]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(threads) as pool:
        try:
            for task in tasks:
                task.ahead()
                running.append((task, pool.submit(task)))
                ahead += task.bytes
                while len(running) > _TASKS_AHEAD or (ahead > _BYTES_AHEAD and len(running) > threads):
                    first, future = running.popleft()
                    ahead -= first.bytes
                    yield first, future.result()
            while running:
                first, future = running.popleft()
                yield first, future.result()
        finally:
            for _, future in running:
                future.cancel()
