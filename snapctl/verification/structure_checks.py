"""What a manifest alone tells about whether it can be right: ``verify --level structure``. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from snapctl.errors import ManifestError
from snapctl.manifest import (
    CONTAINER_ENTRIES,
    DTYPE_SIZES,
    LogicalEntry,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    TensorEntry,
    UnknownEntry,
    no_garbage_collection,
    shards_of,
    split_rank,
)
from snapctl.tensors.layout import (
    MAX_BYTES,
    RAW_SERIALIZER,
    TORCH_SERIALIZERS,
    inspect_layouts,
    is_beyond_bounds,
    is_outside,
    is_tensor_entry,
)
from snapctl.verification.blob_uses import BlobUse, by_location, find_shared_bytes, find_uses
from snapctl.verification.container_checks import find_container_problems, find_missing_ranks
from snapctl.verification.verdicts import Problem, Unchecked, problem_of

_SENSELESS = ("bad-range", "size-mismatch", "outside", "undecodable")
"""Kinds of problems after which the byte ranges of an entry mean nothing: no second problem is made of them."""


class Structure(msgspec.Struct, frozen=True):
    """What is known of a manifest without a look at its blobs."""

    uses: dict[str, list[BlobUse]]
    """By location: the stretches of blobs that are needed."""
    problems: tuple[Problem, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    warnings: tuple[str, ...] = ()


def check_structure(manifest: Manifest) -> Structure:
    """Whether the entries of a manifest make sense: by themselves, together, and with their containers."""
    with no_garbage_collection():
        return _check(manifest)


def _check(manifest: Manifest) -> Structure:
    problems: list[Problem] = []
    unchecked: list[Unchecked] = []
    for logical in manifest.logical_entries():
        first = logical.entries[0][1]
        if isinstance(first, CONTAINER_ENTRIES):
            continue
        if isinstance(first, PrimitiveEntry):
            problems += _primitive_problems(logical)
        elif isinstance(first, UnknownEntry):
            unchecked += [Unchecked(path, f"of the unknown type {first.type!r}") for path, _ in logical.entries]
        elif is_tensor_entry(first):
            if not all(_is_plain(entry) for _, entry in logical.entries):
                problems += map(problem_of, inspect_layouts(logical)[1])
                unchecked += _unknown_codings(logical)
        elif isinstance(first, ObjectEntry):
            found = list(_object_problems(logical))
            problems += found
            unchecked += () if found else _unknown_codings(logical)
    problems += find_container_problems(manifest)
    missing, warnings = find_missing_ranks(manifest)
    problems += missing
    senseless = {(split_rank(p.entry)[1], p.blob) for p in problems if p.kind in _SENSELESS and p.entry is not None}
    uses = by_location(find_uses(manifest, without=senseless))
    problems += find_shared_bytes(uses)
    return Structure(uses, tuple(problems), tuple(unchecked), tuple(warnings))


def _is_plain(entry: object) -> bool:
    """Whether it is a whole tensor in the plainest form, with nothing wrong: nearly all of a large manifest."""
    if not isinstance(entry, TensorEntry) or entry.serializer != RAW_SERIALIZER:
        return False
    each = DTYPE_SIZES.get(entry.dtype or "")
    if each is None or is_outside(entry.location) or min(entry.shape, default=0) < 0:
        return False
    size = math.prod(entry.shape) * each
    if size > MAX_BYTES or (size == 0 and is_beyond_bounds(entry.shape)):
        return False
    if entry.byte_range is None:
        return True
    start, end = entry.byte_range
    return 0 <= start <= end <= MAX_BYTES and end - start == size


def _primitive_problems(logical: LogicalEntry) -> Iterator[Problem]:
    for path, entry in logical.entries:
        if isinstance(entry, PrimitiveEntry):
            try:
                entry.value  # noqa: B018 - whether it raises
            except ManifestError as error:
                yield Problem("undecodable", path, None, error.message)


def _object_problems(logical: LogicalEntry) -> Iterator[Problem]:
    for path, entry in logical.entries:
        if isinstance(entry, ObjectEntry) and is_outside(entry.location):
            detail = f"its location leads out of the checkpoint: {entry.location!r}"
            yield Problem("outside", path, entry.location, detail)


def _unknown_codings(logical: LogicalEntry) -> Iterator[Unchecked]:
    """Entries with a serializer or a dtype that this version does not know."""
    for path, entry in logical.entries:
        stored: Sequence[TensorEntry | ObjectEntry]
        stored = [entry] if isinstance(entry, TensorEntry | ObjectEntry) else [s.tensor for s in shards_of(entry)]
        for item in stored:
            if item.serializer not in (RAW_SERIALIZER, *TORCH_SERIALIZERS):
                yield Unchecked(path, f"of the unknown serializer {item.serializer!r}")
                break
            if isinstance(item, TensorEntry) and item.dtype is not None and item.dtype not in DTYPE_SIZES:
                yield Unchecked(path, f"of the unknown dtype {item.dtype!r}")
                break
