"""DTensors: refused with torchsnapshot 0.1.0, saved exactly with its nightlies.

Where ``SNAPCTL_NIGHTLY_PYTHON`` names an interpreter that has a nightly, the tests of it are run there.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

from snapctl import Snapshot  # noqa: E402
from snapctl.errors import UnsavableError  # noqa: E402
from snapctl.saving.savable import SAVES_DTENSORS  # noqa: E402
from snapctl.storage import LocalStorage  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402
from tests.support.stored import read_manifest, read_stored, same_bytes  # noqa: E402

pytestmark = pytest.mark.torch

needs_nightly = pytest.mark.skipif(
    not SAVES_DTENSORS,
    reason="torchsnapshot 0.1.0 cannot save a DTensor; set SNAPCTL_NIGHTLY_PYTHON to test with a nightly",
)

WHOLE = torch.arange(60.0).reshape(10, 6)
PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicated": ((4,), (Replicate(),)),
    "rows and copies": ((2, 2), (Shard(0), Replicate())),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
}


def values(outcomes: Any) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def place(tensor: Any, mesh_shape: tuple[int, ...], placements: Any) -> Any:
    return distribute_tensor(tensor, init_device_mesh("cpu", mesh_shape), placements)


def save_all(rank: int, path: str, batching: str) -> None:
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = batching
    state: dict[str, Any] = {}
    for name, (mesh_shape, placements) in PLACEMENTS.items():
        state[name] = place(WHOLE, mesh_shape, placements)
    state["bias and copies"] = place(torch.arange(6.0), (2, 2), (Shard(0), Replicate()))
    state["small bias"] = place(torch.arange(3.0), (4,), (Shard(0),))  # the last rank has no row
    state["bfloat16"] = place(WHOLE[:, :1].to(torch.bfloat16), (4,), (Shard(0),))
    mesh = init_device_mesh("cpu", (4,))
    eight = WHOLE[:8].to(torch.float8_e4m3fn)  # gloo cannot send these
    state["float8"] = DTensor.from_local(eight[rank * 2 : rank * 2 + 2].clone(), mesh, [Shard(0)])
    state["parameter"] = torch.nn.Parameter(place(WHOLE, (4,), (Shard(1),)))
    state["empty"] = place(torch.empty(0, 3), (4,), (Replicate(),))
    original = LocalStorage.write_blob

    def slow(self: LocalStorage, *args: Any, **options: Any) -> Any:
        import time

        time.sleep(0.3)
        return original(self, *args, **options)

    LocalStorage.write_blob = slow  # type: ignore[method-assign]
    pending = Snapshot(path, {"m": torchsnapshot.StateDict(**state)}).save(1)
    for tensor in state.values():
        local = tensor.to_local().detach()
        local.view(torch.uint8).zero_() if local.element_size() == 1 else local.zero_()
    pending.wait()


@needs_nightly
@pytest.mark.parametrize("batching", ["0", "1"])
def test_dtensors_are_saved_exactly_as_they_were_when_save_returned(batching: str, tmp_path: pathlib.Path) -> None:
    values(run_ranks(4, save_all, str(tmp_path), batching))
    stored, manifest = read_stored(tmp_path / "1"), read_manifest(tmp_path / "1")
    expected = dict.fromkeys([*PLACEMENTS, "parameter"], WHOLE)
    expected["small bias"] = torch.arange(3.0)
    expected["bfloat16"] = WHOLE[:, :1].to(torch.bfloat16)
    expected["float8"] = WHOLE[:8].to(torch.float8_e4m3fn)
    expected["bias and copies"] = torch.arange(6.0)
    for name, tensor in expected.items():
        path = next(path for path in stored if path.endswith(f"/m/{name}") and stored[path] is not None)
        assert same_bytes(stored[path], torch.as_tensor(tensor)), name
        assert manifest[path]["type"] == "DTensor"
    assert [path for path in manifest if path.endswith("/m/replicated")] == ["0/m/replicated"]
    assert any(path.endswith("/m/empty") for path in manifest)
    for name in ("rows and copies", "bias and copies"):  # no copy is stored twice
        shards = [shard for path, entry in manifest.items() if path.endswith(f"/m/{name}") for shard in entry["shards"]]
        assert len(shards) == 2, name


def restore_rows(rank: int, path: str) -> bool:
    tensor = place(torch.zeros(10, 6), (2,), (Shard(0),))
    torchsnapshot.Snapshot(path).restore({"m": torchsnapshot.StateDict(rows=tensor)})
    return torch.equal(tensor.full_tensor(), WHOLE)


def save_rows(rank: int, path: str) -> None:
    Snapshot(path, {"m": torchsnapshot.StateDict(rows=place(WHOLE, (2,), (Shard(0),)))}).save(1).wait()


@needs_nightly
def test_torchsnapshot_restores_a_dtensor_that_we_saved(tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, save_rows, str(tmp_path)))
    assert values(run_ranks(2, restore_rows, str(tmp_path / "1"))) == [True, True]


def save_fsdp(rank: int, path: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    whole = {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}
    Snapshot(path, {"model": model}).save(1).wait()
    return whole


@needs_nightly
def test_a_model_under_fsdp2_with_biases_smaller_than_the_world(tmp_path: pathlib.Path) -> None:
    whole = values(run_ranks(4, save_fsdp, str(tmp_path)))[0]
    stored = read_stored(tmp_path / "1")
    for name, tensor in whole.items():
        path = next(path for path in stored if path.endswith(f"/model/{name}") and stored[path] is not None)
        assert same_bytes(stored[path], torch.as_tensor(tensor)), name


def save_fsdp_tp(rank: int, path: str) -> tuple[dict[str, Any], str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.Linear(10, 5))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    state = model.state_dict()
    whole = {name: tensor.full_tensor().tolist() for name, tensor in state.items()}
    Snapshot(path, {"model": model}).save(1).wait()
    return whole, str(state["0.weight"].placements)


@needs_nightly
def test_a_model_under_fsdp2_and_tensor_parallelism(tmp_path: pathlib.Path) -> None:
    whole, placements = values(run_ranks(4, save_fsdp_tp, str(tmp_path)))[0]
    assert "StridedShard" in placements  # sharded by both, the tensor-parallel cut first
    stored = read_stored(tmp_path / "1")
    for name, tensor in whole.items():
        path = next(path for path in stored if path.endswith(f"/model/{name}") and stored[path] is not None)
        assert same_bytes(stored[path], torch.as_tensor(tensor)), name


def save_strange(rank: int, path: str) -> str:
    """A strided placement whose shards are no contiguous rows."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(4, 2), mesh, [_StridedShard(0, split_factor=2)])
    with pytest.raises(UnsavableError) as caught:
        Snapshot(path, {"m": torchsnapshot.StateDict(x=tensor)}).save(1)
    return str(caught.value)


