"""What differs between two snapshots: entries, dtypes and shapes, and as far as checksums tell, content. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from snapctl.checksums import combine_crc32c
from snapctl.inspection import matches_glob, primitive_value
from snapctl.manifest import (
    CONTAINER_ENTRIES,
    SHARDED_ENTRIES,
    ChunkedTensorEntry,
    Entry,
    LogicalEntry,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    TensorEntry,
    shards_of,
)
from snapctl.save_record import BlobSum

Aspect: TypeAlias = Literal["type", "dtype", "shape", "value", "content"]
Sums: TypeAlias = Mapping[str, BlobSum] | None
"""Checksums of blobs by location; None where there are none."""

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])", re.ASCII)


class Change(msgspec.Struct, frozen=True, gc=False):
    """An entry that is not the same in both."""

    path: str
    """Logical path."""
    old: LogicalEntry | None
    """None: it was added."""
    new: LogicalEntry | None
    """None: it was removed."""
    aspects: tuple[Aspect, ...] = ()
    """In what they differ, where both are there."""

    @property
    def kind(self) -> str:
        """``added``, ``removed``, or what has changed."""
        if self.old is None:
            return "added"
        return "removed" if self.new is None else ", ".join(self.aspects)


class NotCompared(msgspec.Struct, frozen=True, gc=False):
    """An entry that is alike in everything but its content, which could not be compared."""

    path: str
    reason: str


class Comparison(msgspec.Struct, frozen=True):
    """The differences between two snapshots, in the order of the new one's manifest; what was removed comes last."""

    changes: tuple[Change, ...]
    same: int
    """Entries that are the same, containers not counted."""
    not_compared: tuple[NotCompared, ...] = ()

    @property
    def added(self) -> int:
        return sum(change.old is None for change in self.changes)

    @property
    def removed(self) -> int:
        return sum(change.new is None for change in self.changes)

    @property
    def changed(self) -> int:
        return len(self.changes) - self.added - self.removed


class ChangeGroup(msgspec.Struct, frozen=True, gc=False):
    """Changes that are alike, in repeated layers."""

    path: str
    """With ``#`` for numbers, if there are several."""
    changes: tuple[Change, ...]


def compare(
    old: Manifest, new: Manifest, *, old_sums: Sums = None, new_sums: Sums = None, globs: Sequence[str] = ()
) -> Comparison:
    """Compares two snapshots entry by entry.

    How a tensor is cut into shards or chunks, and which ranks hold it, makes no difference. Content is the same where
    the checksums of all its blobs are. It could not be compared where a blob has none, where several entries share a
    blob that differs, or where a tensor is cut in another way, unless both are cut by rows alone.

    Args:
        old_sums, new_sums: checksums of blobs, by location.
        globs: only entries whose path matches one of these (see `matches_glob`).
    """
    old_entries, new_entries = _by_path(old, globs), _by_path(new, globs)
    changes: list[Change] = []
    not_compared: list[NotCompared] = []
    same = 0
    for path, held in new_entries.items():
        for before, after in _pairs(old_entries.get(path, ()), held):
            if before is None or after is None:
                changes.append(Change(path, before, after))
                continue
            aspects, reason = _compare_entries(before, after, old_sums, new_sums)
            if aspects:
                changes.append(Change(path, before, after, tuple(aspects)))
            elif reason is not None:
                not_compared.append(NotCompared(path, reason))
            elif not _is_container(after):
                same += 1
    changes += [
        Change(path, entry, None) for path, held in old_entries.items() if path not in new_entries for entry in held
    ]
    full = {path: _parents(entries) for path, entries in (("old", old_entries), ("new", new_entries))}
    changes = [change for change in changes if not _is_told_by_children(change, full["old"], full["new"])]
    return Comparison(tuple(changes), same, tuple(not_compared))


