"""What the manifest says of a tensor, put together and judged."""

from __future__ import annotations

from typing import Any

import pytest

from snapctl.errors import DamagedError, UnsupportedEntryError
from snapctl.manifest import LogicalEntry, Manifest, parse_manifest
from snapctl.tensors.layout import (
    TensorLayout,
    find_missing_shards,
    inspect_layouts,
    is_outside,
    item_bytes,
    resolve_layouts,
)
from tests.support.shards import grid
from tests.support.snapshots import metadata, tensor_entry


def _parse(entries: dict[str, Any], world: int = 2) -> Manifest:
    return parse_manifest(metadata(entries, world))


def _entry(entries: dict[str, Any], path: str = "m/t") -> LogicalEntry:
    (found,) = [entry for entry in _parse(entries).logical_entries() if entry.path == path]
    return found


def _layout(entries: dict[str, Any]) -> TensorLayout:
    (layout,) = resolve_layouts(_entry(entries))
    return layout


def _problem(entries: dict[str, Any]) -> DamagedError:
    with pytest.raises(DamagedError) as caught:
        resolve_layouts(_entry(entries))
    return caught.value


def _shard(offsets: list[int], sizes: list[int], dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    location = f"sharded/m/t_{'_'.join(map(str, offsets))}"
    return {"offsets": offsets, "sizes": sizes, "tensor": tensor_entry(location, sizes, dtype)} | changes


def _sharded(*shards: dict[str, Any]) -> dict[str, Any]:
    return {"type": "ShardedTensor", "shards": list(shards)}


def test_a_dense_tensor_is_one_box() -> None:
    layout = _layout({"0/m/t": tensor_entry("0/m/t", [3, 4], byte_range=[100, 148])})
    assert (layout.dtype, layout.shape, layout.size_bytes, layout.ranks) == ("float32", (3, 4), 48, (0,))
    (box,) = layout.boxes
    assert (box.offsets, box.sizes, box.start, box.end) == ((0, 0), (3, 4), 100, 148)
    assert layout.is_raw


def test_shards_of_all_ranks_are_joined_and_a_rank_without_any_is_no_trouble() -> None:
    layout = _layout(
        {"0/m/t": _sharded(), "1/m/t": _sharded(_shard([3, 0], [2, 4], "int64"), _shard([0, 0], [3, 4], "int64"))}
    )
    assert (layout.dtype, layout.shape, layout.ranks) == ("int64", (5, 4), (1,))
    assert [box.offsets for box in layout.boxes] == [(0, 0), (3, 0)]


def test_a_shard_that_two_ranks_list_at_the_same_place_counts_once() -> None:
    layout = _layout({"0/m/t": _sharded(_shard([0], [4])), "1/m/t": _sharded(_shard([0], [4]))})
    assert len(layout.boxes) == 1


def test_the_same_rows_from_two_places_overlap() -> None:
    other = {"offsets": [0], "sizes": [4], "tensor": tensor_entry("elsewhere", [4])}
    problem = _problem({"0/m/t": _sharded(_shard([0], [4])), "1/m/t": _sharded(other)})
    assert problem.kind == "overlap"
    assert "0/m/t" in problem.message
    assert "1/m/t" in problem.message


def test_shards_without_rows_count_for_the_shape_only() -> None:
    layout = _layout({"0/m/t": _sharded(_shard([0, 0], [2, 4])), "1/m/t": _sharded(_shard([2, 0], [0, 4]))})
    assert layout.shape == (2, 4)
    assert [box.needs_blob for box in layout.boxes] == [True, False]


def test_a_table_of_which_no_rank_has_a_shard_is_a_hole() -> None:
    assert _problem({"0/m/t": _sharded(), "1/m/t": _sharded()}).kind == "hole"


def test_missing_rows_are_named() -> None:
    problem = _problem({"0/m/t": _sharded(_shard([0, 0], [3, 4])), "1/m/t": _sharded(_shard([6, 0], [6, 4]))})
    assert (problem.kind, problem.message) == ("hole", "0/m/t: rows 3:6 of 12 are missing")


def test_overlapping_rows_are_refused() -> None:
    problem = _problem({"0/m/t": _sharded(_shard([0, 0], [4, 4])), "1/m/t": _sharded(_shard([3, 0], [3, 4]))})
    assert problem.kind == "overlap"


def test_shards_that_disagree_on_the_dtype_are_refused() -> None:
    problem = _problem({"0/m/t": _sharded(_shard([0], [4])), "1/m/t": _sharded(_shard([4], [4], "int32"))})
    assert problem.kind == "size-mismatch"
    assert "float32 and int32" in problem.message


def test_shards_of_different_dimensions_are_refused() -> None:
    problem = _problem({"0/m/t": _sharded(_shard([0], [4])), "1/m/t": _sharded(_shard([4, 0], [4, 1]))})
    assert problem.kind == "size-mismatch"


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (tensor_entry("0/m/t", [3], byte_range=[12, 0]), "bad-range"),
        (tensor_entry("0/m/t", [3], byte_range=[-4, 8]), "bad-range"),
        (tensor_entry("0/m/t", [3], byte_range=[0, 8]), "size-mismatch"),
        (tensor_entry("0/m/t", [-3]), "size-mismatch"),
        (tensor_entry("0/m/t", [1 << 40, 1 << 40]), "size-mismatch"),
        (tensor_entry("0/m/t", [(1 << 63) - 1]), "size-mismatch"),
        (tensor_entry("../../etc/passwd", [3]), "outside"),
        (tensor_entry("/etc/passwd", [3]), "outside"),
        (tensor_entry("", [3]), "outside"),
        (tensor_entry("0/m/t", [4], "qint8", serializer="per_tensor_qtensor", byte_range=[0, 4]), "size-mismatch"),
        (_sharded(_shard([0, 0], [4])), "size-mismatch"),
        (_sharded(_shard([-1], [4])), "size-mismatch"),
        (_sharded(_shard([(1 << 63) - 1], [4])), "size-mismatch"),
        (_sharded(_shard([0], [4], tensor=tensor_entry("x", [5]))), "size-mismatch"),
    ],
)
def test_what_cannot_be_is_refused_with_its_kind(entry: dict[str, Any], kind: str) -> None:
    problem = _problem({"0/m/t": entry})
    assert problem.kind == kind
    assert problem.entry == "0/m/t"


