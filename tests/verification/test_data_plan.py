"""How the data of a checkpoint is cut into parts and samples, and put together again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapctl.errors import InvalidOptionError
from snapctl.storage import FileInfo
from snapctl.tensors.layout import item_bytes
from snapctl.verification.blob_uses import BlobUse
from snapctl.verification.data_plan import (
    MAX_LOAD_BYTES,
    MIN_LOAD_BYTES,
    BlobPart,
    BlobPlan,
    Sample,
    choose_load_bytes,
    choose_sample,
    cut_loads,
    parse_sample,
    plan_blobs,
)
from snapctl.verification.float_counts import count_non_finite
from tests.support.shards import DTYPES, FLOATS, dtype_of, random_array

# -- samples ---------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text("abc/", min_size=1, max_size=6), st.integers(0, 10**9), max_size=30),
    st.integers(1, 12),
    st.text("0123456789", min_size=1, max_size=5),
)
def test_all_samples_cover_every_blob_once(sizes: dict[str, int], total: int, name: str) -> None:
    samples = [choose_sample(sizes, Sample(number, total), name=name) for number in range(1, total + 1)]
    assert sorted(location for sample in samples for location in sample) == sorted(sizes)


def test_samples_are_about_equally_large() -> None:
    rng = random.Random(0)
    sizes = {f"0/{number}": int(rng.paretovariate(1.2) * 1e6) for number in range(500)}
    loads = [sum(map(sizes.__getitem__, choose_sample(sizes, Sample(n, 7), name="10"))) for n in range(1, 8)]
    assert max(loads) < max(1.1 * min(loads), min(loads) + max(sizes.values()))


def test_the_largest_blob_is_not_in_the_same_sample_of_every_checkpoint() -> None:
    sizes = {"large": 10**9, **{f"small{number}": 10 for number in range(20)}}
    where = {
        next(n for n in range(1, 8) if "large" in choose_sample(sizes, Sample(n, 7), name=str(step)))
        for step in range(0, 10_000, 100)
    }
    assert where == set(range(1, 8))


@pytest.mark.parametrize("text", ["", "1", "0/7", "8/7", "1/0", "a/b", "1/7/2", "-1/7", "1/1000000", "¹/7", "1 /7"])
def test_what_is_no_sample_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="N/T"):
        parse_sample(text)


def test_a_sample_is_counted_from_one() -> None:
    assert parse_sample("7/7") == Sample(7, 7)


# -- parts -----------------------------------------------------------------------------------------------------------


@st.composite
def blobs(draw: st.DrawFn) -> tuple[list[BlobUse], int]:
    """Uses of one blob, in order and without overlaps, some with gaps; and the blob's length."""
    uses: list[BlobUse] = []
    position = 0
    for number in range(draw(st.integers(0, 8))):
        position += draw(st.integers(0, 20))
        dtype = draw(st.sampled_from(DTYPES))
        serializer = draw(st.sampled_from(("buffer_protocol", "buffer_protocol", "torch_save", "per_channel_qtensor")))
        size = draw(st.integers(1, 60)) * (item_bytes(dtype) or 1) + (8 if serializer != "buffer_protocol" else 0)
        end = position + size
        uses.append(BlobUse(f"0/{number}", f"0/{number}", "blob", position, end, serializer, dtype, (size,)))
        position = end
    return uses, position + draw(st.integers(0, 20))


@settings(max_examples=300)
@given(blobs(), st.integers(8, 200), st.booleans())
def test_parts_tile_a_blob_and_cut_no_element(blob: tuple[list[BlobUse], int], part_bytes: int, finite: bool) -> None:
    uses, size = blob
    files = {"blob": FileInfo("blob", size, 1.0, "7")}
    (plan,) = plan_blobs({"blob": uses}, files, finite=finite, part_bytes=part_bytes)
    assert [part.start for part in plan.parts] + [size] == [0] * (size > 0) + [part.end for part in plan.parts] + (
        [size] if size == 0 else []
    )
    assert all(part.version == "7" and part.start < part.end for part in plan.parts)
    assert [use.entry for part in plan.parts for use in part.archives] == [
        use.entry for use in uses if use.serializer == "torch_save"
    ]
    assert [use.entry for part in plan.parts for use in part.axes] == [
        use.entry for use in uses if use.serializer == "per_channel_qtensor"
    ]
    counted = {use.entry: 0 for use in uses}
    for part in plan.parts:
        for use in part.archives:
            assert part.start <= use.start and use.end is not None and use.end <= part.end
        for span in part.floats:
            assert part.start <= span.start < span.end <= part.end
            assert (span.end - span.start) % (item_bytes(span.dtype) or 1) == 0
            counted[span.tensor] += span.end - span.start
    for use in uses:
        is_float = (use.dtype or "").startswith(("float", "bfloat", "complex"))
        wanted = finite and use.is_raw and is_float and use.end is not None
        assert counted[use.entry] == ((use.end or 0) - use.start if wanted else 0)


# -- loads -----------------------------------------------------------------------------------------------------------


