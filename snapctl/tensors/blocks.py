"""Blocks of tensors on their way from the storage to a writer: which go together, and the memory that they lie in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from snapctl.tensors.layout import TensorLayout
from snapctl.tensors.memory import ALIGNMENT, aligned_empty
from snapctl.tensors.tiling import Region

Array = np.ndarray[Any, Any]

MAX_BATCH_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor as `TensorReader.iter_blocks` hands it out."""

    index: int
    """Which of the tensors asked for."""
    region: Region
    array: Array
    """Contiguous. Its memory is used again once the next block is asked for."""


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    index: int
    layout: TensorLayout
    region: Region
    dtype: np.dtype[Any]
    is_raw: bool

    @property
    def arena_bytes(self) -> int:
        """Room that it takes in an arena; none for what is decoded elsewhere."""
        if not self.is_raw:
            return 0
        size = math.prod(self.region[1]) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory that is used again and again: fresh pages for each block would cost as much as reading it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def arrays(self, batch: Sequence[PlannedBlock]) -> list[Array]:
        needed = sum(item.arena_bytes for item in batch)
        if len(self._memory) < needed:
            self._memory = aligned_empty((needed,))
        arrays: list[Array] = []
        position = 0
        for item in batch:
            sizes = item.region[1] if item.is_raw else (0,)
            stop = position + math.prod(sizes) * item.dtype.itemsize
            arrays.append(self._memory[position:stop].view(item.dtype).reshape(sizes))
            position += item.arena_bytes
        return arrays


def iter_batches(items: Iterable[PlannedBlock], batch_bytes: int) -> Iterator[list[PlannedBlock]]:
    held: list[PlannedBlock] = []
    total = 0
    for item in items:
        if held and (total + item.arena_bytes > batch_bytes or len(held) >= MAX_BATCH_BLOCKS):
            yield held
            held, total = [], 0
        held.append(item)
        total += item.arena_bytes
    if held:
        yield held


def slices_of(region: Region, base: Sequence[int]) -> tuple[slice, ...]:
    """The index of a region in an array that begins at `base`."""
    return tuple(slice(o - b, o - b + size) for o, b, size in zip(region[0], base, region[1], strict=True))


def part_of(array: Array, region: Region, base: Sequence[int]) -> Array:
    """A view of a region of an array that begins at `base`."""
    view: Array = array[slices_of(region, base) + (Ellipsis,)]  # noqa: RUF005 - an index of mixed types
    return view


def as_buffer(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
