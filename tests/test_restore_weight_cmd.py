"""`snapctl restore-weight`, as its users run it."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import pty
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.conftest import DATA
from tests.support.command import Finished, snapctl, snapctl_here
from tests.support.servers import Bucket, Controlled
from tests.support.shards import Builder, grid, random_array
from tests.support.snapshots import encode, local_writer, metadata, primitive, tensor_entry

Command = Callable[..., Finished]
TABLE = np.arange(48, dtype="f4").reshape(12, 4)


@pytest.fixture
def out(tmp_path: pathlib.Path) -> pathlib.Path:
    """An empty directory for what is written."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def builder(tmp_path: pathlib.Path) -> Builder:
    return Builder(local_writer(tmp_path / "run"))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "run")


def _restore(*arguments: str, **options: Any) -> Finished:
    """In this process, unless it is to be another one for `options`."""
    return snapctl("restore-weight", *arguments, **options) if options else snapctl_here("restore-weight", *arguments)


def _left(directory: pathlib.Path) -> list[str]:
    return sorted(os.listdir(directory))


def _npy(path: pathlib.Path) -> np.ndarray[Any, Any]:
    return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


# -- the real snapshots ----------------------------------------------------------------------------------------------


def _check_folder(url: str, expected: dict[str, Any], out: pathlib.Path, *more: str) -> None:
    done = _restore(url, *expected, "-o", str(out / "all.safetensors"), "--json", *more)
    assert (done.code, done.stderr) == (0, "")
    loaded = load_file(out / "all.safetensors")
    by_path = {tensor["path"]: tensor for tensor in done.json["tensors"]}
    for path, facts in expected.items():
        array, said = loaded[path], by_path[path]
        assert (array.dtype.name, list(array.shape)) == (facts["dtype"], facts["shape"])
        assert hashlib.sha256(array.tobytes()).hexdigest() == facts["sha256"]
        assert (said["dtype"], said["shape"], said["size_bytes"]) == (facts["dtype"], facts["shape"], array.nbytes)


def _expected(folder: str, rank: int = 0) -> dict[str, Any]:
    found = json.loads((DATA / folder / "expected.json").read_bytes())
    return {
        path.removeprefix(f"{rank}/"): facts
        for path, facts in found.items()
        if path[0] not in "01" or path[0] == str(rank)
    }


FOLDERS = ["torchrec-2ranks", "dtensor-4ranks", "yaml-2022-10", "yaml-chunked-2022-08", "yaml-0.0.2"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_real_snapshot_is_restored_with_its_hashes(folder: str, out: pathlib.Path) -> None:
    if folder.startswith("yaml-0.0") or folder == "yaml-2022-10":
        pytest.importorskip("torch")
    _check_folder(str(DATA / folder), _expected(folder), out)


@pytest.mark.parametrize("folder", FOLDERS)
def test_and_on_gcs(folder: str, out: pathlib.Path, bucket: Bucket) -> None:
    if folder.startswith("yaml-0.0") or folder == "yaml-2022-10":
        pytest.importorskip("torch")
    bucket.upload(DATA / folder, folder)
    _check_folder(f"{bucket.url}/{folder}", _expected(folder), out)


def test_each_rank_of_a_real_snapshot_can_be_asked(out: pathlib.Path) -> None:
    _check_folder(str(DATA / "torchrec-2ranks/100"), _expected("torchrec-2ranks", 1), out, "--rank", "1")


def test_a_whole_model_leaves_torchsnapshot_with_the_keys_of_its_state_dict(out: pathlib.Path) -> None:
    path = out / "model.safetensors"
    done = _restore(str(DATA / "torchrec-2ranks"), "model/*", "-o", str(path), "--strip-prefix", "model/")
    assert (done.code, done.stdout) == (0, "")
    expected = {key.removeprefix("model/"): facts for key, facts in _expected("torchrec-2ranks").items()}
    loaded = load_file(path)
    assert set(loaded) == set(expected)
    for key, facts in expected.items():
        assert hashlib.sha256(loaded[key].tobytes()).hexdigest() == facts["sha256"]
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "step": "100", "source": str(DATA / "torchrec-2ranks/100")}
    assert _left(out) == ["model.safetensors"]


@pytest.mark.torch
def test_it_is_loaded_by_torch_with_equal_tensors(out: pathlib.Path, run: str, builder: Builder) -> None:
    torch = pytest.importorskip("torch")
    import safetensors.torch

    values = {
        dtype: torch.arange(7).to(getattr(torch, dtype)) for dtype in ("bfloat16", "float8_e5m2", "bool", "int16")
    }
    for dtype, value in values.items():
        builder.write(f"10/0/m/{dtype}", value.view(torch.uint8).numpy().tobytes())
        builder.manifest[f"0/m/{dtype}"] = tensor_entry(f"0/m/{dtype}", [7], dtype)
    builder.finish()
    assert _restore(run, "m/*", "-o", str(out / "m.safetensors"), "--strip-prefix", "m/").code == 0
    loaded = safetensors.torch.load_file(out / "m.safetensors")
    assert {
        dtype: torch.equal(loaded[dtype].view(torch.uint8), v.view(torch.uint8)) for dtype, v in values.items()
    } == (dict.fromkeys(values, True))