def group_changes(changes: Iterable[Change]) -> list[ChangeGroup]:
    """Changes of repeated layers together: alike in all but whole numbers between dots and slashes in their paths."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        pattern = _NUMBER.sub("#", change.path)
        groups.setdefault((pattern, change.kind, describe(change.old), describe(change.new)), []).append(change)
    return [
        ChangeGroup(members[0].path if len(members) == 1 else _NUMBER.sub("#", members[0].path), tuple(members))
        for members in groups.values()
    ]


def describe(entry: LogicalEntry | None) -> str:
    """An entry in a few words: ``float32 [4, 3]``, ``int 5``, ``object builtins.dict``; ``-`` for none."""
    if entry is None:
        return "-"
    first = entry.entries[0][1]
    if isinstance(first, PrimitiveEntry):
        value = primitive_value(first)
        return f"{entry.type} {first.serialized_value if value is None or isinstance(value, bytes) else value}"
    if isinstance(first, ObjectEntry) and not first.is_tensor:
        return f"object {first.obj_type}"
    if entry.dtype is None:
        return entry.type
    shape = "?" if entry.shape is None else f"[{', '.join(map(str, entry.shape))}]"
    return f"{entry.dtype} {shape}"


# -- which belong together -------------------------------------------------------------------------------------------


def _by_path(manifest: Manifest, globs: Sequence[str]) -> dict[str, list[LogicalEntry]]:
    found: dict[str, list[LogicalEntry]] = {}
    for entry in manifest.logical_entries():
        if not globs or any(matches_glob(entry.path, glob) for glob in globs):
            found.setdefault(entry.path, []).append(entry)
    return found


def _pairs(
    old: Sequence[LogicalEntry], new: Sequence[LogicalEntry]
) -> list[tuple[LogicalEntry | None, LogicalEntry | None]]:
    """Under one path the ranks may hold different entries: those of the same ranks belong together, then the rest in
    their order."""
    left = list(old)
    pairs: list[tuple[LogicalEntry | None, LogicalEntry | None]] = []
    unpaired: list[LogicalEntry] = []
    for entry in new:
        match = next((other for other in left if other.ranks == entry.ranks), None)
        if match is None:
            unpaired.append(entry)
        else:
            left.remove(match)
            pairs.append((match, entry))
    for entry in unpaired:
        pairs.append((left.pop(0) if left else None, entry))
    return [*pairs, *((entry, None) for entry in left)]


def _parents(entries: Mapping[str, object]) -> set[str]:
    return {path.rpartition("/")[0] for path in entries}


def _is_told_by_children(change: Change, old_parents: set[str], new_parents: set[str]) -> bool:
    """A container that came or went together with what is in it."""
    entry = change.new or change.old
    if entry is None or not _is_container(entry) or (change.old is not None and change.new is not None):
        return False
    return change.path in (old_parents if change.new is None else new_parents)


def _is_container(entry: LogicalEntry) -> bool:
    return isinstance(entry.entries[0][1], CONTAINER_ENTRIES)


# -- one entry -------------------------------------------------------------------------------------------------------


def _compare_entries(
    old: LogicalEntry, new: LogicalEntry, old_sums: Sums, new_sums: Sums
) -> tuple[list[Aspect], str | None]:
    """In what they differ; and why their content could not be compared, if it could not."""
    before, after = old.entries[0][1], new.entries[0][1]
    if _kind(before) != _kind(after):
        return ["type"], None
    if isinstance(before, PrimitiveEntry) and isinstance(after, PrimitiveEntry):
        return (["value"] if before.serialized_value != after.serialized_value else []), None
    if _is_container(old):
        return [], None
    if (old.dtype is None) != (new.dtype is None) or (old.shape is None) != (new.shape is None):
        return [], "its dtype and shape are in the blob alone"
    aspects: list[Aspect] = []
    if old.dtype != new.dtype:
        aspects.append("dtype")
    if old.shape != new.shape:
        aspects.append("shape")
    if aspects:
        return aspects, None  # then the content differs as a matter of course
    alike, reason = _compare_content(old, new, old_sums, new_sums)
    return (["content"] if alike is False else []), reason


def _kind(entry: Entry) -> str:
    """The same for what is the same kind of thing, however it is stored."""
    if isinstance(entry, (TensorEntry, ChunkedTensorEntry, *SHARDED_ENTRIES)):
        return "tensor"
    if isinstance(entry, ObjectEntry):
        return "tensor" if entry.is_tensor else f"object {entry.obj_type}"
    return entry.type_name


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """Where a part of an entry lies, and the checksum of the blob there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: BlobSum | None
    byte_range: tuple[int, int] | None
    """None: the whole blob."""
    is_raw: bool


