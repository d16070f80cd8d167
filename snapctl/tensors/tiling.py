"""Whether boxes tile a larger one: overlaps and holes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""``(offsets, sizes)`` of a part of a tensor."""


def find_overlap(boxes: Sequence[Region]) -> tuple[int, int] | None:
    """The indices of two boxes that share an element, or None. Boxes without elements are not to be handed over.

    A sweep along the dimension in which the fewest boxes stand side by side: a grid of 10,000 boxes in three
    dimensions takes a few hundred comparisons each, and what does not overlap at all never more than all pairs once.
    """
    if len(boxes) < 2:
        return None
    if not boxes[0][0]:
        return (0, 1)  # two scalars
    import numpy as np

    starts = np.array([box[0] for box in boxes], dtype=np.int64)
    ends = starts + np.array([box[1] for box in boxes], dtype=np.int64)
    best_order, best_reach, best_cost = None, None, -1
    for dim in range(starts.shape[1]):
        order = np.argsort(starts[:, dim], kind="stable")
        reach = np.searchsorted(starts[order, dim], ends[order, dim], side="left")
        cost = int((reach - np.arange(len(boxes)) - 1).sum())
        if best_order is None or cost < best_cost:
            best_order, best_reach, best_cost = order, reach, cost
    assert best_order is not None and best_reach is not None
    starts, ends = starts[best_order], ends[best_order]
    for index, stop in enumerate(best_reach.tolist()):
        if stop <= index + 1:
            continue
        others = slice(index + 1, stop)
        shared = ((starts[others] < ends[index]) & (ends[others] > starts[index])).all(axis=1)
        if shared.any():
            hit = index + 1 + int(shared.argmax())
            return int(best_order[index]), int(best_order[hit])
    return None


def describe_hole(boxes: Sequence[Region], shape: tuple[int, ...]) -> str:
    """What boxes that do not overlap leave uncovered, in words: the rows, or the ranges of another dimension."""
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in boxes)
    for dim in range(len(shape)):
        gaps = [(start, stop) for start, stop, covered in _coverage(boxes, shape, dim) if covered == 0]
        full = math.prod(shape[:dim] + shape[dim + 1 :])
        if sum((stop - start) * full for start, stop in gaps) == missing:
            name = "rows" if dim == 0 else f"indices of dimension {dim}"
            ranges = ", ".join(f"{start}:{stop}" for start, stop in gaps[:5]) + (", …" if len(gaps) > 5 else "")
            return f"{name} {ranges} of {shape[dim]} are missing"
    if not shape:
        return "its one element is missing"
    full_row = math.prod(shape[1:])
    partial = [(start, stop) for start, stop, covered in _coverage(boxes, shape, 0) if covered < full_row]
    where = f" in rows {partial[0][0]}:{partial[-1][1]}" if partial else ""
    return f"{missing} of {math.prod(shape)} elements are missing{where}"


def _coverage(boxes: Sequence[Region], shape: tuple[int, ...], dim: int) -> Iterator[tuple[int, int, int]]:
    """``(start, stop, elements covered at each index)`` along one dimension; neighbours that are alike are joined."""
    change: dict[int, int] = {0: 0, shape[dim]: 0}
    for offsets, sizes in boxes:
        each = math.prod(sizes[:dim] + sizes[dim + 1 :])
        change[offsets[dim]] = change.get(offsets[dim], 0) + each
        change[offsets[dim] + sizes[dim]] = change.get(offsets[dim] + sizes[dim], 0) - each
    points = sorted(change)
    covered = 0
    held: tuple[int, int, int] | None = None
    for start, stop in itertools.pairwise(points):
        covered += change[start]
        if held is not None and held[2] == covered:
            held = (held[0], stop, covered)
            continue
        if held is not None:
            yield held
        held = (start, stop, covered)
    if held is not None:
        yield held
