"""What the ranks hold under one path, put together."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from snapctl.manifest.entries import (
    SHARDED_ENTRIES,
    ChunkedTensorEntry,
    DTensorEntry,
    Entry,
    ObjectEntry,
    PrimitiveEntry,
    ShardedTensorEntry,
    TensorEntry,
    UnknownEntry,
    shards_of,
    split_rank,
    stored_bytes,
)


class LogicalEntry(msgspec.Struct, frozen=True, gc=False):
    """What the ranks hold under one logical path, put together."""

    path: str
    """Without a rank; keys percent-encoded, as in the manifest."""
    type: str
    """The entry's type; ``Tensor`` also for what 0.0.x stored as ``torch.Tensor``."""
    dtype: str | None
    """Without ``torch.``; None for what is no tensor, or where only the blob knows it."""
    shape: tuple[int, ...] | None
    """Of the whole tensor; None like `dtype`."""
    size_bytes: int | None
    """Of all that the ranks stored under this path; None where only the blobs know."""
    ranks: tuple[int, ...]
    """The ranks that list it, ascending."""
    replicated: bool
    shards: int
    """Shards or chunks; 1 for a whole tensor, 0 for what is no tensor."""
    entries: tuple[tuple[str, Entry], ...]
    """The entries behind it with their manifest paths, in the order of the ranks."""


class Manifest(msgspec.Struct, frozen=True):
    """A parsed manifest."""

    version: str
    world_size: int
    """How many ranks saved the snapshot, whether or not each has an entry."""
    entries: dict[str, Entry]
    """By manifest path, in the manifest's order."""
    extra_fields: Mapping[str, Mapping[str, Any]] = {}
    """Fields that this version does not know, by manifest path; under ``""`` those of the document itself."""

    def logical_entries(self) -> list[LogicalEntry]:
        """What is in the snapshot, in the manifest's order.

        Entries of several ranks under one path are one logical entry where they are parts of one tensor, or alike
        (type, dtype, shape, value); where they differ, each kind stands by itself. A rank that holds no shard of a
        sharded tensor is not among its ranks.
        """
        with no_garbage_collection():
            return list(_logical_entries(self.entries))

    def blob_locations(self) -> set[str]:
        """The blobs that the manifest speaks of."""
        return {tensor.location for _, tensor in self.iter_blobs()}

    def iter_blobs(self) -> Iterator[tuple[str, TensorEntry | ObjectEntry]]:
        """Each place where an entry lies in a blob, with the manifest path of its entry."""
        for path, entry in self.entries.items():
            if isinstance(entry, TensorEntry | ObjectEntry):
                yield path, entry
            else:
                for shard in shards_of(entry):
                    yield path, shard.tensor


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While many values are made: nothing in a manifest forms a cycle, and collecting among 200,000 new objects costs
    more than decoding them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _logical_entries(entries: Mapping[str, Entry]) -> Iterator[LogicalEntry]:
    by_path: dict[str, list[tuple[int, str, Entry]]] = {}
    for manifest_path, entry in entries.items():
        rank, path = split_rank(manifest_path)
        held = by_path.get(path)
        if held is None:
            by_path[path] = [(rank or 0, manifest_path, entry)]
        else:
            held.append((rank or 0, manifest_path, entry))
    for path, held in by_path.items():
        if len(held) == 1:
            yield _combine(path, held)
            continue
        alike: dict[object, list[tuple[int, str, Entry]]] = {}
        for item in sorted(held, key=lambda item: item[0]):
            alike.setdefault(_likeness(item[2]), []).append(item)
        for group in alike.values():
            yield _combine(path, group)


def _likeness(entry: Entry) -> object:
    """Equal for entries of several ranks that are one logical entry."""
    match entry:
        case TensorEntry() | ChunkedTensorEntry():
            return ("tensor", entry.dtype, tuple(entry.shape), entry.replicated)
        case ShardedTensorEntry() | DTensorEntry():
            return entry.type_name
        case ObjectEntry():
            return ("object", entry.obj_type)
        case PrimitiveEntry():
            return (entry.kind, entry.serialized_value)
        case UnknownEntry():
            return (entry.type, repr(entry.fields))
        case _:
            return entry.type_name


def _combine(path: str, held: Sequence[tuple[int, str, Entry]]) -> LogicalEntry:
    rank, manifest_path, first = held[0]
    if type(first) is TensorEntry and len(held) == 1:  # nearly all of a large manifest: worth its own line
        shape, size, sources = tuple(first.shape), first.size_bytes, ((manifest_path, first),)
        return LogicalEntry(path, "Tensor", _short(first.dtype), shape, size, (rank,), first.replicated, 1, sources)
    if isinstance(first, SHARDED_ENTRIES):
        return _combine_shards(path, held)
    sizes = [stored_bytes(entry) for _, _, entry in held]
    size_bytes = sum(size for size in sizes if size is not None) if None not in sizes else None
    tensor = first if isinstance(first, TensorEntry | ChunkedTensorEntry) else None
    is_tensor_object = isinstance(first, ObjectEntry) and first.is_tensor
    return LogicalEntry(
        path,
        "Tensor" if is_tensor_object else first.type_name,
        _short(tensor.dtype) if tensor else None,
        tuple(tensor.shape) if tensor else None,
        size_bytes,
        tuple(rank for rank, _, _ in held),
        bool(getattr(first, "replicated", False)),
        max(len(shards_of(entry)) for _, _, entry in held) or int(tensor is not None or is_tensor_object),
        _sources(held),
    )


def _sources(held: Sequence[tuple[int, str, Entry]]) -> tuple[tuple[str, Entry], ...]:
    return tuple((manifest_path, entry) for _, manifest_path, entry in held)


def _combine_shards(path: str, held: Sequence[tuple[int, str, Entry]]) -> LogicalEntry:
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], TensorEntry] = {}
    for _, _, entry in held:
        for shard in shards_of(entry):
            boxes.setdefault((tuple(shard.offsets), tuple(shard.sizes)), shard.tensor)
    dtypes = {tensor.dtype for tensor in boxes.values()}
    sizes = [tensor.size_bytes for tensor in boxes.values()]
    return LogicalEntry(
        path,
        held[0][2].type_name,
        _short(dtypes.pop()) if len(dtypes) == 1 else None,
        global_shape(list(boxes)),
        sum(size for size in sizes if size is not None) if None not in sizes else None,
        tuple(rank for rank, _, entry in held if shards_of(entry)) or tuple(rank for rank, _, _ in held),
        False,
        len(boxes),
        _sources(held),
    )


def global_shape(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...] | None:
    """The shape of the tensor that ``(offsets, sizes)`` boxes are parts of; None if there is none to tell it.

    Source: a sharded entry does not state its shape: it is the largest ``offsets + sizes`` over all ranks.
    """
    widths = {len(sizes) for _, sizes in boxes} | {len(offsets) for offsets, _ in boxes}
    if len(widths) != 1:
        return None
    return tuple(max(ends) for ends in zip(*([o + s for o, s in zip(*box, strict=True)] for box in boxes), strict=True))


def _short(dtype: str | None) -> str | None:
    return dtype.removeprefix("torch.") if dtype else None
