"""What counts as a difference between two manifests, and when content can be compared."""

from __future__ import annotations

import random
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.comparison import Comparison, compare
from snapctl.manifest import Manifest, parse_manifest
from snapctl.save_record import BlobSum
from tests.support.random_snapshots import random_snapshot, summed
from tests.support.snapshots import metadata, primitive, tensor_entry

Sums = dict[str, BlobSum]


def manifest(entries: dict[str, Any], world_size: int = 1) -> Manifest:
    return parse_manifest(metadata(entries, world_size))


def summary(found: Comparison) -> tuple[list[tuple[str, str]], int, list[str]]:
    return (
        [(change.path, change.kind) for change in found.changes],
        found.same,
        [item.reason for item in found.not_compared],
    )


def rows(array: np.ndarray[Any, Any], cuts: list[int], *, kind: str) -> tuple[Manifest, Sums]:
    """A tensor cut by rows: whole, in chunks, or in shards of a rank each."""
    sums: Sums = {}
    shards = []
    for first, last in zip([0, *cuts], [*cuts, len(array)], strict=True):
        location = f"m/w_{first}"
        sums[location] = summed(array[first:last].tobytes())
        tensor = tensor_entry(location, array[first:last].shape, array.dtype.name)
        shards.append({"offsets": [first, 0], "sizes": list(array[first:last].shape), "tensor": tensor})
    if kind == "Tensor":
        return manifest({"0/w": shards[0]["tensor"]}), sums
    if kind == "ChunkedTensor":
        entry = {"type": kind, "dtype": f"torch.{array.dtype.name}", "shape": list(array.shape), "replicated": False}
        return manifest({"0/w": {**entry, "chunks": shards}}), sums
    mesh = {"mesh": list(range(len(shards))), "dim_map": [[0], [-1]]} if kind == "DTensor" else {}
    entries = {f"{rank}/w": {"type": kind, "shards": [shard], **mesh} for rank, shard in enumerate(shards)}
    return manifest(entries, len(shards)), sums


@pytest.mark.parametrize("new_kind", ["Tensor", "ChunkedTensor", "ShardedTensor", "DTensor"])
@pytest.mark.parametrize("old_kind", ["Tensor", "ShardedTensor"])
def test_how_rows_are_cut_makes_no_difference(old_kind: str, new_kind: str) -> None:
    array = np.arange(40, dtype="f4").reshape(10, 4)
    old, old_sums = rows(array, [] if old_kind == "Tensor" else [5], kind=old_kind)
    new, new_sums = rows(array, [] if new_kind == "Tensor" else [3, 7], kind=new_kind)
    assert summary(compare(old, new, old_sums=old_sums, new_sums=new_sums)) == ([], 1, [])
    array[9, 3] = -1
    new, new_sums = rows(array, [] if new_kind == "Tensor" else [3, 7], kind=new_kind)
    assert summary(compare(old, new, old_sums=old_sums, new_sums=new_sums)) == ([("w", "content")], 0, [])


def test_a_cut_by_columns_cannot_be_compared_with_another() -> None:
    def columns(cut: int) -> tuple[Manifest, Sums]:
        shards, sums = [], {}
        for first, last in ((0, cut), (cut, 4)):
            location = f"m/w_0_{first}"
            sums[location] = BlobSum((last - first) * 4, first)
            tensor = tensor_entry(location, [1, last - first])
            shards.append({"offsets": [0, first], "sizes": [1, last - first], "tensor": tensor})
        return manifest({"0/w": {"type": "ShardedTensor", "shards": shards}}), sums

    (old, old_sums), (new, new_sums) = columns(2), columns(3)
    found = compare(old, new, old_sums=old_sums, new_sums=new_sums)
    assert summary(found) == ([], 0, ["it is cut into shards in another way"])
    assert summary(compare(old, old, old_sums=old_sums, new_sums=old_sums)) == ([], 1, [])
    changed = {**old_sums, "m/w_0_2": BlobSum(8, 99)}
    assert summary(compare(old, old, old_sums=old_sums, new_sums=changed)) == ([("w", "content")], 0, [])


def test_raw_bytes_and_an_archive_of_the_same_tensor_cannot_be_compared() -> None:
    """What 0.0.x saved lies in an archive of torch.save: other bytes, the same values."""
    array = np.arange(4, dtype="f4").reshape(2, 2)
    raw, raw_sums = rows(array, [], kind="Tensor")
    archived = manifest({"0/w": {**tensor_entry("m/w_0", array.shape), "serializer": "torch_save"}})
    archived_sums = {"m/w_0": summed(b"an archive")}
    for old, new, sums in ((raw, archived, (raw_sums, archived_sums)), (archived, raw, (archived_sums, raw_sums))):
        found = compare(old, new, old_sums=sums[0], new_sums=sums[1])
        assert summary(found) == ([], 0, ["it is stored in another form"])