def test_the_truncated_snapshot_is_refused_with_what_is_missing_and_nothing_is_written(out: pathlib.Path) -> None:
    for name, text in (("v", "4 bytes, and it needs 6"), ("big", "6004 bytes, and it needs 6006")):
        done = _restore(str(DATA / "truncated-bfloat16/7"), f"a/{name}", "-o", str(out / "a.safetensors"))
        assert (done.code, done.stdout) == (1, "")
        assert f"error: 0/a/{name}: 0/a/{name} has {text}\n" in done.stderr
    assert _left(out) == []


# -- names -----------------------------------------------------------------------------------------------------------


def _two_ranks(builder: Builder) -> None:
    builder.sharded("m/rows.weight", TABLE, {0: grid((12, 4), (4, 1))[:2], 1: grid((12, 4), (4, 1))[2:]})
    builder.sharded("m/cols.weight", TABLE, {0: grid((12, 4), (1, 2))[:1], 1: grid((12, 4), (1, 2))[1:]})
    builder.sharded("m/only1.weight", TABLE, {0: [], 1: [((0, 0), (12, 4))]})
    builder.finish(2)


@pytest.mark.parametrize("name", ["rows", "cols", "only1"])
@pytest.mark.parametrize("prefix", ["0/m/", "1/m/", "m/", ""])
def test_a_sharded_table_is_whole_from_the_path_of_any_rank(
    name: str, prefix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    _two_ranks(builder)
    done = _restore(run, f"{prefix}{name}.weight", "-o", str(out / "t.npy"))
    assert done.code == 0
    assert np.array_equal(_npy(out / "t.npy"), TABLE)
    assert f"m/{name}.weight: float32 [12, 4]" in done.stderr


def test_several_hits_are_candidates_and_none_is_picked(run: str, builder: Builder, out: pathlib.Path) -> None:
    _two_ranks(builder)
    done = _restore(run, "weight", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.stdout) == (3, "")
    assert sorted(done.error["candidates"]) == ["m/cols.weight", "m/only1.weight", "m/rows.weight"]
    assert _left(out) == []


def test_no_hit_tells_the_nearest_names(run: str, builder: Builder) -> None:
    _two_ranks(builder)
    done = _restore(run, "row.weight", "--stats")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: row.weight: no such entry\nhint: the nearest names are: m/rows.weight")


def test_ranks_that_hold_different_tensors_need_to_be_told_apart(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.dense("1/m/t", TABLE + 1)
    builder.dense("0/m/same", TABLE)
    builder.dense("1/m/same", TABLE)
    builder.finish(2)
    done = _restore(run, "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.error["candidates"]) == (3, ["0/m/t", "1/m/t"])
    assert "--rank" in done.error["hint"]
    assert _restore(run, "m/*", "-o", str(out / "t.safetensors")).code == 3
    assert _left(out) == []
    for arguments in (["m/t", "--rank", "1"], ["1/m/t"]):
        assert _restore(run, *arguments, "-o", str(out / "t.npy"), "--force").code == 0
        assert np.array_equal(_npy(out / "t.npy"), TABLE + 1)
    done = _restore(run, "m/same", "-o", str(out / "t.npy"), "--force")
    assert done.code == 0
    assert "m/same: 2 ranks hold one each; comparing them" in done.stderr
    assert _restore(run, "m/*", "--rank", "0", "-o", str(out / "t.safetensors")).code == 0


NAMES = [
    "layers[0].w",
    "[bold]x[/bold]",
    "a[/b",
    ":smile:",
    "a/b",
    "50%",
    "a%2Fb",
    "sp ace",
    "ü",
    "-1",
    "00",
    "*",
    "\x1b[2J",
]


def test_odd_names_are_found_and_printed_literally(tmp_path: pathlib.Path, out: pathlib.Path) -> None:
    root = tmp_path / "run[lr=0.1][/red]"
    builder = Builder(local_writer(root))
    for number, key in enumerate(NAMES):
        builder.write(f"10/b/{number}", np.full(2, number, "f4").tobytes())
        builder.manifest[f"0/m/{encode(key)}"] = tensor_entry(f"b/{number}", [2])
    builder.finish()
    for number, key in enumerate(NAMES):
        done = _restore(f"{root}/10", f"m/{encode(key)}", "-o", str(out / "t.npy"), "--force")
        assert done.code == 0, done.stderr
        assert _npy(out / "t.npy").tolist() == [number, number]
        shown = encode(key).replace("\x1b", "\\x1b")
        assert f"found 0/m/{shown}: float32 [2]\n" in done.stderr
    done = _restore(f"{root}/10", "m/[bold]y[/bold]", "--stats")
    assert done.code == 3
    assert "error: m/[bold]y[/bold]: no such entry" in done.stderr
    done = _restore(f"{root}/10", "0/m/*", "-o", str(out / "star.safetensors"), "--strip-prefix", "m/")
    assert "found 0/m/*: float32 [2]" in done.stderr  # the name of a tensor comes before a glob
    done = _restore(f"{root}/10", "0/m/?*", "-o", str(out / "all.safetensors"), "--strip-prefix", "m/")
    assert done.code == 0, done.stderr
    assert set(load_file(out / "all.safetensors")) == set(NAMES)


def test_keys_that_read_alike_once_decoded_keep_the_spelling_of_the_manifest(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    builder.manifest["0/m/a%2Fb"] = tensor_entry("x", [2])
    builder.manifest["0/m/a/b"] = tensor_entry("y", [2])
    builder.write("10/x", np.zeros(2, "f4").tobytes())
    builder.write("10/y", np.ones(2, "f4").tobytes())
    builder.finish()
    assert _restore(run, "m/a*", "-o", str(out / "t.safetensors")).code == 0
    assert {name: array[0] for name, array in load_file(out / "t.safetensors").items()} == {"m/a%2Fb": 0, "m/a/b": 1}


# -- what is wrong ---------------------------------------------------------------------------------------------------


def _shard(offset: int, rows: int, dtype: str = "float32") -> dict[str, Any]:
    return {"offsets": [offset, 0], "sizes": [rows, 4], "tensor": tensor_entry(f"s/{offset}", [rows, 4], dtype)}


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([_shard(0, 4), _shard(8, 4)], "rows 4:8 of 12 are missing"),
        ([_shard(0, 8), _shard(6, 6)], "parts overlap: [0, 0] + [8, 4] of 0/m/t and [6, 0] + [6, 4] of 1/m/t"),
        ([_shard(0, 6), _shard(6, 6, "int32")], "disagree on the dtype: float32 and int32"),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_what_does_not_make_a_whole_tensor_is_refused_and_nothing_is_written(
    shards: list[Any], text: str, suffix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    for rank, shard in enumerate(shards):
        builder.write(f"10/s/{shard['offsets'][0]}", bytes(16 * shard["sizes"][0]))
        builder.manifest[f"{rank}/m/t"] = {"type": "ShardedTensor", "shards": [shard]}
    builder.finish(2)
    done = _restore(run, "m/t", "-o", str(out / f"t.{suffix}"))
    assert (done.code, done.stdout) == (1, "")
    assert text in done.stderr
    assert done.stderr.count("error:") == 1
    assert _left(out) == []


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_a_missing_or_short_blob_of_one_of_many_tensors_leaves_nothing(
    suffix: str, run: str, builder: Builder, out: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    if suffix == "pt":
        pytest.importorskip("torch")
    builder.dense("0/m/a", TABLE)
    builder.dense("0/m/b", TABLE)
    builder.finish()
    names = ["m/b"] if suffix == "npy" else ["m/*"]
    (out / f"t.{suffix}").write_bytes(b"old")
    os.truncate(tmp_path / "run/10/0/m/b", 100)
    done = _restore(run, *names, "-o", str(out / f"t.{suffix}"), "--force")
    assert done.code == 1
    assert "0/m/b has 100 bytes, and it needs 192" in done.stderr
    (tmp_path / "run/10/0/m/b").unlink()
    assert _restore(run, *names, "-o", str(out / f"t.{suffix}"), "--force").code == 1
    assert (out / f"t.{suffix}").read_bytes() == b"old"
    assert _left(out) == [f"t.{suffix}"]


def test_a_location_that_leads_out_is_refused(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.manifest["0/m/t"] = tensor_entry("../../../etc/hostname", [1], "uint8")
    builder.finish()
    done = _restore(run, "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.error["kind"]) == (1, "outside")


def test_an_incomplete_checkpoint_and_a_missing_step_are_not_there(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    local_writer(run)("30/0/m/t", b"half")
    for arguments in ((f"{run}/30",), (run, "--step", "30"), (run, "--step", "99")):
        done = _restore(arguments[0], "m/t", "--stats", *arguments[1:])
        assert (done.code, done.stdout) == (3, "")
    assert ".snapshot_metadata is missing or empty" in _restore(f"{run}/30", "m/t", "--stats").stderr
    assert _restore(run, "m/t", "--stats").code == 0


# -- kinds of entries ------------------------------------------------------------------------------------------------


def test_chunks_slabs_and_replicated_entries(run: str, builder: Builder, out: pathlib.Path) -> None:
    big = np.arange(40, dtype="f4").reshape(10, 4)
    builder.chunked("0/m/big", big, [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (3, 4)), ((9, 0), (1, 4))])
    builder.dense("0/m/rep", big[:2], replicated=True)
    builder.dense("0/m/s1", big[0, :3].copy(), slab=True)
    builder.dense("0/m/s2", big.reshape(-1)[3:10].copy(), slab=True)
    builder.finish(2)
    for name, expected in (("0/m/big", big), ("0/m/rep", big[:2]), ("1/m/rep", big[:2]), ("m/s1", big[0, :3]), ("s2", big.reshape(-1)[3:10])):  # fmt: skip  # noqa: E501
        assert _restore(run, name, "-o", str(out / "t.npy"), "--force").code == 0
        assert np.array_equal(_npy(out / "t.npy"), expected)


def test_scalars_and_nothing_have_their_shape_in_every_format(run: str, builder: Builder, out: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    entries = {
        "0/m/s": tensor_entry("0/m/s", []),
        "0/m/z0": tensor_entry("0/m/gone", [0]),
        "0/m/z1": tensor_entry("0/m/gone", [0, 3], "int64"),
        "0/m/zb": tensor_entry("0/m/s", [0, 5], byte_range=[4, 4]),
        "0/m/zc": {
            "type": "ChunkedTensor",
            "dtype": "torch.float32",
            "shape": [0, 2],
            "chunks": [],
            "replicated": False,
        },
        "0/m/t": {"type": "ShardedTensor", "shards": [_shard(0, 2)]},
        "1/m/t": {"type": "ShardedTensor", "shards": [_shard(2, 0)]},
    }
    builder.manifest.update(entries)
    builder.write("10/0/m/s", np.float32(2.5).tobytes())
    builder.write("10/s/0", np.arange(8, dtype="f4").tobytes())
    builder.finish(2)
    shapes = {"s": (), "z0": (0,), "z1": (0, 3), "zb": (0, 5), "zc": (0, 2), "t": (2, 4)}
    for name, shape in shapes.items():
        assert _restore(run, f"m/{name}", "-o", str(out / "t.npy"), "--force").code == 0
        assert _npy(out / "t.npy").shape == shape
        assert _restore(run, f"m/{name}", "-o", str(out / "t.pt"), "--force").code == 0
        assert tuple(torch.load(out / "t.pt").shape) == shape
    assert _restore(run, "m/*", "-o", str(out / "t.safetensors"), "--strip-prefix", "m/").code == 0
    loaded = load_file(out / "t.safetensors")
    assert {name: array.shape for name, array in loaded.items()} == shapes
    assert loaded["z1"].dtype == np.int64
    done = _restore(run, "m/z0", "--stats", "--json")
    assert done.json["tensors"][0]["stats"] == {"count": 0, "min": None, "max": None, "mean": None, "nan": 0, "inf": 0, "first": []}  # fmt: skip  # noqa: E501


def _all_dtypes(builder: Builder) -> dict[str, Any]:
    """One tensor of each dtype that torchsnapshot or a newer torch can have put in a snapshot."""
    import torch

    values = {
        "bf16": torch.tensor([1.5, -0.0, float("nan"), 3e38]).bfloat16(),
        "f16": torch.ones(3, dtype=torch.float16),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
        "u8": torch.tensor([0, 255], dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "f64": torch.tensor([0.1], dtype=torch.float64),
        "i64": torch.tensor([2**62, -(2**63)]),
        "c64": torch.tensor([1 + 2j, 3 - 4j]),
        "c128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "c32": torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex32),
        "q8": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
        "qch": torch.quantize_per_channel(torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.zeros(2), 0, torch.qint8),
        "f8e4": torch.ones(4).to(torch.float8_e4m3fn),
        "f8e5": torch.ones(4).to(torch.float8_e5m2),
        "u16": torch.tensor([65535], dtype=torch.uint16),
        "u32": torch.tensor([2**32 - 1], dtype=torch.uint32),
    }  # fmt: skip
    import io

    for name, value in values.items():
        raw = not (value.is_complex() or value.is_quantized)
        buffer = io.BytesIO()
        if raw:
            buffer.write(value.view(torch.uint8).numpy().tobytes())
        else:
            torch.save(value, buffer)
        builder.write(f"10/0/m/{name}", buffer.getvalue())
        builder.manifest[f"0/m/{name}"] = tensor_entry(
            f"0/m/{name}",
            list(value.shape),
            str(value.dtype)[6:],
            serializer="buffer_protocol" if raw else "torch_save",
        )
    builder.finish()
    return values


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning", "ignore:ComplexHalf")
def test_every_dtype_is_bit_exact_or_refused_with_a_hint_and_never_widened(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    values = _all_dtypes(builder)
    done = _restore(run, "m/*", "-o", str(out / "all.pt"), "--strip-prefix", "m/")
    assert done.code == 0, done.stderr
    for name, found in torch.load(out / "all.pt").items():
        value = values[name]
        assert found.dtype == value.dtype
        one, other = (found.int_repr(), value.int_repr()) if value.is_quantized else (found, value)
        assert one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
        if value.is_quantized:
            assert torch.equal(found.dequantize(), value.dequantize())
    for name, value in values.items():
        done = _restore(run, f"m/{name}", "-o", str(out / f"{name}.npy"))
        if name in ("bf16", "f8e4", "f8e5", "q8", "qch", "c32"):
            assert done.code == 6, name
            assert "hint: " in done.stderr
            assert "--dtype" in done.stderr
        else:
            assert done.code == 0
            assert _npy(out / f"{name}.npy").tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes()
    assert not [name for name in _left(out) if "snapctl-tmp" in name]
    for name in ("q8", "qch", "c32", "c128"):
        assert _restore(run, f"m/{name}", "-o", str(out / "t.safetensors")).code == 6
    converted = {"bf16": "float32", "f8e4": "float32", "q8": "float32", "qch": "float64", "c32": "complex64"}
    for name, dtype in converted.items():
        for suffix in ("npy", "safetensors"):
            done = _restore(run, f"m/{name}", "-o", str(out / f"{name}2.{suffix}"), "--dtype", dtype)
            assert (done.code, name) == (0, name), done.stderr
        value = values[name].dequantize() if values[name].is_quantized else values[name]
        expected = value.to(getattr(torch, dtype)).numpy()
        assert np.array_equal(_npy(out / f"{name}2.npy"), expected, equal_nan=True)
        assert np.array_equal(load_file(out / f"{name}2.safetensors")[f"m/{name}"], expected, equal_nan=True)
    assert _restore(run, "m/c64", "-o", str(out / "x.npy"), "--dtype", "float32").code == 6
    done = _restore(run, "m/*", "--stats", "--json")
    assert done.code == 0
    assert {t["path"] for t in done.json["tensors"]} == {f"m/{name}" for name in values}


@pytest.mark.torch
def test_a_pt_file_of_one_name_holds_the_tensor_and_of_a_glob_a_dict(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE, slab=True)
    builder.dense("0/m/u", np.zeros(1000), slab=True)
    builder.manifest["0/m/n"] = primitive(3)
    builder.finish()
    assert _restore(run, "m/t", "-o", str(out / "t.pt"), "--rows", "2:4").code == 0
    found = torch.load(out / "t.pt")
    assert torch.equal(found, torch.from_numpy(TABLE[2:4]))
    assert found.untyped_storage().nbytes() == 32  # the slice, not its slab
    assert _restore(run, "m/t*", "-o", str(out / "d.pt")).code == 0
    assert list(torch.load(out / "d.pt")) == ["m/t"]
    assert _restore(run, "m/*", "-o", str(out / "e.pt"), "--strip-prefix", "m/").code == 0
    whole = torch.load(out / "e.pt")
    assert (whole["n"], whole["u"].shape) == (3, (1000,))
    assert os.path.getsize(out / "t.pt") < 3000


# -- what is no tensor -----------------------------------------------------------------------------------------------


def _values(builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    for key, value in {"step": 7, "name": "x: y", "ok": True, "lr": 0.5}.items():
        builder.manifest[f"0/extra/{key}"] = primitive(value)
    builder.manifest["0/extra/bad"] = {"type": "float", "serialized_value": "!", "replicated": False, "readable": None}
    builder.finish()


def test_inline_values_are_printed_when_there_is_no_file_for_them(run: str, builder: Builder) -> None:
    _values(builder)
    done = _restore(run, "extra/step")
    assert (done.code, done.stdout, done.stderr) == (0, "7\n", "found 0/extra/step: int\n")
    done = _restore(run, "extra/step", "extra/name", "extra/ok", "lr")
    assert [line.split(": ", 1)[1].strip() for line in done.stdout.splitlines()] == ["7", "x: y", "True", "0.5"]
    done = _restore(run, "extra/n*", "extra/lr", "--json")
    values = [(value["path"], value["type"], value["value"]) for value in done.json["values"]]
    assert values == [("extra/name", "str", "x: y"), ("extra/lr", "float", 0.5)]
    assert done.json["tensors"] == []
    assert _restore(run, "extra/bad").code == 1


def test_a_tensor_without_a_file_for_it_is_a_wrong_command_line(run: str, builder: Builder) -> None:
    _values(builder)
    done = _restore(run, "m/t")
    assert (done.code, done.stdout) == (2, "")
    assert "--output FILE, --into FILE.pt --as KEY, or --stats" in done.stderr


def test_what_a_file_has_no_room_for_is_said(run: str, builder: Builder, out: pathlib.Path) -> None:
    _values(builder)
    done = _restore(run, "*", "-o", str(out / "t.safetensors"))
    assert done.code == 0
    assert "warning: not in the file, since they are no tensors: extra/step (int)" in done.stderr
    done = _restore(run, "extra/step", "-o", str(out / "u.safetensors"))
    assert (done.code, _left(out)) == (6, ["t.safetensors"])
    assert _restore(run, "extra/*", "-o", str(out / "u.npy")).code == 6
    assert _restore(run, "m/*", "extra/st*", "-o", str(out / "u.npy")).code == 0


@pytest.mark.torch
def test_objects_are_loaded_weights_only_and_others_refused_by_name(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    import datetime
    import io

    def entry(key: str, value: Any, kind: str) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        builder.write(f"10/0/o/{key}", buffer.getvalue())
        builder.manifest[f"0/o/{key}"] = {"type": "object", "location": f"0/o/{key}", "serializer": "torch_save", "obj_type": kind, "replicated": False}  # fmt: skip  # noqa: E501

    entry("good", {"a": [1, 2.5], "t": torch.ones(2)}, "builtins.dict")
    entry("bad", datetime.datetime(2026, 1, 1), "datetime.datetime")
    builder.finish()
    done = _restore(run, "o/good", "--json")
    assert done.json["values"][0]["value"] == {"a": [1, 2.5], "t": "tensor([1., 1.])"}
    assert _restore(run, "o/good", "-o", str(out / "o.pt")).code == 0
    assert torch.load(out / "o.pt")["a"] == [1, 2.5]
    for arguments in (["o/bad"], ["o/bad", "-o", str(out / "p.pt")], ["o/*", "-o", str(out / "p.pt")]):
        done = _restore(run, *arguments)
        assert (done.code, done.stdout) == (6, "")
        assert "0/o/bad: an object of datetime.datetime that would have to be unpickled" in done.stderr
    assert _left(out) == ["o.pt"]


def test_an_unknown_type_is_named_only_by_what_needs_it(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.manifest["0/m/q"] = {"type": "Quux", "location": "x"}
    builder.finish()
    done = _restore(run, "m/q")
    assert (done.code, "of type Quux" in done.stderr) == (6, True)
    assert _restore(run, "m/t", "-o", str(out / "t.npy")).code == 0
    done = _restore(run, "m/*", "-o", str(out / "t.safetensors"))
    assert (done.code, "m/q (Quux)" in done.stderr) == (0, True)


# -- the output ------------------------------------------------------------------------------------------------------


def _simple(builder: Builder) -> None:
    builder.dense("0/model/weight", np.arange(1 << 18, dtype="f4"))
    builder.finish()


def test_an_existing_file_is_kept_unless_forced(run: str, builder: Builder, out: pathlib.Path) -> None:
    _simple(builder)
    (out / "a.npy").write_bytes(b"keep")
    done = _restore(run, "weight", "-o", str(out / "a.npy"))
    assert (done.code, done.stdout) == (6, "")
    assert done.stderr == f"error: {out}/a.npy: exists already\nhint: --force replaces it\n"
    assert (out / "a.npy").read_bytes() == b"keep"
    assert _restore(run, "weight", "-o", str(out / "a.npy"), "--force").code == 0
    assert _npy(out / "a.npy").size == 1 << 18


def test_a_missing_parent_a_directory_and_a_url_are_one_line(run: str, builder: Builder, out: pathlib.Path) -> None:
    _simple(builder)
    (out / "d.pt").mkdir()
    for path, code in ((out / "no/such/a.pt", 4), (out / "d.pt", 2), ("gs://b/x.npy", 2), (out / "d", 2)):
        done = _restore(run, "weight", "-o", str(path))
        assert (done.code, done.stdout) == (code, "")
        assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert _left(out) == ["d.pt"]


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_a_full_disk_leaves_the_old_file_and_no_litter(
    suffix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    if suffix == "pt":
        pytest.importorskip("torch")
    _simple(builder)
    (out / f"b.{suffix}").write_bytes(b"old")
    command = f"{sys.executable} -m snapctl restore-weight {run} weight --force -o {out}/b.{suffix}"
    script = f"ulimit -f 64; trap '' XFSZ; exec {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert f"error: {out}/b.{suffix}: File too large\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert (out / f"b.{suffix}").read_bytes() == b"old"
    assert _left(out) == [f"b.{suffix}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_directory_that_may_not_be_written_to_is_one_line(run: str, builder: Builder, tmp_path: pathlib.Path) -> None:
    _simple(builder)
    (tmp_path / "ro").mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)
    assert _restore(run, "weight", "-o", str(tmp_path / "a.npy")).code == 0  # all that it imports is there now
    os.seteuid(65534)
    try:
        done = _restore(run, "weight", "-o", str(tmp_path / "ro/a.npy"))
    finally:
        os.seteuid(0)
    assert (done.code, done.stdout) == (4, "")
    assert done.stderr == f"error: {tmp_path}/ro: permission denied\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_within_a_second_and_leaves_nothing(
    number: signal.Signals, minigcs: Controlled, out: pathlib.Path
) -> None:
    bucket = Bucket(minigcs.endpoint, "b")
    entries = {"0/m": {"type": "dict", "keys": ["t"]}, "0/m/t": tensor_entry("batched/x", [1 << 26])}
    bucket.write("10/.snapshot_metadata", metadata(entries))
    minigcs.seed("b", [("10/batched/x", 1 << 28)])
    minigcs.configure(latency=0.5)
    command = [sys.executable, "-m", "snapctl", "restore-weight", "gs://b/10", "m/t", "-o", str(out / "t.npy")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(400):
        if _left(out) or process.poll() is not None:
            break
        time.sleep(0.02)
    assert _left(out)
    started = time.monotonic()
    process.send_signal(number)
    code = process.wait(10)
    assert code == 128 + number
    assert time.monotonic() - started < 1
    assert _left(out) == []
    assert b"Traceback" not in process.communicate()[1]


def test_standard_output_takes_a_file_with_a_format(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    for name in ("npy", "safetensors"):
        with open(out / f"t.{name}", "wb") as file:
            command = [sys.executable, "-m", "snapctl", "restore-weight", run, "m/t", "-o", "-", "--format", name]
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0
        assert done.stderr == "found 0/m/t: float32 [12, 4]\n"
    assert np.array_equal(_npy(out / "t.npy"), TABLE)
    assert np.array_equal(load_file(out / "t.safetensors")["m/t"], TABLE)


def test_a_reader_that_goes_away_is_no_error(run: str, builder: Builder) -> None:
    _simple(builder)
    script = f"{sys.executable} -m snapctl restore-weight {run} weight -o - --format npy 2>err.$$ | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}; cat err.$$; rm err.$$"  # noqa: E501
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=run)
    assert done.stdout == "141\nfound 0/model/weight: float32 [262144]\n"


def test_a_full_standard_output_is_an_error_of_the_storage(run: str, builder: Builder) -> None:
    _simple(builder)
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1] == "error: stdout: No space left on device"


def test_binary_data_is_not_written_to_a_terminal(run: str, builder: Builder) -> None:
    _simple(builder)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"]
    done = subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, text=True)
    os.close(secondary)
    os.close(primary)
    assert done.returncode == 2
    assert "binary data is not written to a terminal" in done.stderr


def test_progress_with_a_rate_goes_to_a_terminal_on_stderr_only(minigcs: Controlled, out: pathlib.Path) -> None:
    bucket = Bucket(minigcs.endpoint, "b")
    bucket.write("10/.snapshot_metadata", metadata({"0/t": tensor_entry("batched/x", [1 << 23])}))
    minigcs.seed("b", [("10/batched/x", 1 << 25)])
    minigcs.configure(latency=0.2)
    for more, expected in ((), True), (("--no-progress",), False):
        primary, secondary = pty.openpty()
        command = [sys.executable, "-m", "snapctl", *more, "restore-weight", "gs://b/10", "t", "--force"]
        done = subprocess.Popen(
            [*command, "-o", str(out / "t.npy")],
            stdout=subprocess.PIPE,
            stderr=secondary,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(secondary)
        text = b""
        while True:
            try:
                piece = os.read(primary, 4096)
            except OSError:
                break
            if not piece:
                break
            text += piece
        os.close(primary)
        assert done.wait() == 0
        assert (b"reading" in text and b"/s" in text) == expected


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "x.npy", "--stats"],
        ["-o", "x.npy", "--into", "y.pt", "--as", "k"],
        ["--into", "y.pt"],
        ["--as", "k"],
        ["--stats", "--force"],
        ["--stats", "--format", "npy"],
        ["--stats", "--strip-prefix", "m/"],
        ["-o", "x.bin"],
        ["-o", "-"],
        ["-o", "-", "--format", "zip"],
        ["-o", "-", "--format", "npy", "--json"],
        ["-o", "x.npy", "--rows", "5"],
        ["-o", "x.npy", "--rows", "a:b"],
        ["-o", "x.npy", "--rows", "-3:4"],
        ["-o", "x.npy", "--dtype", "float5"],
        ["-o", "x.npy", "--dtype", "qint8"],
        ["-o", "x.npy", "--rank", "-1"],
        ["-o", "x.npy", "--rank", "1"],
        ["-o", "x.npy", "--rows", "0:13"],
        ["-o", "x.npy", "--rows", "5:4"],
        ["-o", "x.safetensors", "--strip-prefix", "other/"],
        ["-o", "x.safetensors", "--strip-prefix", "m/t"],
    ],
)
def test_what_makes_no_sense_is_2_and_writes_nothing(
    arguments: list[str], run: str, builder: Builder, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    monkeypatch.chdir(out)
    done = _restore(run, "m/t", *arguments)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert _left(out) == []


def test_no_name_is_2(run: str, builder: Builder) -> None:
    _simple(builder)
    assert _restore(run).code == 2


def test_rows_are_read_alone(run: str, builder: Builder, out: pathlib.Path) -> None:
    _two_ranks(builder)
    for text, expected in (("2:5", TABLE[2:5]), (":3", TABLE[:3]), ("10:", TABLE[10:]), ("4:4", TABLE[4:4])):
        for name in ("rows", "cols"):
            done = _restore(run, f"m/{name}.weight", "-o", str(out / "t.npy"), "--rows", text, "--force", "--json")
            assert done.code == 0
            assert np.array_equal(_npy(out / "t.npy"), expected)
            assert (done.json["bytes_read"], done.json["tensors"][0]["shape"]) == (expected.nbytes, [*expected.shape])


def test_the_json_document_has_the_facts(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", random_array((5, 3), "bfloat16"))
    builder.finish()
    done = _restore(run, "m/t", "-o", str(out / "t.npy"), "--dtype", "float32", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.json == {
        "path": f"{run}/10",
        "step": 10,
        "tensors": [
            {
                "path": "m/t",
                "entry": "0/m/t",
                "name": "m/t",
                "dtype": "float32",
                "shape": [5, 3],
                "size_bytes": 60,
                "output": str(out / "t.npy"),
                "stats": None,
            }
        ],
        "bytes_read": 30,
    }


def test_statistics_instead_of_a_file(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", np.array([[1, np.nan, -2], [np.inf, 4, 5]], ml_dtypes.bfloat16))
    builder.dense("0/m/i", np.array([1, 2, 2**62]))
    builder.finish()
    done = _restore(run, "m/t", "--stats", "--json")
    assert done.json["tensors"][0]["stats"] == {
        "count": 6,
        "min": -2.0,
        "max": 5.0,
        "mean": 2.0,
        "nan": 1,
        "inf": 1,
        "first": [1.0, "NaN", -2.0, "Infinity", 4.0],
    }
    assert _restore(run, "m/i", "--stats", "--json").json["tensors"][0]["stats"]["max"] == 2**62
    done = _restore(run, "m/*", "--stats")
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["PATH", "DTYPE", "SHAPE", "MIN", "MAX", "MEAN", "NAN", "INF", "FIRST"]
    assert lines[1].split()[:2] == ["m/t", "bfloat16"]
    assert "4611686018427387904" in lines[2]


# -- into a state dict -----------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_tensor_is_put_into_a_state_dict_in_place_of_what_is_there(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE)
    builder.finish()
    tied = torch.zeros(12, 4)
    torch.save({"emb.weight": tied, "head.weight": tied, "b": torch.ones(2), "n": 3}, out / "s.pt")
    (out / "s.pt").chmod(0o640)
    done = _restore(run, "m/t", "--into", str(out / "s.pt"), "--as", "emb.weight", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.json["tensors"][0]["output"] == str(out / "s.pt")
    state = torch.load(out / "s.pt")
    assert torch.equal(state["emb.weight"], torch.from_numpy(TABLE))
    assert torch.equal(state["head.weight"], state["emb.weight"])  # they were one, and still are
    assert (state["b"].tolist(), state["n"]) == ([1, 1], 3)
    assert os.stat(out / "s.pt").st_mode & 0o777 == 0o640
    assert _left(out) == ["s.pt"]


@pytest.mark.torch
def test_what_does_not_fit_into_the_state_dict_leaves_it_as_it_was(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE)
    builder.dense("0/m/u", TABLE)
    builder.finish()
    state = {"w": torch.zeros(12, 4), "half": torch.zeros(12, 4).half(), "short": torch.zeros(3, 4), "n": 3}
    torch.save(state, out / "s.pt")
    before = (out / "s.pt").read_bytes()
    into = ["--into", str(out / "s.pt"), "--as"]
    for arguments, code, text in (
        (["m/t", *into, "short"], 6, "short is float32 [3, 4], and the tensor is float32 [12, 4]"),
        (["m/t", *into, "half"], 6, "hint: --dtype float16 converts"),
        (["m/t", *into, "n"], 6, "n is a int, not a tensor"),
        (["m/t", *into, "x"], 3, "no such key: x"),
        (["m/t", "m/u", *into, "w"], 2, "--into takes one tensor"),
        (["m/t", "--into", str(out / "none.pt"), "--as", "w"], 3, "no such file"),
    ):
        done = _restore(run, *arguments)
        assert (done.code, done.stdout) == (code, ""), done.stderr
        assert text in done.stderr
    (out / "junk.pt").write_bytes(b"junk")
    assert _restore(run, "m/t", "--into", str(out / "junk.pt"), "--as", "w").code == 2
    assert (out / "s.pt").read_bytes() == before
    assert _left(out) == ["junk.pt", "s.pt"]
    assert _restore(run, "m/t", *into, "half", "--dtype", "float16").code == 0
    assert torch.equal(torch.load(out / "s.pt")["half"], torch.from_numpy(TABLE).half())


# -- without torch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_torch(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment in which torch cannot be imported."""
    (tmp_path / "hidden/torch").mkdir(parents=True)
    (tmp_path / "hidden/torch/__init__.py").write_text("raise ImportError('hidden')\n")
    return {"PYTHONPATH": f"{tmp_path}/hidden:{pathlib.Path(__file__).parent.parent}"}


def test_raw_tensors_need_no_torch_and_others_say_how_to_get_it(
    run: str, builder: Builder, out: pathlib.Path, no_torch: dict[str, str]
) -> None:
    builder.dense("0/m/t", random_array((4, 4), "bfloat16"))
    builder.dense("0/m/c", TABLE)
    builder.manifest["0/m/c"] |= {"serializer": "torch_save"}
    builder.manifest["0/m/q"] = tensor_entry("0/m/t", [2], "qint8", serializer="per_tensor_qtensor")
    builder.finish()
    assert _restore(run, "m/t", "-o", str(out / "t.safetensors"), env=no_torch).code == 0
    assert _restore(run, "m/t", "-o", str(out / "t.npy"), "--dtype", "float32", env=no_torch).code == 0
    assert _restore(run, "m/t", "--stats", env=no_torch).code == 0
    for arguments in (["m/t", "-o", str(out / "t.pt")], ["m/c", "-o", str(out / "c.npy")], ["m/q", "--stats"]):
        done = _restore(run, *arguments, env=no_torch)
        assert (done.code, done.stdout) == (6, "")
        assert done.stderr.endswith("hint: pip install 'snapctl[torch]'\n")
    assert _left(out) == ["t.npy", "t.safetensors"]


# -- Google Cloud Storage --------------------------------------------------------------------------------------------


def test_one_tensor_on_gcs_is_the_manifest_and_one_ranged_get(
    proxied: tuple[Bucket, Controlled], out: pathlib.Path
) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    for name in "atz":
        builder.dense(f"0/m/{name}", TABLE, slab=True)
    builder.finish()
    proxy.reset()
    done = _restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.json["bytes_read"], done.json["path"]) == (0, 192, f"{bucket.url}/10")
    media = [(entry[1], entry[3]) for entry in proxy.stats(log=True)["log"] if "alt=media" in entry[1]]
    assert [span for _, span in media] == [None, "bytes=192-383"]
    assert proxy.stats()["n"] == 4
    assert np.array_equal(_npy(out / "t.npy"), TABLE)


def test_a_storage_that_says_no_is_4_and_leaves_nothing(proxied: tuple[Bucket, Controlled], out: pathlib.Path) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: grid((12, 4), (6, 1))})
    builder.finish()
    proxy.configure(faults=[{"match": "t_6_0.*alt=media", "status": 403, "body": '{"error": {"message": "no"}}'}])
    done = _restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy"))
    assert (done.code, done.stdout) == (4, "")
    assert "permission denied" in done.stderr
    assert _left(out) == []


def test_a_hiccup_is_survived(proxied: tuple[Bucket, Controlled], out: pathlib.Path) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: grid((12, 4), (6, 1))})
    builder.finish()
    proxy.configure(
        faults=[{"match": "t_.*alt=media", "status": 503, "n": 3}, {"match": "t_0_0.*alt=media", "drop": True, "n": 1}]
    )
    assert _restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy")).code == 0
    assert np.array_equal(_npy(out / "t.npy"), TABLE)


def test_a_table_of_all_kinds_of_shardings_over_memory_storage_is_no_special_case(out: pathlib.Path) -> None:
    code = (
        "import sys, numpy as np\nfrom tests.support.shards import Builder, grid\nimport fsspec, snapctl\n"
        "fs = fsspec.filesystem('memory')\n"
        "b = Builder(lambda path, data: fs.pipe_file('/run/' + path, data))\n"
        "t = np.arange(60.).reshape(10, 6)\n"
        "b.sharded('m/t', t, {0: grid((10, 6), (3, 2))[::2], 1: grid((10, 6), (3, 2))[1::2]}); b.finish(2)\n"
        "assert np.array_equal(snapctl.read_tensor('memory://run', 'm/t', rows=(2, 9)), t[2:9])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).parent.parent)


def test_the_header_of_a_safetensors_file_is_what_its_readers_expect(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    builder.dense("0/m/a", np.ones(3, "i1"))
    builder.dense("0/m/b", np.ones(3, "f8"))
    builder.dense("0/m/c", np.ones(3, "f2"))
    builder.finish()
    assert _restore(run, "m/*", "-o", str(out / "t.safetensors")).code == 0
    data = (out / "t.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    spans = {name: header[f"m/{name}"]["data_offsets"] for name in "abc"}
    assert spans == {"b": [0, 24], "c": [24, 30], "a": [30, 33]}  # the widest first: all are aligned
    assert len(data) == 8 + length + 33
