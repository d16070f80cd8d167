"""Sharded tensors for jobs of several ranks: any boxes on any ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata

from tests.support.shards import Box, grid


def values_of(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A tensor in which every element is another one."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape)) + seed * 1000


def boxes_by_rank(how: str, shape: Sequence[int], world_size: int) -> dict[int, list[Box]]:
    """Row-wise, column-wise or table-wise (all on the last rank)."""
    if how == "table":
        return {rank: [] for rank in range(world_size - 1)} | {world_size - 1: [((0,) * len(shape), tuple(shape))]}
    cuts = [1] * len(shape)
    cuts[0 if how == "row" else 1] = world_size
    return {rank: [box] for rank, box in enumerate(grid(shape, cuts))}


def sharded(whole: torch.Tensor, by_rank: Mapping[int, Sequence[Box]], *, empty: bool = False) -> ShardedTensor:
    """A ShardedTensor whose shards hold a tensor's values, or zeros. A collective."""
    rank = dist.get_rank()
    shards = []
    for offsets, sizes in by_rank[rank]:
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()
        metadata = ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")
        shards.append(Shard(torch.zeros_like(part) if empty else part, metadata))
    return ShardedTensor._init_from_local_shards(shards, *whole.shape)


def holds(tensor: Any, whole: torch.Tensor) -> bool:
    """Whether the local shards of a ShardedTensor hold their part of a tensor."""
    for shard in tensor.local_shards():
        places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        if not torch.equal(shard.tensor, whole[tuple(slice(o, o + s) for o, s in places)]):
            return False
    return True
