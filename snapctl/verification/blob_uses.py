"""Which bytes of which blobs the entries of a manifest need. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from snapctl.manifest import (
    SHARDED_ENTRIES,
    ChunkedTensorEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    UnknownEntry,
    split_rank,
)
from snapctl.tensors.layout import RAW_SERIALIZER, Box, is_outside
from snapctl.verification.verdicts import Problem

GAP_BYTES = 64
"""Fewer bytes between two tensors of a slab are padding."""


class BlobUse(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a blob that an entry needs."""

    entry: str
    """Its manifest path."""
    tensor: str
    """The same for all parts of one tensor: the manifest path of the first entry that lists one."""
    location: str
    start: int
    end: int | None
    """None: to the end of the blob, wherever that is."""
    serializer: str
    dtype: str | None
    """Without ``torch.``; None where only the blob knows it."""
    shape: tuple[int, ...]
    obj_type: str | None = None
    """The class of an object; None for a tensor."""

    @property
    def is_raw(self) -> bool:
        return self.serializer == RAW_SERIALIZER

    @property
    def needed_bytes(self) -> int:
        """How long the blob must be at least."""
        return self.end if self.end is not None else self.start + 1


def find_uses(manifest: Manifest, *, without: Collection[tuple[str, str | None]] = ()) -> list[BlobUse]:
    """All stretches of blobs of which at least one byte is needed, in the manifest's order.

    Args:
        without: pairs of a logical path and a location (or None for all of its blobs) of which it is known already
            that what the manifest says about them makes no sense.
    """
    uses: list[BlobUse] = []
    first_paths: dict[str, str] = {}
    for path, entry in manifest.entries.items():
        tensor = path
        if isinstance(entry, SHARDED_ENTRIES):
            tensor = first_paths.setdefault(split_rank(path)[1], path)
        for stored in _stored(entry):
            if without and _is_among(without, split_rank(path)[1], stored.location):
                continue
            use = _use(path, tensor, stored, scalar_chunk=isinstance(entry, ChunkedTensorEntry) and not entry.shape)
            if use is not None:
                uses.append(use)
    return uses


def _is_among(without: Collection[tuple[str, str | None]], path: str, location: str) -> bool:
    return (path, location) in without or (path, None) in without


def _stored(entry: object) -> Iterable[TensorEntry | ObjectEntry]:
    if isinstance(entry, TensorEntry | ObjectEntry):
        return (entry,)
    if isinstance(entry, ChunkedTensorEntry):
        return [chunk.tensor for chunk in entry.chunks]
    if isinstance(entry, SHARDED_ENTRIES):
        return [shard.tensor for shard in entry.shards]
    return ()


def _use(path: str, tensor: str, stored: TensorEntry | ObjectEntry, *, scalar_chunk: bool) -> BlobUse | None:
    """None where no byte is needed, or where what is said cannot be."""
    if is_outside(stored.location):
        return None
    if isinstance(stored, ObjectEntry):
        obj_type = None if stored.is_tensor else stored.obj_type
        return BlobUse(path, tensor, stored.location, 0, None, stored.serializer, None, (), obj_type)
    dtype = stored.dtype.removeprefix("torch.") if stored.dtype else None
    shape = () if scalar_chunk and stored.shape == [1] else tuple(stored.shape)
    box = Box(path, (0,) * len(shape), shape, stored.location, stored.serializer, dtype, stored.byte_range)
    if not box.needs_blob:
        return None
    if stored.byte_range is not None and not 0 <= stored.byte_range[0] < stored.byte_range[1]:
        return None
    return BlobUse(path, tensor, stored.location, box.start, box.end, stored.serializer, dtype, shape)


def by_location(uses: Iterable[BlobUse]) -> dict[str, list[BlobUse]]:
    """The uses of each blob, in the manifest's order."""
    found: dict[str, list[BlobUse]] = {}
    for use in uses:
        held = found.get(use.location)
        if held is None:
            found[use.location] = [use]
        else:
            held.append(use)
    return found


def distinct(uses: Sequence[BlobUse]) -> list[BlobUse]:
    """The uses of one blob by their start; what several ranks list of one and the same thing counts once."""
    kept: dict[object, BlobUse] = {}
    for use in uses:
        kept.setdefault((use.start, use.end, split_rank(use.entry)[1]), use)
    return sorted(kept.values(), key=_place)


def _place(use: BlobUse) -> tuple[int, float]:
    return use.start, use.end if use.end is not None else float("inf")


def find_shared_bytes(uses: Mapping[str, Sequence[BlobUse]]) -> Iterator[Problem]:
    """Bytes of a blob that belong to two entries, one problem for each entry that begins inside another."""
    for location, held in uses.items():
        if len(held) < 2:
            continue
        ordered = distinct(held)
        before = ordered[0]
        for use in ordered[1:]:
            reach = _place(before)[1]
            if use.start < reach:
                end = min(reach, _place(use)[1])
                text = f"bytes [{use.start}, {'end' if end == float('inf') else int(end)})"
                yield Problem("overlap", use.entry, location, f"{text} also belong to {before.entry}")
            if _place(use)[1] > reach:
                before = use


def find_unneeded_bytes(uses: Mapping[str, Sequence[BlobUse]], sizes: Mapping[str, int]) -> list[str]:
    """Stretches of slabs that belong to no entry, in words: perhaps an entry was lost."""
    found = []
    for location, held in uses.items():
        if any(use.end is None for use in held) or (len(held) == 1 and held[0].start == 0):
            continue  # it is no slab
        position = 0
        for use in sorted(held, key=_place):
            if use.start - position >= GAP_BYTES:
                found.append(f"bytes [{position}, {use.start}) of {location} belong to no entry")
            position = max(position, use.end or 0)
        if sizes.get(location, 0) - position >= GAP_BYTES:
            found.append(f"bytes [{position}, {sizes[location]}) of {location} belong to no entry")
    return found


def mentioned_locations(manifest: Manifest) -> set[str]:
    """Every location that the manifest speaks of, those in entries of unknown types included."""
    found = manifest.blob_locations()
    for entry in manifest.entries.values():
        if isinstance(entry, UnknownEntry):
            _collect_locations(entry.fields, found)
    return found


def _collect_locations(value: object, found: set[str]) -> None:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if isinstance(item.get("location"), str):
                found.add(item["location"])
            todo += item.values()
        elif isinstance(item, list):
            todo += item


class UseIndex:
    """The use of a blob that an offset lies in."""

    def __init__(self, uses: Sequence[BlobUse]) -> None:
        """`uses` are sorted by their start and do not overlap."""
        self._uses = uses
        self._starts = [use.start for use in uses]

    def find(self, offset: int) -> BlobUse | None:
        """The use that begins before an offset and ends after it."""
        index = bisect.bisect_left(self._starts, offset) - 1
        if index < 0:
            return None
        use = self._uses[index]
        return use if use.end is None or use.end > offset else None

    def between(self, start: int, end: int) -> Sequence[BlobUse]:
        """The uses that share bytes with a stretch."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, end)
        return [use for use in self._uses[first:last] if use.end is None or use.end > start]
