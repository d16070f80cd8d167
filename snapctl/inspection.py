"""What `show` tells about a checkpoint: totals, and its entries rolled up. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from snapctl.errors import ManifestError
from snapctl.manifest import (
    CONTAINER_ENTRIES,
    Entry,
    LogicalEntry,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    TensorEntry,
    UnknownEntry,
    decode_path,
    shards_of,
    split_rank,
)

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])", re.ASCII)


class Summary(msgspec.Struct, frozen=True):
    """Totals over a manifest."""

    entries: int
    """All that is no container."""
    blobs: int
    """Distinct blobs."""
    size_bytes: int | None
    """Of all tensors and objects as stored; None where some blob alone knows its size."""
    dtype_bytes: Mapping[str, int]
    """Bytes by dtype (without ``torch.``), the largest first; ``object`` for what is no tensor."""


class RolledUp(msgspec.Struct, gc=False):
    """Several entries in one line."""

    path: str
    """A common beginning (`roll_up`), or a path with ``#`` for numbers (`group_layers`)."""
    count: int
    """How many entries."""
    size_bytes: int | None
    types: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    """Where all have the same."""
    ranks: tuple[int, ...] | None = None
    """None where different entries are rolled up; so for `replicated`."""
    replicated: bool | None = None


def summarize(manifest: Manifest, blob_sizes: Mapping[str, int] | None = None) -> Summary:
    """Totals over a manifest.

    Args:
        blob_sizes: sizes of blobs by location, where they are known, for entries whose size only the blob knows.
    """
    sizes: Counter[str] = Counter()
    locations: set[str] = set()
    unknown = False
    for entry in manifest.entries.values():
        for tensor in (entry,) if type(entry) is TensorEntry else _stored_parts(entry):
            size = tensor.size_bytes if type(tensor) is TensorEntry else None
            if size is None and tensor.location not in locations:
                size = (blob_sizes or {}).get(tensor.location)
                unknown = unknown or size is None
            locations.add(tensor.location)
            dtype = tensor.dtype if type(tensor) is TensorEntry else None
            sizes[dtype or "object"] += size or 0
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    dtype_bytes = {dtype.removeprefix("torch."): size for dtype, size in ordered}
    return Summary(count_entries(manifest), len(locations), None if unknown else sum(sizes.values()), dtype_bytes)


def _stored_parts(entry: Entry) -> Sequence[TensorEntry | ObjectEntry]:
    if isinstance(entry, ObjectEntry):
        return (entry,)
    return [shard.tensor for shard in shards_of(entry)]


def count_entries(manifest: Manifest) -> int:
    """How many logical paths there are that are no container."""
    paths = (path for path, entry in manifest.entries.items() if not isinstance(entry, CONTAINER_ENTRIES))
    if manifest.world_size == 1:
        return sum(1 for _ in paths)
    return len({split_rank(path)[1] for path in paths})


def extra_state_values(manifest: Manifest) -> dict[str, int | str | bool | bytes | float | None]:
    """The inline primitives directly under ``extra_state``, by decoded key, as the lowest rank saved them.

    A value that does not parse is None.
    """
    values: dict[str, int | str | bool | bytes | float | None] = {}
    for manifest_path, entry in manifest.entries.items():
        if "/extra_state/" not in manifest_path or not isinstance(entry, PrimitiveEntry):
            continue
        parts = split_rank(manifest_path)[1].split("/")
        if len(parts) == 2 and parts[0] == "extra_state":
            values.setdefault(decode_path(parts[1]), primitive_value(entry))
    return values


def primitive_value(entry: Entry) -> int | str | bool | bytes | float | None:
    """The value of an inline primitive; None for anything else, and for one that does not parse."""
    if not isinstance(entry, PrimitiveEntry):
        return None
    try:
        return entry.value
    except ManifestError:
        return None


