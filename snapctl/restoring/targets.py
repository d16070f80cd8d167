"""Tensors of a training state as something to read into: plain ones, ShardedTensor and DTensor, on any device.

Bits are moved straight into the memory of a dense tensor on the CPU; into anything else they are copied block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from snapctl.restoring.state_tree import TensorTarget
from snapctl.saving.savable import strange_placement
from snapctl.tensors.blocks import slices_of
from snapctl.tensors.dtypes import QUANTIZED_DTYPES
from snapctl.tensors.layout import TensorLayout
from snapctl.tensors.reader import ReadRequest, TensorReader
from snapctl.tensors.tiling import Region
from snapctl.tensors.torch_decoding import numpy_to_torch, torch_dtype, torch_elements

TORCH_ONLY_DTYPES = (*QUANTIZED_DTYPES, "complex32")
"""numpy cannot hold them."""


def describe(value: Any) -> TensorTarget | None:
    """A tensor of the state as a target; None for what is no tensor."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        parts = tuple((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in shards)
        refusal = next((text for shard in shards if (text := _refusal(shard.tensor))), "")
        metadata = value.metadata()  # its own size() and dtype warn that the class is deprecated
        return TensorTarget(
            _name(metadata.tensor_properties.dtype), tuple(metadata.size), parts, "ShardedTensor", refusal, value
        )
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(value.shape)
    if isinstance(value, DTensor):
        strange = strange_placement(value)
        if strange is not None:
            return TensorTarget(
                _name(value.dtype), shape, (), "DTensor", f"a DTensor with the placement {strange}", value
            )
        return TensorTarget(
            _name(value.dtype), shape, _dtensor_parts(value), "DTensor", _refusal(value.to_local()), value
        )
    return TensorTarget(_name(value.dtype), shape, (((0,) * len(shape), shape),), "tensor", _refusal(value), value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(tensor: torch.Tensor) -> str:
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {str(tensor.layout).removeprefix('torch.')}"
        return f"a {kind}"
    return "a tensor on the meta device, which has no memory" if tensor.is_meta else ""


def _dtensor_parts(value: DTensor) -> tuple[Region, ...]:
    if value.device_mesh.get_coordinate() is None:
        return ()
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return () if 0 in sizes else ((tuple(offsets), tuple(sizes)),)


def local_tensors(target: TensorTarget) -> list[torch.Tensor]:
    """The tensors that hold the parts of a target."""
    if isinstance(target.handle, ShardedTensor):
        return [shard.tensor for shard in target.handle.local_shards()]
    if isinstance(target.handle, DTensor):
        return [target.handle.to_local()] if target.parts else []
    return [target.handle]


def new_target(layout: TensorLayout, like: TensorTarget | None) -> TensorTarget:
    """A new tensor for one of the checkpoint: whole, on the CPU; or sharded as another one of the same shape is."""
    dtype = torch_dtype(layout.dtype or "")
    shape = layout.shape or ()
    found: TensorTarget | None = None
    if like is not None and like.shape == shape:
        if isinstance(like.handle, DTensor):
            found = describe(torch.empty_like(like.handle, dtype=dtype, requires_grad=False))
        elif isinstance(like.handle, ShardedTensor):
            found = describe(_sharded_like(like.handle, dtype))
    return found or TensorTarget(layout.dtype or "", shape, (((0,) * len(shape), shape),), handle=torch.empty(
        shape, dtype=dtype))  # fmt: skip


def _sharded_like(model: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    from dataclasses import replace

    shards = [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in model.local_shards()]
    metadata = model.metadata()
    metadata = replace(metadata, tensor_properties=replace(metadata.tensor_properties, dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=model._process_group
    )


def must_be_replaced(target: TensorTarget) -> bool:
    """Whether nothing can be copied into it as it is: a quantizer, or several elements in one place of memory."""
    if target.kind != "tensor":
        return False
    tensor = target.handle
    return bool(tensor.is_quantized or torch._debug_has_internal_overlap(tensor) == 1)


def takes_bits(tensor: torch.Tensor, dtype: str) -> bool:
    """Whether bits can be put straight into its memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and dtype not in TORCH_ONLY_DTYPES
        and torch._debug_has_internal_overlap(tensor) != 1
    )


def fill(reader: TensorReader, wanted: Sequence[tuple[TensorLayout, TensorTarget]]) -> None:
    """Reads tensors into targets of their dtype and shape.

    Raises:
        DamagedError, UnsupportedEntryError, RefusedError, StorageError: as `TensorReader.read`.
    """
    direct: list[ReadRequest] = []
    staged: list[tuple[TensorLayout, Region, torch.Tensor]] = []
    for layout, target in wanted:
        for region, tensor in zip(target.parts, local_tensors(target), strict=True):
            if 0 in region[1]:
                continue
            if takes_bits(tensor, layout.dtype or ""):
                direct.append(ReadRequest(layout, region, torch_elements(tensor)))
                mark_changed(tensor)
            else:
                staged.append((layout, region, tensor))
    reader.read_into(direct)
    with torch.no_grad():
        _fill_staged(reader, staged)


def _fill_staged(reader: TensorReader, staged: Sequence[tuple[TensorLayout, Region, torch.Tensor]]) -> None:
    """By way of blocks in memory, a bounded number of bytes at a time."""
    raw = [item for item in staged if item[0].dtype not in TORCH_ONLY_DTYPES]
    for block in reader.iter_blocks((layout, region) for layout, region, _ in raw):
        layout, region, tensor = raw[block.index]
        source = numpy_to_torch(block.array, layout.dtype or "")
        tensor.detach()[slices_of(block.region, region[0])].copy_(source)
    for layout, region, tensor in staged:
        if layout.dtype in TORCH_ONLY_DTYPES:
            tensor.detach().copy_(reader.read_torch(layout)[slices_of(region, (0,) * len(region[0]))])


def mark_changed(tensor: torch.Tensor) -> None:
    """Tells autograd that the memory is another one now."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def regions(target: TensorTarget) -> Iterator[Region]:
    """The parts that have elements."""
    yield from (region for region in target.parts if 0 not in region[1])