def _compare_content(
    old: LogicalEntry, new: LogicalEntry, old_sums: Sums, new_sums: Sums
) -> tuple[bool | None, str | None]:
    """Whether the content is the same; None and the reason where nobody can tell."""
    if old.size_bytes == 0 and new.size_bytes == 0:
        return True, None
    before, after = _pieces(old, old_sums), _pieces(new, new_sums)
    if not before or not after:
        return None, "of an unknown type"
    missing = [name for name, pieces in (("A", before), ("B", after)) if any(p.blob is None for p in pieces)]
    if missing:
        return None, f"no checksum was recorded in {' and '.join(missing)}"
    if before == after:
        return True, None
    if {piece.is_raw for piece in before} != {piece.is_raw for piece in after}:
        return None, "it is stored in another form"
    sums = _whole_sum(before, old.shape), _whole_sum(after, new.shape)
    if None not in sums:
        return sums[0] == sums[1], None
    theirs = {(piece.offsets, piece.sizes): piece for piece in before}
    for piece in after:
        other = theirs.get((piece.offsets, piece.sizes))
        if other is not None and None is piece.byte_range is other.byte_range and other.blob != piece.blob:
            return False, None
    if any(piece.byte_range is not None for piece in (*before, *after)):
        return None, "it shares a blob with others, and the two blobs differ"
    return None, "it is cut into shards in another way"


def _pieces(entry: LogicalEntry, sums: Sums) -> list[_Piece]:
    """The parts of an entry in the order of their place; what several ranks hold of one tensor counts once."""
    found: dict[object, _Piece] = {}
    is_one = isinstance(entry.entries[0][1], SHARDED_ENTRIES)
    for number, (_, held) in enumerate(entry.entries):
        copy = 0 if is_one else number
        shards = shards_of(held)
        if shards:
            for shard in shards:
                place = (copy, tuple(shard.offsets), tuple(shard.sizes))
                found.setdefault(place, _piece(shard.tensor, sums, place[1], place[2]))
        elif isinstance(held, TensorEntry | ObjectEntry):
            shape = tuple(held.shape) if isinstance(held, TensorEntry) else ()
            found[copy, (0,) * len(shape), shape] = _piece(held, sums, (0,) * len(shape), shape)
    unique = dict.fromkeys(found.values())  # copies that are alike
    return sorted(unique, key=lambda piece: (piece.offsets, piece.sizes))


def _piece(stored: TensorEntry | ObjectEntry, sums: Sums, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _Piece:
    blob = None if sums is None else sums.get(stored.location)
    span = getattr(stored, "byte_range", None)
    span = None if span is None else (span[0], span[1])
    if blob is not None and span == (0, blob.size_bytes):
        span = None
    return _Piece(offsets, sizes, blob, span, stored.serializer == "buffer_protocol")


def _whole_sum(pieces: Sequence[_Piece], shape: tuple[int, ...] | None) -> BlobSum | None:
    """The checksum of a tensor as a whole, where its pieces are blobs of their own that follow each other by rows."""
    if any(piece.byte_range is not None for piece in pieces):
        return None
    first = pieces[0].blob
    if len(pieces) == 1:
        return first
    if shape is None or not shape or not all(piece.is_raw for piece in pieces):
        return None
    row, size, crc = 0, 0, 0
    for piece in pieces:
        is_rows = piece.sizes[1:] == shape[1:] and not any(piece.offsets[1:])
        if piece.blob is None or not is_rows or piece.offsets[0] != row:
            return None
        row += piece.sizes[0]
        size += piece.blob.size_bytes
        crc = combine_crc32c(crc, piece.blob.crc32c, piece.blob.size_bytes)
    return BlobSum(size, crc) if row == shape[0] else None
