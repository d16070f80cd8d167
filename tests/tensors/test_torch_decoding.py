"""torch_save and quantized tensors, weights-only, in no more memory than they need."""

from __future__ import annotations

import datetime
import io
import pathlib
import struct
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),  # the tests' own
]

from snapctl.checkpoints import read_manifest  # noqa: E402
from snapctl.errors import DamagedError, RefusedError, UnsupportedEntryError  # noqa: E402
from snapctl.manifest import ObjectEntry  # noqa: E402
from snapctl.storage import LocalStorage, open_storage  # noqa: E402
from snapctl.tensors.layout import TensorLayout, resolve_layouts  # noqa: E402
from snapctl.tensors.reader import TensorReader, region_of_rows  # noqa: E402
from snapctl.tensors.torch_decoding import torch_elements, values_of  # noqa: E402
from tests.support.servers import Bucket, Controlled  # noqa: E402
from tests.support.snapshots import local_writer, metadata, tensor_entry  # noqa: E402

Checkpoint = tuple[TensorReader, dict[str, TensorLayout]]


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _open(root: pathlib.Path, entries: dict[str, Any], blobs: dict[str, bytes]) -> Checkpoint:
    write = local_writer(root)
    for location, data in blobs.items():
        write(f"10/{location}", data)
    write("10/.snapshot_metadata", metadata(entries))
    storage = LocalStorage(str(root / "10"))
    found = read_manifest(storage).logical_entries()
    return TensorReader(storage), {entry.path: resolve_layouts(entry)[0] for entry in found}


def _one(root: pathlib.Path, value: Any, dtype: str | None = None, shape: list[int] | None = None) -> Checkpoint:
    dtype = dtype or str(value.dtype)[6:]
    entry = tensor_entry("t", list(value.shape) if shape is None else shape, dtype, serializer="torch_save")
    return _open(root, {"0/t": entry}, {"t": saved(value)})


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float32", "bfloat16", "float8_e5m2", "bool", "uint16"])
def test_a_torch_save_tensor_is_read_bit_by_bit(tmp_path: pathlib.Path, dtype: str) -> None:
    value = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    reader, layouts = _one(tmp_path, value)
    found = reader.read(layouts["t"], (1, 3))
    assert found.dtype.name == dtype
    assert found.tobytes() == value[1:].contiguous().view(torch.uint8).numpy().tobytes()
    again = reader.read_torch(layouts["t"])
    assert again.dtype == value.dtype
    assert torch.equal(again.view(torch.uint8), value.view(torch.uint8))


def test_conjugates_and_transposes_come_as_they_look(tmp_path: pathlib.Path) -> None:
    value = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).conj().t()
    reader, layouts = _one(tmp_path, value)
    assert np.array_equal(reader.read(layouts["t"]), value.resolve_conj().numpy())


def test_a_view_does_not_bring_its_storage_along(tmp_path: pathlib.Path) -> None:
    reader, layouts = _one(tmp_path, torch.zeros(100_000)[10:13])
    found = reader.read_torch(layouts["t"])
    assert found.untyped_storage().nbytes() == 12
    (tmp_path / "two").mkdir()
    reader, layouts = _one(tmp_path / "two", torch.zeros(100_000))
    assert reader.read_torch(layouts["t"], (5, 8)).untyped_storage().nbytes() == 12


def test_a_large_one_is_read_once_and_not_held_twice(tmp_path: pathlib.Path) -> None:
    value = torch.arange(2_000_000, dtype=torch.int64)
    reader, layouts = _one(tmp_path, value)
    assert torch.equal(reader.read_torch(layouts["t"]), value)
    assert reader.bytes_read < 16_000_000 + (2 << 20)


def test_a_scalar_and_nothing_are_tensors_too(tmp_path: pathlib.Path) -> None:
    reader, layouts = _one(tmp_path, torch.tensor(2.5))
    assert reader.read(layouts["t"]) == np.float32(2.5)
    assert reader.read_torch(layouts["t"]).shape == ()
    entry = tensor_entry("none", [0, 3], "complex64", serializer="torch_save")
    reader, layouts = _open(tmp_path / "z", {"0/t": entry}, {})
    assert reader.read_torch(layouts["t"]).shape == (0, 3)
    assert reader.read(layouts["t"]).dtype == np.complex64


