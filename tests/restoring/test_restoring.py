"""Restoring by one rank: everything that a save writes comes back, whatever wrote it, or an error says why not."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

from snapctl import SaveOptions, Snapshot  # noqa: E402
from snapctl.checkpoints import read_manifest  # noqa: E402
from snapctl.errors import (  # noqa: E402
    CheckpointNotFoundError,
    DamagedError,
    InvalidOptionError,
    RefusedError,
    RestoreDamagedError,
    RestoreError,
    RestoreRefusedError,
    SaveDirNotFoundError,
)
from snapctl.restoring.targets import describe, fill  # noqa: E402
from snapctl.storage import LocalStorage, open_storage  # noqa: E402
from snapctl.tensors.layout import resolve_layouts  # noqa: E402
from snapctl.tensors.reader import TensorReader  # noqa: E402
from tests.saving.test_staging import KINDS, ODD_KEYS, bare_take, layout, save  # noqa: E402, F401
from tests.support.servers import Bucket, Controlled  # noqa: E402
from tests.support.snapshots import local_writer, metadata, tensor_entry  # noqa: E402
from tests.support.stored import raw, same_bytes  # noqa: E402

pytestmark = pytest.mark.torch
State = torchsnapshot.StateDict


def restore(checkpoint: Any, into: dict[str, Any], **options: Any) -> Snapshot:
    snapshot = Snapshot("/nowhere", into)
    snapshot.restore(checkpoint, **options)
    return snapshot


def blank(tensor: Any) -> Any:
    """A tensor of the same kind with other values."""
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype) if not tensor.is_quantized else None
    if plain is None:
        return tensor.clone()
    if plain.numel():
        plain.untyped_storage().copy_(torch.full((plain.untyped_storage().nbytes(),), 77, dtype=torch.uint8)
                                      .untyped_storage())  # fmt: skip
    return plain


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The fields of the last restore."""
    found = [
        record.snapctl for record in caplog.records if record.name == "snapctl.restoring" and hasattr(record, "snapctl")
    ]
    return dict(found[-1])


# -- everything comes back -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("layout")
def test_every_kind_of_tensor_comes_back_bit_by_bit_and_in_place(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, **KINDS)
    into = State(**{name: blank(tensor) for name, tensor in KINDS.items()})
    before = dict(into)
    restore(path, {"m": into})
    for name, tensor in KINDS.items():
        assert same_bytes(into[name], tensor), name
        if name != "expanded" and not tensor.is_quantized:
            assert into[name] is before[name], name


def test_a_state_that_lacks_everything_gets_everything(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, **KINDS)
    into = State()
    restore(path, {"m": into})
    assert list(into) == list(KINDS)
    assert all(same_bytes(into[name], tensor) for name, tensor in KINDS.items())


def test_views_into_larger_tensors_are_filled_and_their_neighbours_left_alone(tmp_path: pathlib.Path) -> None:
    values = {"rows": torch.randn(3, 4), "columns": torch.randn(5, 2), "steps": torch.randn(4)}
    base = {"rows": torch.zeros(9, 4), "columns": torch.zeros(5, 6), "steps": torch.zeros(12)}
    into = {"rows": base["rows"][2:5], "columns": base["columns"][:, 3:5], "steps": base["steps"][1::3]}
    restore(save(tmp_path, **values), {"m": State(**into)})
    for name, tensor in values.items():
        assert torch.equal(into[name], tensor), name
        assert base[name].count_nonzero() == tensor.count_nonzero(), name


