"""Differences computed from bits, against torch's arithmetic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainium.checkpoint.statistics import compare, largest_difference, numbers, same_bits
from trainium.checkpoint.weights import as_raw

DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "uint8", "bool"]
ODD = [0.0, -0.0, 1.0, -1.5, 6e-8, 65504.0, 1e-40, 3.38e38, float("nan"), float("inf"), float("-inf")]


def tensor(dtype: str, values: list[float] | None = None, seed: int = 0) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.randint(0, 2 if dtype == "bool" else 100, (40,), generator=torch.Generator().manual_seed(seed)).to(
            kind
        )
    return torch.tensor([*(values or []), *torch.randn(40, generator=torch.Generator().manual_seed(seed)).tolist()]).to(
        kind
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_torch(dtype: str) -> None:
    """Every bit pattern of the narrow dtypes, and odd numbers of the wide ones."""
    kind = getattr(torch, dtype)
    if kind.itemsize == 1 and dtype != "bool":
        values = torch.arange(256, dtype=torch.uint8).view(kind)
    elif kind.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kind)
    else:
        values = tensor(dtype, ODD)
    with np.errstate(invalid="ignore"):  # signaling NaN
        ours = torch.from_numpy(numbers(as_raw(values), dtype).astype("float64"))
    theirs = values.double()
    assert torch.equal(ours.nan_to_num(nan=-7.5, posinf=1e300, neginf=-1e300), theirs.nan_to_num(-7.5, 1e300, -1e300))


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", ["bfloat16", "float16", "float32", "float64", "int64"])
def test_statistics_are_those_of_torch(first: str, second: str) -> None:
    a, b = tensor(first, ODD, 1), tensor(second, ODD, 2)
    size = min(len(a), len(b))
    a, b = a[-size:], b[-size:]
    found = compare(as_raw(a), as_raw(b), (first, second))
    difference = (b.double() - a.double()).abs()
    difference = difference[difference.isfinite()]
    assert not found.equal
    assert found.largest == pytest.approx(float(difference.max()), rel=1e-6)
    assert found.total == pytest.approx(float(difference.sum()), rel=1e-5)
    assert found.nan == tuple(int(x.double().isnan().sum()) for x in (a, b))
    assert found.inf == tuple(int(x.double().isinf().sum()) for x in (a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_are_only_searched_for_what_is_not_finite(dtype: str) -> None:
    values = tensor(dtype, ODD)
    found = compare(as_raw(values), as_raw(values.clone()), (dtype, dtype))
    assert found.equal
    assert (found.largest, found.total) == (0, 0)
    assert found.nan == (int(values.double().isnan().sum()),) * 2
    assert found.inf == (int(values.double().isinf().sum()),) * 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300_000), st.integers(1, 3))
def test_pieces_add_up(size: int, step: int) -> None:
    """Sizes around those in which the work is cut, of views with gaps as well."""
    a = torch.zeros(size * step)[::step]
    b = a.clone()
    b[size // 2 :] = 2
    found = compare(as_raw(a), as_raw(b), ("float32", "float32"))
    assert found.equal == (size == 0)
    assert found.total == 2 * (size - size // 2)


def test_bits_decide_what_is_equal() -> None:
    zero, nan = torch.tensor([0.0, float("nan")]), torch.tensor([-0.0, float("nan")])
    assert same_bits(as_raw(nan), as_raw(nan.clone()))
    assert not same_bits(as_raw(zero), as_raw(nan))
    assert not same_bits(as_raw(zero), as_raw(zero.half()))
    assert largest_difference(as_raw(zero), as_raw(nan), "float32") == math.inf