def plan_of(location: str, *sizes: int) -> BlobPlan:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [BlobPart(location, "", start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return BlobPlan(location, (), tuple(parts))


@given(st.lists(st.lists(st.integers(1, 300), max_size=6), max_size=12), st.integers(0, 400), st.integers(0, 30))
def test_loads_hold_every_part_once_in_order_and_are_no_larger_than_wanted(
    sizes: list[list[int]], load_bytes: int, read_cost: int
) -> None:
    plans = [plan_of(str(number), *held) for number, held in enumerate(sizes)]
    loads = list(cut_loads(plans, load_bytes=lambda: load_bytes, read_cost=read_cost))
    stretches = [stretch for load in loads for stretch in load]
    assert [part for stretch in stretches for part in stretch.parts] == [part for plan in plans for part in plan.parts]
    for load in loads:
        costs = [part.size_bytes + read_cost for stretch in load for part in stretch.parts]
        assert costs and (len(costs) == 1 or sum(costs) <= load_bytes)
        assert len({stretch.blob for stretch in load}) == len(load)
    for stretch in stretches:
        assert {part.location for part in stretch.parts} == {str(stretch.blob)}
        assert stretch.size_bytes == sum(part.size_bytes for part in stretch.parts)
    for one, other in pairwise(loads):
        first = other[0].parts[0].size_bytes + read_cost
        assert sum(part.size_bytes + read_cost for s in one for part in s.parts) + first > load_bytes


def test_a_plan_is_asked_for_only_when_its_turn_comes() -> None:
    asked = []

    def plans() -> Iterator[BlobPlan]:
        for number in range(100):
            asked.append(number)
            yield plan_of(str(number), 10, 10)

    next(cut_loads(plans(), load_bytes=lambda: 60, read_cost=0))
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("size_bytes", "known", "loads"),
    [
        (1000, {}, 1),
        (1000, {"reads": 10_000}, 78),  # many small blobs are work, too
        (1 << 40, {}, 8192),
        (4 << 30, {}, 40),  # four for each worker
        (4 << 30, {"workers": 1}, 32),
        (1 << 40, {"pace": 5e8}, 2199),  # a second's work
        (1 << 40, {"pace": 1e5}, 131072),
        (1 << 40, {"pace": 1e300}, 1024),
        (4 << 30, {"pace": 1e300}, 40),
        (4 << 30, {"pace": 1e300, "left": 100}, 4),  # the others come behind it
        (100 << 20, {"pace": 1e300, "left": 100}, 1),
    ],
)
def test_a_checkpoint_is_cut_into_loads_of_a_second_or_so_and_for_all_workers(
    size_bytes: int, known: dict[str, Any], loads: int
) -> None:
    reads = known.get("reads", 1)
    chosen = choose_load_bytes(
        size_bytes,
        reads,
        left=known.get("left", 1),
        workers=known.get("workers", 10),
        read_cost=1 << 20,
        bytes_per_second=known.get("pace"),
    )
    assert chosen >= MIN_LOAD_BYTES
    wanted = (size_bytes + (reads << 20)) / loads
    assert wanted <= chosen <= max(1.11 * wanted, MIN_LOAD_BYTES)
    assert chosen <= 1.11 * MAX_LOAD_BYTES


def test_the_size_of_loads_may_change_from_one_to_the_next() -> None:
    wanted = iter([20, 60, 10, 10, 10, 10])
    loads = cut_loads([plan_of("a", *[10] * 11)], load_bytes=lambda: next(wanted), read_cost=0)
    assert [load[0].size_bytes for load in loads] == [20, 60, 10, 10, 10]


# -- numbers that are none -------------------------------------------------------------------------------------------


@given(st.sampled_from((*FLOATS, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")), st.integers(0, 1 << 30))
def test_non_finite_elements_are_counted_as_numpy_counts_them(dtype: str, seed: int) -> None:
    array = random_array([257], dtype, seed)
    found = count_non_finite(memoryview(array.tobytes()), dtype)
    with np.errstate(invalid="ignore"):
        wide = array.astype(np.float64) if dtype != "float64" else array
    assert found == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()), 257)


def test_a_buffer_need_not_be_aligned() -> None:
    array = np.array([1.0, np.nan, np.inf, -np.inf], "f8")
    data = memoryview(b"\1" + array.tobytes())[1:]
    assert count_non_finite(data, "float64") == (1, 2, 4)


def test_a_complex_number_counts_once() -> None:
    array = np.array([complex(np.nan, np.inf), complex(np.inf, 1), 1j, complex(0, np.nan)], "c8")
    assert count_non_finite(memoryview(array.tobytes()), "complex64") == (2, 1, 4)
    halves = np.array([[np.nan, 1], [np.inf, np.nan], [1, -np.inf], [0, 0]], "f2")
    assert count_non_finite(memoryview(halves.tobytes()), "complex32") == (2, 1, 4)


def test_the_dtypes_of_the_tests_are_known_to_numpy() -> None:
    assert all(dtype_of(name).itemsize == item_bytes(name) for name in DTYPES)
