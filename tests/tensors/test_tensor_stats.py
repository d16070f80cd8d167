from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from snapctl.export.stats import StatsBuilder, TensorStats


def _stats(*arrays: np.ndarray) -> TensorStats:
    builder = StatsBuilder()
    for array in arrays:
        builder.add(array)
    return builder.finish()


def test_range_and_mean_are_of_the_finite_values() -> None:
    found = _stats(np.array([1, np.nan, np.inf, -np.inf, 3], "f4"), np.array([8.0], "f4"))
    assert (found.count, found.min, found.max, found.mean, found.nan, found.inf) == (6, 1.0, 8.0, 4.0, 1, 2)


def test_pieces_make_the_same_as_the_whole() -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    whole, pieces = _stats(values), _stats(*np.array_split(values, 7))
    assert pieces.mean == pytest.approx(values.mean(), abs=1e-12)
    assert (whole.min, whole.max, whole.first) == (pieces.min, pieces.max, pieces.first)


def test_large_integers_are_not_rounded() -> None:
    found = _stats(np.array([2**62, -(2**63), 2**63 - 1], "i8"))
    assert (found.min, found.max, found.first) == (-(2**63), 2**63 - 1, (2**62, -(2**63), 2**63 - 1))
    assert _stats(np.array([2**64 - 1], "u8")).max == 2**64 - 1


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_are_numbers_like_others(name: str) -> None:
    found = _stats(np.array([1.5, np.nan, -2.0], getattr(ml_dtypes, name)))
    assert (found.min, found.max, found.mean, found.nan) == (-2.0, 1.5, -0.25, 1)
    assert found.first[0] == 1.5


def test_truth_values_have_a_mean() -> None:
    found = _stats(np.array([True, False, True, True]))
    assert (found.min, found.max, found.mean, found.first) == (False, True, 0.75, (True, False, True, True))


def test_complex_numbers_have_a_mean_and_no_range() -> None:
    found = _stats(np.array([1 + 2j, complex(np.nan, 1), complex(np.inf, 0), 3j]))
    assert (found.min, found.max, found.mean, found.nan, found.inf) == (None, None, 0.5 + 2.5j, 1, 1)


def test_nothing_has_neither() -> None:
    assert _stats(np.empty((0, 3), "f4")) == TensorStats(0, None, None, None, 0, 0, ())
    found = _stats(np.array(np.nan))
    assert (found.mean, found.min, found.nan) == (None, None, 1)


def test_only_the_first_few_values_are_kept() -> None:
    assert _stats(np.arange(3), np.arange(3, 100)).first == (0, 1, 2, 3, 4)