def test_what_the_blob_holds_must_be_what_the_manifest_says(tmp_path: pathlib.Path) -> None:
    reader, layouts = _one(tmp_path, torch.zeros(3), shape=[4])
    with pytest.raises(DamagedError, match=r"holds float32 \[3\], and the manifest says float32 \[4\]") as caught:
        reader.read(layouts["t"])
    assert caught.value.kind == "size-mismatch"
    reader, layouts = _one(tmp_path, torch.zeros(3), dtype="float64")
    with pytest.raises(DamagedError):
        reader.read(layouts["t"])


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04 and then nothing"])
def test_garbage_is_undecodable(tmp_path: pathlib.Path, data: bytes) -> None:
    reader, layouts = _open(tmp_path, {"0/t": tensor_entry("t", [3], serializer="torch_save")}, {"t": data})
    with pytest.raises(DamagedError) as caught:
        reader.read(layouts["t"])
    assert (caught.value.kind, caught.value.blob) == ("undecodable", "t")


def test_an_archive_that_was_cut_off_anywhere_is_undecodable(tmp_path: pathlib.Path) -> None:
    data = saved(torch.arange(1000.0))
    for length in range(1, len(data), 97):
        root = tmp_path / str(length)
        reader, layouts = _open(root, {"0/t": tensor_entry("t", [1000], serializer="torch_save")}, {"t": data[:length]})
        with pytest.raises(DamagedError):
            reader.read(layouts["t"])


def test_what_is_no_tensor_is_undecodable_and_what_is_not_dense_is_unsupported(tmp_path: pathlib.Path) -> None:
    blobs = {"t": saved([1, 2]), "s": saved(torch.eye(3).to_sparse())}
    entries = {f"0/{name}": tensor_entry(name, [3, 3], serializer="torch_save") for name in blobs}
    reader, layouts = _open(tmp_path, entries, blobs)
    with pytest.raises(DamagedError, match="holds a list"):
        reader.read(layouts["t"])
    with pytest.raises(UnsupportedEntryError, match="sparse"):
        reader.read(layouts["s"])


class Custom:
    """Not on any list."""


def test_nothing_is_unpickled_beyond_the_weights_only_list(tmp_path: pathlib.Path) -> None:
    blobs = {"t": saved(datetime.datetime(2026, 1, 1)), "c": saved(Custom()), "d": saved({"a": [1, torch.ones(2)]})}
    reader, _ = _open(tmp_path, {}, blobs)
    with pytest.raises(RefusedError, match=r"0/t: an object of datetime\.datetime that would have to be unpickled"):
        reader.read_object("0/t", ObjectEntry("t", "torch_save", "datetime.datetime"))
    with pytest.raises(RefusedError, match="Custom"):
        reader.read_object("0/c", ObjectEntry("c", "torch_save", "m.Custom"))
    found = reader.read_object("0/d", ObjectEntry("d", "torch_save", "builtins.dict"))
    assert found["a"][0] == 1


def test_shards_of_torch_save_are_put_together(tmp_path: pathlib.Path) -> None:
    whole = torch.arange(20.0).reshape(10, 2).to(torch.complex64)
    shards = [
        {
            "offsets": [o, 0],
            "sizes": [5, 2],
            "tensor": tensor_entry(f"s{o}", [5, 2], "complex64", serializer="torch_save"),
        }
        for o in (0, 5)
    ]
    blobs = {"s0": saved(whole[:5].clone()), "s5": saved(whole[5:].clone())}
    reader, layouts = _open(tmp_path, {"0/t": {"type": "ShardedTensor", "shards": shards}}, blobs)
    assert torch.equal(torch.from_numpy(reader.read(layouts["t"], (3, 8))), whole[3:8])
    assert torch.equal(reader.read_torch(layouts["t"], (3, 8)), whole[3:8])
    (block,) = reader.iter_blocks([(layouts["t"], region_of_rows(layouts["t"]))])
    assert torch.equal(torch.from_numpy(block.array), whole)


