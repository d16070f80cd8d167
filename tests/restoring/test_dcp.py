"""torchsnapshot checkpoints through torch.distributed.checkpoint."""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from snapctl import Snapshot  # noqa: E402
from snapctl.dcp import StorageReader  # noqa: E402
from snapctl.errors import NotFoundError  # noqa: E402
from tests.saving.test_staging import KINDS  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.repository import DOCS, require_repository  # noqa: E402
from tests.support.servers import Bucket  # noqa: E402
from tests.support.sharded import boxes_by_rank, holds, sharded  # noqa: E402
from tests.support.stored import raw, same_bytes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
State = torchsnapshot.StateDict


def convert(checkpoint: Any, target: pathlib.Path) -> dict[str, Any]:
    """The documented way to a DCP checkpoint."""
    reader = StorageReader(checkpoint)
    state = reader.empty_state_dict()
    dcp.load(state, storage_reader=reader)
    dcp.save(state, checkpoint_id=target)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return same_bytes(one.detach(), other.detach())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def trained() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_becomes_one_of_dcp_from_which_training_goes_on(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained()
    extra = State(note="x", history=[1, [2.5]], mixed=[{"a": 1}, torch.ones(2)], pair=(1, 2), none=None)
    snapshot = Snapshot(tmp_path / "run", {"model": model, "optim": optimizer, "extra": extra})
    snapshot.step = 4
    snapshot.save(4).wait()
    convert(tmp_path / "run/4", tmp_path / "converted")

    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    its = torch.optim.Adam(other.parameters())
    blank = {key: torch.zeros(2) if key == "mixed" else None for key in extra}
    blank["mixed"] = [{"a": None}, torch.zeros(2)]
    state = {"model": other.state_dict(), "extra": blank, "extra_state": {"step": None, "walltime": None}}
    dcp.load(state, checkpoint_id=tmp_path / "converted")
    other.load_state_dict(state["model"])
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(state["extra"], dict(extra)) and state["extra_state"] == {"step": 4, "walltime": 0.0}

    whole = torch.load(to_torch(tmp_path), weights_only=True)
    entries = {int(key): value for key, value in whole["optim"]["state"].items()}
    groups = whole["optim"]["param_groups"]
    its.load_state_dict({"state": entries, "param_groups": groups})
    assert same(its.state_dict()["state"], optimizer.state_dict()["state"])


def to_torch(tmp_path: pathlib.Path) -> str:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "converted", tmp_path / "whole.pt")
    return str(tmp_path / "whole.pt")


