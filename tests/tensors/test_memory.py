"""Memory that files are read into begins at a cache line."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from snapctl.storage import open_storage
from snapctl.tensors.memory import ALIGNMENT, aligned_empty
from snapctl.verification import data_checks


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (2, 0, 5), (1000, 1001)])
@pytest.mark.parametrize("dtype", ["u1", "<f4", "<f8", "<c16", "?"])
def test_an_array_of_any_shape_is_aligned(shape: tuple[int, ...], dtype: str) -> None:
    for _ in range(5):
        array = aligned_empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
        array[...] = 1
        assert array.all()


@pytest.mark.parametrize("size", [5, 1 << 20, 5 << 20])
def test_what_verify_reads_into_is_aligned(size: int, tmp_path: pathlib.Path) -> None:
    for buffer in (data_checks._buffer(size), data_checks._block_buffer(open_storage(tmp_path))):
        assert np.frombuffer(buffer, "u1").ctypes.data % ALIGNMENT == 0
