"""What of a training state can be saved exactly, and what has to be refused before anything is written."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchsnapshot
import torchsnapshot.serialization
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchsnapshot.manifest import PrimitiveEntry

from snapctl.errors import UnsavableError
from snapctl.ranks import Ranks

SAVES_DTENSORS = hasattr(importlib.import_module("torchsnapshot.manifest"), "DTensorEntry")
"""Whether this torchsnapshot can save a DTensor (nightlies since 2023 can, 0.1.0 cannot)."""

RAW_DTYPES = (
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""dtypes that torchsnapshot does not know, stored as their raw elements."""
PICKLED_DTYPES = ("complex32",)
"""The same, stored with ``torch.save``."""

STRIDED = "_StridedShard"
"""A placement of PyTorch's own, not for users; not a kind of ``Shard`` in every release."""

LONGEST_INLINE_INT_BITS = 14_000
"""Python refuses to write out integers of more than 4,300 digits."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Something in the state that cannot be saved exactly."""

    path: str
    reason: str
    way_out: str


def refuse_together(refused: Sequence[Refused], ranks: Ranks) -> None:
    """Raises on every rank if any rank has found something, in one error that names all of it."""
    gathered = ranks.gather(refused)
    merged: dict[Refused, list[int]] | None = None
    if gathered is not None:
        merged = {}
        for rank, found in enumerate(gathered):
            for item in found:
                merged.setdefault(item, []).append(rank)
    merged = ranks.share(merged)
    if not merged:
        return
    lines = []
    for item, on_ranks in merged.items():
        where = "" if len(on_ranks) == ranks.world_size else f" (rank {', '.join(map(str, on_ranks))})"
        lines.append(f"{item.path}{where}: {item.reason}")
    ways_out = dict.fromkeys(item.way_out for item in merged)
    raise UnsavableError(f"cannot be saved exactly: {'; '.join(lines)}", hint="; ".join(ways_out))


def find_refused(flattened: Mapping[str, Any], pickled: dict[str, memoryview]) -> list[Refused]:
    """What cannot be saved; what has to be pickled is, into `pickled`, since that alone shows whether it can be."""
    refused: list[Refused] = []
    for path, value in flattened.items():
        if isinstance(value, torch.Tensor | ShardedTensor):
            found = why_refused(value)
            if found is not None:
                refused.append(Refused(path, *found))
        elif not is_inline(value):
            buffer = io.BytesIO()
            try:
                torch.save(value, buffer)
            except Exception as error:  # noqa: BLE001 - pickling calls whatever the object brings along
                reason = f"{type(value).__qualname__} cannot be pickled: {' '.join(str(error).split())[:200]}"
                refused.append(Refused(path, reason, "leave it out of the state, or give it __getstate__"))
            else:
                pickled[path] = buffer.getbuffer()
    return refused


def why_refused(value: Any) -> tuple[str, str] | None:
    """``(reason, way out)`` of a tensor that cannot be saved exactly, or None."""
    if isinstance(value, ShardedTensor):
        reasons = (why_refused(shard.tensor) for shard in value.local_shards())
        return next((reason for reason in reasons if reason is not None), None)
    if is_dtensor(value):
        if not SAVES_DTENSORS:
            way_out = "pip install torchsnapshot-nightly==2024.7.26, or save its full_tensor()"
            return f"a DTensor, which torchsnapshot {torchsnapshot.__version__} cannot save", way_out
        strange = strange_placement(value)
        if strange is not None:
            return f"a DTensor with the placement {strange}", "redistribute() it to Shard and Replicate"
        return why_refused(_local(value))
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"a tensor subclass ({type(value).__qualname__}) comes back plain",
            "save the plain tensors it is made of",
        )
    if value.is_nested:
        return "a nested tensor", "save its components (unbind()), or to_padded_tensor()"
    if value.layout != torch.strided:
        return (
            f"a tensor of layout {str(value.layout).removeprefix('torch.')}",
            "save its indices and values, or to_dense()",
        )
    if value.device.type == "meta":
        return "a tensor on the meta device has no data", "materialise it first (to_empty() and load)"
    name = str(value.dtype).removeprefix("torch.")
    if value.dtype not in torchsnapshot.serialization._DTYPE_TO_STRING and name not in RAW_DTYPES + PICKLED_DTYPES:
        return f"dtype {name} is not known to the format", "save it viewed as uint8"
    return None


def strange_placement(tensor: Any) -> str | None:
    """The name of a placement whose local tensors are no boxes of the whole one, or None.

    FSDP over tensor parallelism cuts the same dimension twice, the inner mesh dimension first: it calls the outer
    placement strided, and its shards are boxes if it is strided by just as many parts as the inner ones make.
    """
    for dim, placement in enumerate(tensor.placements):
        name = type(placement).__name__
        if name == STRIDED:
            inner = 1
            for later in range(dim + 1, len(tensor.placements)):
                if type(tensor.placements[later]) is Shard and tensor.placements[later].dim == placement.dim:
                    inner *= tensor.device_mesh.size(later)
            if placement.split_factor == inner:
                continue
        if type(placement) not in (Shard, Replicate):
            return name
    return None


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local()
    wait = getattr(local, "wait", None)  # what a collective still under way gives back
    return wait() if wait is not None else local


def is_inline(value: Any) -> bool:
    """Whether it stands in the manifest itself. torchsnapshot asks for the name of the type alone."""
    if type(value) is int:
        return value.bit_length() <= LONGEST_INLINE_INT_BITS
    return type(value).__name__ in PrimitiveEntry.supported_types


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)
