"""Whether all blobs are there, from one listing."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from snapctl.checkpoints import read_manifest
from snapctl.completeness import check_blobs, find_blob_gaps, needed_bytes
from snapctl.manifest import parse_manifest
from snapctl.storage import FileInfo, open_storage
from tests.support.snapshots import metadata, tensor_entry

REAL = ["dtensor-4ranks/1", "torchrec-2ranks/100", "yaml-0.0.2/5", "yaml-2022-10/5", "yaml-chunked-2022-08/5"]


@pytest.mark.parametrize("name", REAL)
def test_real_snapshots_have_all_their_blobs(data: Callable[[str], pathlib.Path], name: str) -> None:
    root, step = name.split("/")
    storage = open_storage(data(root) / step)
    assert check_blobs(storage, read_manifest(storage)) == []


@pytest.mark.parametrize("name", REAL)
def test_every_missing_blob_and_every_lost_last_byte_is_found(data: Callable[[str], pathlib.Path], name: str) -> None:
    root, step = name.split("/")
    checkpoint = data(root) / step
    storage = open_storage(checkpoint)
    manifest = read_manifest(storage)
    needed = needed_bytes(manifest)
    assert needed.keys() == {location for location in manifest.blob_locations() if location in needed}
    for location, least in needed.items():
        blob = checkpoint / location
        content = blob.read_bytes()
        blob.unlink()
        (gap,) = check_blobs(storage, manifest)
        assert str(gap) == f"{location}: is missing"
        blob.write_bytes(content[: least - 1])
        (gap,) = check_blobs(storage, manifest)
        assert (gap.location, gap.found_bytes, gap.needed_bytes) == (location, least - 1, least)
        blob.write_bytes(content)


def test_the_bfloat16_that_lost_an_element_is_found(data: Callable[[str], pathlib.Path]) -> None:
    storage = open_storage(data("truncated-bfloat16") / "7")
    gaps = check_blobs(storage, read_manifest(storage))
    assert [gap.needed_bytes - (gap.found_bytes or 0) for gap in gaps] == [2, 2]


def gaps(entries: dict[str, object], sizes: dict[str, int]) -> list[str]:
    manifest = parse_manifest(metadata(entries))
    return [str(gap) for gap in find_blob_gaps(manifest, [FileInfo(path, size, 0.0) for path, size in sizes.items()])]


def test_a_blob_of_which_no_byte_is_needed_may_be_missing() -> None:
    empty = tensor_entry("0/empty", [0, 4])
    batched = tensor_entry("batched/x", [0], byte_range=[8, 8])
    chunked = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [0], "chunks": [], "replicated": False}
    assert gaps({"0/a": empty, "0/b": batched, "0/c": chunked}, {}) == []


def test_a_slab_must_reach_to_the_last_byte_that_any_entry_needs() -> None:
    entries = {
        "0/a": tensor_entry("batched/x", [2], byte_range=[0, 8]),
        "0/b": tensor_entry("batched/x", [2], byte_range=[100, 108]),
        "0/c": tensor_entry("batched/x", [2], byte_range=[8, 16]),
    }
    assert gaps(entries, {"batched/x": 108}) == []
    assert gaps(entries, {"batched/x": 107}) == ["batched/x: 107 bytes, 108 needed"]


def test_of_a_blob_that_alone_knows_its_length_one_byte_is_needed() -> None:
    pickled = {"type": "object", "location": "0/o", "serializer": "torch_save", "obj_type": "x.Y", "replicated": False}
    saved = tensor_entry("0/t", [3], "complex64", serializer="torch_save")
    assert gaps({"0/o": pickled, "0/t": saved}, {"0/o": 1, "0/t": 1}) == []
    assert gaps({"0/o": pickled, "0/t": saved}, {"0/o": 0}) == ["0/o: 0 bytes, 1 needed", "0/t: is missing"]