def matches_glob(path: str, glob: str) -> bool:
    """Whether a path is a name literally, or matches it as a glob whose ``*`` also takes in slashes."""
    return path == glob or decode_path(path) == glob or fnmatch.fnmatchcase(path, glob)


def select_entries(
    entries: Iterable[LogicalEntry], *, globs: Sequence[str] = (), rank: int | None = None
) -> list[LogicalEntry]:
    """Entries whose logical or manifest path matches one of the globs, and that the rank holds.

    A replicated entry is held by every rank.
    """
    return [
        entry
        for entry in entries
        if (rank is None or rank in entry.ranks or entry.replicated)
        and (
            not globs
            or any(matches_glob(name, glob) for glob in globs for name in (entry.path, *(s[0] for s in entry.entries)))
        )
    ]


def roll_up(manifest: Manifest, depth: int) -> list[RolledUp]:
    """One line for each beginning of `depth` keys, in the manifest's order; containers do not count as entries.

    It goes over the manifest's entries as they are: what several ranks hold counts once for each.
    """
    lines: dict[str, RolledUp] = {}
    types: dict[str, set[str]] = {}
    dtypes: dict[str, set[str | None]] = {}
    ends: dict[str, str] = {}  # the beginning of a path up to its last key: most entries share theirs
    for manifest_path, entry in manifest.entries.items():
        if isinstance(entry, CONTAINER_ENTRIES):
            continue
        parent, _, _ = manifest_path.rpartition("/")
        path = ends.get(parent)
        if path is None:
            logical = split_rank(manifest_path)[1]
            segments = logical.split("/")
            path = "/".join(segments[:depth])
            if len(segments) > depth:
                ends[parent] = path
        line = lines.get(path)
        if line is None:
            line = lines[path] = RolledUp(path, 0, 0, (), ())
            types[path], dtypes[path] = set(), set()
        line.count += 1
        if type(entry) is TensorEntry:
            size, dtype, kind = entry.size_bytes, entry.dtype, "Tensor"
        else:
            size, dtype, kind = _stored(entry)
        if size is None or line.size_bytes is None:
            line.size_bytes = None
        else:
            line.size_bytes += size
        types[path].add(kind)
        if dtype is not None:
            dtypes[path].add(dtype)
    for path, line in lines.items():
        line.types = tuple(sorted(types[path]))
        line.dtypes = tuple(sorted(dtype.removeprefix("torch.") for dtype in dtypes[path] if dtype))
    return list(lines.values())


def _stored(entry: Entry) -> tuple[int | None, str | None, str]:
    shards = shards_of(entry)
    if shards:
        sizes = [shard.tensor.size_bytes for shard in shards]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        return total, shards[0].tensor.dtype, entry.type_name
    if isinstance(entry, ObjectEntry | UnknownEntry):
        return None, None, entry.type_name
    return 0, getattr(entry, "dtype", None), entry.type_name


def group_layers(entries: Iterable[LogicalEntry]) -> list[RolledUp]:
    """Repeated layers in one line: paths that differ only in whole numbers between dots and slashes, and are alike in
    type, dtype and shape. Containers are left out."""
    groups: dict[tuple[object, ...], list[LogicalEntry]] = {}
    for entry in entries:
        if isinstance(entry.entries[0][1], CONTAINER_ENTRIES):
            continue
        pattern = _NUMBER.sub("#", entry.path)
        groups.setdefault((pattern, entry.type, entry.dtype, entry.shape, entry.ranks), []).append(entry)
    return [_group(str(key[0]), members) for key, members in groups.items()]


def _group(pattern: str, members: Sequence[LogicalEntry]) -> RolledUp:
    first = members[0]
    sizes = [member.size_bytes for member in members]
    return RolledUp(
        first.path if len(members) == 1 else pattern,
        len(members),
        None if None in sizes else sum(size for size in sizes if size is not None),
        (first.type,),
        (first.dtype,) if first.dtype else (),
        first.shape,
        first.ranks,
        first.replicated,
    )
