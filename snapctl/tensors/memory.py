"""Memory that files are read into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes. Where a copy ends up a few bytes behind its source, modulo a page, some processors copy at a third of their
speed or less; numpy's own large arrays lie 16 bytes behind a page, and what is read often at the beginning of one. In
front of everything aligned like this (a cache line) they are fast, wherever in the file one reads."""


def aligned_empty(shape: Sequence[int], dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    """An array with arbitrary content, as `numpy.empty` makes it, whose first element is aligned."""
    kind = np.dtype(dtype)
    size_bytes = math.prod(shape) * kind.itemsize
    memory: np.ndarray[Any, Any] = np.empty(size_bytes + ALIGNMENT - 1, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray[Any, Any] = memory[skip : skip + size_bytes].view(kind).reshape(tuple(shape))
    return array