def test_shards_of_which_only_the_blobs_know_the_dtype(tmp_path: pathlib.Path) -> None:
    """0.0.x: a shard carries its location directly."""
    shards = "".join(f"    - offsets: [{o}, 0]\n      sizes: [5, 2]\n      location: sharded/t_{o}_0\n" for o in (0, 5))
    text = f"version: 0.0.1\nworld_size: 1\nmanifest:\n  0/t:\n    type: ShardedTensor\n    shards:\n{shards}"
    whole = torch.arange(20, dtype=torch.float16).reshape(10, 2)
    write = local_writer(tmp_path)
    write("10/.snapshot_metadata", text.encode())
    for o in (0, 5):
        write(f"10/sharded/t_{o}_0", saved(whole[o : o + 5].clone()))
    storage = LocalStorage(str(tmp_path / "10"))
    (entry,) = read_manifest(storage).logical_entries()
    reader = TensorReader(storage)
    (layout,) = resolve_layouts(entry)
    assert (layout.dtype, layout.shape) == (None, (10, 2))
    found = reader.read(layout)
    assert found.dtype == np.float16
    assert found.tobytes() == whole.numpy().tobytes()


# -- quantized -------------------------------------------------------------------------------------------------------


def _per_tensor(value: Any) -> bytes:
    return bytes(value.int_repr().numpy().tobytes() + struct.pack("<dq", value.q_scale(), value.q_zero_point()))


def _per_channel(value: Any) -> bytes:
    head = struct.pack("<q", value.q_per_channel_axis()) + value.int_repr().numpy().tobytes()
    scales = value.q_per_channel_scales().double().numpy().tobytes()
    return bytes(head + scales + value.q_per_channel_zero_points().long().numpy().tobytes())


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32"])
@pytest.mark.parametrize("serializer", ["per_tensor_qtensor", "per_channel_qtensor", "torch_save"])
def test_quantized_tensors_keep_their_integers_and_scales(tmp_path: pathlib.Path, dtype: str, serializer: str) -> None:
    values = torch.randn(3, 4)
    kind = getattr(torch, dtype)
    if serializer == "per_channel_qtensor":
        value = torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 0, 2]), 0, kind)
        data = _per_channel(value)
    else:
        value = torch.quantize_per_tensor(values, 0.1, 2, kind)
        data = _per_tensor(value) if serializer == "per_tensor_qtensor" else saved(value)
    entry = tensor_entry("slab", [3, 4], dtype, serializer=serializer, byte_range=[7, 7 + len(data)])
    reader, layouts = _open(tmp_path, {"0/t": entry}, {"slab": b"seven b" + data + b"more"})
    found = reader.read_torch(layouts["t"])
    assert found.qscheme() == value.qscheme()
    assert torch.equal(found.int_repr(), value.int_repr())
    assert torch.equal(found.dequantize(), value.dequantize())
    with pytest.raises(UnsupportedEntryError, match=dtype) as caught:
        reader.read(layouts["t"])
    assert "--dtype float32" in str(caught.value.hint)


def test_quantized_parts_of_one_scale_are_put_together_and_others_are_not(tmp_path: pathlib.Path) -> None:
    whole = torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8)
    other = torch.quantize_per_tensor(torch.randn(2, 3), 0.5, 0, torch.qint8)

    def chunked(*locations: str) -> dict[str, Any]:
        tensors = [tensor_entry(loc, [2, 3], "qint8", serializer="per_tensor_qtensor") for loc in locations]
        chunks = [{"offsets": [2 * n, 0], "sizes": [2, 3], "tensor": tensor} for n, tensor in enumerate(tensors)]
        return {"type": "ChunkedTensor", "dtype": "torch.qint8", "shape": [4, 3], "chunks": chunks, "replicated": False}

    blobs = {"a": _per_tensor(whole[:2]), "b": _per_tensor(whole[2:]), "c": _per_tensor(other)}
    reader, layouts = _open(tmp_path, {"0/t": chunked("a", "b"), "0/u": chunked("a", "c")}, blobs)
    assert torch.equal(reader.read_torch(layouts["t"]).int_repr(), whole.int_repr())
    with pytest.raises(UnsupportedEntryError, match="scales"):
        reader.read_torch(layouts["u"])


