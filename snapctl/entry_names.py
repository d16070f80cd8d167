"""From what a user types to the entries that are meant. Pure; nothing is ever picked among several.

A name is tried as a manifest path with its rank, as a path without one, as either with the keys decoded, as a glob, and
as the end of a path that begins after a ``/`` or a ``.``; the first of these that hits anything decides.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate

import msgspec

from snapctl.errors import EntryNotFoundError
from snapctl.manifest import (
    CONTAINER_ENTRIES,
    DTensorEntry,
    LogicalEntry,
    Manifest,
    ShardedTensorEntry,
    decode_path,
    split_rank,
)

MAX_CANDIDATES = 20
_COMPARED_NAMES = 3000
_GLOB_CHARACTERS = re.compile(r"[*?\[]")
_SEPARATORS = re.compile(r"[./]")
_WORDS = re.compile(r"[^./_%]+")


@dataclass(frozen=True, slots=True)
class Match:
    """What a name stands for."""

    entries: tuple[LogicalEntry, ...]
    """One, or with a glob any number but none, in the manifest's order; never a container."""
    is_glob: bool = False
    ambiguous: tuple[tuple[LogicalEntry, ...], ...] = ()
    """Those of one path of which the ranks hold different things, without a rank to tell which is meant."""


class EntryIndex:
    """The logical entries of a manifest, by path."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.containers: dict[str, LogicalEntry] = {}
        self.by_path: dict[str, list[LogicalEntry]] = {}
        for entry in manifest.logical_entries():
            if isinstance(entry.entries[0][1], CONTAINER_ENTRIES):
                self.containers[entry.path] = entry
            else:
                self.by_path.setdefault(entry.path, []).append(entry)
        self.ranks = frozenset(
            rank for held in self.by_path.values() for entry in held for rank in entry.ranks
        ) | frozenset(rank for entry in self.containers.values() for rank in entry.ranks)

    def __iter__(self) -> Iterator[LogicalEntry]:
        for held in self.by_path.values():
            yield from held


def find_entries(index: EntryIndex, name: str, *, rank: int | None = None) -> Match:
    """The entries that a name stands for.

    Args:
        rank: what this rank holds. Without it, and without a rank in the name, an entry of which each rank holds its
            own comes back with all of them: whether they are equal is not in the manifest.

    Raises:
        EntryNotFoundError: nothing, or several in one step; `candidates` are these, or the nearest names.
    """
    for hits in (_by_manifest_path(index, name, rank), _by_path(index, name, rank), _by_decoded(index, name, rank)):
        if hits:
            return Match((_only(name, hits),))
    if _GLOB_CHARACTERS.search(name):
        globbed = _by_glob(index, name, rank)
        if globbed is not None:
            return globbed
    hits = _by_suffix(index, name, rank)
    if hits:
        return Match((_only(name, hits),))
    raise _not_found(index, name, rank)


def restrict(entry: LogicalEntry, rank: int) -> LogicalEntry:
    """What one rank holds of an entry; a sharded or replicated one is the same whoever asks."""
    if _is_shared(entry):
        return entry
    own = tuple(item for item in entry.entries if split_rank(item[0])[0] == rank)
    return msgspec.structs.replace(entry, entries=own, ranks=(rank,)) if own else entry


def _is_shared(entry: LogicalEntry) -> bool:
    return entry.replicated or isinstance(entry.entries[0][1], ShardedTensorEntry | DTensorEntry)


def _lists(entry: LogicalEntry, rank: int) -> bool:
    return any(split_rank(path)[0] == rank for path, _ in entry.entries)


def _held(entries: Iterable[LogicalEntry], rank: int | None) -> list[LogicalEntry]:
    """Those that a rank can name; all without a rank."""
    if rank is None:
        return list(entries)
    return [restrict(entry, rank) for entry in entries if _is_shared(entry) or _lists(entry, rank)]


def _with_rank(index: EntryIndex, name: str, rank: int | None) -> tuple[int, str] | None:
    named, path = split_rank(name)
    if named is None or (rank is not None and named != rank):
        return None
    if named >= index.manifest.world_size and named not in index.ranks:
        return None
    return named, path


def _by_manifest_path(index: EntryIndex, name: str, rank: int | None) -> list[LogicalEntry]:
    named = _with_rank(index, name, rank)
    return [] if named is None else _held(index.by_path.get(named[1], ()), named[0])


def _by_path(index: EntryIndex, name: str, rank: int | None) -> list[LogicalEntry]:
    return _held(index.by_path.get(name, ()), rank)


def _by_decoded(index: EntryIndex, name: str, rank: int | None) -> list[LogicalEntry]:
    named = _with_rank(index, name, rank)
    hits: list[LogicalEntry] = []
    for path, entries in index.by_path.items():
        if "%" not in path:
            continue  # decoded it is what it was
        decoded = decode_path(path)
        if decoded == name:
            hits += _held(entries, rank)
        elif named is not None and decoded == named[1]:
            hits += _held(entries, named[0])
    # a key with a slash in it and two keys may look alike once they are decoded
    plain = index.by_path.get(name, ()) if hits else ()
    return hits + _held(plain, rank)


def _by_glob(index: EntryIndex, glob: str, rank: int | None) -> Match | None:
    """Every entry that a glob fits, by its path with or without a rank, encoded or decoded."""
    fits = re.compile(translate(glob)).match
    named = _with_rank(index, glob, rank)
    fits_on_rank = None if named is None else re.compile(translate(named[1])).match
    any_rank = _GLOB_CHARACTERS.search(glob.partition("/")[0]) is not None
    hits: list[LogicalEntry] = []
    ambiguous: list[tuple[LogicalEntry, ...]] = []
    for path, entries in index.by_path.items():
        spellings = {path, decode_path(path)} if "%" in path else {path}
        found: list[LogicalEntry] = []
        if any(map(fits, spellings)):
            found = _globbed(entries, rank)
        elif named is not None and fits_on_rank is not None and any(map(fits_on_rank, spellings)):
            found = _globbed(entries, named[0])
        elif any_rank:
            for one in sorted({r for entry in entries for r in _ranks(entry)}) if rank is None else [rank]:
                if any(fits(f"{one}/{spelling}") for spelling in spellings):
                    found += [item for item in _globbed(entries, one) if item not in found]
        if len(found) > 1:
            ambiguous.append(tuple(found))
        else:
            hits += found
    return Match(tuple(hits), True, tuple(ambiguous)) if hits or ambiguous else None


def _globbed(entries: Sequence[LogicalEntry], rank: int | None) -> list[LogicalEntry]:
    """As `_held`, but a rank has of the sharded tensors only those that it names itself."""
    if rank is None:
        return list(entries)
    return [
        restrict(entry, rank)
        for entry in entries
        if entry.replicated or isinstance(entry.entries[0][1], DTensorEntry) or _lists(entry, rank)
    ]


def _ranks(entry: LogicalEntry) -> set[int]:
    return {rank for path, _ in entry.entries if (rank := split_rank(path)[0]) is not None}


def _by_suffix(index: EntryIndex, name: str, rank: int | None) -> list[LogicalEntry]:
    ends = (f"/{name}", f".{name}")
    hits: list[LogicalEntry] = []
    for path, entries in index.by_path.items():
        if path.endswith(ends) or ("%" in path and decode_path(path).endswith(ends)):
            hits += _held(entries, rank)
    return hits


def _only(name: str, hits: Sequence[LogicalEntry]) -> LogicalEntry:
    """The one hit.

    Raises:
        EntryNotFoundError: there are several.
    """
    if len(hits) == 1:
        return hits[0]
    if len({entry.path for entry in hits}) == 1:
        raise differing_ranks(name, hits)
    paths = tuple(entry.path for entry in hits)
    raise EntryNotFoundError(
        f"{name}: {len(hits)} entries fit: {_listed(paths)}",
        candidates=paths[:MAX_CANDIDATES],
        hint="name one of them in full, or all of them with a glob",
    )


def differing_ranks(name: str, entries: Sequence[LogicalEntry]) -> EntryNotFoundError:
    """The error for several things that the ranks hold under one path."""
    paths = tuple(path for entry in entries for path, _ in entry.entries)
    return EntryNotFoundError(
        f"{name}: the ranks hold different things under {entries[0].path}: {_listed(paths)}",
        candidates=paths[:MAX_CANDIDATES],
        hint="say which with --rank, or with the rank in the name",
    )


def _not_found(index: EntryIndex, name: str, rank: int | None) -> EntryNotFoundError:
    container = _container(index, name)
    if container is not None:
        inside = [path for path in index.by_path if path.startswith(f"{container.path}/")]
        return EntryNotFoundError(
            f"{name}: is a {container.type} of {len(inside)} entries, not one",
            candidates=tuple(inside[:MAX_CANDIDATES]),
            hint=f"'{container.path}/*' for all of them",
        )
    entries = list(index) if rank is None else [entry for entry in index if _globbed([entry], rank)]
    nearest = nearest_names(name, [entry.path for entry in entries])
    where = "" if rank is None else f" on rank {rank}"
    hint = f"the nearest names are: {_listed(nearest)}" if nearest else None
    return EntryNotFoundError(f"{name}: no such entry{where}", candidates=nearest, hint=hint)


def _container(index: EntryIndex, name: str) -> LogicalEntry | None:
    for path in (name.rstrip("/"), split_rank(name.rstrip("/"))[1]):
        if path in index.containers:
            return index.containers[path]
    return None


def nearest_names(name: str, names: Sequence[str], *, count: int = 5) -> tuple[str, ...]:
    """The names that look most like one, the likeliest first; of each also its end is compared, as long as the name."""
    path = split_rank(name)[1]
    if len(names) > _COMPARED_NAMES:  # comparing letter by letter is slow: first those that share the most words
        words = set(_WORDS.findall(path))
        names = sorted(names, key=lambda other: -len(words.intersection(_WORDS.findall(other))))[:_COMPARED_NAMES]
    separators = len(_SEPARATORS.findall(path))
    spellings: dict[str, str] = {}
    for other in names:
        cuts = [match.end() for match in _SEPARATORS.finditer(other)]
        tail = other[cuts[-separators - 1] :] if len(cuts) > separators else other
        spellings.setdefault(tail, other)
        spellings[other] = other
    close = difflib.get_close_matches(path, spellings, n=2 * count, cutoff=0.6)
    return tuple(dict.fromkeys(spellings[spelling] for spelling in close))[:count]


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:5]) + (f", … ({len(paths)} in all)" if len(paths) > 5 else "")
