from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from snapctl.tensors.tiling import describe_hole, find_overlap
from tests.support.shards import cut, grid

small_shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=6)


@given(small_shapes, st.integers(1, 8), st.randoms(use_true_random=False))
def test_boxes_that_tile_a_shape_do_not_overlap(shape: tuple[int, ...], parts: int, rng: random.Random) -> None:
    assert find_overlap(cut(shape, rng, parts)) is None


@given(st.data())
@settings(max_examples=200)
def test_an_overlap_is_found_exactly_where_two_boxes_share_an_element(data: st.DataObject) -> None:
    shape = data.draw(small_shapes)
    boxes = []
    for _ in range(data.draw(st.integers(0, 6))):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - o)) for o, size in zip(offsets, shape, strict=True))
        boxes.append((offsets, sizes))
    counts = np.zeros(shape, int)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    pair = find_overlap(boxes)
    assert (pair is not None) == bool((counts > 1).any())
    if pair is not None:
        marks = np.zeros(shape, int)
        for index in pair:
            marks[tuple(slice(o, o + s) for o, s in zip(*boxes[index], strict=True))] += 1
        assert pair[0] != pair[1]
        assert (marks == 2).any()


def test_two_scalars_overlap() -> None:
    assert find_overlap([((), ()), ((), ())]) == (0, 1)


def test_ten_thousand_shards_in_three_dimensions_are_checked_without_all_their_coordinates() -> None:
    boxes = grid((10_000_000, 4096, 4096), (25, 20, 20))
    assert len(boxes) == 10_000
    assert find_overlap(boxes) is None
    boxes[777] = (boxes[778][0], boxes[777][1])
    assert sorted(find_overlap(boxes) or ()) == [777, 778]


def test_sticks_in_every_direction_are_compared_once_each() -> None:
    """Boxes that stand side by side whichever way one sweeps: no grid of coordinates could hold them."""
    n = 2000
    sticks = [((i * 3, 0, 0), (1, n * 3, 1)) for i in range(n)]
    sticks += [((0, i * 3, 1), (n * 3, 1, 1)) for i in range(n)]
    sticks += [((i * 3 + 1, 0, 2), (1, 1, n * 3)) for i in range(n)]
    assert find_overlap(sticks) is None


def test_a_hole_of_rows_is_named_by_its_rows() -> None:
    assert describe_hole([((0, 0), (3, 4)), ((6, 0), (6, 4))], (12, 4)) == "rows 3:6 of 12 are missing"


def test_a_hole_of_columns_is_named_by_its_dimension() -> None:
    assert describe_hole([((0, 0), (12, 2))], (12, 4)) == "indices of dimension 1 2:4 of 4 are missing"


def test_a_hole_in_the_middle_is_counted_and_placed() -> None:
    boxes = [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((4, 0), (2, 4))]
    assert describe_hole(boxes, (6, 4)) == "6 of 24 elements are missing in rows 2:4"


def test_a_tensor_of_nothing_is_all_hole() -> None:
    assert describe_hole([], (5,)) == "rows 0:5 of 5 are missing"
    assert describe_hole([], ()) == "its one element is missing"
