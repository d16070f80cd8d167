"""Random sound snapshots: every kind of entry, odd keys, nested containers, ranks, slabs, chunks, shards, records."""

from __future__ import annotations

import io
import random
import struct
import time
import zipfile
from typing import Any

import google_crc32c
import numpy as np

from snapctl.save_record import BlobSum, SaveRecord, format_save_record
from tests.support.shards import DTYPES, Box, cut, part, random_array
from tests.support.snapshots import Write, encode, metadata, primitive, tensor_entry

KEYS = ("w", "b", "weight", "a/b", "50%", "a%2Fb", "ü", "with space", "[x]", "0", "00", "-1", "x.y", "😀")


def archive(members: dict[str, bytes] | None = None) -> bytes:
    """A zip archive laid out as ``torch.save`` does it; its pickle is of a dict of plain values."""
    import pickle

    members = members or {"data.pkl": pickle.dumps({"lr": 0.1, "betas": (0.9, 0.99)}, protocol=2), "version": b"3\n"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        for name, data in members.items():
            out.writestr(f"archive/{name}", data)
    return file.getvalue()


class Snapshot:
    """One checkpoint in the making: its manifest and its blobs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.manifest: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.slabs: dict[str, bytearray] = {}
        self.record: bytes | None = None
        self.world_size = rng.choice((1, 1, 2, 3, 4))

    # -- entries ---------------------------------------------------------------------------------------------------

    def tensor(self, location: str, array: np.ndarray[Any, Any], *, slab: str | None = None) -> dict[str, Any]:
        return self._stored(location, array.shape, array.dtype.name, array.tobytes(), slab)

    def _stored(
        self, location: str, shape: Any, dtype: str, data: bytes, slab: str | None, serializer: str = "buffer_protocol"
    ) -> dict[str, Any]:
        if slab is not None:
            held = self.slabs.setdefault(f"batched/{slab}", bytearray())
            start = len(held)
            held += data
            return tensor_entry(f"batched/{slab}", shape, dtype, byte_range=[start, len(held)], serializer=serializer)
        if data or self.rng.random() < 0.5:  # a blob of no bytes may be there or not
            self.blobs[location] = data
        whole = [0, len(data)] if self.rng.random() < 0.2 else None
        return tensor_entry(location, shape, dtype, byte_range=whole, serializer=serializer)

    def quantized(self, location: str, shape: Any, *, slab: str | None = None) -> dict[str, Any]:
        elements = random_array(shape, "int8", self.rng.randrange(1 << 30)).tobytes()
        if self.rng.random() < 0.5 or not shape:
            data = elements + struct.pack("<dq", 0.5, 3)
            return self._stored(location, shape, "qint8", data, slab, "per_tensor_qtensor")
        axis = self.rng.randrange(len(shape))
        data = struct.pack("<q", axis) + elements + bytes(16 * shape[axis])
        return self._stored(location, shape, "qint8", data, slab, "per_channel_qtensor")

    def boxes(self, prefix: str, array: np.ndarray[Any, Any], boxes: list[Box]) -> list[dict[str, Any]]:
        return [
            {
                "offsets": list(box[0]),
                "sizes": list(box[1]),
                "tensor": self._stored(
                    f"{prefix}_{'_'.join(map(str, box[0]))}_{number}",
                    box[1],
                    array.dtype.name,
                    part(array, box),
                    "5ab" if self.rng.random() < 0.3 else None,
                ),
            }
            for number, box in enumerate(boxes)
        ]

    # -- trees -----------------------------------------------------------------------------------------------------

    def fill(self, rank: int, path: str, depth: int) -> None:
        """A container at `path` of one rank, with whatever below it."""
        rng = self.rng
        count = rng.randrange(0, 4)
        if rng.random() < 0.25:
            self.manifest[f"{rank}/{path}"] = {"type": "list"}
            keys: list[Any] = list(range(count))
        else:
            keys = rng.sample(KEYS, count) + rng.sample((7, 12, True), rng.randrange(0, 2))
            self.manifest[f"{rank}/{path}"] = {"type": rng.choice(("dict", "OrderedDict")), "keys": keys}
        for key in keys:
            child = f"{path}/{encode(key)}"
            if depth > 0 and rng.random() < 0.3:
                self.fill(rank, child, depth - 1)
            else:
                self.manifest[f"{rank}/{child}"] = self.leaf(rank, child)

    def leaf(self, rank: int, path: str) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(("tensor", "tensor", "slab", "chunked", "object", "primitive", "quantized"))
        location = f"{rank}/{path}"
        shape = tuple(rng.randrange(0, 6) for _ in range(rng.randrange(0, 4)))
        if kind == "primitive":
            return primitive(rng.choice((1, -7, True, 2.5, float("nan"), "text", "")))
        if kind == "object":
            self.blobs[location] = archive()
            obj = {"type": "object", "location": location, "serializer": "torch_save"}
            return obj | {"obj_type": "builtins.dict", "replicated": False}
        if kind == "quantized":
            shape = tuple(size + 1 for size in shape)
            return self.quantized(location, shape, slab="c0de" if rng.random() < 0.5 else None)
        array = random_array(shape, rng.choice(DTYPES), rng.randrange(1 << 30))
        if kind == "chunked":
            boxes = cut(shape, rng, rng.randrange(1, 5)) if array.size else []
            return {
                "type": "ChunkedTensor",
                "dtype": f"torch.{array.dtype.name}",
                "shape": list(shape),
                "chunks": self.boxes(location, array, boxes),
                "replicated": False,
            }
        return self.tensor(location, array, slab=rng.choice(("5ab", "c0de")) if kind == "slab" else None)

    def share(self, path: str, key: str, by_rank: dict[int, dict[str, Any]]) -> None:
        """Entries of several ranks under one key of a container that every rank has."""
        for rank in range(self.world_size):
            self.manifest.setdefault(f"{rank}/{path}", {"type": "dict", "keys": []})["keys"].append(key)
        for rank, entry in by_rank.items():
            self.manifest[f"{rank}/{path}/{encode(key)}"] = entry

    def add_shared(self) -> None:
        rng = self.rng
        for number in range(rng.randrange(0, 4)):
            key = f"shared{number}"
            kind = rng.choice(("ShardedTensor", "DTensor", "replicated"))
            shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
            array = random_array(shape, rng.choice(DTYPES), rng.randrange(1 << 30))
            if kind == "replicated":
                entry = self.tensor(f"replicated/model/{key}", array) | {"replicated": True}
                self.share("model", key, {0: entry})
                continue
            shards = self.boxes(f"sharded/model/{key}", array, cut(shape, rng, rng.randrange(1, 7)))
            held: dict[int, list[Any]] = {rank: [] for rank in range(self.world_size)}
            for shard in shards:
                held[rng.randrange(self.world_size)].append(shard)
            if kind == "ShardedTensor":
                entries = {rank: {"type": kind, "shards": items} for rank, items in held.items()}
            else:
                mesh = {"mesh": list(range(self.world_size)), "dim_map": [[0]] + [[-1]] * (len(shape) - 1)}
                entries = {rank: {"type": kind, "shards": items, **mesh} for rank, items in held.items() if items}
            self.share("model", key, entries)

    # -- the whole -------------------------------------------------------------------------------------------------

    def seal(self, *, recorded: bool) -> None:
        """Puts the slabs and, if wanted, the save record to the blobs."""
        for location, data in self.slabs.items():
            self.blobs[location] = bytes(data)
        self.slabs = {}
        if recorded:
            content = metadata(self.manifest, self.world_size)
            sums = {location: summed(data) for location, data in self.blobs.items()}
            record = SaveRecord(time.time(), self.world_size, summed(content), blobs=sums)
            self.record = format_save_record(record)

    def write(self, write: Write, name: str) -> None:
        for location, data in self.blobs.items():
            write(f"{name}/{location}", data)
        if self.record is not None:
            write(f"{name}/.snapctl/save.json", self.record)
        write(f"{name}/.snapshot_metadata", metadata(self.manifest, self.world_size))


def summed(data: bytes) -> BlobSum:
    return BlobSum(len(data), int(google_crc32c.value(data)))


def random_snapshot(seed: int) -> Snapshot:
    """A sound one."""
    rng = random.Random(seed)
    snapshot = Snapshot(rng)
    for rank in range(snapshot.world_size):
        for name in ("optim", "extra_state"):
            snapshot.fill(rank, name, 2)
    snapshot.add_shared()
    snapshot.seal(recorded=rng.random() < 0.7)
    return snapshot


def full_snapshot(*, recorded: bool = False) -> Snapshot:
    """A sound one of two ranks with one entry of each kind, each in a blob of its own or, in `slab`, three in one."""
    snapshot = Snapshot(random.Random(1))
    snapshot.world_size = 2
    floats = np.arange(12, dtype="f4").reshape(4, 3)
    model: dict[str, dict[str, Any]] = {}
    for key in ("slab_a", "slab_b", "slab_c"):
        model[key] = snapshot.tensor("", floats, slab="5ab")
    snapshot.blobs["0/model/dense"] = floats.tobytes()
    model["dense"] = tensor_entry("0/model/dense", [4, 3])
    rows: list[Box] = [((row, 0), (1, 3)) for row in range(4)]
    model["chunked"] = {
        "type": "ChunkedTensor",
        "dtype": "torch.float32",
        "shape": [4, 3],
        "chunks": _plain_boxes(snapshot, "0/model/chunked", floats, rows),
        "replicated": False,
    }
    snapshot.blobs["0/model/object"] = archive()
    model["object"] = {
        "type": "object",
        "location": "0/model/object",
        "serializer": "torch_save",
        "obj_type": "builtins.dict",
        "replicated": False,
    }
    snapshot.blobs["0/model/quantized"] = struct.pack("<q", 0) + bytes(12) + bytes(16 * 4)
    model["quantized"] = tensor_entry("0/model/quantized", [4, 3], "qint8", serializer="per_channel_qtensor")
    model["number"] = primitive(2.5)
    snapshot.manifest["0/model"] = {"type": "dict", "keys": []}
    snapshot.manifest["1/model"] = {"type": "dict", "keys": []}
    for key, entry in model.items():
        snapshot.manifest["0/model"]["keys"].append(key)
        snapshot.manifest[f"0/model/{key}"] = entry
    snapshot.manifest["0/items"] = {"type": "list"}
    for number in range(3):
        snapshot.manifest[f"0/items/{number}"] = primitive(number)
    for kind in ("ShardedTensor", "DTensor"):
        shards = _plain_boxes(snapshot, f"sharded/model/{kind}", floats, rows)
        mesh = {} if kind == "ShardedTensor" else {"mesh": [0, 1], "dim_map": [[0], [-1]]}
        entries = {rank: {"type": kind, "shards": shards[rank * 2 : rank * 2 + 2], **mesh} for rank in (0, 1)}
        snapshot.share("model", kind, entries)
    snapshot.blobs["replicated/model/copy"] = floats.tobytes()
    snapshot.share("model", "copy", {0: tensor_entry("replicated/model/copy", [4, 3], replicated=True)})
    snapshot.seal(recorded=recorded)
    return snapshot


def _plain_boxes(
    snapshot: Snapshot, prefix: str, array: np.ndarray[Any, Any], boxes: list[Box]
) -> list[dict[str, Any]]:
    shards = []
    for box in boxes:
        location = f"{prefix}_{box[0][0]}"
        snapshot.blobs[location] = part(array, box)
        tensor = tensor_entry(location, box[1], array.dtype.name)
        shards.append({"offsets": list(box[0]), "sizes": list(box[1]), "tensor": tensor})
    return shards
