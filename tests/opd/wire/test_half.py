"""Halves have numpy's bits, whatever the number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.wire.tensors import to_half, to_single


def numpys(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = np.uint16 if a.dtype == np.float16 else np.uint32
    return bool((a.view(kind) == b.view(kind)).all())


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64))
def test_any_float32_rounds_as_in_numpy(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    assert same_bits(to_half(values), numpys(values))


def test_ties_and_their_neighbours_round_as_in_numpy() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    edges = np.float32([0, 65504, 65519.99, 65520, 65536, 1e30, np.inf])
    for near in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(9e9)), edges):
        for values in (near, -near):
            assert same_bits(to_half(values), numpys(values))


def test_slices_and_shapes_are_kept_and_what_may_not_be_written_is_read() -> None:
    values = np.random.default_rng(0).normal(0, 9, (3, 50)).astype(np.float32)
    values[0, :9] *= 1e-6
    assert same_bits(to_half(values[:, ::2]), numpys(values[:, ::2]))
    assert to_half(np.zeros((0, 4), np.float32)).shape == (0, 4)
    values.flags.writeable = False
    half = to_half(values)
    assert same_bits(half, numpys(values))
    half.flags.writeable = False
    assert same_bits(to_single(half[:, ::2]), half[:, ::2].astype(np.float32))


def test_nan_stays_nan_beside_other_numbers() -> None:
    values = np.float32([1.5, np.nan, -np.inf, -2e-6])
    half = to_half(values)
    assert np.isnan(half[1]) and same_bits(half[[0, 2, 3]], numpys(values[[0, 2, 3]]))


def test_every_half_becomes_its_own_float32() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    known = ~np.isnan(halves)
    assert same_bits(to_single(halves)[known], halves.astype(np.float32)[known])
    assert np.isnan(to_single(halves)[~known]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wider_numbers_are_cast(dtype: type) -> None:
    assert to_single(np.array([1.5], dtype)).dtype == np.float32
