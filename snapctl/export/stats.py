"""What a tensor's values look like: range, mean, and what is not finite. In bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from snapctl.export.writing import Item, numpy_dtype_of, rows_of
from snapctl.tensors.dtypes import TORCH_ONLY_DTYPES, convert
from snapctl.tensors.reader import TensorReader
from snapctl.tensors.torch_decoding import values_of

FIRST_VALUES = 5
_CHUNK_ELEMENTS = 1 << 18

Number = int | float | complex | bool


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of the elements of a tensor."""

    count: int
    """All elements."""
    min: Number | None
    """Of the finite ones; None where there are none, and for complex numbers."""
    max: Number | None
    mean: Number | None
    """Of the finite ones, in double precision."""
    nan: int
    """How many are not a number (complex: in either part)."""
    inf: int
    """How many are infinite, of either sign."""
    first: tuple[Number, ...]
    """The first few, row-major."""


class StatsBuilder:
    """Takes a tensor's elements piece by piece, in row-major order."""

    def __init__(self) -> None:
        self._count = self._finite = self._nan = self._inf = 0
        self._mean: complex = 0.0
        self._min: Number | None = None
        self._max: Number | None = None
        self._first: list[Number] = []
        self._is_complex = False

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """The next elements."""
        flat = array.reshape(-1)
        self._is_complex = flat.dtype.kind == "c"
        if len(self._first) < FIRST_VALUES:
            self._first += [_plain(value) for value in flat[: FIRST_VALUES - len(self._first)]]
        for start in range(0, flat.size, _CHUNK_ELEMENTS):
            self._add_chunk(flat[start : start + _CHUNK_ELEMENTS])

    def _add_chunk(self, chunk: np.ndarray[Any, Any]) -> None:
        self._count += chunk.size
        values = chunk if chunk.dtype.kind in "biuc" else chunk.astype(np.float64)
        if values.dtype.kind in "fc":
            nan, finite = np.isnan(values), np.isfinite(values)
            self._nan += int(nan.sum())
            self._inf += int(values.size - (nan | finite).sum())
            values = values[finite]
        if values.size == 0:
            return
        self._finite += values.size
        wide = values.astype(np.complex128 if self._is_complex else np.float64)
        with np.errstate(all="ignore"):
            part = complex(wide.mean()) if self._is_complex else float(wide.mean())
        self._mean += (part - self._mean) * (values.size / self._finite)
        if not self._is_complex:
            low, high = _plain(values.min()), _plain(values.max())
            self._min = low if self._min is None or low < self._min else self._min  # type: ignore[operator]
            self._max = high if self._max is None or high > self._max else self._max  # type: ignore[operator]

    def finish(self) -> TensorStats:
        """The statistics of all that was added."""
        mean: Number | None = None
        if self._finite:
            mean = self._mean if self._is_complex else self._mean.real
        return TensorStats(self._count, self._min, self._max, mean, self._nan, self._inf, tuple(self._first))


def _plain(value: Any) -> Number:
    """A Python number of a numpy scalar of any dtype."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        number: Number = value.item()
        return number
    return float(value)


def compute_stats(reader: TensorReader, items: Sequence[Item]) -> list[TensorStats]:
    """The statistics of items, read in one go: of the values as they would be written, converted where that is asked
    for; of quantized ones of the values that they stand for.

    Raises:
        DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `TensorReader.read`.
    """
    builders = [StatsBuilder() for _ in items]
    streamed = [number for number, item in enumerate(items) if item.layout.dtype not in TORCH_ONLY_DTYPES]
    for block in reader.iter_blocks((items[number].layout, items[number].region) for number in streamed):
        number = streamed[block.index]
        builders[number].add(_converted(items[number], block.array))
    for number, item in enumerate(items):
        if item.layout.dtype in TORCH_ONLY_DTYPES:
            tensor = reader.read_torch(item.layout, rows_of(item))
            builders[number].add(_converted(item, values_of(tensor, entry=item.layout.entry)))
    return [builder.finish() for builder in builders]


def _converted(item: Item, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if item.dtype == item.layout.dtype else convert(array, numpy_dtype_of(item))