def test_quantized_bytes_of_the_wrong_length_are_undecodable(tmp_path: pathlib.Path) -> None:
    entries = {"0/t": tensor_entry("t", [3], "qint8", serializer="per_channel_qtensor")}
    for data in (b"", struct.pack("<q", 5) + bytes(100), struct.pack("<q", 0) + bytes(7)):
        reader, layouts = _open(tmp_path, entries, {"t": data})
        with pytest.raises(DamagedError) as caught:
            reader.read_torch(layouts["t"])
        assert caught.value.kind == "undecodable"


def test_zero_points_that_no_quantized_tensor_has_are_undecodable(tmp_path: pathlib.Path) -> None:
    entries = {
        "0/t": tensor_entry("t", [3], "qint8", serializer="per_tensor_qtensor"),
        "0/c": tensor_entry("c", [1], "quint8", serializer="per_channel_qtensor"),
        "0/s": tensor_entry("s", [2], "qint8", serializer="torch_save"),
    }
    blobs = {
        "t": bytes(3) + struct.pack("<dq", 0.5, 1 << 60),
        "c": struct.pack("<q", 0) + bytes(1) + struct.pack("<dq", 0.5, -1),
        "s": saved(torch._make_per_tensor_quantized_tensor(torch.ones(2, dtype=torch.int8), 0.5, 1 << 60)),
    }
    reader, layouts = _open(tmp_path, entries, blobs)
    for name in entries:
        with pytest.raises(DamagedError) as caught:
            values_of(reader.read_torch(layouts[name[2:]]), entry=name)
        assert caught.value.kind == "undecodable"


# -- raw tensors as torch tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "uint64", "complex128"])
def test_a_raw_tensor_is_read_into_a_torch_tensor_of_any_strides(tmp_path: pathlib.Path, dtype: str) -> None:
    value = torch.arange(24).reshape(6, 4).to(getattr(torch, dtype))
    data = value.view(torch.uint8).numpy().tobytes()
    reader, layouts = _open(tmp_path, {"0/t": tensor_entry("t", [6, 4], dtype)}, {"t": data})
    assert torch.equal(reader.read_torch(layouts["t"]).view(torch.uint8), value.view(torch.uint8))
    target = torch.zeros(8, 6, dtype=value.dtype).t()[:, ::2]
    torch_elements(target)[...] = torch_elements(value)
    assert torch.equal(target.contiguous().view(torch.uint8), value.view(torch.uint8))


def test_over_the_network_an_archive_takes_a_few_requests(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    value = torch.randn(1_500_000).to(torch.complex64)
    bucket.write("10/t", saved(value))
    entry = tensor_entry("t", [1_500_000], "complex64", serializer="torch_save")
    bucket.write("10/.snapshot_metadata", metadata({"0/t": entry}))
    storage = open_storage(f"{bucket.url}/10")
    (logical,) = read_manifest(storage).logical_entries()
    proxy.reset()
    reader = TensorReader(storage)
    assert torch.equal(reader.read_torch(resolve_layouts(logical)[0]), value)
    assert proxy.stats()["n"] <= 8


def test_many_small_ones_over_the_network_are_read_at_once(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    entries = {}
    for number in range(40):
        bucket.write(f"10/o/{number}", saved(torch.full((3,), number).to(torch.complex64)))
        entries[f"0/t{number}"] = tensor_entry(f"o/{number}", [3], "complex64", serializer="torch_save")
    bucket.write("10/.snapshot_metadata", metadata(entries))
    storage = open_storage(f"{bucket.url}/10")
    layouts = [resolve_layouts(entry)[0] for entry in read_manifest(storage).logical_entries()]
    proxy.reset()
    proxy.configure(latency=0.05)
    reader = TensorReader(storage)
    reader.prefetch(layouts)
    assert [int(reader.read(layout)[0].real) for layout in layouts] == list(range(40))
    assert (proxy.stats()["n"], proxy.stats()["maxinflight"] > 10) == (41, True)
