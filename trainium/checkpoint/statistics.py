"""Two pieces of a tensor as bits: equal or not, and if not by how much. numpy only; small pieces stay in the cache."""

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainium.checkpoint.weights import Raw

_PIECE = 1 << 17  # numbers at a time: what is computed from them stays in a core's own cache

Numbers = NDArray[np.floating[Any]]

# Bits of an infinity without its sign; what is larger (sign aside) is NaN.
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0000000000000}


@dataclass(frozen=True)
class Statistics:
    """Of b against a. `largest` and `total` of the absolute differences between finite numbers."""

    equal: bool = True
    largest: float = 0.0
    total: float = 0.0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.equal and other.equal,
            max(self.largest, other.largest),
            self.total + other.total,
            (self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            (self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]),
        )


def same_bits(a: Raw, b: Raw) -> bool:
    """Equal as bytes: NaN equals itself, 0 and −0 differ."""
    if a.dtype == b.dtype and a.shape == b.shape and a.flags.c_contiguous and b.flags.c_contiguous and not a.nbytes % 8:
        return bool(np.array_equal(a.reshape(-1).view(np.uint64), b.reshape(-1).view(np.uint64)))
    return bool(a.dtype == b.dtype and np.array_equal(a, b))


def compare(a: Raw, b: Raw, dtypes: tuple[str, str]) -> Statistics:
    """Statistics of two pieces of one shape. Equal bits are only searched for NaN and infinity.

    Differences are computed in float32 where both sides are at most that wide, else in float64, and added in float64.
    """
    if dtypes[0] == dtypes[1] and same_bits(a, b):
        nan, inf = _not_finite(b, dtypes[1])
        return Statistics(nan=(nan, nan), inf=(inf, inf))
    found = Statistics(equal=False)
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.size, _PIECE):
        found += _difference(a[start : start + _PIECE], b[start : start + _PIECE], dtypes)
    return found


def largest_difference(a: Raw, b: Raw, dtype: str) -> float:
    """The largest absolute difference of two pieces; infinite where only one of them is finite, or either is NaN."""
    with np.errstate(all="ignore"):
        difference = np.abs(numbers(a, dtype).astype(np.float64) - numbers(b, dtype))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))


def numbers(raw: Raw, dtype: str, out: NDArray[np.float32] | None = None) -> Numbers:
    """The values of these bits: float32 where that holds them exactly, else float64.

    out: where the values of 16 and 32 bits of a one-dimensional `raw` may be put.
    """
    if dtype == "bfloat16":
        bits = None if out is None else out.view(np.uint32)
        wide: Numbers = np.left_shift(raw, np.uint32(16), out=bits, dtype=np.uint32).view(np.float32)
        return wide
    if dtype == "float16" and _finite(raw, dtype):
        # numpy's own conversion is five times slower. The exponent's offset is 15 here and 127 there.
        bits = None if out is None else out.view(np.int32)
        bits = np.left_shift(raw.view(np.int16), np.int32(13), out=bits, dtype=np.int32)
        np.bitwise_and(bits, np.int32(~0x70001FFF), out=bits)  # the sign once
        half = bits.view(np.float32)
        return np.multiply(half, np.float32(2.0**112), out=half)
    if dtype == "float16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    if dtype.startswith("float8"):
        table: Numbers = _float8(dtype)[raw]
        return table
    if dtype in ("float32", "float64"):
        return np.ascontiguousarray(raw).view(dtype)
    return np.ascontiguousarray(raw).view("uint8" if dtype == "bool" else dtype).astype(np.float64)


class _Scratch(threading.local):
    """Two arrays per thread: memory that is new for every piece costs more than the arithmetic."""

    def __init__(self) -> None:
        self.x, self.y = np.empty(_PIECE, np.float32), np.empty(_PIECE, np.float32)


_scratch = _Scratch()


def _difference(a: Raw, b: Raw, dtypes: tuple[str, str]) -> Statistics:
    with np.errstate(all="ignore"):
        x = numbers(a, dtypes[0], _scratch.x[: a.size])
        y = numbers(b, dtypes[1], _scratch.y[: b.size])
        narrow = x.dtype == y.dtype == np.float32
        difference = np.subtract(y, x, out=_scratch.y[: b.size] if narrow else None)
        np.abs(difference, out=difference)
        largest = float(difference.max(initial=0.0))
        if np.isfinite(largest):
            return Statistics(False, largest, float(difference.sum()))
        # Not finite, or beyond float32.
        x, y = (numbers(raw, dtype).astype(np.float64) for raw, dtype in zip((a, b), dtypes, strict=True))
        difference = np.abs(y - x)
        difference = difference[np.isfinite(difference)]
    return Statistics(
        False,
        float(difference.max(initial=0.0)),
        float(difference.sum()),
        (int(np.isnan(x).sum()), int(np.isnan(y).sum())),
        (int(np.isinf(x).sum()), int(np.isinf(y).sum())),
    )


def _not_finite(raw: Raw, dtype: str) -> tuple[int, int]:
    """How many are NaN, and infinite."""
    if "float" not in dtype or (dtype in _INFINITY and _finite(raw, dtype)):
        return 0, 0
    return _count(raw, dtype)


def _finite(raw: Raw, dtype: str) -> bool:
    """Whether no number is NaN or infinite: two maxima over the bits tell it without a copy."""
    sign = 1 << (8 * raw.itemsize - 1)
    signed = raw.view(f"i{raw.itemsize}")  # as signed integers, the largest is of a number without the sign bit
    largest, largest_signed = int(raw.max(initial=0)), int(signed.max(initial=0))
    return largest_signed < _INFINITY[dtype] and largest < _INFINITY[dtype] + sign


def _count(raw: Raw, dtype: str) -> tuple[int, int]:
    values = numbers(raw, dtype)
    return int(np.isnan(values).sum()), int(np.isinf(values).sum())


@cache
def _float8(dtype: str) -> NDArray[np.float32]:
    """The 256 values; torch knows them."""
    import torch

    table: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    return table
