"""Every kind of entry, every dtype, every format."""

from __future__ import annotations

import json
import os
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.restore_weight.common import TABLE, left, load_npy, restore, shard_entry
from tests.support.shards import Builder
from tests.support.snapshots import primitive, tensor_entry


def test_chunks_slabs_and_replicated_entries(run: str, builder: Builder, out: pathlib.Path) -> None:
    big = np.arange(40, dtype="f4").reshape(10, 4)
    builder.chunked("0/m/big", big, [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (3, 4)), ((9, 0), (1, 4))])
    builder.dense("0/m/rep", big[:2], replicated=True)
    builder.dense("0/m/s1", big[0, :3].copy(), slab=True)
    builder.dense("0/m/s2", big.reshape(-1)[3:10].copy(), slab=True)
    builder.finish(2)
    for name, expected in (("0/m/big", big), ("0/m/rep", big[:2]), ("1/m/rep", big[:2]), ("m/s1", big[0, :3]), ("s2", big.reshape(-1)[3:10])):  # fmt: skip  # noqa: E501
        assert restore(run, name, "-o", str(out / "t.npy"), "--force").code == 0
        assert np.array_equal(load_npy(out / "t.npy"), expected)


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
        "0/m/t": {"type": "ShardedTensor", "shards": [shard_entry(0, 2)]},
        "1/m/t": {"type": "ShardedTensor", "shards": [shard_entry(2, 0)]},
    }
    builder.manifest.update(entries)
    builder.write("10/0/m/s", np.float32(2.5).tobytes())
    builder.write("10/s/0", np.arange(8, dtype="f4").tobytes())
    builder.finish(2)
    shapes = {"s": (), "z0": (0,), "z1": (0, 3), "zb": (0, 5), "zc": (0, 2), "t": (2, 4)}
    for name, shape in shapes.items():
        assert restore(run, f"m/{name}", "-o", str(out / "t.npy"), "--force").code == 0
        assert load_npy(out / "t.npy").shape == shape
        assert restore(run, f"m/{name}", "-o", str(out / "t.pt"), "--force").code == 0
        assert tuple(torch.load(out / "t.pt").shape) == shape
    assert restore(run, "m/*", "-o", str(out / "t.safetensors"), "--strip-prefix", "m/").code == 0
    loaded = load_file(out / "t.safetensors")
    assert {name: array.shape for name, array in loaded.items()} == shapes
    assert loaded["z1"].dtype == np.int64
    done = restore(run, "m/z0", "--stats", "--json")
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
    done = restore(run, "m/*", "-o", str(out / "all.pt"), "--strip-prefix", "m/")
    assert done.code == 0, done.stderr
    for name, found in torch.load(out / "all.pt").items():
        value = values[name]
        assert found.dtype == value.dtype
        one, other = (found.int_repr(), value.int_repr()) if value.is_quantized else (found, value)
        assert one.contiguous().view(torch.uint8).tolist() == other.contiguous().view(torch.uint8).tolist()
        if value.is_quantized:
            assert torch.equal(found.dequantize(), value.dequantize())
    for name, value in values.items():
        done = restore(run, f"m/{name}", "-o", str(out / f"{name}.npy"))
        if name in ("bf16", "f8e4", "f8e5", "q8", "qch", "c32"):
            assert done.code == 6, name
            assert "hint: " in done.stderr
            assert "--dtype" in done.stderr
        else:
            assert done.code == 0
            assert load_npy(out / f"{name}.npy").tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes()
    assert not [name for name in left(out) if "snapctl-tmp" in name]
    for name in ("q8", "qch", "c32", "c128"):
        assert restore(run, f"m/{name}", "-o", str(out / "t.safetensors")).code == 6
    converted = {"bf16": "float32", "f8e4": "float32", "q8": "float32", "qch": "float64", "c32": "complex64"}
    for name, dtype in converted.items():
        for suffix in ("npy", "safetensors"):
            done = restore(run, f"m/{name}", "-o", str(out / f"{name}2.{suffix}"), "--dtype", dtype)
            assert (done.code, name) == (0, name), done.stderr
        value = values[name].dequantize() if values[name].is_quantized else values[name]
        expected = value.to(getattr(torch, dtype)).numpy()
        assert np.array_equal(load_npy(out / f"{name}2.npy"), expected, equal_nan=True)
        assert np.array_equal(load_file(out / f"{name}2.safetensors")[f"m/{name}"], expected, equal_nan=True)
    assert restore(run, "m/c64", "-o", str(out / "x.npy"), "--dtype", "float32").code == 6
    done = restore(run, "m/*", "--stats", "--json")
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
    assert restore(run, "m/t", "-o", str(out / "t.pt"), "--rows", "2:4").code == 0
    found = torch.load(out / "t.pt")
    assert torch.equal(found, torch.from_numpy(TABLE[2:4]))
    assert found.untyped_storage().nbytes() == 32  # the slice, not its slab
    assert restore(run, "m/t*", "-o", str(out / "d.pt")).code == 0
    assert list(torch.load(out / "d.pt")) == ["m/t"]
    assert restore(run, "m/*", "-o", str(out / "e.pt"), "--strip-prefix", "m/").code == 0
    whole = torch.load(out / "e.pt")
    assert (whole["n"], whole["u"].shape) == (3, (1000,))
    assert os.path.getsize(out / "t.pt") < 3000


def test_the_header_of_a_safetensors_file_is_what_its_readers_expect(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    builder.dense("0/m/a", np.ones(3, "i1"))
    builder.dense("0/m/b", np.ones(3, "f8"))
    builder.dense("0/m/c", np.ones(3, "f2"))
    builder.finish()
    assert restore(run, "m/*", "-o", str(out / "t.safetensors")).code == 0
    data = (out / "t.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    spans = {name: header[f"m/{name}"]["data_offsets"] for name in "abc"}
    assert spans == {"b": [0, 24], "c": [24, 30], "a": [30, 33]}  # the widest first: all are aligned
    assert len(data) == 8 + length + 33
