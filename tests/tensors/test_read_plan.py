from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from snapctl.tensors.layout import Box, TensorLayout
from snapctl.tensors.read_plan import BoxIndex, cut_into_blocks, intersect, merge_spans, plan_box
from tests.support.shards import cut

some_shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=7)


def _region(data: st.DataObject, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    return offsets, tuple(data.draw(st.integers(1, size - o)) for o, size in zip(offsets, shape, strict=True))


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...], location: str = "blob", start: int = 0) -> Box:
    end = start + 4 * int(np.prod(sizes, dtype=int))
    return Box("0/t", offsets, sizes, location, "buffer_protocol", "float32", (start, end))


@given(st.data())
@settings(max_examples=300)
def test_spans_hold_exactly_the_elements_of_the_part_whatever_the_bounds(data: st.DataObject) -> None:
    shape = data.draw(some_shapes)
    base = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    box = _box(base, shape, start=data.draw(st.integers(0, 20)))
    stored = np.arange(int(np.prod(shape, dtype=int)), dtype="u4").reshape(shape)
    blob = bytes(box.start) + stored.tobytes()
    offsets, sizes = _region(data, shape)
    region = tuple(o + b for o, b in zip(offsets, base, strict=True)), sizes
    gap = data.draw(st.integers(0, 100))
    limit = data.draw(st.integers(4, 200))
    out = np.full(sizes, 0xFFFFFFFF, "u4")
    for span in plan_box(box, region, 0, region, 4, gap_bytes=gap, read_bytes=limit):
        assert span.end - span.start <= limit
        source: np.ndarray = np.ndarray(span.sizes, "u4", blob, span.start, span.strides)
        place = out[(*(slice(o, o + s) for o, s in zip(span.offsets, span.sizes, strict=True)), ...)]
        assert (place == 0xFFFFFFFF).all(), "an element was planned twice"
        place[...] = source
        assert span.is_contiguous == (span.end - span.start == 4 * place.size)
        if gap == 0:
            assert span.is_contiguous
    expected = stored[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    assert np.array_equal(out, expected)


def test_a_narrow_part_of_a_wide_table_is_not_read_as_a_whole() -> None:
    box = _box((0, 0), (1000, 100_000))
    part = ((0, 10), (1000, 5))
    spans = list(plan_box(box, part, 0, part, 4, gap_bytes=1024, read_bytes=1 << 20))
    assert len(spans) == 1000
    assert sum(span.end - span.start for span in spans) == 1000 * 5 * 4


def test_a_gap_deep_inside_is_no_smaller_for_a_narrow_one_outside() -> None:
    box = _box((0, 0, 0), (4, 50, 100_000))
    part = ((0, 0, 0), (4, 50, 2))
    spans = list(plan_box(box, part, 0, part, 4, gap_bytes=1024, read_bytes=1 << 30))
    assert len(spans) == 200


def test_neighbours_are_merged_within_the_bounds_and_per_blob() -> None:
    def spans(*places: tuple[str, int, int]) -> list:
        return [
            span
            for location, start, end in places
            for span in plan_box(
                _box((0,), ((end - start) // 4,), location, start),
                ((0,), ((end - start) // 4,)),
                0,
                ((0,), ((end - start) // 4,)),
                4,
                gap_bytes=0,
                read_bytes=1 << 20,
            )
        ]

    found = spans(("a", 0, 100), ("a", 108, 200), ("a", 400, 500), ("b", 200, 300), ("a", 500, 600))
    reads = merge_spans(found, gap_bytes=8, read_bytes=150)
    places = [(read.location, read.start, read.end, len(read.spans)) for read in reads]
    assert places == [("a", 0, 100, 1), ("a", 108, 200, 1), ("a", 400, 500, 1), ("a", 500, 600, 1), ("b", 200, 300, 1)]
    reads = merge_spans(found, gap_bytes=8, read_bytes=1000)
    assert [(r.location, r.start, r.end) for r in reads] == [("a", 0, 200), ("a", 400, 600), ("b", 200, 300)]


@given(some_shapes, st.integers(4, 300))
def test_blocks_follow_each_other_in_row_major_order_and_stay_small(shape: tuple[int, ...], limit: int) -> None:
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    out = []
    for offsets, sizes in cut_into_blocks(((0,) * len(shape), shape), 4, limit):
        assert 4 * int(np.prod(sizes, dtype=int)) <= limit
        out += list(array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1))
    assert out == list(range(array.size))


def test_a_block_without_elements_is_one_block() -> None:
    assert list(cut_into_blocks(((0, 0), (0, 5)), 4, 100)) == [((0, 0), (0, 5))]


@given(st.data())
def test_the_index_finds_the_same_boxes_as_looking_at_all(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=5, max_side=30))
    rng = random.Random(data.draw(st.integers(0, 1000)))
    boxes = tuple(_box(*box) for box in cut(shape, rng, 120))
    region = _region(data, shape)
    found = list(BoxIndex(TensorLayout("t", "0/t", (0,), "float32", shape, boxes)).find(region))
    expected = [(b, s) for b in boxes if (s := intersect((b.offsets, b.sizes), region)) is not None]
    assert found == expected
