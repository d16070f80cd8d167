"""`read_tensor`: the function for users, on everything that is in tests/data, locally and on gs://."""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import snapctl
from snapctl.errors import DamagedError, EntryNotFoundError, InvalidOptionError, UnsupportedEntryError
from tests.conftest import DATA
from tests.support.servers import Bucket
from tests.support.shards import Builder, grid, random_array
from tests.support.snapshots import local_writer

EXPECTED = [
    pytest.param(
        folder.name, name, facts, id=f"{folder.name}-{name}", marks=[pytest.mark.torch] * ("0.0" in folder.name)
    )
    for folder in sorted(DATA.iterdir())
    if (folder / "expected.json").exists()
    for name, facts in json.loads((folder / "expected.json").read_bytes()).items()
]


def _check(array: np.ndarray[Any, Any], facts: dict[str, Any]) -> None:
    assert (array.dtype.name, list(array.shape)) == (facts["dtype"], facts["shape"])
    assert hashlib.sha256(array.tobytes()).hexdigest() == facts["sha256"]


@pytest.mark.parametrize(("folder", "name", "facts"), EXPECTED)
def test_every_tensor_of_the_real_snapshots_has_the_bytes_that_were_saved(
    folder: str, name: str, facts: dict[str, Any]
) -> None:
    if folder == "yaml-0.0.2":  # all of it is torch_save
        pytest.importorskip("torch")
    _check(snapctl.read_tensor(str(DATA / folder), name), facts)


@pytest.mark.parametrize("folder", ["torchrec-2ranks", "dtensor-4ranks", "yaml-chunked-2022-08"])
def test_they_have_them_on_gcs_too(bucket: Bucket, folder: str) -> None:
    bucket.upload(DATA / folder, folder)
    for name, facts in json.loads((DATA / folder / "expected.json").read_bytes()).items():
        _check(snapctl.read_tensor(f"{bucket.url}/{folder}", name), facts)


def test_the_truncated_tensors_are_refused_with_what_is_missing() -> None:
    for name, lengths in (("v", "4 bytes, and it needs 6"), ("big", "6004 bytes, and it needs 6006")):
        with pytest.raises(DamagedError, match=lengths):
            snapctl.read_tensor(str(DATA / "truncated-bfloat16/7"), f"0/a/{name}")


@pytest.fixture
def two_ranks(tmp_path: pathlib.Path) -> Callable[..., str]:
    def build(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> str:
        builder = Builder(local_writer(tmp_path))
        builder.dense("0/m/t", first)
        builder.dense("1/m/t", second)
        builder.finish(2)
        return str(tmp_path)

    return build


def test_equal_tensors_of_several_ranks_are_one(two_ranks: Callable[..., str]) -> None:
    array = random_array((300, 7), "bfloat16")
    assert snapctl.read_tensor(two_ranks(array, array), "m/t").tobytes() == array.tobytes()


def test_different_tensors_of_several_ranks_need_a_rank(two_ranks: Callable[..., str]) -> None:
    first = np.zeros(2_000_000, "f4")
    second = first.copy()
    second[-1] = -0.0  # equal as numbers, not as bits
    root = two_ranks(first, second)
    with pytest.raises(EntryNotFoundError, match="m/t: the ranks hold different tensors") as caught:
        snapctl.read_tensor(root, "m/t")
    assert caught.value.candidates == ("0/m/t", "1/m/t")
    assert np.signbit(snapctl.read_tensor(root, "m/t", rank=1)[-1])
    assert not np.signbit(snapctl.read_tensor(root, "0/m/t")[-1])


def test_a_table_that_has_lost_the_entry_of_a_rank_is_not_a_shorter_table(tmp_path: pathlib.Path) -> None:
    table = np.arange(12, dtype="f4").reshape(6, 2)
    builder = Builder(local_writer(tmp_path))
    builder.sharded("m/t", table, dict(enumerate([grid(table.shape, (2, 1))[:1], grid(table.shape, (2, 1))[1:]])))
    manifest = builder.finish(2)
    del manifest["1/m/t"]
    builder.write(
        "10/.snapshot_metadata", json.dumps({"version": "0.1.0", "world_size": 2, "manifest": manifest}).encode()
    )
    with pytest.raises(DamagedError, match="1/m/t") as caught:
        snapctl.read_tensor(str(tmp_path), "m/t")
    assert caught.value.kind == "missing-entry"


def test_rows_and_steps_and_dtypes_can_be_chosen(tmp_path: pathlib.Path) -> None:
    for step in (10, 20):
        builder = Builder(local_writer(tmp_path), step)
        builder.dense("0/m/t", np.arange(6, dtype="f4").reshape(3, 2) + step)
        builder.finish()
    root = str(tmp_path)
    assert snapctl.read_tensor(root, "m/t", rows=(1, 2)).tolist() == [[22, 23]]
    assert snapctl.read_tensor(root, "m/t", rows=slice(1, 3), step=10).tolist() == [[12, 13], [14, 15]]
    assert snapctl.read_tensor(f"{root}/10", "m/t", dtype="torch.float64").dtype == np.float64
    with pytest.raises(InvalidOptionError):
        snapctl.read_tensor(root, "m/t", rows=slice(0, 3, 2))
    with pytest.raises(UnsupportedEntryError):
        snapctl.read_tensor(root, "m/t", dtype="float5")


def test_a_glob_must_fit_one_tensor(tmp_path: pathlib.Path) -> None:
    builder = Builder(local_writer(tmp_path))
    builder.dense("0/m/t", np.ones(2))
    builder.dense("0/m/u", np.ones(2))
    builder.finish()
    assert snapctl.read_tensor(str(tmp_path), "m/t*").shape == (2,)
    with pytest.raises(EntryNotFoundError, match="2 entries fit"):
        snapctl.read_tensor(str(tmp_path), "m/*")


def test_a_glob_that_fits_different_tensors_of_the_ranks_names_them(two_ranks: Callable[..., str]) -> None:
    with pytest.raises(EntryNotFoundError, match="different things") as caught:
        snapctl.read_tensor(two_ranks(np.zeros(2, "f4"), np.zeros(3, "f4")), "m/*")
    assert caught.value.candidates == ("0/m/t", "1/m/t")


@pytest.mark.torch
def test_a_quantized_tensor_is_read_as_the_values_that_it_stands_for(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    value = torch.quantize_per_tensor(torch.randn(3), 0.1, 2, torch.qint8)
    builder = Builder(local_writer(tmp_path))
    builder.dense("0/m/t", value.int_repr().numpy())
    builder.manifest["0/m/t"] |= {"dtype": "torch.qint8", "serializer": "per_tensor_qtensor"}
    data = value.int_repr().numpy().tobytes() + np.float64(0.1).tobytes() + np.int64(2).tobytes()
    builder.write("10/0/m/t", data)
    builder.finish()
    assert np.array_equal(snapctl.read_tensor(str(tmp_path), "m/t", dtype="float32"), value.dequantize().numpy())


def test_raw_tensors_are_read_without_torch(tmp_path: pathlib.Path) -> None:
    builder = Builder(local_writer(tmp_path))
    builder.dense("0/m/t", random_array((4, 4), "bfloat16"))
    builder.finish()
    code = "import sys, snapctl; snapctl.read_tensor(sys.argv[1], 'm/t'); print([m for m in sys.modules if m in ('torch', 'fsspec')])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
