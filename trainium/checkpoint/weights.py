"""Named tensors on disk, read only where they are touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import FloatDtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Raw = NDArray[np.unsignedinteger[Any]]  # the bits of a tensor as unsigned integers of its item size, in its shape

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

    def reshaped(self, shape: tuple[int, ...]) -> TensorInfo:
        """The same dtype in another shape, as a part of it has."""
        return TensorInfo(self.dtype, shape)


class Weights(Mapping[str, "Tensor"]):
    """A lazy mapping: `info` is known, a tensor is a view of the mapped file until something copies it.

    Nothing may write to such a tensor. `raw` gives the same view without torch, `check` compares its bytes with the
    checksum that the file has for them, `ahead` has the disk begin to read it, `files` are what was opened.
    """

    def __init__(
        self,
        where: Path,
        info: Mapping[str, TensorInfo],
        raw: Callable[[str], Raw],
        *,
        check: Callable[[str], None] = lambda name: None,
        ahead: Callable[[str], None] = lambda name: None,
        files: tuple[Path, ...] = (),
    ) -> None:
        self.where = where
        self.info = info
        self.raw = raw
        self.check = check
        self.ahead = ahead
        self.files = files or (where,)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.info:
            raise KeyError(name)
        return as_tensor(self.raw(name), self.info[name].dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.info.items()}


def in_memory(tensors: Mapping[str, Tensor]) -> Weights:
    """The same face for tensors that somebody holds; Weights are given back."""
    if isinstance(tensors, Weights):
        return tensors
    info = {name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    return Weights(Path("memory"), info, lambda name: as_raw(tensors[name]))


def mapped_array(buffer: Any, info: TensorInfo, start: int, stride: tuple[int, ...] | None = None) -> Raw:
    """A view of mapped bytes from `start` on; stride in elements, row-major without. ValueError: beyond the end."""
    width = ITEM_BYTES[info.dtype]
    if 0 in info.shape:
        return np.empty(info.shape, f"<u{width}")
    strides = None if stride is None else tuple(width * step for step in stride)
    return np.ndarray(info.shape, f"<u{width}", buffer, start, strides)


def as_tensor(raw: Raw, dtype: str) -> Tensor:
    """The tensor of these bits, sharing their memory."""
    import torch

    return torch.from_numpy(raw).view(torch_dtype(dtype))


def as_raw(tensor: Tensor) -> Raw:
    """The bits of a tensor, sharing its memory."""
    import torch

    integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    raw: Raw = tensor.detach().view(integers).numpy()
    return raw


def flat_bytes(raw: Raw) -> memoryview:
    """The bytes of a row-major array, sharing its memory."""
    flat: Any = raw.reshape(-1).view(np.uint8)
    return memoryview(flat)


def byte_view(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order; copies only what is not contiguous."""
    return flat_bytes(as_raw(tensor.contiguous()))


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
