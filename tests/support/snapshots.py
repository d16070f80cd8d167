"""Snapshots written by hand, in the layout of torchsnapshot 0.1.0, into any directory or bucket."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Write = Callable[[str, bytes], None]
"""``write(path, data)``: puts a file below a save directory."""


def local_writer(root: str | os.PathLike[str]) -> Write:
    """A `Write` into a local directory, which it makes."""
    base = pathlib.Path(root)
    base.mkdir(parents=True, exist_ok=True)

    def write(path: str, data: bytes = b"") -> None:
        target = base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    return write


def tensor_entry(
    location: str,
    shape: Sequence[int],
    dtype: str = "float32",
    *,
    byte_range: Sequence[int] | None = None,
    replicated: bool = False,
    serializer: str = "buffer_protocol",
) -> dict[str, Any]:
    return {
        "type": "Tensor",
        "location": location,
        "serializer": serializer,
        "dtype": f"torch.{dtype}",
        "shape": list(shape),
        "replicated": replicated,
        "byte_range": None if byte_range is None else list(byte_range),
    }


def primitive(value: int | float | str | bool, replicated: bool = False) -> dict[str, Any]:
    kind = type(value).__name__
    if isinstance(value, float):
        text = base64.b64encode(struct.pack("<d", value)).decode()
        return {"type": kind, "serialized_value": text, "replicated": replicated, "readable": str(value)}
    return {"type": kind, "serialized_value": str(value), "replicated": replicated, "readable": None}


def encode(key: object) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")


def metadata(manifest: Mapping[str, Any], world_size: int = 1, version: str = "0.1.0") -> bytes:
    document = {"version": version, "world_size": world_size, "manifest": dict(manifest)}
    return json.dumps(document, indent=2).encode()


def write_checkpoint(
    write: Write,
    step: int | str,
    tensors: Mapping[str, Any] | None = None,
    *,
    complete: bool = True,
    markers: Sequence[str] = (),
    name: str | None = None,
) -> dict[str, Any]:
    """An ordinary checkpoint of one rank: a ``model`` of tensors and an ``extra_state``; returns its manifest."""
    name = str(step) if name is None else name
    tensors = {"weight": np.arange(6, dtype="f4").reshape(2, 3)} if tensors is None else tensors
    manifest: dict[str, Any] = {"0/model": {"type": "dict", "keys": list(tensors)}}
    for key, array in tensors.items():
        location = f"0/model/{encode(key)}"
        write(f"{name}/{location}", np.ascontiguousarray(array).tobytes())
        manifest[location] = tensor_entry(location, array.shape, array.dtype.name)
    manifest["0/extra_state"] = {"type": "dict", "keys": ["step", "walltime"]}
    manifest["0/extra_state/step"] = primitive(int(step) if str(step).isdecimal() else 0)
    manifest["0/extra_state/walltime"] = primitive(1.5)
    if complete:
        write(f"{name}/.snapshot_metadata", metadata(manifest))
    for partition in markers:
        write(f"{name}/evaled_by/{partition}_DONE", b"")
    return manifest