def _chunked(shape: list[int], *chunks: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    return {"type": "ChunkedTensor", "dtype": f"torch.{dtype}", "shape": shape, "chunks": list(chunks),
            "replicated": False}  # fmt: skip


def test_chunks_must_fill_the_shape_that_the_entry_states() -> None:
    assert _layout({"0/m/t": _chunked([4, 2], _shard([0, 0], [3, 2]), _shard([3, 0], [1, 2]))}).shape == (4, 2)
    assert _problem({"0/m/t": _chunked([5, 2], _shard([0, 0], [3, 2]), _shard([3, 0], [1, 2]))}).kind == "hole"
    assert _problem({"0/m/t": _chunked([2, 2], _shard([0, 0], [3, 2]))}).kind == "size-mismatch"
    assert _problem({"0/m/t": _chunked([4], _shard([0, 0], [2, 2]))}).kind == "size-mismatch"
    assert _problem({"0/m/t": _chunked([3], _shard([0], [3]), dtype="int32")}).kind == "size-mismatch"


def test_a_chunked_tensor_without_chunks_has_no_elements() -> None:
    assert _layout({"0/m/t": _chunked([0, 3])}).size_bytes == 0
    assert _problem({"0/m/t": _chunked([2, 3])}).kind == "hole"


def test_a_scalar_may_be_one_chunk_of_one_row() -> None:
    layout = _layout({"0/m/t": _chunked([], _shard([0], [1]))})
    assert (layout.shape, layout.boxes[0].offsets, layout.boxes[0].end) == ((), (), 4)


def test_tensors_of_several_ranks_are_one_where_they_lead_to_the_same_bytes_and_else_each_its_own() -> None:
    same = {f"{rank}/m/t": tensor_entry("shared", [3]) for rank in (0, 1)}
    assert [layout.ranks for layout in resolve_layouts(_entry(same))] == [(0, 1)]
    own = {f"{rank}/m/t": tensor_entry(f"{rank}/m/t", [3]) for rank in (0, 1)}
    assert [layout.entry for layout in resolve_layouts(_entry(own))] == ["0/m/t", "1/m/t"]


def test_all_that_is_wrong_comes_back_as_values_with_the_layouts_that_are_sound() -> None:
    entry = _entry(
        {"0/m/t": tensor_entry("0/m/t", [3], byte_range=[0, 1]), "1/m/t": tensor_entry("1/m/t", [3])}
    )  # fmt: skip
    layouts, problems = inspect_layouts(entry)
    assert [layout.entry for layout in layouts] == ["1/m/t"]
    assert [(problem.kind, problem.entry) for problem in problems] == [("size-mismatch", "0/m/t")]


def test_what_is_no_tensor_is_unsupported() -> None:
    with pytest.raises(UnsupportedEntryError, match="of type Quux"):
        resolve_layouts(_entry({"0/m/t": {"type": "Quux", "location": "x"}}))


def test_an_unknown_serializer_or_dtype_is_carried_and_not_damage() -> None:
    layout = _layout({"0/m/t": tensor_entry("0/m/t", [3], "float5", serializer="zstd")})
    assert (layout.dtype, layout.size_bytes, layout.is_raw) == ("float5", None, False)


def test_a_rank_whose_container_names_a_sharded_tensor_must_list_it() -> None:
    manifest = _parse(
        {
            "0/m": {"type": "dict", "keys": ["t"]},
            "1/m": {"type": "dict", "keys": ["t"]},
            "0/m/t": _sharded(_shard([0], [4])),
        }
    )
    (entry,) = [entry for entry in manifest.logical_entries() if entry.path == "m/t"]
    (problem,) = find_missing_shards(entry, manifest, (0, 1))
    assert (problem.kind, problem.entry) == ("missing-entry", "1/m/t")
    assert find_missing_shards(entry, manifest, (0,)) == []


def test_a_thousand_shards_take_no_time_worth_measuring() -> None:
    boxes = grid((1 << 20, 64, 64), (10, 10, 10))
    by_rank = {f"{rank}/m/t": _sharded(*(_shard(list(o), list(s)) for o, s in boxes[rank::8])) for rank in range(8)}
    assert len(_layout(by_rank).boxes) == 1000


def test_outside_is_what_leads_out() -> None:
    assert [loc for loc in ("a/b", "a/../b", "..", "a..b/c", "/a", "", "a\0b") if is_outside(loc)] == [
        "a/../b",
        "..",
        "/a",
        "",
        "a\0b",
    ]


def test_item_bytes_of_what_nobody_knows() -> None:
    assert (item_bytes("bfloat16"), item_bytes("float5"), item_bytes(None)) == (2, None, None)
