"""The reader: every element from its byte, no byte more than needed, and nothing of what is not whole."""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapctl.checkpoints import read_manifest
from snapctl.errors import DamagedError, InvalidOptionError, PreconditionError, UnsupportedEntryError
from snapctl.storage import FileInfo, LocalStorage, Storage, open_storage
from snapctl.tensors.layout import TensorLayout, resolve_layouts
from snapctl.tensors.reader import ReadRequest, TensorReader, region_of_rows
from tests.support.servers import Bucket, Controlled
from tests.support.shards import Builder, cut, dtypes, grid, random_array, shapes
from tests.support.snapshots import local_writer, metadata, tensor_entry

TABLE = np.arange(64 * 8, dtype="f4").reshape(64, 8)
ROWS = grid(TABLE.shape, (8, 1))
COLUMNS = grid(TABLE.shape, (1, 4))


def _layout(storage: Storage, path: str = "m/t") -> TensorLayout:
    manifest = read_manifest(storage)
    (entry,) = [entry for entry in manifest.logical_entries() if entry.path == path]
    return resolve_layouts(entry)[0]


def _same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path


@pytest.fixture
def builder(root: pathlib.Path) -> Builder:
    return Builder(local_writer(root))


@pytest.fixture
def storage(root: pathlib.Path) -> LocalStorage:
    return LocalStorage(str(root / "10"))


@pytest.fixture
def reader(storage: LocalStorage) -> Iterator[TensorReader]:
    with TensorReader(storage) as opened:
        yield opened


# -- the right elements ----------------------------------------------------------------------------------------------


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Any], dict[int, list[Any]], str]:
    shape, dtype = draw(shapes), draw(dtypes)
    array = random_array(shape, dtype, draw(st.integers(0, 99)))
    rng = random.Random(draw(st.integers(0, 9999)))
    boxes = cut(shape, rng, draw(st.integers(1, 12))) if array.size else [((0,) * array.ndim, shape)]
    ranks = draw(st.integers(1, 4))
    by_rank: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
    for box in boxes:
        by_rank[rng.randrange(ranks)].append(box)
    return array, boxes, by_rank, draw(st.sampled_from(["ShardedTensor", "DTensor", "ChunkedTensor", "Tensor"]))


