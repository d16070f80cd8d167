"""What a save puts into a checkpoint: every kind of value exactly, as it was when `save` returned."""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import math
import pathlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from snapctl import Snapshot  # noqa: E402
from snapctl.errors import RefusedError, UnsavableError  # noqa: E402
from snapctl.manifest import parse_manifest  # noqa: E402
from snapctl.saving.savable import PICKLED_DTYPES, RAW_DTYPES, SAVES_DTENSORS  # noqa: E402
from snapctl.saving.staging import safe_location  # noqa: E402
from tests.support.stored import raw, read_manifest, read_stored, same_bytes  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(params=["batched", "unbatched", "chunked"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How blobs are laid out: several in a slab, each by itself, or cut into chunks."""
    if request.param != "batched":
        monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    if request.param == "chunked":
        monkeypatch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "8")
    return str(request.param)


def save(directory: pathlib.Path, **values: Any) -> pathlib.Path:
    """Saves values under ``m``; the checkpoint's directory."""
    Snapshot(directory / "run", {"m": torchsnapshot.StateDict(**values)}).save(1).wait()
    return directory / "run/1"


def bare_take(directory: pathlib.Path, **values: Any) -> pathlib.Path:
    """The same with torchsnapshot alone."""
    torchsnapshot.Snapshot.take(str(directory / "bare"), {"m": torchsnapshot.StateDict(**values)})
    return directory / "bare"


@contextlib.contextmanager
def bare_fails() -> Iterator[None]:
    """torchsnapshot alone still gets it wrong: fails, or gives back something else."""
    with pytest.raises(Exception):  # noqa: B017 - it has an error of another type for each
        yield


def kinds() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = {
        "bfloat16 of odd size": torch.randn(1001, 3).to(torch.bfloat16),
        "bfloat16 of one element": torch.ones(1, dtype=torch.bfloat16),
        "bfloat16 scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "bool scalar": torch.tensor(True),
        "no rows": torch.empty(0, 3),
        "no columns": torch.empty(3, 0, dtype=torch.int64),
        "nothing at all": torch.empty(0, dtype=torch.bfloat16),
        "transposed": torch.randn(5, 7).t(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "strided": torch.randn(20)[::3],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "negated lazily": torch.randn(4, dtype=torch.complex64).conj().imag,
        "negated lazily, contiguous": torch._neg_view(torch.randn(4)),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "needs grad": torch.randn(3, requires_grad=True) * 2,
        "complex64": torch.randn(9, dtype=torch.complex64),
        "complex128 conjugated lazily": torch.randn(3, dtype=torch.complex128).conj(),
        "complex parameter": torch.nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        "quantized": torch.quantize_per_tensor(torch.randn(4, 5), 0.1, 3, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "signed zero and NaN": torch.tensor([-0.0, math.nan, math.inf]),
    }
    for dtype in ("float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        tensors[dtype] = (torch.randn(3, 5) * 9).to(getattr(torch, dtype))
    for dtype in RAW_DTYPES:
        bits = torch.randint(0, 120, (3, 5), dtype=torch.uint8)
        tensors[dtype] = (
            bits.to(getattr(torch, dtype)) if dtype.startswith("uint") else bits.view(getattr(torch, dtype))
        )
    for dtype in PICKLED_DTYPES:
        tensors[dtype] = torch.randn(3, dtype=torch.complex64).to(getattr(torch, dtype))
    return tensors


KINDS = kinds()


def test_every_kind_of_tensor_is_stored_bit_by_bit(tmp_path: pathlib.Path, layout: str) -> None:
    stored = read_stored(save(tmp_path, **KINDS))
    for name, tensor in KINDS.items():
        assert same_bytes(stored[f"0/m/{name}"], tensor), name
        assert type(stored[f"0/m/{name}"]) is torch.Tensor, name


@pytest.mark.parametrize(
    "name",
    ["bfloat16 of odd size", "no rows", "no columns", "parameter", "complex32", *RAW_DTYPES],
)
def test_what_torchsnapshot_alone_loses_or_refuses(name: str, tmp_path: pathlib.Path) -> None:
    with bare_fails():
        assert same_bytes(read_stored(bare_take(tmp_path, x=KINDS[name]))["0/m/x"], KINDS[name])


def test_torchsnapshot_alone_writes_an_odd_bfloat16_short(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    odd = {"one": 1, "three": 3}
    tensors = {name: torch.ones(size, dtype=torch.bfloat16) for name, size in odd.items()}
    for name, size in odd.items():
        assert (bare_take(tmp_path, **tensors) / "0/m" / name).stat().st_size == 2 * size - 2
        assert (save(tmp_path, **tensors) / "0/m" / name).stat().st_size == 2 * size


def test_an_odd_bfloat16_too_large_for_a_slab_is_whole_and_alone_it_is_short(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default settings these are tensors of 128 MiB and more; the slabs are made small here."""
    monkeypatch.setenv("TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE", "1024")
    tensor = torch.arange(1001).to(torch.bfloat16)
    assert (bare_take(tmp_path, x=tensor) / "0/m/x").stat().st_size == 2000
    path = save(tmp_path, x=tensor)
    assert (path / "0/m/x").stat().st_size == 2002
    assert same_bytes(read_stored(path)["0/m/x"], tensor)


def test_torchsnapshot_reads_back_what_it_can(tmp_path: pathlib.Path, layout: str) -> None:
    names = ["bfloat16 of odd size", "bfloat16 scalar", "scalar", "transposed", "complex64", "parameter", "int64"]
    values = {name: KINDS[name] for name in names}
    path = save(tmp_path, empty=torch.empty(0, 3), **values)
    into = torchsnapshot.StateDict(
        empty=torch.ones(0, 3), **{k: torch.zeros_like(v.detach()) for k, v in values.items()}
    )
    torchsnapshot.Snapshot(str(path)).restore({"m": into})
    assert all(same_bytes(into[name], tensor.detach()) for name, tensor in values.items())
    assert into["empty"].shape == (0, 3)


def test_a_checkpoint_with_float8_still_lets_torchsnapshot_read_the_rest(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, f8=KINDS["float8_e4m3fn"], plain=KINDS["scalar"])
    assert torchsnapshot.Snapshot(str(path)).read_object("0/m/plain") == KINDS["scalar"]
    with pytest.raises(ValueError, match="Unsupported dtype"):
        torchsnapshot.Snapshot(str(path)).read_object("0/m/f8")


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path: pathlib.Path) -> None:
    view = torch.randn(1_000_000, dtype=torch.complex64)[5:8]
    stored = save(tmp_path, x=view) / "0/m/x"
    assert stored.stat().st_size < 5_000
    assert (bare_take(tmp_path, x=view) / "0/m/x").stat().st_size > 8_000_000


# -- a snapshot is of one moment -------------------------------------------------------------------------------------


def test_what_changes_after_save_returns_is_not_in_it(
    tmp_path: pathlib.Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_back_writes(monkeypatch)
    values = {
        name: KINDS[name].detach().clone()
        for name in ("scalar", "int64", "complex64", "bfloat16 of odd size", "float8_e5m2", "float64")
    }
    values["strided"] = torch.randn(40)[::2]
    values["transposed"] = torch.randn(6, 7).t()
    expected = {name: raw(tensor) for name, tensor in values.items()}
    mutable = {"list": [1, 2], "array": np.arange(3)}
    state = torchsnapshot.StateDict(**values, objects=(mutable,), number=1)
    pending = Snapshot(tmp_path, {"m": state}).save(1)
    for tensor in values.values():
        tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).zero_()
    mutable["list"].append(3)
    mutable["array"][:] = 9
    state["number"] = 2
    assert not pending.done()
    gate.set()
    pending.wait()
    stored = read_stored(tmp_path / "1")
    assert {name: raw(stored[f"0/m/{name}"]) for name in values} == expected
    assert stored["0/m/objects"][0]["list"] == [1, 2]
    assert stored["0/m/objects"][0]["array"].tolist() == [0, 1, 2]
    assert stored["0/m/number"] == "1"


@pytest.mark.skipif(SAVES_DTENSORS, reason="the nightly's async_take does not work without a process group")
def test_torchsnapshot_alone_stores_what_changes_later(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    from torchsnapshot.storage_plugins.fs import FSStoragePlugin

    gate = hold_back(monkeypatch, FSStoragePlugin, "write")
    tensor = torch.ones(1000)
    pending = torchsnapshot.Snapshot.async_take(str(tmp_path / "bare"), {"m": torchsnapshot.StateDict(x=tensor)})
    tensor.zero_()
    gate.set()
    pending.wait()
    assert read_stored(tmp_path / "bare")["0/m/x"].sum() == 0


def hold_back_writes(monkeypatch: pytest.MonkeyPatch) -> Any:
    from snapctl.storage import LocalStorage

    return hold_back(monkeypatch, LocalStorage, "write_blob")


def hold_back(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Any:
    """Makes a method wait for the event that is returned."""
    import asyncio
    import inspect
    import threading

    gate = threading.Event()
    original = getattr(owner, name)

    async def later(*args: Any, **options: Any) -> Any:
        await asyncio.get_running_loop().run_in_executor(None, gate.wait, 30)
        return await original(*args, **options)

    def wait(*args: Any, **options: Any) -> Any:
        gate.wait(30)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, later if inspect.iscoroutinefunction(original) else wait)
    return gate


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_stored_as_they_were_when_save_returned(
    tmp_path: pathlib.Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_back_writes(monkeypatch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what is under way on training's own stream belongs to the snapshot
        values = {
            name: KINDS[name].detach().cuda()
            for name in ("scalar", "int64", "complex64", "bfloat16 of odd size", "float8_e5m2", "transposed", "no rows")
        }
        values["large"] = torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        pending = Snapshot(tmp_path, {"m": torchsnapshot.StateDict(**values)}).save(1)
        torch.cuda.synchronize()
        expected = {name: raw(tensor) for name, tensor in values.items()}
        for tensor in values.values():
            tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).zero_()
    gate.set()
    pending.wait()
    stored = read_stored(tmp_path / "1")
    assert {name: raw(stored[f"0/m/{name}"]) for name in values} == expected


# -- keys and containers ---------------------------------------------------------------------------------------------

ODD_KEYS = ["..", ".", "", "x" * 300, "a/b", "50%", "a%2Fb", "new\nline", "nul\0", "ü", "😀", "\x85", "\u2028"]
ODD_KEYS += ["\ufeff", "w.snapctl-tmp-1", "\ud800", " ", "~"]


def test_every_key_gets_a_location_inside_its_folder(tmp_path: pathlib.Path, layout: str) -> None:
    values = {key: torch.full((3,), float(number)) for number, key in enumerate(ODD_KEYS)}
    path = save(tmp_path, **values)
    entries = parse_manifest((path / ".snapshot_metadata").read_bytes())
    stored = read_stored(path)
    for key, tensor in values.items():
        encoded = key.replace("%", "%25").replace("/", "%2F")
        assert same_bytes(stored[f"0/m/{encoded}"], tensor), repr(key)
    roots = (path / "0", path / "batched")
    for location in entries.blob_locations():
        assert any(root.resolve() in (path / location).resolve().parents for root in roots)
    assert [entry for entry in path.parent.parent.iterdir() if entry.name != "run"] == []


def test_torchsnapshot_reads_keys_outside_the_bmp_and_characters_that_yaml_refuses(tmp_path: pathlib.Path) -> None:
    keys = [key for key in ODD_KEYS if key != "\ud800"]
    path = save(tmp_path, **{key: torch.full((3,), float(number)) for number, key in enumerate(keys)})
    into = torchsnapshot.StateDict(**{key: torch.zeros(3) for key in keys})
    torchsnapshot.Snapshot(str(path)).restore({"m": into})
    assert [into[key][0].item() for key in keys] == list(range(len(keys)))


@pytest.mark.parametrize("key", ["..", "x" * 300, "😀"])
def test_odd_keys_are_too_much_for_torchsnapshot_alone(
    key: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    with bare_fails():
        path = bare_take(tmp_path, **{key: torch.ones(3)})
        torchsnapshot.Snapshot(str(path)).restore({"m": torchsnapshot.StateDict(**{key: torch.zeros(3)})})


def test_boolean_keys_stay_boolean_in_the_manifest(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path, d={True: torch.ones(2), 2: torch.zeros(3)})
    assert read_manifest(path)["0/m/d"] == {"type": "dict", "keys": [True, 2]}
    assert same_bytes(read_stored(path)["0/m/d/True"], torch.ones(2))
    into = torchsnapshot.StateDict(d={True: torch.zeros(2), 2: torch.ones(3)})
    torchsnapshot.Snapshot(str(bare_take(tmp_path, d={True: torch.ones(2), 2: torch.zeros(3)}))).restore({"m": into})
    assert list(into["d"]) == [2]  # torchsnapshot alone loses it


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("key", [Colour.RED, np.str_("k"), 1 << 64, 1.5, (1, 2), None])
def test_a_dict_whose_keys_no_manifest_can_hold_is_pickled_whole(key: Any, tmp_path: pathlib.Path) -> None:
    found = read_stored(save(tmp_path, d={key: torch.ones(2)}))["0/m/d"]
    (stored,) = found
    assert type(stored) is type(key) and stored == key
    assert same_bytes(found[key], torch.ones(2))


def test_containers_and_values_of_all_kinds(tmp_path: pathlib.Path) -> None:
    values: dict[str, Any] = {
        "nested": {"a": [1, {"b": OrderedDict(c=2.5)}], "empty": {}, "none": []},
        "tuple": (1, "x"),
        "none": None,
        "date": datetime.date(2026, 11, 30),
        "array": np.arange(3),
        "nan": math.nan,
        "minus zero": -0.0,
        "bytes": b"\x00\xff",
        "text": "line\nü😀\ud800",
        "huge": 1 << 20_000,
        "collision": {1: "a", "1": "b"},
    }
    path = save(tmp_path, **values)
    manifest, stored = read_manifest(path), read_stored(path)
    assert manifest["0/m/nested"] == {"type": "dict", "keys": ["a", "empty", "none"]}
    assert manifest["0/m/nested/a"] == {"type": "list"}
    assert manifest["0/m/nested/a/1/b"] == {"type": "OrderedDict", "keys": ["c"]}
    assert stored["0/m/text"] == values["text"]
    for name in ("tuple", "none", "date", "huge", "collision"):
        assert stored[f"0/m/{name}"] == values[name]
    assert stored["0/m/array"].tolist() == [0, 1, 2]
    entries = parse_manifest((path / ".snapshot_metadata").read_bytes()).entries
    assert math.isnan(entries["0/m/nan"].value) and math.copysign(1, entries["0/m/minus zero"].value) == -1


def test_a_state_name_may_be_anything(tmp_path: pathlib.Path) -> None:
    names = ["", "..", "a/b", "/abs", "[x]"]
    state = {name: torchsnapshot.StateDict(x=torch.full((2,), float(i))) for i, name in enumerate(names)}
    Snapshot(tmp_path, state).save(1).wait()
    stored = read_stored(tmp_path / "1")
    for number, name in enumerate(names):
        encoded = name.replace("/", "%2F")
        assert stored[f"0/{encoded}/x"][0] == number


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_a_safe_location_is_a_path_of_ordinary_names(keys: list[str]) -> None:
    encoded = "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)
    parts = safe_location(encoded).split("/")
    assert all(part not in ("", ".", "..") and len(part.encode()) <= 150 and "\0" not in part for part in parts)


@settings(max_examples=300)
@given(st.text(), st.text())
def test_two_keys_never_share_a_location(a: str, b: str) -> None:
    a, b = (key.replace("%", "%25").replace("/", "%2F") for key in (a, b))
    assert (safe_location(a) == safe_location(b)) == (a == b)


def test_two_tensors_that_would_share_a_blob_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    monkeypatch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "8")
    with pytest.raises(RefusedError, match=r"m/w_0_0 and m/w would both|m/w and m/w_0_0 would both"):
        save(tmp_path, w=torch.ones(4, 2), w_0_0=torch.zeros(1))
    with pytest.raises(RefusedError, match=r"m/w would be stored as 0/m/w_0_0, and m/w_0_0/x inside it as 0/m/w_0_0/x"):
        save(tmp_path, w=torch.ones(4, 2), w_0_0={"x": torch.zeros(1)})


@pytest.mark.parametrize("batched", [True, False])
def test_one_element_with_a_stride_is_an_element_like_others(
    batched: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not batched:
        monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    one = torch.arange(8.0)[3::8]
    pair = torch.arange(8.0).reshape(2, 4)[:, 3:4].t()[:, :1]  # [1, 1], of strides other than 1
    found = read_stored(save(tmp_path, one=one, pair=pair, c=torch.ones(3, dtype=torch.complex64)[1::2]))
    assert (found["0/m/one"].tolist(), found["0/m/pair"].tolist(), found["0/m/c"].tolist()) == ([3], [[3]], [1])


# -- what is refused -------------------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    pass


def refused_values() -> dict[str, Any]:
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "subclass": torch.ones(3).as_subclass(Tagged),
        "lambda": lambda: None,
    }


def test_what_cannot_be_saved_is_refused_in_one_error_before_anything_is_written(
    tmp_path: pathlib.Path,
) -> None:
    save(tmp_path, x=torch.ones(2))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UnsavableError) as caught:
        save(tmp_path, good=torch.zeros(2), **refused_values())
    for name in refused_values():
        assert f"m/{name}: " in str(caught.value)
    assert "m/good" not in str(caught.value)
    assert "to_dense()" in str(caught.value.hint)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["sparse", "nested", "meta", "subclass"])
def test_torchsnapshot_alone_fails_or_loses_them(name: str, tmp_path: pathlib.Path) -> None:
    value = refused_values()[name]
    with bare_fails():
        into = torchsnapshot.StateDict(x=value.clone())
        path = bare_take(tmp_path, x=value)
        del into["x"]
        torchsnapshot.Snapshot(str(path)).restore({"m": into})
        assert type(into["x"]) is type(value)


def test_torchsnapshot_is_as_it_was_after_a_save(tmp_path: pathlib.Path) -> None:
    import torchsnapshot.batcher
    import torchsnapshot.flatten
    import torchsnapshot.io_preparer
    import torchsnapshot.serialization

    def state() -> list[Any]:
        modules = (torchsnapshot.snapshot, torchsnapshot.io_preparer, torchsnapshot.flatten)
        stager = torchsnapshot.io_preparers.tensor.TensorBufferStager
        shards = torchsnapshot.io_preparers.sharded_tensor.ShardedTensorIOPreparer
        tables = [
            dict(torchsnapshot.serialization._DTYPE_TO_STRING),
            dict(torchsnapshot.serialization._STRING_TO_DTYPE),
            dict(torchsnapshot.serialization._DTYPE_TO_ELEMENT_SIZE),
            list(torchsnapshot.serialization.BUFFER_PROTOCOL_SUPPORTED_DTYPES),
        ]
        return [*(dict(vars(owner)) for owner in (*modules, stager)), dict(vars(shards))["subdivide_shard"], tables]

    before = state()
    assert isinstance(before[-2], staticmethod)
    save(tmp_path, x=torch.ones(2))
    with pytest.raises(UnsavableError):
        save(tmp_path, x=torch.empty(1, device="meta"))
    after = state()
    assert [len(part) if isinstance(part, dict) else part for part in after] == [
        len(part) if isinstance(part, dict) else part for part in before
    ]
    assert before == after


def test_the_manifest_is_what_torchsnapshot_itself_would_write(tmp_path: pathlib.Path) -> None:
    values = {"w": torch.ones(3), "n": 1, "f": 0.5, "l": [1, {"a": 2}]}
    ours, theirs = save(tmp_path, **values), bare_take(tmp_path, **values)
    texts = [(path / ".snapshot_metadata").read_text() for path in (ours, theirs)]
    plain = [re.sub(r"batched/[0-9a-f-]{36}", "batched/X", text) for text in texts]
    documents = [json.loads(text) for text in plain]
    for key in list(documents[0]["manifest"]):
        if key.startswith("0/extra_state"):
            del documents[0]["manifest"][key]
    start = documents[1]["manifest"]["0/m/w"]["byte_range"]
    documents[0]["manifest"]["0/m/w"]["byte_range"] = start
    assert json.dumps(documents[0], indent=2) == json.dumps(documents[1], indent=2)
