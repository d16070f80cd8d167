"""How many NaN and infinities there are among elements, at about the speed of memory. numpy, no torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from snapctl.tensors.dtypes import numpy_dtype
from snapctl.verification.verdicts import NonFinite

_STEP_ELEMENTS = 1 << 18

Array = np.ndarray[Any, Any]


def count_non_finite(data: memoryview | Array, dtype: str) -> NonFinite:
    """The count among elements of a torch dtype (without ``torch.``) that begin at the first byte of a buffer.

    Complex elements count once: as NaN if either part is one. The buffer need not be aligned.
    """
    if dtype == "complex32":
        return _count_pairs(np.frombuffer(data, "<u2").reshape(-1, 2))
    kind = numpy_dtype(dtype)
    if kind.itemsize == 1:
        return _count_bytes(np.frombuffer(data, np.uint8), dtype)
    elements = np.frombuffer(data, kind)
    total = NonFinite(elements=len(elements))
    for first in range(0, len(elements), _STEP_ELEMENTS):
        part = np.require(elements[first : first + _STEP_ELEMENTS], requirements="A")
        with np.errstate(invalid="ignore"):  # signalling NaNs
            if _all_finite(part, dtype):
                continue
            nan = np.isnan(part)
            total = total.plus(NonFinite(int(nan.sum()), int((np.isinf(part) & ~nan).sum())))
    return total


def _all_finite(part: Array, dtype: str) -> bool:
    """Without `all` and `any`, which go byte by byte whenever their result happens to lie near what they read."""
    if dtype in ("bfloat16", "float16"):  # numpy goes through float32 for them
        mask = np.uint16(0x7F80 if dtype == "bfloat16" else 0x7C00)
        return bool((part.view(np.uint16) & mask).max(initial=0) < mask)
    return int(np.count_nonzero(np.isfinite(part))) == len(part)


def _count_bytes(data: Array, dtype: str) -> NonFinite:
    nan, infinite = _byte_tables(dtype)
    counts = np.bincount(data, minlength=256)
    return NonFinite(int(counts[nan].sum()), int(counts[infinite].sum()), len(data))


@functools.cache
def _byte_tables(dtype: str) -> tuple[Array, Array]:
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    return np.isnan(values), np.isinf(values)


def _count_pairs(parts: Array) -> NonFinite:
    exponent, fraction = parts & 0x7C00, parts & 0x03FF
    nan = ((exponent == 0x7C00) & (fraction != 0)).any(axis=1)
    infinite = ((exponent == 0x7C00) & (fraction == 0)).any(axis=1) & ~nan
    return NonFinite(int(nan.sum()), int(infinite.sum()), len(parts))
