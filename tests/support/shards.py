"""Sharded, chunked and batched tensors written by hand, and random ways to cut a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.snapshots import Write, metadata, tensor_entry

Box = tuple[tuple[int, ...], tuple[int, ...]]

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
DTYPES = (*FLOATS, *INTEGERS, "complex64", "complex128")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def cut(shape: Sequence[int], rng: Any, parts: int) -> list[Box]:
    """Boxes that tile a shape: random cuts, each through one box."""
    boxes: list[Box] = [((0,) * len(shape), tuple(shape))]
    for _ in range(parts - 1):
        index = rng.randrange(len(boxes))
        offsets, sizes = boxes[index]
        dims = [d for d, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, sizes[dim])
        boxes[index] = (offsets, (*sizes[:dim], at, *sizes[dim + 1 :]))
        upper = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes.append((upper, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return boxes


def grid(shape: Sequence[int], cuts: Sequence[int]) -> list[Box]:
    """A regular grid of boxes."""
    boxes: list[Box] = []
    for index in np.ndindex(*cuts):
        starts = [i * size // n for i, size, n in zip(index, shape, cuts, strict=True)]
        stops = [(i + 1) * size // n for i, size, n in zip(index, shape, cuts, strict=True)]
        boxes.append((tuple(starts), tuple(b - a for a, b in zip(starts, stops, strict=True))))
    return boxes


def part(array: np.ndarray[Any, Any], box: Box) -> bytes:
    slices = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
    return np.ascontiguousarray(array[slices]).tobytes()


class Builder:
    """Collects the entries of one checkpoint and writes its blobs; small ones can go into a slab."""

    def __init__(self, write: Write, step: int = 10) -> None:
        self.write = write
        self.step = step
        self.manifest: dict[str, Any] = {}
        self._slab = bytearray()

    def dense(self, path: str, array: np.ndarray[Any, Any], *, replicated: bool = False, slab: bool = False) -> None:
        self.manifest[path] = self._tensor(path, array.shape, array.dtype.name, array.tobytes(), slab) | {
            "replicated": replicated
        }

    def chunked(self, path: str, array: np.ndarray[Any, Any], boxes: Sequence[Box]) -> None:
        self.manifest[path] = {
            "type": "ChunkedTensor",
            "dtype": f"torch.{array.dtype.name}",
            "shape": list(array.shape),
            "chunks": [self._shard(path, array, box, False) for box in boxes],
            "replicated": False,
        }

    def sharded(
        self,
        path: str,
        array: np.ndarray[Any, Any],
        by_rank: Mapping[int, Sequence[Box]],
        *,
        kind: str = "ShardedTensor",
        slab: bool = False,
    ) -> None:
        for rank, boxes in by_rank.items():
            entry: dict[str, Any] = {"type": kind, "shards": [self._shard(path, array, box, slab) for box in boxes]}
            if kind == "DTensor":
                entry |= {"mesh": [list(by_rank)], "dim_map": [[0]] + [[-1]] * (array.ndim - 1)}
            self.manifest[f"{rank}/{path}"] = entry

    def _shard(self, path: str, array: np.ndarray[Any, Any], box: Box, slab: bool) -> dict[str, Any]:
        location = f"sharded/{path}_{'_'.join(map(str, box[0]))}"
        tensor = self._tensor(location, box[1], array.dtype.name, part(array, box), slab)
        return {"offsets": list(box[0]), "sizes": list(box[1]), "tensor": tensor}

    def _tensor(self, location: str, shape: Sequence[int], dtype: str, data: bytes, slab: bool) -> dict[str, Any]:
        if not slab:
            self.write(f"{self.step}/{location}", data)
            return tensor_entry(location, shape, dtype)
        start = len(self._slab)
        self._slab += data
        return tensor_entry("batched/0f0f", shape, dtype, byte_range=[start, len(self._slab)])

    def finish(self, world_size: int = 1) -> dict[str, Any]:
        """Writes containers, slab and manifest."""
        containers: dict[str, list[str]] = {}
        for path in self.manifest:
            parent, _, key = path.rpartition("/")
            containers.setdefault(parent, []).append(key.replace("%2F", "/").replace("%25", "%"))
        manifest = {path: {"type": "dict", "keys": keys} for path, keys in containers.items()} | self.manifest
        if self._slab:
            self.write(f"{self.step}/batched/0f0f", bytes(self._slab))
        self.write(f"{self.step}/.snapshot_metadata", metadata(manifest, world_size))
        return manifest


def random_array(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bits: NaNs of every kind, subnormals, everything."""
    kind = dtype_of(dtype)
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, tuple(shape)).astype(bool)
    data = rng.integers(0, 256, math.prod(shape) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape(tuple(shape)).copy()


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
dtypes = st.sampled_from(DTYPES)