@given(_cases(), st.data(), st.booleans(), st.sampled_from([16, 64, 300, 1 << 20]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_tensor_however_it_is_cut_is_the_numpy_array_that_was_saved(
    tmp_path_factory: pytest.TempPathFactory, case: Any, data: st.DataObject, slab: bool, batch_bytes: int
) -> None:
    array, boxes, by_rank, kind = case
    root = tmp_path_factory.mktemp("case")
    builder = Builder(local_writer(root))
    if kind == "Tensor":
        builder.dense("0/m/t", array, slab=slab)
    elif kind == "ChunkedTensor":
        builder.chunked("0/m/t", array, boxes)
    else:
        builder.sharded("m/t", array, by_rank, kind=kind, slab=slab)
    builder.finish(4)
    storage = LocalStorage(str(root / "10"))
    layout = _layout(storage)
    with TensorReader(storage, batch_bytes=batch_bytes) as reader:
        assert _same(reader.read(layout), array)
        region = region_of_rows(layout)
        if array.ndim:
            start = data.draw(st.integers(0, array.shape[0]))
            stop = data.draw(st.integers(start, array.shape[0]))
            before = reader.bytes_read
            assert _same(reader.read(layout, (start, stop)), array[start:stop])
            assert reader.bytes_read - before == array[start:stop].nbytes
            region = region_of_rows(layout, (start, stop))
            array = array[start:stop]
        blocks = [(block.region, block.array.copy()) for block in reader.iter_blocks([(layout, region)])]
        assert b"".join(block.tobytes() for _, block in blocks) == array.tobytes()
        assert all(block.nbytes <= max(batch_bytes, array.itemsize) for _, block in blocks)
        if array.size:
            _check_a_region(reader, layout, region, array, data)


def _check_a_region(
    reader: TensorReader, layout: TensorLayout, region: Any, array: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    """Any part, into a target that is itself a view with strides of its own."""
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    sizes = tuple(data.draw(st.integers(1, size - o)) for o, size in zip(offsets, array.shape, strict=True))
    whole = np.zeros(tuple(2 * size for size in sizes), array.dtype)
    out = whole[tuple(slice(None, None, 2) for _ in sizes) + (...,)]  # noqa: RUF005
    place = tuple(a + b for a, b in zip(offsets, region[0], strict=True))
    reader.read_into([ReadRequest(layout, (place, sizes), out)])
    expected = array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    assert out.tobytes() == expected.tobytes()


def test_many_tensors_are_handed_out_in_the_order_asked_for(
    builder: Builder, reader: TensorReader, storage: LocalStorage
) -> None:
    arrays = [np.full((number % 5, 3), number, "i8") for number in range(200)]
    for number, array in enumerate(arrays):
        builder.dense(f"0/m/{number}", array, slab=number % 2 == 0)
    builder.finish()
    entries = {entry.path: entry for entry in read_manifest(storage).logical_entries()}
    layouts = [resolve_layouts(entries[f"m/{number}"])[0] for number in range(200)]
    found = [b""] * 200
    for block in reader.iter_blocks((layout, region_of_rows(layout)) for layout in layouts):
        found[block.index] += block.array.tobytes()
    assert found == [array.tobytes() for array in arrays]


def test_blocks_may_be_left_before_the_end(builder: Builder, storage: LocalStorage) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    layout = _layout(storage)
    with TensorReader(storage, batch_bytes=64) as reader:
        for block in reader.iter_blocks([(layout, region_of_rows(layout))]):
            assert block.array.shape == (2, 8)
            break


# -- no byte more ----------------------------------------------------------------------------------------------------


def test_rows_of_a_row_wise_table_leave_the_other_shards_alone(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.sharded("m/t", TABLE, {0: ROWS[:4], 1: ROWS[4:]})
    builder.finish(2)
    for box in ROWS[:3] + ROWS[5:]:
        (root / "10" / f"sharded/m/t_{box[0][0]}_0").unlink()
    assert _same(reader.read(_layout(storage), (30, 34)), TABLE[30:34])
    assert reader.bytes_read == 4 * 8 * 4


def test_what_is_read_is_counted_to_the_byte(builder: Builder, reader: TensorReader, storage: LocalStorage) -> None:
    builder.sharded("m/t", TABLE, {0: COLUMNS[:2], 1: COLUMNS[2:]}, slab=True)
    builder.finish(2)
    assert _same(reader.read(_layout(storage)), TABLE)
    assert reader.bytes_read == TABLE.nbytes


# -- nothing of what is not whole ------------------------------------------------------------------------------------


def test_a_short_blob_is_refused_before_anything_is_read(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    os.truncate(root / "10/0/m/t", 2000)
    with pytest.raises(DamagedError, match="0/m/t has 2000 bytes, and it needs 2048") as caught:
        reader.read(_layout(storage))
    assert (caught.value.kind, caught.value.blob, reader.bytes_read) == ("short-blob", "0/m/t", 0)


def test_a_blob_that_is_not_there_is_named(builder: Builder, reader: TensorReader, storage: LocalStorage) -> None:
    builder.manifest["0/m/t"] = tensor_entry("0/m/gone", [4])
    builder.finish()
    with pytest.raises(DamagedError, match="0/m/t: 0/m/gone is not there") as caught:
        reader.read(_layout(storage))
    assert caught.value.kind == "missing-blob"


def test_a_shape_that_no_blob_backs_costs_no_memory(
    builder: Builder, reader: TensorReader, storage: LocalStorage
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.manifest["0/m/t"]["shape"] = [1 << 40, 8]
    builder.finish()
    with pytest.raises(DamagedError) as caught:
        reader.read(_layout(storage))
    assert caught.value.kind == "short-blob"


def test_no_elements_need_no_blob(builder: Builder, reader: TensorReader, storage: LocalStorage) -> None:
    builder.manifest["0/m/t"] = tensor_entry("0/m/none", [0, 3], "int64")
    builder.finish()
    assert _same(reader.read(_layout(storage)), np.empty((0, 3), "i8"))


def test_a_blob_behind_a_link_out_of_the_checkpoint_is_outside(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    (root / "elsewhere").write_bytes((root / "10/0/m/t").read_bytes())
    (root / "10/0/m/t").unlink()
    (root / "10/0/m/t").symlink_to(root / "elsewhere")
    with pytest.raises(DamagedError) as caught:
        reader.read(_layout(storage))
    assert caught.value.kind == "outside"


def test_a_blob_behind_a_link_inside_the_checkpoint_is_read(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    (root / "10/0/m/t").rename(root / "10/0/m/real")
    (root / "10/0/m/t").symlink_to("real")
    assert _same(reader.read(_layout(storage)), TABLE)


def test_a_blob_that_was_replaced_since_it_was_looked_up_is_not_read(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    layout = _layout(storage)
    reader.check([layout])
    (root / "new").write_bytes(bytes(TABLE.nbytes))
    os.replace(root / "new", root / "10/0/m/t")
    with pytest.raises(PreconditionError, match="is no longer the file"):
        reader.read(layout)


def test_all_problems_of_blobs_come_back_as_values(
    builder: Builder, reader: TensorReader, storage: LocalStorage, root: pathlib.Path
) -> None:
    builder.sharded("m/t", TABLE, {0: ROWS[:4], 1: ROWS[4:]})
    builder.finish(2)
    (root / "10/sharded/m/t_8_0").unlink()
    os.truncate(root / "10/sharded/m/t_40_0", 3)
    problems = reader.find_blob_problems([_layout(storage)])
    assert [(p.kind, p.entry, p.blob) for p in problems] == [
        ("missing-blob", "0/m/t", "sharded/m/t_8_0"),
        ("short-blob", "1/m/t", "sharded/m/t_40_0"),
    ]


def test_a_listing_of_the_whole_checkpoint_can_stand_for_looking_up(
    builder: Builder, reader: TensorReader, storage: LocalStorage
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    layout = _layout(storage)
    reader.use_listing([])
    assert [p.kind for p in reader.find_blob_problems([layout])] == ["missing-blob"]
    reader.use_listing(storage.list_tree())
    assert reader.find_blob_problems([layout]) == []


def test_rows_that_are_not_there_are_refused(builder: Builder, reader: TensorReader, storage: LocalStorage) -> None:
    builder.dense("0/m/t", TABLE)
    builder.dense("0/m/s", np.float32(1).reshape(()))
    builder.finish()
    for rows in ((0, 65), (5, 4), (-1, 4)):
        with pytest.raises(InvalidOptionError, match="it has 64"):
            reader.read(_layout(storage), rows)
    with pytest.raises(InvalidOptionError, match="scalar"):
        reader.read(_layout(storage, "m/s"), (0, 1))


def test_an_unknown_serializer_or_dtype_is_named(builder: Builder, reader: TensorReader, storage: LocalStorage) -> None:
    builder.dense("0/m/t", TABLE)
    builder.dense("0/m/u", TABLE)
    builder.manifest["0/m/t"]["serializer"] = "zstd"
    builder.manifest["0/m/u"]["dtype"] = "torch.float5"
    builder.finish()
    with pytest.raises(UnsupportedEntryError, match="zstd"):
        reader.read(_layout(storage))
    with pytest.raises(UnsupportedEntryError, match="float5"):
        reader.read(_layout(storage, "m/u"))


def test_a_target_of_another_shape_or_width_is_a_mistake_of_the_caller(
    builder: Builder, reader: TensorReader, storage: LocalStorage
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    layout = _layout(storage)
    for out in (np.empty((64, 7), "f4"), np.empty((64, 8), "f8")):
        with pytest.raises(ValueError, match="do not go into"):
            reader.read_into([ReadRequest(layout, region_of_rows(layout), out)])


# -- Google Cloud Storage --------------------------------------------------------------------------------------------


def _media_requests(proxy: Controlled) -> list[tuple[str, str]]:
    return [(entry[1], entry[3]) for entry in proxy.stats(log=True)["log"] if "alt=media" in entry[1]]


def test_one_tensor_of_a_slab_is_one_ranged_get_of_its_bytes(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    for name in ("a", "t", "z"):
        builder.dense(f"0/m/{name}", TABLE, slab=True)
    builder.finish()
    storage = open_storage(f"{bucket.url}/10")
    layout = _layout(storage)
    proxy.reset()
    with TensorReader(storage) as reader:
        assert _same(reader.read(layout), TABLE)
        assert reader.bytes_read == TABLE.nbytes
    ((path, byte_range),) = _media_requests(proxy)
    assert byte_range == "bytes=2048-4095"
    assert "generation=" in path
    assert proxy.stats()["n"] == 2  # and one to look it up


def test_many_shards_are_looked_up_with_one_listing_and_read_at_once(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    table = np.arange(256 * 4, dtype="i4").reshape(256, 4)
    builder = Builder(bucket.write)
    builder.sharded("m/t", table, {rank: grid(table.shape, (64, 1))[rank::4] for rank in range(4)})
    builder.finish(4)
    storage = open_storage(f"{bucket.url}/10")
    layout = _layout(storage)
    proxy.reset()
    proxy.configure(latency=0.05)
    with TensorReader(storage) as reader:
        assert _same(reader.read(layout), table)
    stats = proxy.stats()
    assert stats["n"] == 65
    assert stats["maxinflight"] > 16


def test_neighbours_in_a_slab_are_asked_for_together(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: COLUMNS}, slab=True)
    builder.finish()
    storage = open_storage(f"{bucket.url}/10")
    layout = _layout(storage)
    proxy.reset()
    with TensorReader(storage) as reader:
        assert _same(reader.read(layout), TABLE)
    assert len(_media_requests(proxy)) == 1


def test_an_object_that_was_replaced_or_deleted_since_it_was_looked_up_is_not_read(bucket: Bucket) -> None:
    builder = Builder(bucket.write)
    builder.dense("0/m/t", TABLE)
    builder.finish()
    storage = open_storage(f"{bucket.url}/10")
    layout = _layout(storage)
    with TensorReader(storage) as reader:
        reader.check([layout])
        bucket.write("10/0/m/t", bytes(TABLE.nbytes))
        with pytest.raises(PreconditionError, match="replaced or deleted"):
            reader.read(layout)


def test_a_short_object_is_refused(bucket: Bucket) -> None:
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: ROWS[:4], 1: ROWS[4:]})
    builder.finish(2)
    bucket.write("10/sharded/m/t_40_0", b"abc")
    storage = open_storage(f"{bucket.url}/10")
    with TensorReader(storage) as reader, pytest.raises(DamagedError) as caught:
        reader.read(_layout(storage))
    assert caught.value.kind == "short-blob"


def test_find_files_lists_a_full_directory_only_as_long_as_that_pays(minigcs: Controlled) -> None:
    minigcs.seed("b", [(f"10/batched/{number:05d}", 1) for number in range(20_000)])
    storage = open_storage("gs://b/10")
    wanted = [f"batched/{number:05d}" for number in range(0, 20_000, 1000)] + ["batched/none", "other"]
    minigcs.reset()
    found: dict[str, FileInfo] = storage.find_files(wanted)
    assert sorted(found) == sorted(wanted)[:-2]
    assert minigcs.stats()["n"] <= 30
    near = [f"batched/{number:05d}" for number in range(100, 200)]
    minigcs.reset()
    assert sorted(storage.find_files(near)) == near
    assert minigcs.stats()["n"] == 1


def test_the_manifest_of_a_bucket_is_read_like_a_local_one(bucket: Bucket) -> None:
    bucket.write("10/.snapshot_metadata", metadata({"0/m/t": tensor_entry("0/m/t", [0])}))
    storage = open_storage(f"{bucket.url}/10")
    with TensorReader(storage) as reader:
        assert reader.read(_layout(storage)).shape == (0,)