def test_autograd_notices_that_a_tensor_was_restored(tmp_path: pathlib.Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    product = (weight * weight).sum()
    restore(save(tmp_path, w=torch.zeros(3)), {"m": State(w=weight)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


class Tagged(torch.Tensor):
    pass


def test_what_cannot_be_written_to_directly_is_copied_into(tmp_path: pathlib.Path) -> None:
    values = {"plain": torch.randn(300, 7), "scalar": torch.tensor(2.5), "half": torch.randn(4, 4).bfloat16()}
    path = save(tmp_path, **values, lazy=torch.randn(5, dtype=torch.complex64))
    into = State(**{k: torch.zeros_like(v).as_subclass(Tagged) for k, v in values.items()})
    into["lazy"] = torch.zeros(5, dtype=torch.complex64).conj()
    before = dict(into)
    restore(path, {"m": into})
    for name, tensor in values.items():
        assert into[name] is before[name] and torch.equal(into[name].as_subclass(torch.Tensor), tensor)
    assert into["lazy"].is_conj()
    fresh = State()
    restore(path, {"m": fresh})
    assert torch.equal(into["lazy"].resolve_conj(), fresh["lazy"])


def test_it_is_copied_in_blocks_of_bounded_size(tmp_path: pathlib.Path) -> None:
    values = {"plain": torch.randn(300, 7), "wide": torch.randn(2, 400), "scalar": torch.tensor(2.5)}
    path = save(tmp_path, **values)
    entries = {entry.path: entry for entry in read_manifest(open_storage(path)).logical_entries()}
    targets = {name: torch.zeros_like(tensor).as_subclass(Tagged) for name, tensor in values.items()}
    wanted = []
    for name, target in targets.items():
        described = describe(target)
        assert described is not None
        wanted.append((resolve_layouts(entries[f"m/{name}"])[0], described))
    with TensorReader(open_storage(path), batch_bytes=64) as reader:
        fill(reader, wanted)
    assert all(torch.equal(targets[name].as_subclass(torch.Tensor), tensor) for name, tensor in values.items())


def test_zero_sized_tensors_need_no_blob(tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    write("10/0/m/s", np.float32(2.5).tobytes())
    shards = [{"offsets": [0, 0], "sizes": [2, 4], "tensor": tensor_entry("sharded/m/t_0_0", [2, 4])}]
    none = [{"offsets": [2, 0], "sizes": [0, 4], "tensor": tensor_entry("sharded/m/t_2_0", [0, 4])}]
    write("10/sharded/m/t_0_0", np.arange(8, dtype="f4").tobytes())
    entries = {
        "0/m": {"type": "dict", "keys": ["s", "z0", "z1", "zb", "t", "e"]},
        "0/m/s": tensor_entry("0/m/s", []),
        "0/m/z0": tensor_entry("0/m/z0", [0]),
        "0/m/z1": tensor_entry("0/m/z1", [0, 3], "int64"),
        "0/m/zb": tensor_entry("0/m/s", [0, 5], byte_range=[4, 4]),
        "0/m/t": {"type": "ShardedTensor", "shards": shards},
        "0/m/e": {"type": "ShardedTensor", "shards": []},
        "1/m": {"type": "dict", "keys": ["t"]},
        "1/m/t": {"type": "ShardedTensor", "shards": none},
    }
    write("10/.snapshot_metadata", metadata(entries, 2))
    into = State(s=torch.tensor(0.0), z0=torch.empty(0), z1=torch.empty(0, 3, dtype=torch.int64), zb=torch.empty(0, 5),
                 t=torch.zeros(2, 4), e=torch.empty(0, 4))  # fmt: skip
    restore(tmp_path / "10", {"m": into})
    assert into["s"] == 2.5 and into["t"].flatten().tolist() == list(range(8))


def test_containers_and_values_come_back_in_their_order_and_with_their_types(tmp_path: pathlib.Path) -> None:
    values: dict[str, Any] = {
        "nested": {"z": [1, {"b": OrderedDict(c=2.5)}], "empty": {}, "none": [], "a": torch.ones(2)},
        "tuple": (1, "x"),
        "none": None,
        "float": -0.0,
        "bytes": b"\x00\xff",
        "text": "line\nü😀\ud800",
        "keys": {True: torch.ones(2), 2: "two", "3": 3},
        "odd keys": {(1, 2): torch.ones(1)},
        "history": [1, 2],
        "longer": [],
        "was none": torch.ones(2),
    }
    path = save(tmp_path, **values)
    into = State(
        nested={"a": torch.zeros(2), "z": []},
        tuple=None,
        none=3,
        float=1.0,
        bytes=b"",
        text="",
        keys={True: torch.zeros(2), 2: "", "3": 0},
        **{"odd keys": {}, "history": [9, 9, 9, 9], "longer": [5], "was none": None},
    )
    restore(path, {"m": into})
    assert torch.equal(into["nested"].pop("a"), torch.ones(2)) and torch.equal(into["keys"][True], torch.ones(2))
    assert list(into["keys"]) == [True, 2, "3"] and type(next(iter(into["keys"]))) is bool
    assert into["nested"] == {"z": [1, {"b": OrderedDict(c=2.5)}], "empty": {}, "none": []}
    assert list(into["nested"]) == ["z", "empty", "none"]
    assert type(into["nested"]["z"][1]["b"]) is OrderedDict
    for name in ("tuple", "none", "bytes", "text", "history", "longer"):
        assert into[name] == values[name] and type(into[name]) is type(values[name]), name
    assert str(into["float"]) == "-0.0" and torch.equal(into["odd keys"][(1, 2)], torch.ones(1))
    assert torch.equal(into["was none"], torch.ones(2))


@pytest.mark.usefixtures("layout")
def test_every_key_finds_its_own_value(tmp_path: pathlib.Path) -> None:
    values = {key: torch.full((3,), float(number)) for number, key in enumerate(ODD_KEYS)}
    names = ["", "..", "a/b", "50%"]
    state = {name: State(x=torch.full((2,), float(i))) for i, name in enumerate(names)}
    Snapshot(tmp_path / "run", {"m": State(**values), **state}).save(1).wait()
    into = State(**{key: torch.zeros(3) for key in ODD_KEYS})
    others = {name: State(x=torch.zeros(2)) for name in names}
    restore(tmp_path / "run/1", {"m": into, **others})
    assert [into[key][0].item() for key in ODD_KEYS] == list(range(len(ODD_KEYS)))
    assert [others[name]["x"][0].item() for name in names] == list(range(len(names)))


def test_two_places_of_one_object_do_not_share_it_afterwards(tmp_path: pathlib.Path) -> None:
    entry = {"type": "object", "location": "0/m/a", "serializer": "torch_save", "obj_type": "set", "replicated": False}
    write = local_writer(tmp_path)
    torch.save({1, 2}, tmp_path / "blob")
    write("1/0/m/a", (tmp_path / "blob").read_bytes())
    entries = {"0/m": {"type": "dict", "keys": ["a", "b"]}, "0/m/a": entry, "0/m/b": entry}
    write("1/.snapshot_metadata", metadata(entries))
    into = State(a=None, b=None)
    restore(tmp_path / "1", {"m": into})
    assert into["a"] == into["b"] == {1, 2} and into["a"] is not into["b"]


# -- every generation ------------------------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
        self.b = torch.nn.Linear(3, 2)


@pytest.mark.parametrize("name", ["yaml-0.0.2", "yaml-chunked-2022-08", "yaml-2022-10"])
def test_checkpoints_of_every_generation_restore(name: str, data: Callable[[str], pathlib.Path]) -> None:
    root = data(name)
    model = TwoLayers()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=5.0)
    with torch.no_grad():
        for state in optimizer.state.values():
            state["sum"].fill_(3)
    snapshot = restore(root / "5", {"model": model, "optim": optimizer})
    expected = json.loads((root / "expected.json").read_text())
    found: dict[str, Any] = {f"0/model/{key}": value for key, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"0/optim/state/{index}/{key}": value for key, value in state.items()}
    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        assert hashlib.sha256(raw(tensor)).hexdigest() == expected[path]["sha256"], path
    assert (snapshot.step, snapshot.walltime) == (5, 0.25)
    assert optimizer.param_groups[0]["lr"] != 5.0


def test_sharded_tables_restore_into_plain_tensors_of_one_rank(data: Callable[[str], pathlib.Path]) -> None:
    root = data("torchrec-2ranks")
    expected = json.loads((root / "expected.json").read_text())
    into = State()
    for path, facts in expected.items():
        name = path.partition("model/")[2]
        into[name] = torch.zeros(facts["shape"])
    snapshot = restore(root / "100", {"model": into})
    for path, facts in expected.items():
        assert hashlib.sha256(raw(into[path.partition("model/")[2]])).hexdigest() == facts["sha256"], path
    assert (snapshot.step, snapshot.walltime) == (100, 12.5)


def test_dtensors_restore_into_a_plain_tensor(data: Callable[[str], pathlib.Path]) -> None:
    root = data("dtensor-4ranks")
    into = State(w=torch.zeros(10, 7))
    restore(root / "1", {"m": into})
    expected = json.loads((root / "expected.json").read_text())
    assert hashlib.sha256(raw(into["w"])).hexdigest() == expected["m/w"]["sha256"]


@pytest.mark.usefixtures("layout")
def test_what_torchsnapshot_alone_saved_restores(tmp_path: pathlib.Path) -> None:
    names = ["scalar", "transposed", "complex64", "int64", "bool scalar", "float16", "channels last"]
    values = {name: KINDS[name] for name in names}
    path = bare_take(tmp_path, **values, n=1, nested={"l": [1.5, {"x": None}]})
    into = State(**{k: blank(v) for k, v in values.items()}, n=0, nested={})
    restore(path, {"m": into})
    assert all(same_bytes(into[name], tensor.detach()) for name, tensor in values.items())
    assert (into["n"], into["nested"]) == (1, {"l": [1.5, {"x": None}]})


@pytest.mark.parametrize("keys", [(), ("step",), ("step", "walltime")])
def test_step_and_walltime_may_be_missing(keys: tuple[str, ...], tmp_path: pathlib.Path,
                                          caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    state = {"m": State(x=torch.ones(2))}
    if keys:
        state["extra_state"] = State(**dict.fromkeys(keys, 9))
    torchsnapshot.Snapshot.take(str(tmp_path / "1"), state)
    snapshot = Snapshot("/nowhere", {"m": State(x=torch.zeros(2))})
    snapshot.step, snapshot.walltime = 4, 2.5
    snapshot.restore(tmp_path / "1")
    assert (snapshot.step, snapshot.walltime) == (9 if "step" in keys else 4, 9 if "walltime" in keys else 2.5)
    missing = [f"extra_state/{key}" for key in ("step", "walltime") if key not in keys]
    assert [path in caplog.text for path in missing] == [True] * len(missing)


def test_other_things_in_extra_state_must_be_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RestoreError, match="extra_state/mine: is not in the checkpoint"):
        restore(save(tmp_path, x=1), {"m": State(x=1), "extra_state": State(step=0, walltime=0.0, mine=1)})


# -- modules, optimizers, random numbers -----------------------------------------------------------------------------


def trained(steps: int = 3, kind: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_goes_on_as_the_saved_one_would(kind: Any, steps: int, tmp_path: pathlib.Path) -> None:
    model, optimizer = trained(3, kind)
    Snapshot(tmp_path, {"model": model, "optim": optimizer}).save(3).wait()
    other, its_optimizer = trained(steps, kind)
    restore(tmp_path / "3", {"model": other, "optim": its_optimizer})
    batch = torch.randn(6, 4)
    for one, its in ((model, optimizer), (other, its_optimizer)):
        for _ in range(2):
            its.zero_grad()
            one(batch).sum().backward()
            its.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_rolling_back_to_before_the_first_step_empties_an_optimizer(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained(0)
    Snapshot(tmp_path, {"model": model, "optim": optimizer}).save(0).wait()
    other, its_optimizer = trained(2)
    restore(tmp_path / "0", {"model": other, "optim": its_optimizer})
    assert its_optimizer.state_dict()["state"] == {}


def test_options_that_came_after_the_checkpoint_stay_as_they_are(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(1)
    old = optimizer.state_dict()
    del old["param_groups"][0]["maximize"]
    Snapshot(tmp_path, {"model": model, "optim": State(**old)}).save(1).wait()
    other, its_optimizer = trained(0)
    its_optimizer.param_groups[0]["maximize"] = True
    restore(tmp_path / "1", {"model": other, "optim": its_optimizer})
    assert its_optimizer.param_groups[0]["maximize"] is True
    assert "optim/param_groups/0/maximize" in caplog.text


def test_an_optimizer_of_other_parameters_is_refused_before_the_model_is_touched(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained(1)
    Snapshot(tmp_path, {"model": model, "optim": optimizer}).save(1).wait()
    other, _ = trained(0)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    its_optimizer = torch.optim.AdamW(list(other.parameters())[:2])
    with pytest.raises(RestoreError, match=r"optim/param_groups/0/params: has 6 items in the checkpoint and 2 here"):
        restore(tmp_path / "1", {"model": other, "optim": its_optimizer})
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in before.items())


def test_an_optimizers_state_keeps_its_dtype(tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([1.0001, 2, 3])
    Snapshot(tmp_path, {"optim": optimizer}).save(1).wait()
    fresh = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], momentum=0.9)
    restore(tmp_path / "1", {"optim": fresh})
    (state,) = fresh.state.values()
    assert torch.equal(state["momentum_buffer"], torch.tensor([1.0001, 2, 3]))


def test_random_numbers_go_on_where_they_were_saved(tmp_path: pathlib.Path) -> None:
    class Noisy:
        """Uses the generator while it is being loaded, and comes after it by name."""

        def state_dict(self) -> dict[str, Any]:
            return {"x": torch.ones(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(5)

    state = {"a_rng": torchsnapshot.RNGState(), "z": Noisy()}
    Snapshot(tmp_path, state).save(1).wait()
    expected = torch.rand(3)
    torch.manual_seed(99)
    restore(tmp_path / "1", {"a_rng": torchsnapshot.RNGState(), "z": Noisy()})
    assert torch.equal(torch.rand(3), expected)


def test_modules_get_the_metadata_of_their_state_dict(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []

    class Versioned(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict: Any, prefix: Any, local_metadata: Any, *rest: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    Snapshot(tmp_path, {"model": Versioned(2, 2)}).save(1).wait()
    restore(tmp_path / "1", {"model": Versioned(2, 2)})
    assert seen == [2]


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_is_touched(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, shape=torch.ones(2, 3), dtype=torch.ones(2), kind=5, good=torch.ones(3), obj=(1,))
    into = State(
        shape=torch.zeros(3, 2), dtype=torch.zeros(2, dtype=torch.float64), kind=torch.zeros(1), good=torch.zeros(3),
        new=torch.zeros(1), more={"a": 1}, obj=torch.zeros(1), sparse=torch.eye(2).to_sparse(),
    )  # fmt: skip
    with pytest.raises(RestoreError) as caught:
        restore(path, {"m": into, "other": State(x=1)})
    assert caught.value.problems == (
        "m/shape: has the shape [2, 3] in the checkpoint and [3, 2] in the state",
        "m/dtype: is float32 in the checkpoint and float64 in the state",
        "m/kind: is of type int in the checkpoint and a tensor in the state",
        "m/new: is not in the checkpoint",
        "m/more/a: is not in the checkpoint",
        "m/obj: is of type tuple in the checkpoint and a tensor in the state",
        "m/sparse: is not in the checkpoint",
        "other/x: is not in the checkpoint",
    )
    assert all(text in str(caught.value) for text in caught.value.problems)
    assert (caught.value.loaded, caught.value.incomplete) == ((), ())
    assert "the state is as it was" in str(caught.value)
    assert into["good"].sum() == 0


def test_a_tensor_without_memory_is_refused(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, x=torch.ones(2), y=torch.ones(2, 2))
    with pytest.raises(RestoreError, match=r"m/x: .* meta device.*m/y: .*tensor of layout sparse_coo"):
        restore(path, {"m": State(x=torch.empty(2, device="meta"), y=torch.eye(2).to_sparse())})


def test_what_the_state_lacks_is_one_log_line(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="snapctl.restoring")
    state = {"m": State(a=1, b=torch.ones(2)), "n": State(c=1)}
    Snapshot(tmp_path, state).save(1).wait()
    into = State(a=0)
    restore(tmp_path / "1", {"m": into})
    lines = [record.message for record in caplog.records if "not in the state" in record.message]
    assert lines == [f"{tmp_path}/1: in the checkpoint and not in the state: n, m/b"]
    assert dict(into) == {"a": 1}


def test_a_state_of_the_wrong_kind_is_an_error(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, x=1)
    with pytest.raises(RestoreError, match="m: a dict has no state_dict"):
        restore(path, {"m": {"x": 1}})
    with pytest.raises(InvalidOptionError, match="not a checkpoint: 5"):
        restore(5, {"m": State(x=1)})


def test_what_is_not_there_is_said_as_everywhere(tmp_path: pathlib.Path) -> None:
    save(tmp_path, x=1)
    with pytest.raises(SaveDirNotFoundError):
        restore(tmp_path / "nowhere", {})
    (tmp_path / "run/7/0").mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError):
        restore(tmp_path / "run/7", {})
    none = Snapshot.get_torch_snapshot(str(tmp_path / "nowhere"), missing_ok=True)
    with pytest.raises(CheckpointNotFoundError):
        restore(none, {})


@pytest.mark.usefixtures("entry_point")
def test_a_save_directory_and_a_torchsnapshot_snapshot_are_taken_too(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, x=1)
    for checkpoint in (
        path.parent,
        str(path),
        Snapshot.get_torch_snapshot(str(path)),
        torchsnapshot.Snapshot(str(path)),
    ):
        into = State(x=0)
        restore(checkpoint, {"m": into})
        assert into["x"] == 1


def test_a_load_state_dict_that_fails_says_what_was_loaded(tmp_path: pathlib.Path) -> None:
    class Failing(State):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("oh")

    Snapshot(tmp_path, {"a": State(x=torch.ones(1)), "b": State(x=1), "c": State(x=1)}).save(1).wait()
    state = {"a": State(x=torch.zeros(1)), "b": Failing(x=0), "c": State(x=0)}
    with pytest.raises(RestoreError, match="b: KeyError: 'oh'") as caught:
        restore(tmp_path / "1", state)
    assert (caught.value.loaded, caught.value.incomplete) == (("a",), ("b",))
    assert state["a"]["x"] == 1 and state["c"]["x"] == 0
    assert isinstance(caught.value.__cause__, KeyError)


# -- objects ---------------------------------------------------------------------------------------------------------


def test_objects_that_would_have_to_be_unpickled_are_refused_together(tmp_path: pathlib.Path) -> None:
    values = {"date": datetime.date(2026, 11, 30), "array": np.arange(3), "fine": (1, {2}), "huge": 1 << 20_000}
    path = save(tmp_path, **values, x=torch.ones(2), unused=datetime.time(1))
    into = State(date=None, array=None, fine=None, huge=0, x=torch.zeros(2))
    with pytest.raises(RestoreRefusedError) as caught:
        restore(path, {"m": into})
    assert isinstance(caught.value, RefusedError)
    assert len(caught.value.problems) == 3
    assert "0/m/date: an object of datetime.date" in str(caught.value)
    assert "0/m/array: an object of numpy.ndarray" in str(caught.value)
    assert "0/m/huge: an object of builtins.int" in str(caught.value)
    assert "allow_pickle=True" in str(caught.value.hint)
    assert into["x"].sum() == 0
    restore(path, {"m": into}, allow_pickle=True)
    assert into["date"] == values["date"] and into["array"].tolist() == [0, 1, 2] and into["fine"] == (1, {2})
    assert into["huge"] == 1 << 20_000


# -- damage ----------------------------------------------------------------------------------------------------------


def blobs(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".", "save.")))


@pytest.mark.parametrize("harm", ["short", "missing", "empty"])
@pytest.mark.usefixtures("layout")
def test_blobs_that_are_missing_or_short_are_named_before_anything_is_touched(
    harm: str, tmp_path: pathlib.Path
) -> None:
    path = save(tmp_path, x=torch.ones(200), y=torch.ones(100, 2))
    for blob in blobs(path):
        if harm == "missing":
            blob.unlink()
        else:
            with blob.open("r+b") as file:
                file.truncate(0 if harm == "empty" else blob.stat().st_size - 1)
    into = State(x=torch.zeros(200), y=torch.zeros(100, 2))
    for checksums in (True, False):
        with pytest.raises(RestoreDamagedError) as caught:
            restore(path, {"m": into}, checksums=checksums)
        error = caught.value
        assert isinstance(error, DamagedError) and error.entry is not None and error.entry.startswith("0/m/")
        assert error.blob in {str(blob.relative_to(path)) for blob in blobs(path)} or harm == "missing"
        assert str(error.blob) in str(error) and str(error.entry) in str(error)
        assert error.kind == ("missing-blob" if harm == "missing" else "short-blob")
        assert into["x"].sum() == into["y"].sum() == 0
        assert any("0/m/y" in text for text in error.problems)


def test_holes_and_overlaps_are_named_before_anything_is_touched(tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    write("1/sharded/m/t_0_0", bytes(32))
    shard = {"offsets": [2, 0], "sizes": [2, 4], "tensor": tensor_entry("sharded/m/t_0_0", [2, 4])}
    none: list[Any] = []
    entries = {
        "0/m": {"type": "dict", "keys": ["t", "lost", "x"]},
        "0/m/t": {"type": "ShardedTensor", "shards": [shard]},
        "0/m/lost": {"type": "ShardedTensor", "shards": none},
        "0/m/x": {"type": "ShardedTensor", "shards": [shard | {"offsets": [0, 0]}]},
        "1/m": {"type": "dict", "keys": ["x"]},
    }
    write("1/.snapshot_metadata", metadata(entries, 2))
    into = State(t=torch.ones(4, 4), lost=torch.ones(2), x=torch.ones(2, 4))
    with pytest.raises(RestoreDamagedError) as caught:
        restore(tmp_path / "1", {"m": into})
    assert caught.value.kind == "hole" and len(caught.value.problems) == 3
    assert "1/m/x: 1/m names it, and it has no entry" in str(caught.value)
    assert all(tensor.eq(1).all() for tensor in into.values())


@pytest.mark.usefixtures("layout")
def test_a_changed_byte_is_found_where_checksums_were_recorded(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, {"a": State(x=torch.ones(50)), "b": State(x=torch.ones(300)), "c": State(n=(1,))}).save(1).wait()
    path = tmp_path / "1"
    victim = max((blob for blob in blobs(path) if "/0/c" not in str(blob)), key=lambda blob: blob.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    state = {"a": State(x=torch.zeros(50)), "b": State(x=torch.zeros(300)), "c": State(n=None)}
    with pytest.raises(RestoreDamagedError) as caught:
        restore(path, state)
    assert caught.value.kind == "checksum" and caught.value.blob == str(victim.relative_to(path))
    assert "CRC32C" in str(caught.value)
    assert caught.value.incomplete in (("a",), ("b",)) and "loaded: " in str(caught.value)
    restore(path, state, checksums=False)
    assert state["a"]["x"].all() and state["b"]["x"].all()
    off = Snapshot("/nowhere", state, options=SaveOptions(checksums=False))
    off.restore(path)


def test_a_damaged_object_is_found_before_anything_is_touched(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, x=torch.ones(2), o=("a", "b"), bad=("c", "d"))
    data = bytearray((path / "0/m/o").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "0/m/o").write_bytes(data)
    (path / "0/m/bad").write_bytes(b"nonsense")
    into = State(x=torch.zeros(2), o=None, bad=None)
    with pytest.raises(RestoreDamagedError) as caught:
        restore(path, {"m": into})
    assert {"0/m/o", "0/m/bad"} == {text.partition(":")[0] for text in caught.value.problems}
    assert into["x"].sum() == 0


def test_a_record_of_another_save_is_not_used(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, x=torch.ones(2))
    torchsnapshot.Snapshot.take(str(path), {"m": State(x=torch.full((2,), 2.0))})
    into = State(x=torch.zeros(2))
    restore(path, {"m": into})
    assert into["x"].tolist() == [2, 2]
    assert "saved again by something else" in caplog.text


def test_a_blob_that_is_replaced_while_it_is_being_read_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot(tmp_path, {"a": State(x=torch.ones(40)), "b": State(x=torch.ones(40))}).save(1).wait()
    original = LocalStorage.read_into
    lock, done = threading.Lock(), []

    def read_into(self: Any, path: str, start: int, buffer: Any, *, version: str = "") -> None:
        with lock:
            if not done and path.startswith("batched"):
                done.append(path)
                data = (tmp_path / "1" / path).read_bytes()
                (tmp_path / "1" / path).unlink()
                (tmp_path / "1" / path).write_bytes(data)
        original(self, path, start, buffer, version=version)

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    with pytest.raises(RestoreError, match="replaced") as caught:
        restore(tmp_path / "1", {"a": State(x=torch.zeros(40)), "b": State(x=torch.zeros(40))})
    assert caught.value.incomplete == ("a",) and caught.value.loaded == ()


# -- what is read ----------------------------------------------------------------------------------------------------


def test_each_needed_byte_is_read_once_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="snapctl.restoring")
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    state = {name: State(x=torch.ones(1000), y=torch.ones(500)) for name in "abcd"}
    Snapshot(tmp_path, state).save(1).wait()
    listings = count_calls(monkeypatch, "list_tree")
    restore(tmp_path / "1", {name: State(x=torch.zeros(1000)) for name in "abc"})
    fields = logged(caplog)
    assert fields["bytes"] == fields["bytes_read"] == 3 * 4000
    assert fields["checked_blobs"] == 3
    assert len(listings) == 1
    assert fields["planned_seconds"] <= fields["restored_seconds"] and fields["world_size"] == 1


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    calls: list[str] = []
    original = getattr(LocalStorage, name)

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return original(self, *args, **options)

    monkeypatch.setattr(LocalStorage, name, counted)
    return calls


def test_from_a_bucket_in_few_requests(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    state = {name: State(x=torch.ones(1000), o=(1,)) for name in "abc"}
    Snapshot(f"gs://{bucket.name}/run", state).save(1).wait()
    proxy.reset()
    into = {name: State(x=torch.zeros(1000), o=None) for name in "abc"}
    snapshot = restore(f"gs://{bucket.name}/run/1", into)
    asked = [(entry[0], entry[1]) for entry in proxy.stats(log=True)["log"]]
    assert all(into[name]["x"].sum() == 1000 and into[name]["o"] == (1,) for name in "abc")
    assert snapshot.step == 0
    assert len(asked) <= 20, asked


def test_a_bucket_that_fails_in_the_middle_says_what_was_loaded(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    Snapshot(f"gs://{bucket.name}/run", {"a": State(x=torch.ones(10)), "b": State(x=torch.ones(10))}).save(1).wait()
    proxy.configure(faults=[{"match": "batched.*alt=media|/download/.*batched", "status": 403}])
    with pytest.raises(RestoreError) as caught:
        restore(f"gs://{bucket.name}/run/1", {"a": State(x=torch.zeros(10)), "b": State(x=torch.zeros(10))})
    assert caught.value.incomplete == ("a",)
