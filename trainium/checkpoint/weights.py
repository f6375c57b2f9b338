"""Named tensors on disk, read only where they are touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from trainium.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What weights may be written as; the names are torch's and those of a config.json.
FloatDtype = Literal["bfloat16", "float16", "float32"]

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64"), 8),
}


@dataclass(frozen=True)
class TensorInfo:
    """dtype by torch's name ("bfloat16") and shape of a tensor that nobody has read yet."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def cast(self, dtype: FloatDtype | None) -> TensorInfo:
        """The same tensor after a conversion to `dtype`, which leaves integers alone."""
        return TensorInfo(dtype, self.shape) if dtype and "float" in self.dtype else self


class Weights(Mapping[str, "Tensor"]):
    """A lazy mapping: `info` is known, a tensor is a view of the mapped file until something copies it.

    Nothing may write to such a tensor.
    """

    def __init__(self, where: Path, info: Mapping[str, TensorInfo], load: Callable[[str], Tensor]) -> None:
        self.where = where
        self.info = info
        self._load = load

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.info:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.info.items()}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def float_dtype(name: str) -> FloatDtype:
    """The name as one that weights can be written as. Raises CheckpointError."""
    known: tuple[FloatDtype, ...] = get_args(FloatDtype)
    for dtype in known:
        if name == dtype:
            return dtype
    raise CheckpointError(f"dtype={name!r} must be one of {', '.join(known)}")


def damaged(path: Path, reason: object) -> NoReturn:
    """A file that cannot be read as what it should be."""
    raise CheckpointError(f"{path} cannot be read: {reason}")