def test_of_a_slab_that_differs_nobody_knows_which_tensor_has_changed() -> None:
    entries = {f"0/t{n}": tensor_entry("batched/1", [2], byte_range=[n * 8, n * 8 + 8]) for n in range(2)}
    entries["0/all"] = tensor_entry("batched/2", [2], byte_range=[0, 8])
    old = manifest(entries)
    sums = {"batched/1": BlobSum(16, 1), "batched/2": BlobSum(8, 1)}
    assert summary(compare(old, old, old_sums=sums, new_sums=sums)) == ([], 3, [])
    other = {"batched/1": BlobSum(16, 2), "batched/2": BlobSum(8, 2)}
    reason = "it shares a blob with others, and the two blobs differ"
    assert summary(compare(old, old, old_sums=sums, new_sums=other)) == ([("all", "content")], 0, [reason, reason])


def test_an_object_is_compared_by_its_blob_and_its_class() -> None:
    def entry(kind: str) -> dict[str, Any]:
        return {"type": "object", "location": "0/o", "serializer": "torch_save", "obj_type": kind, "replicated": False}

    old, new = manifest({"0/o": entry("builtins.set")}), manifest({"0/o": entry("collections.Counter")})
    one, two = {"0/o": BlobSum(5, 1)}, {"0/o": BlobSum(5, 2)}
    assert summary(compare(old, old, old_sums=one, new_sums=one)) == ([], 1, [])
    assert summary(compare(old, old, old_sums=one, new_sums=two)) == ([("o", "content")], 0, [])
    assert summary(compare(old, new, old_sums=one, new_sums=one)) == ([("o", "type")], 0, [])


def test_containers_count_only_where_nothing_is_in_them() -> None:
    old = manifest({"0/m": {"type": "dict", "keys": ["a"]}, "0/m/a": primitive(1)})
    new = manifest({"0/n": {"type": "dict", "keys": []}, "0/l": {"type": "list"}, "0/l/0": primitive(1)})
    assert summary(compare(old, new)) == ([("n", "added"), ("l/0", "added"), ("m/a", "removed")], 0, [])
    other = manifest({"0/m": {"type": "list"}, "0/m/a": primitive(1)})
    assert summary(compare(old, other)) == ([("m", "type")], 1, [])


def test_what_ranks_hold_differently_is_compared_rank_by_rank() -> None:
    def ranks(*values: int) -> Manifest:
        return manifest({f"{rank}/seed": primitive(value) for rank, value in enumerate(values)}, len(values))

    assert summary(compare(ranks(1, 2), ranks(1, 2))) == ([], 2, [])
    assert summary(compare(ranks(1, 2), ranks(1, 3))) == ([("seed", "value")], 1, [])
    assert summary(compare(ranks(1, 1), ranks(1, 1, 1, 1))) == ([], 1, [])
    assert summary(compare(ranks(1, 2), ranks(1))) == ([("seed", "removed")], 1, [])


def test_copies_of_ranks_are_compared_too() -> None:
    entries = {f"{rank}/w": tensor_entry(f"{rank}/w", [2]) for rank in range(2)}
    both = manifest(entries, 2)
    one = {"0/w": BlobSum(8, 1), "1/w": BlobSum(8, 1)}
    two = {"0/w": BlobSum(8, 1), "1/w": BlobSum(8, 2)}
    assert summary(compare(both, both, old_sums=one, new_sums=one)) == ([], 1, [])
    assert summary(compare(both, both, old_sums=one, new_sums=two)) == ([("w", "content")], 0, [])


def test_a_tensor_without_elements_has_no_content_to_compare() -> None:
    old = manifest({"0/z": tensor_entry("0/z", [0, 3])})
    assert summary(compare(old, old)) == ([], 1, [])


@given(st.integers(0, 1 << 30))
def test_a_snapshot_is_the_same_as_itself_and_differs_in_what_is_changed(seed: int) -> None:
    rng = random.Random(seed)
    snapshot = random_snapshot(seed)
    found = parse_manifest(metadata(snapshot.manifest, snapshot.world_size))
    sums = {location: summed(data) for location, data in snapshot.blobs.items()}
    assert not compare(found, found, old_sums=sums, new_sums=sums).changes
    assert not compare(found, found, old_sums=sums, new_sums=sums).not_compared
    needed = sorted(found.blob_locations() & {location for location, data in snapshot.blobs.items() if data})
    if not needed:
        return
    harmed = rng.choice(needed)
    data = bytearray(snapshot.blobs[harmed])
    data[rng.randrange(len(data))] ^= 1
    other = {**sums, harmed: BlobSum(len(data), google_crc32c.value(bytes(data)))}
    result = compare(found, found, old_sums=sums, new_sums=other)
    touched = {path.partition("/")[2] for path, stored in found.iter_blobs() if stored.location == harmed}
    told = {change.path for change in result.changes} | {item.path for item in result.not_compared}
    assert all(change.kind == "content" for change in result.changes)
    assert told <= touched and (
        told or all(entry.size_bytes == 0 for entry in found.logical_entries() if entry.path in touched)
    )
