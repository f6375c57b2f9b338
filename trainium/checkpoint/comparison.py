"""What a comparison of two models found. No torch, no numpy."""

from dataclasses import asdict, dataclass
from typing import Any

from trainium.checkpoint.inventory import TensorProblem


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """Two tensors of one name. Differences are of finite numbers; nan and inf of b, a_nan and a_inf of a.

    unchanged: equal bit by bit. where: a file of b that holds a number that differs, or of a when b is one folder.
    """

    name: str
    unchanged: bool
    max_difference: float
    mean_difference: float
    nan: int
    inf: int
    a_nan: int = 0
    a_inf: int = 0
    where: str = ""


@dataclass(frozen=True)
class DifferingCopy:
    """A rank's copy of numbers that an earlier rank of the same model (`side`: "A" or "B") holds otherwise."""

    side: str
    tensor: str
    tp_rank: int
    pp_rank: int
    file: str
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Model b against model a.

    common: how many names both have. problems: of single ranks, in either (`where` starts with "A: " or "B: ").
    copies: pieces that ranks hold again, and that were compared. bytes: of the tensors that were read.
    """

    a: str
    b: str
    forms: tuple[str, str]
    common: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    shape_differences: tuple[TensorProblem, ...]
    dtype_differences: tuple[TensorProblem, ...]
    names_only: bool
    tensors: tuple[TensorComparison, ...]
    problems: tuple[TensorProblem, ...] = ()
    copies: int = 0
    differing_copies: tuple[DifferingCopy, ...] = ()
    bytes: int = 0
    notes: tuple[str, ...] = ()

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
        """Same names, shapes and dtypes, no problem in a rank, and what was compared is the same in every bit."""
        differ = self.only_in_a or self.only_in_b or self.shape_differences or self.dtype_differences
        return not (differ or self.problems or self.differing_copies) and self.unchanged == len(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        summary = {key: getattr(self, key) for key in ("equal", "finite", "unchanged", "max_difference")}
        return summary | {"compared": len(self.tensors)} | asdict(self)
