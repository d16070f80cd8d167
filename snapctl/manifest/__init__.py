"""The torchsnapshot manifest, typed. Pure: bytes in, values out.

A manifest maps a *manifest path* (``0/model/fc.weight``: the rank that saved it, then the keys of the state dict,
percent-encoded) to an entry. Seen without its rank it is a *logical path*; `Manifest.logical_entries` puts together
what the ranks hold under one.

Source: snapshots that torchsnapshot 0.0.1 to 0.1.0 and its nightlies to 2024-07 wrote.
"""

from __future__ import annotations

from snapctl.manifest.entries import (
    CONTAINER_ENTRIES,
    DTYPE_SIZES,
    MANIFEST_NAME,
    SHARDED_ENTRIES,
    TENSOR_ENTRIES,
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    Key,
    ListEntry,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    UnknownEntry,
    decode_path,
    encode_key,
    shards_of,
    split_rank,
)
from snapctl.manifest.logical import LogicalEntry, Manifest, no_garbage_collection
from snapctl.manifest.parsing import parse_manifest

__all__ = [
    "CONTAINER_ENTRIES",
    "DTYPE_SIZES",
    "MANIFEST_NAME",
    "SHARDED_ENTRIES",
    "TENSOR_ENTRIES",
    "ChunkedTensorEntry",
    "DTensorEntry",
    "DictEntry",
    "Entry",
    "Key",
    "ListEntry",
    "LogicalEntry",
    "Manifest",
    "ObjectEntry",
    "OrderedDictEntry",
    "PrimitiveEntry",
    "Shard",
    "ShardedTensorEntry",
    "TensorEntry",
    "UnknownEntry",
    "decode_path",
    "encode_key",
    "no_garbage_collection",
    "parse_manifest",
    "shards_of",
    "split_rank",
]
