"""What lies in a checkpoint, decoded from its manifest and blobs in the plainest way; local directories only."""

from __future__ import annotations

import io
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch


def read_manifest(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    return dict(json.loads((pathlib.Path(checkpoint) / ".snapshot_metadata").read_text("utf-8"))["manifest"])


def read_stored(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Tensors, objects and values by manifest path; shards of all ranks put together, on the path of each."""
    root = pathlib.Path(checkpoint)
    manifest = read_manifest(root)
    shards: dict[str, list[Any]] = {}
    for path, entry in manifest.items():
        if entry["type"] in ("ShardedTensor", "DTensor"):
            shards.setdefault(path.partition("/")[2], []).extend(entry["shards"])
    found: dict[str, Any] = {}
    for path, entry in manifest.items():
        kind = entry["type"]
        if kind in ("ShardedTensor", "DTensor"):
            boxes = shards[path.partition("/")[2]]
            found[path] = _put_together(root, boxes) if boxes else None
        elif kind == "ChunkedTensor":
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            found[path] = _put_together(root, entry["chunks"], entry["shape"], dtype)
        elif kind == "Tensor":
            found[path] = _tensor(root, entry)
        elif kind == "object":
            found[path] = torch.load(io.BytesIO(_bytes(root, entry)), weights_only=False)
        elif "serialized_value" in entry:
            found[path] = entry["serialized_value"]
    return found


def _bytes(root: pathlib.Path, entry: Mapping[str, Any]) -> bytes:
    data = (root / entry["location"]).read_bytes()
    start, end = entry.get("byte_range") or (0, len(data))
    assert len(data) >= end, f"{entry['location']}: {len(data)} bytes of {end}"
    return data[start:end]


def _tensor(root: pathlib.Path, entry: Mapping[str, Any]) -> torch.Tensor:
    data = _bytes(root, entry)
    if entry["serializer"] == "torch_save":
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert isinstance(loaded, torch.Tensor)
        return loaded
    dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(entry["shape"])


def _put_together(root: pathlib.Path, boxes: Any, shape: Any = None, dtype: Any = None) -> torch.Tensor:
    parts = [(box["offsets"], box["sizes"], _tensor(root, box["tensor"])) for box in boxes]
    if shape is None:
        shape = [
            max(ends) for ends in zip(*([o + s for o, s in zip(a, b, strict=True)] for a, b, _ in parts), strict=True)
        ]
    whole = torch.zeros(shape, dtype=dtype or parts[0][2].dtype)
    for offsets, sizes, tensor in parts:
        view = whole.view(-1) if not shape else whole
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            view = view.narrow(dim, start, length)
        view.copy_(tensor)
    return whole


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors agree in dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr()) and torch.equal(a.dequantize(), b.dequantize())
    return raw(a) == raw(b)


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