def test_dcp_loads_into_the_objects_of_a_training_state(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained()
    Snapshot(tmp_path, {"model": model, "optim": optimizer}).save(1).wait()
    other, its = trained()
    for tensor in (*other.state_dict().values(), *its.state_dict()["state"][0].values()):
        tensor.zero_()
    dcp.load({"model": other, "optim": its}, storage_reader=StorageReader(tmp_path / "1"))
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(its.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("batching", [True, False])
def test_every_kind_of_tensor_comes_through(
    batching: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not batching:
        monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
        monkeypatch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "8")
    Snapshot(tmp_path, {"m": State(**KINDS)}).save(1).wait()
    reader = StorageReader(tmp_path / "1")
    state = reader.empty_state_dict(lambda name: name.startswith("m."))
    dcp.load(state, storage_reader=reader)
    assert list(state) == ["m"]
    for name, tensor in KINDS.items():
        assert same_bytes(state["m"][name], tensor), name


@pytest.mark.parametrize(
    "name", ["yaml-0.0.2", "yaml-chunked-2022-08", "yaml-2022-10", "dtensor-4ranks", "torchrec-2ranks"]
)
def test_checkpoints_of_every_generation_become_ones_of_dcp(
    name: str, data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    root = data(name)
    (checkpoint,) = [path for path in root.iterdir() if path.is_dir()]
    state = convert(checkpoint, tmp_path / "converted")
    assert set(state.get("extra_state", {})) >= ({"step", "walltime"} if "extra_state" in state else set())
    for path, facts in json.loads((root / "expected.json").read_text()).items():
        keys = path.removeprefix("0/").removeprefix("1/").split("/")
        found: Any = state
        for key in keys:
            found = found[key]
        assert hashlib.sha256(raw(found)).hexdigest() == facts["sha256"], path
    again: Any = StorageReader(checkpoint).empty_state_dict()
    dcp.load(again, checkpoint_id=tmp_path / "converted")
    assert same(again, state)


def test_from_a_bucket(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    Snapshot(f"{bucket.url}/run", {"m": State(w=torch.arange(6.0), n=3)}).save(2).wait()
    state = convert(f"{bucket.url}/run", tmp_path / "converted")
    assert state["m"]["w"].tolist() == list(range(6)) and state["m"]["n"] == 3


def sharded_job(rank: int, checkpoint: str, expected: dict[str, Any]) -> Any:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    names = {name: f"ebc.embedding_bags.{name}.weight" for name in ("t_rw", "t_cw", "t_tw")}
    shapes = {name: expected[f"model/{path}"]["shape"] for name, path in names.items()}
    reader = StorageReader(checkpoint, replicated=("model/over.*",))
    model: dict[str, Any] = {
        names["t_rw"]: sharded(torch.zeros(shapes["t_rw"]), boxes_by_rank("row", shapes["t_rw"], world_size)),
        names["t_cw"]: distribute_tensor(torch.zeros(shapes["t_cw"]), mesh, [Shard(0)]),
        names["t_tw"]: torch.zeros(shapes["t_tw"]),
        "over.bias": torch.zeros(1),
    }
    dcp.load({"model": model}, storage_reader=reader)
    hashes = [hashlib.sha256(raw(model[names["t_tw"]])).hexdigest(),
              hashlib.sha256(raw(model[names["t_cw"]].full_tensor())).hexdigest()]  # fmt: skip
    whole = torch.zeros(shapes["t_rw"])
    Snapshot.load_snapshot_to_weight(checkpoint, "t_rw", whole)
    needed = sum(shard.tensor.numel() * 4 for shard in model[names["t_rw"]].local_shards())
    needed += model[names["t_cw"]].to_local().numel() * 4 + 50 * 4 * 4 + 4
    return hashes, holds(model[names["t_rw"]], whole), reader.bytes_read, needed


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_tensors_load_on_any_number_of_ranks(world_size: int, data: Callable[[str], pathlib.Path]) -> None:
    root = data("torchrec-2ranks")
    expected = json.loads((root / "expected.json").read_text())
    wanted = [expected[f"model/ebc.embedding_bags.{name}.weight"]["sha256"] for name in ("t_tw", "t_cw")]
    for outcome in run_ranks(world_size, sharded_job, str(root / "100"), expected):
        assert outcome.error is None
        hashes, is_held, read, needed = outcome.value
        assert hashes == wanted and is_held and read == needed


def test_what_does_not_fit_is_an_error(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, {"m": State(w=torch.ones(3), date=datetime.date(2026, 1, 1))}).save(1).wait()
    for state, text in (
        ({"m": {"w": torch.zeros(3, dtype=torch.float64)}}, "m.w: is float32 in the checkpoint, not float64"),
        ({"m": {"w": torch.zeros(4)}}, "Size mismatch"),
        ({"m": {"x": torch.zeros(4)}}, "Missing key"),
        ({"m": {"date": None}}, "would have to be unpickled"),
    ):
        with pytest.raises(CheckpointException, match=text):
            dcp.load(state, storage_reader=StorageReader(tmp_path / "1"))
    state = {"m": {"date": None}}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "1", allow_pickle=True))
    assert state["m"]["date"] == datetime.date(2026, 1, 1)
    with pytest.raises(NotFoundError):
        StorageReader(tmp_path / "2").read_metadata()


def test_short_blobs_are_found_before_anything_is_read(data: Callable[[str], pathlib.Path]) -> None:
    state = {"a": {"big": torch.zeros(1001, 3, dtype=torch.bfloat16)}}
    reader = StorageReader(data("truncated-bfloat16") / "7")
    with pytest.raises(CheckpointException, match="has 6004 bytes, and it needs 6006"):
        dcp.load(state, storage_reader=reader)
    assert reader.bytes_read == 0


def take_job(rank: int, directory: str) -> None:
    torchsnapshot.Snapshot.take(directory, {"m": State(n=3, own=torch.full((2,), float(rank)), mine=rank)})


def test_what_ranks_saved_for_themselves_is_that_of_the_rank_that_is_meant(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [outcome.error for outcome in run_ranks(2, take_job, str(tmp_path / "1"))] == [None] * 2
    for rank in (0, 1):
        reader = StorageReader(tmp_path / "1", rank=rank)
        state = reader.empty_state_dict()
        dcp.load(state, storage_reader=reader)
        assert state["m"]["own"].tolist() == [rank, rank] and state["m"]["mine"] == rank
    reader = StorageReader(tmp_path / "1", rank=5)
    assert reader.empty_state_dict() == {"m": {"n": None}}
    assert set(reader.left_out) == {"m/own", "m/mine"} and "m/own" in caplog.text


def test_two_entries_of_one_name_in_dcp_are_an_error(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, {"m": State(**{"a.b": 1, "a": {"b": 2}})}).save(1).wait()
    with pytest.raises(ValueError, match=r"two entries have the name m\.a\.b"):
        StorageReader(tmp_path / "1").read_metadata()


def test_a_reader_can_be_used_again_and_for_another_checkpoint(tmp_path: pathlib.Path) -> None:
    for step in (1, 2):
        Snapshot(tmp_path, {"m": State(n=step)}).save(step).wait()
    reader = StorageReader(tmp_path / "1")
    for step in (1, 1, 2):
        state: dict[str, Any] = {"m": {"n": None}}
        dcp.load(state, storage_reader=reader, checkpoint_id=str(tmp_path / str(step)))
        assert state["m"]["n"] == step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.close()


def test_the_example_of_the_documentation_runs_as_it_stands(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_repository()
    model, optimizer = trained()
    Snapshot(tmp_path / "run", {"model": model, "optimizer": optimizer}).save(100).wait()
    text = (DOCS / "dcp.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(found, checkpoint_id="converted/100")
    assert same(found["model"], dict(model.state_dict()))
