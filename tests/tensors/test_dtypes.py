from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from snapctl.errors import UnsupportedEntryError
from snapctl.manifest import DTYPE_SIZES
from snapctl.tensors.dtypes import bits, convert, numpy_dtype
from tests.support.shards import DTYPES, dtype_of, random_array


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_has_its_width_in_numpy(name: str) -> None:
    assert numpy_dtype(name) == dtype_of(name)
    assert numpy_dtype(name).itemsize == DTYPE_SIZES[f"torch.{name}"]


@pytest.mark.parametrize("name", ["complex32", "qint8", "float5", "", "str", "O"])
def test_what_numpy_has_not_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedEntryError, match="numpy has no dtype"):
        numpy_dtype(name)


@pytest.mark.parametrize("name", DTYPES)
def test_bits_move_as_they_are(name: str) -> None:
    array = random_array((5, 3), name)
    out = np.zeros((5, 6), array.dtype)
    bits(out)[:, ::2] = bits(array)
    assert out[:, ::2].tobytes() == array.tobytes()


def test_conversion_is_by_value() -> None:
    array = np.array([1.5, -2.0, 1e30], ml_dtypes.bfloat16)
    assert list(convert(array, np.dtype("f4"))[:2]) == [1.5, -2.0]
    assert convert(np.array([1e30], "f4"), np.dtype("f2"))[0] == np.inf
    assert convert(array, array.dtype) is array


def test_imaginary_parts_are_not_dropped() -> None:
    with pytest.raises(UnsupportedEntryError, match="imaginary"):
        convert(np.array([1j]), np.dtype("f4"))
