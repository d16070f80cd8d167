"""Loading one tensor of a checkpoint into an existing weight."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from snapctl import Snapshot  # noqa: E402
from snapctl.errors import (  # noqa: E402
    CheckpointNotFoundError,
    DamagedError,
    EntryNotFoundError,
    InvalidOptionError,
    RestoreError,
)
from snapctl.storage import LocalStorage  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.servers import Bucket  # noqa: E402
from tests.support.sharded import boxes_by_rank, holds, sharded, values_of  # noqa: E402
from tests.support.shards import Builder, grid, random_array  # noqa: E402
from tests.support.snapshots import local_writer  # noqa: E402
from tests.support.stored import raw  # noqa: E402

pytestmark = pytest.mark.torch
State = torchsnapshot.StateDict
load = Snapshot.load_snapshot_to_weight


@pytest.mark.parametrize("table", ["t_rw", "t_cw", "t_tw"])
def test_tables_of_every_sharding_load_into_a_plain_weight(table: str, data: Callable[[str], pathlib.Path]) -> None:
    root = data("torchrec-2ranks")
    facts = json.loads((root / "expected.json").read_text())[f"model/ebc.embedding_bags.{table}.weight"]
    weight = torch.nn.Parameter(torch.zeros(facts["shape"]))
    address = weight.data_ptr()
    for name in (table, f"embedding_bags.{table}.weight", f"model/ebc.embedding_bags.{table}.weight",
                 f"0/model/ebc.embedding_bags.{table}.weight"):  # fmt: skip
        weight.data.zero_()
        load(str(root / "100"), name, weight)
        assert hashlib.sha256(raw(weight)).hexdigest() == facts["sha256"], name
    assert weight.data_ptr() == address


@pytest.mark.usefixtures("entry_point")
def test_it_takes_what_get_torch_snapshot_returns_and_a_save_directory(data: Callable[[str], pathlib.Path]) -> None:
    root = data("torchrec-2ranks")
    for snapshot in (Snapshot.get_torch_snapshot(str(root)), Snapshot.get_torch_snapshot(str(root), 100), root):
        weight = torch.zeros(101, 8)
        load(snapshot, "t_rw", weight)
        assert weight.sum().item() == pytest.approx(0.79025821)
    with pytest.raises(CheckpointNotFoundError):
        load(Snapshot.get_torch_snapshot(f"{root}/none", missing_ok=True), "t_rw", weight)


@pytest.mark.usefixtures("entry_point")
def test_from_a_bucket(bucket: Bucket) -> None:
    Snapshot(f"{bucket.url}/run", {"m": State(w=torch.arange(6.0).reshape(2, 3))}).save(3).wait()
    weight = torch.zeros(2, 3)
    load(Snapshot.get_torch_snapshot(f"{bucket.url}/run"), "m/w", weight)
    assert weight.flatten().tolist() == list(range(6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "complex64", "float8_e4m3fn"])
def test_dense_and_chunked_tensors_load_bit_by_bit(dtype: str, tmp_path: pathlib.Path) -> None:
    array = random_array((10, 6), dtype)
    builder = Builder(local_writer(tmp_path))
    builder.dense("0/m/dense", array)
    builder.chunked("0/m/chunked", array, grid((10, 6), (3, 2)))
    builder.finish()
    kind = getattr(torch, dtype)
    base = torch.zeros(20, 6, dtype=torch.uint8 if dtype.startswith("float8") else kind)
    weight = base[::2]
    for name in ("dense", "chunked"):
        weight.zero_()
        load(tmp_path / "10", name, weight.view(kind) if weight.dtype != kind else weight)
        assert raw(weight.contiguous().view(kind)) == array.tobytes()
    assert not base[1::2].any()


def test_an_ambiguous_name_is_an_error_with_the_candidates(tmp_path: pathlib.Path) -> None:
    state = {"model": State(**{"a.table_1.weight": torch.ones(2), "a.table_10.weight": torch.ones(2)}),
             "optim": State(**{"a.table_1.weight": torch.ones(2), "n": 1})}  # fmt: skip
    Snapshot(tmp_path, state).save(1).wait()
    weight = torch.zeros(2)
    for name, count in (("table_1.weight", 2), ("table_1", 3), ("model/*", 2), ("optim/a.t", 1)):
        if count == 1:
            load(tmp_path / "1", name, weight)
            assert weight.sum() == 2
            continue
        with pytest.raises(EntryNotFoundError) as caught:
            load(tmp_path / "1", name, weight)
        assert len(caught.value.candidates) == count and weight.sum() == 0
    with pytest.raises(EntryNotFoundError, match="nothing"):
        load(tmp_path / "1", "nothing", weight)
    with pytest.raises(EntryNotFoundError):
        load(tmp_path / "1", "", weight)


def test_another_shape_or_dtype_is_stated_and_the_weight_left_alone(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, {"m": State(w=torch.ones(4, 2))}).save(1).wait()
    weight = torch.zeros(2, 4)
    with pytest.raises(RestoreError, match=r"m/w: has the shape \[4, 2\] in .*/1, the weight \[2, 4\]"):
        load(tmp_path / "1", "m/w", weight)
    with pytest.raises(RestoreError, match=r"m/w: is float32 in .*, the weight float64"):
        load(tmp_path / "1", "m/w", torch.zeros(4, 2, dtype=torch.float64))
    with pytest.raises(RestoreError, match="meta device"):
        load(tmp_path / "1", "m/w", torch.empty(4, 2, device="meta"))
    with pytest.raises(InvalidOptionError, match="is a list, not a tensor"):
        load(tmp_path / "1", "m/w", [1])
    assert weight.sum() == 0


def test_a_short_blob_leaves_the_weight_alone(data: Callable[[str], pathlib.Path]) -> None:
    weight = torch.zeros(1001, 3, dtype=torch.bfloat16)
    with pytest.raises(DamagedError, match="6004"):
        load(data("truncated-bfloat16") / "7", "big", weight)
    assert weight.sum() == 0


def test_a_missing_part_leaves_the_weight_alone(tmp_path: pathlib.Path) -> None:
    builder = Builder(local_writer(tmp_path))
    builder.chunked("0/m/w", random_array((8, 2), "int32"), grid((8, 2), (4, 1)))
    builder.finish()
    (tmp_path / "10/sharded/0/m/w_6_0").unlink()
    weight = torch.zeros(8, 2, dtype=torch.int32)
    with pytest.raises(DamagedError, match="w_6_0 is not there"):
        load(tmp_path / "10", "m/w", weight)
    assert not weight.any()


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    original = LocalStorage.read_into

    def read_into(self: Any, path: str, start: int, buffer: Any, *, version: str = "") -> None:
        counted.append(len(buffer))
        original(self, path, start, buffer, version=version)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    return counted


def test_only_the_bytes_of_the_tensor_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Snapshot(tmp_path, {"m": State(w=torch.ones(100), other=torch.ones(5000))}).save(1).wait()
    counted = count_bytes(monkeypatch)
    load(tmp_path / "1", "m/w", torch.zeros(100))
    assert sum(counted) == 400


def sharded_job(rank: int, directory: str) -> list[Any]:
    world_size = dist.get_world_size()
    shape = (12, 6)
    if world_size == 4:
        Snapshot(directory, {"m": State(t=sharded(values_of(shape), boxes_by_rank("row", shape, 4)))}).save(1).wait()
    found: list[Any] = []
    for how in ("row", "column", "table"):
        weight = sharded(values_of(shape), boxes_by_rank(how, shape, world_size), empty=True)
        load(f"{directory}/1", "m/t", weight)
        found.append(holds(weight, values_of(shape)))
    mesh = init_device_mesh("cpu", (world_size,))
    dtensor = distribute_tensor(torch.zeros(shape), mesh, [Shard(1)])
    load(f"{directory}/1", "m/t", dtensor)
    found.append(torch.equal(dtensor.full_tensor(), values_of(shape)))
    if rank == 0:  # it is no collective
        plain = torch.zeros(shape)
        load(f"{directory}/1", "t", plain)
        found.append(torch.equal(plain, values_of(shape)))
    return found


def test_into_sharded_tensors_and_dtensors_of_other_numbers_of_ranks(tmp_path: pathlib.Path) -> None:
    for world_size in (4, 2):
        for outcome in run_ranks(world_size, sharded_job, str(tmp_path)):
            assert outcome.error is None and all(outcome.value), outcome