@needs_nightly
def test_shards_that_are_not_contiguous_are_refused(tmp_path: pathlib.Path) -> None:
    for text in values(run_ranks(2, save_strange, str(tmp_path / "run"))):
        assert "m/x: a DTensor with the placement _StridedShard" in text


def bare_fsdp(rank: int, path: str) -> None:
    tensor = place(torch.arange(3.0), (4,), (Shard(0),))
    torchsnapshot.Snapshot.take(path, {"m": torchsnapshot.StateDict(bias=tensor)})


@needs_nightly
def test_the_nightly_alone_cannot_save_a_dtensor_with_a_shard_of_no_rows(tmp_path: pathlib.Path) -> None:
    found = run_ranks(4, bare_fsdp, str(tmp_path / "1"), until_error=True)
    assert any(isinstance(outcome.error, ZeroDivisionError) for outcome in found)


def save_partial(rank: int, path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        Snapshot(path, {"m": torchsnapshot.StateDict(x=tensor)}).save(1)
    except UnsavableError as error:
        return f"{error} hint: {error.hint}"
    return "saved"


def test_a_dtensor_that_cannot_be_saved_is_refused_with_the_way_out(tmp_path: pathlib.Path) -> None:
    for text in values(run_ranks(2, save_partial, str(tmp_path / "run"))):
        if SAVES_DTENSORS:
            assert "m/x: a DTensor with the placement Partial" in text and "redistribute()" in text
        else:
            assert "m/x: a DTensor, which torchsnapshot 0.1.0 cannot save" in text
            assert "pip install torchsnapshot-nightly" in text and "full_tensor()" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(650)
def test_with_a_nightly_all_of_this_passes(tmp_path: pathlib.Path) -> None:
    python = os.environ.get("SNAPCTL_NIGHTLY_PYTHON")
    if SAVES_DTENSORS:
        pytest.skip("this is a nightly")
    if not python:
        pytest.skip("SNAPCTL_NIGHTLY_PYTHON names no interpreter with a nightly of torchsnapshot")
    command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'nightly'}"]
    command += [
        str(ROOT / "tests" / name)
        for name in ("saving/test_saving_dtensor.py", "saving/test_staging.py", "test_training.py")
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
