"""Which bytes of which blobs make a part of a tensor, and in which requests they are fetched. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from snapctl.tensors.layout import Box, TensorLayout
from snapctl.tensors.tiling import Region


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one blob and the place of the target that it fills.

    The stretch is read as an array of `sizes` with `strides`; where these leave gaps, it holds bytes that nobody needs.
    """

    entry: str
    location: str
    start: int
    end: int
    target: int
    """The number of the target."""
    offsets: tuple[int, ...]
    """Where in the target it begins."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    is_contiguous: bool


@dataclass(frozen=True, slots=True)
class Read:
    """One request: ``[start, end)`` of a blob, and the spans that it serves."""

    location: str
    start: int
    end: int
    spans: tuple[Span, ...]


def intersect(one: Region, other: Region) -> Region | None:
    """What two boxes share, or None."""
    offsets, sizes = [], []
    for o1, s1, o2, s2 in zip(*one, *other, strict=True):
        start, stop = max(o1, o2), min(o1 + s1, o2 + s2)
        if stop <= start:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return tuple(offsets), tuple(sizes)


class BoxIndex:
    """The boxes of a layout by the rows of dimension 0 that they hold, so that 10,000 are not all looked at for each
    block. Boxes without elements are left out."""

    def __init__(self, layout: TensorLayout) -> None:
        self._boxes = [box for box in layout.boxes if box.elements > 0]
        self._arrays: tuple[object, object] | None = None
        if len(self._boxes) > 64 and self._boxes[0].offsets:
            import numpy as np

            starts = np.array([box.offsets for box in self._boxes], dtype=np.int64)
            self._arrays = (starts, starts + np.array([box.sizes for box in self._boxes], dtype=np.int64))

    def find(self, region: Region) -> Iterator[tuple[Box, Region]]:
        """The boxes that share elements with a region, and what they share."""
        if len(self._boxes) == 1 and region == (self._boxes[0].offsets, self._boxes[0].sizes):
            yield self._boxes[0], region
            return
        for box in self._candidates(region):
            shared = intersect((box.offsets, box.sizes), region)
            if shared is not None:
                yield box, shared

    def _candidates(self, region: Region) -> Iterable[Box]:
        if self._arrays is None:
            return self._boxes
        import numpy as np

        starts, ends = self._arrays
        low = np.array(region[0], dtype=np.int64)
        high = low + np.array(region[1], dtype=np.int64)
        hits = ((starts < high) & (ends > low)).all(axis=1)  # type: ignore[operator]
        return [self._boxes[index] for index in np.flatnonzero(hits)]


def plan_box(
    box: Box, shared: Region, target: int, region: Region, item_bytes: int, *, gap_bytes: int, read_bytes: int
) -> Iterator[Span]:
    """The stretches of a box's blob that hold a part of it.

    Args:
        shared: the part, in the tensor's coordinates.
        region: the target's place in the tensor.
        gap_bytes: read over as many bytes that nobody needs, rather than ask twice.
        read_bytes: make no stretch longer, where it can be cut at all.
    """
    strides = _strides(box.sizes, item_bytes)
    size_bytes = item_bytes * math.prod(shared[1])
    if (
        shared == region == (box.offsets, box.sizes) and size_bytes <= read_bytes
    ):  # a whole small tensor: the usual case
        origin = (0,) * len(strides)
        start = box.start
        yield Span(box.entry, box.location, start, start + size_bytes, target, origin, box.sizes, strides, True)
        return
    offsets = tuple(a - b for a, b in zip(shared[0], box.offsets, strict=True))
    to_target = tuple(a - b for a, b in zip(box.offsets, region[0], strict=True))
    for begin, sizes in _cut(offsets, shared[1], strides, item_bytes, gap_bytes, read_bytes):
        first = box.start + sum(o * stride for o, stride in zip(begin, strides, strict=True))
        end = first + _length(sizes, strides, item_bytes)
        yield Span(
            box.entry,
            box.location,
            first,
            end,
            target,
            tuple(a + b for a, b in zip(begin, to_target, strict=True)),
            sizes,
            strides,
            end - first == item_bytes * math.prod(sizes),
        )


def _cut(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    gap_bytes: int,
    read_bytes: int,
) -> Iterator[Region]:
    """A part of a box, cut so that each piece is one stretch of the blob."""
    dim = next((d for d, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        yield offsets, sizes
        return
    inner = _length((1, *sizes[dim + 1 :]), (0, *strides[dim + 1 :]), item_bytes)
    if inner <= read_bytes and _widest_gap(sizes, strides, item_bytes) <= gap_bytes:
        step = max(1, (read_bytes - inner) // strides[dim] + 1)
        for first in range(0, sizes[dim], step):
            count = min(step, sizes[dim] - first)
            yield _replaced(offsets, dim, offsets[dim] + first), _replaced(sizes, dim, count)
        return
    for index in range(sizes[dim]):
        yield from _cut(
            _replaced(offsets, dim, offsets[dim] + index),
            _replaced(sizes, dim, 1),
            strides,
            item_bytes,
            gap_bytes,
            read_bytes,
        )


def merge_spans(spans: Iterable[Span], *, gap_bytes: int, read_bytes: int) -> list[Read]:
    """Requests for spans: neighbours in one blob go together while the gap and the whole stay within the bounds."""
    reads: list[Read] = []
    held: list[Span] = []
    end = 0
    for span in sorted(spans, key=lambda span: (span.location, span.start, span.end)):
        if held and (
            span.location != held[0].location
            or span.start - end > gap_bytes
            or max(end, span.end) - held[0].start > read_bytes
        ):
            reads.append(Read(held[0].location, held[0].start, end, tuple(held)))
            held = []
        end = max(end, span.end) if held else span.end
        held.append(span)
    if held:
        reads.append(Read(held[0].location, held[0].start, end, tuple(held)))
    return reads


def find_extents(layout: TensorLayout, index: BoxIndex, region: Region) -> list[tuple[Box, int, int]]:
    """The byte ranges of blobs that follow each other in a region; none where it is not made of whole rows of boxes."""
    shape, item_bytes = layout.shape, layout.item_bytes
    if not shape or not item_bytes or region[1][1:] != shape[1:]:
        return []
    found = sorted(index.find(region), key=lambda pair: pair[1][0])
    if any(box.sizes[1:] != shape[1:] for box, _ in found):
        return []
    row_bytes = math.prod(shape[1:]) * item_bytes
    extents = []
    for box, (offsets, sizes) in found:
        start = box.start + (offsets[0] - box.offsets[0]) * row_bytes
        extents.append((box, start, start + sizes[0] * row_bytes))
    return extents


def cut_into_blocks(region: Region, item_bytes: int, block_bytes: int) -> Iterator[Region]:
    """A region in parts that follow each other in row-major order, each of at most so many bytes.

    A part is a range of rows, or, where one row is larger than that, a part of a row, and so on. What is contiguous in
    the region is contiguous in each box, however the tensor is sharded.
    """
    offsets, sizes = region
    if 0 in sizes:
        yield region
        return
    whole = item_bytes * math.prod(sizes)
    if whole <= block_bytes:
        yield region
        return
    dim = next(d for d, size in enumerate(sizes) if size > 1)
    inner = item_bytes * math.prod(sizes[dim + 1 :])
    step = block_bytes // inner
    for first in range(0, sizes[dim], max(step, 1)):
        count = min(max(step, 1), sizes[dim] - first)
        part = _replaced(offsets, dim, offsets[dim] + first), _replaced(sizes, dim, count)
        if step >= 1:
            yield part
        else:
            yield from cut_into_blocks(part, item_bytes, block_bytes)


def _strides(sizes: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    strides = []
    step = item_bytes
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _widest_gap(sizes: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """The most bytes between two neighbouring stretches of a part of a box."""
    widest, inner = 0, item_bytes
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1:
            widest = max(widest, stride - inner)
            inner += (size - 1) * stride
    return widest


def _length(sizes: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """From the first byte of the first element to the last byte of the last one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + item_bytes


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
