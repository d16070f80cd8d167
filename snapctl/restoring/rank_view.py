"""What one rank of a job is given of a checkpoint that any number of ranks saved. Pure.

A rank that saved it gets its own; sharded tensors go to whoever holds a part of them; what is replicated, or equal on
all ranks that saved, goes to all; a plain tensor that each rank saved for itself goes to a rank that did not save it
only where the caller says that it is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from snapctl.entry_names import EntryIndex
from snapctl.errors import DamagedError, ManifestError, UnsupportedEntryError
from snapctl.manifest import (
    CONTAINER_ENTRIES,
    SHARDED_ENTRIES,
    TENSOR_ENTRIES,
    DTensorEntry,
    Entry,
    Key,
    ListEntry,
    LogicalEntry,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    encode_key,
    shards_of,
    split_rank,
)
from snapctl.tensors.layout import TensorLayout, find_missing_shards, is_tensor_entry, resolve_layouts

Sources: TypeAlias = Sequence[tuple[str, Entry]]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the checkpoint."""

    layout: TensorLayout


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """A pickled object."""

    manifest_path: str
    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class ValueSource:
    """A value that is known already."""

    value: Any


@dataclass(frozen=True, slots=True)
class EmptySource:
    """A sharded tensor of which no rank lists a shard: one without elements, or one that has lost all of them."""

    manifest_path: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """It is there, and of no use to this rank."""

    kind: str
    """``own`` (of other ranks), ``damaged`` or ``unsupported``."""
    text: str
    error: DamagedError | None = None


Source: TypeAlias = "TensorSource | ObjectSource | ValueSource | EmptySource"


class RankView:
    """A checkpoint as one rank sees it."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        rank: int,
        names: Collection[str] | None = None,
        is_replicated: Callable[[str], bool] = lambda path: False,
        same_objects: Callable[[Sequence[tuple[str, ObjectEntry]]], bool] = lambda entries: False,
    ) -> None:
        """
        Args:
            rank: of the job that restores.
            names: the first segments of paths that matter; None: all.
            is_replicated: whether the caller says that what lies under a path is the same on all ranks.
            same_objects: whether some blobs hold the same.
        """
        self.manifest = manifest
        self.rank = rank
        self._is_replicated = is_replicated
        self._same_objects = same_objects
        kept = {
            path: entry
            for path, entry in manifest.entries.items()
            if names is None or split_rank(path)[1].partition("/")[0] in names
        }
        self._index = EntryIndex(msgspec.structs.replace(manifest, entries=kept))
        saved = range(manifest.world_size)
        self.saved_ranks = frozenset(saved) | self._index.ranks
        self.is_new = rank not in self.saved_ranks
        self._model_rank = min(self._index.ranks, default=0) if self.is_new else rank
        self._children: dict[str, dict[str, None]] = {}
        for manifest_path, entry in kept.items():
            owner, path = split_rank(manifest_path)
            if owner == self._model_rank or getattr(entry, "replicated", False) or isinstance(entry, DTensorEntry):
                self._enter(path)

    def _enter(self, path: str) -> None:
        parent, slash, segment = path.rpartition("/")
        while slash:
            children = self._children.setdefault(parent, {})
            if segment in children:
                return
            children[segment] = None
            parent, slash, segment = parent.rpartition("/")

    # -- containers ----------------------------------------------------------------------------------------------

    def container(self, path: str) -> str | None:
        """``dict``, ``OrderedDict`` or ``list``, where this rank has a container there; None if not."""
        entry = self._container_entry(path)
        if entry is not None:
            return entry.type_name
        return "dict" if path in self._children and path not in self._index.by_path else None

    def has(self, path: str) -> bool:
        """Whether any rank has something there: cheaper than `find`."""
        return path in self._index.by_path or self.container(path) is not None

    def keys(self, path: str) -> dict[str, Key]:
        """The keys of a container by their segment, in order."""
        entry = self._container_entry(path)
        listed = self._children.get(path, {})
        if isinstance(entry, ListEntry):
            numbers = sorted(int(segment) for segment in listed if segment.isdecimal() and segment.isascii())
            return {str(number): number for number in numbers}
        if entry is None:
            return {segment: segment.replace("%2F", "/").replace("%25", "%") for segment in listed}
        keys: Sequence[Key] = getattr(entry, "keys", ())
        return {encode_key(key): key for key in keys}

    def _container_entry(self, path: str) -> Entry | None:
        found = self._index.containers.get(path)
        if found is None:
            return None
        own = self._index.manifest.entries.get(f"{self._model_rank}/{path}")
        if isinstance(own, CONTAINER_ENTRIES):
            return own
        return None if own is not None or (not self.is_new and path in self._index.by_path) else found.entries[0][1]

    def names(self) -> set[str]:
        """The first segments of all paths."""
        return {split_rank(path)[1].partition("/")[0] for path in self._index.manifest.entries}

    # -- everything else -----------------------------------------------------------------------------------------

    def find(self, path: str) -> Source | Unusable | None:
        """What this rank gets under a path; None if there is nothing, on any rank."""
        groups = self._index.by_path.get(path)
        if not groups:
            return None
        held = [item for group in groups for item in group.entries]
        own = [item for item in held if split_rank(item[0])[0] == self.rank]
        sharded = [group for group in groups if isinstance(group.entries[0][1], SHARDED_ENTRIES)]
        if sharded and (not own or isinstance(own[0][1], SHARDED_ENTRIES)):
            return self._join(sharded)
        chosen = own or [item for item in held if getattr(item[1], "replicated", False)]
        if not chosen and self._equal_everywhere(held):
            chosen = held
        if not chosen and self._is_replicated(path):
            chosen = sorted(held, key=lambda item: split_rank(item[0])[0] or 0)
        if not chosen:
            ranks = sorted({split_rank(item[0])[0] or 0 for item in held})
            what = "its own tensor" if is_tensor_entry(held[0][1]) else "a value of its own"
            return Unusable(
                "own", f"{_some_ranks(ranks)} saved {what}, and rank {self.rank} has none in the checkpoint"
            )
        return self._source(path, groups[0], chosen[:1])

    def _source(self, path: str, group: LogicalEntry, chosen: Sources) -> Source | Unusable:
        manifest_path, entry = chosen[0]
        if is_tensor_entry(entry):
            only = msgspec.structs.replace(group, path=path, entries=tuple(chosen))
            return self._resolve(only)
        if isinstance(entry, ObjectEntry):
            return ObjectSource(manifest_path, entry)
        if isinstance(entry, PrimitiveEntry):
            try:
                return ValueSource(entry.value)
            except ManifestError as error:
                damaged = DamagedError(f"{manifest_path}: {error.message}", kind="undecodable", entry=manifest_path)
                return Unusable("damaged", damaged.message, damaged)
        return Unusable("unsupported", f"is of type {entry.type_name}, which this version does not know")

    def _join(self, groups: Sequence[LogicalEntry]) -> Source | Unusable:
        entries = tuple(item for group in groups for item in group.entries)
        whole = msgspec.structs.replace(groups[0], entries=entries)
        if not any(shards_of(entry) for _, entry in entries):
            return EmptySource(entries[0][0])
        for problem in find_missing_shards(whole, self.manifest, self._index.ranks):
            return Unusable("damaged", problem.message, problem)
        return self._resolve(whole)

    @staticmethod
    def _resolve(entry: LogicalEntry) -> Source | Unusable:
        try:
            return TensorSource(resolve_layouts(entry)[0])
        except DamagedError as error:
            return Unusable("damaged", error.message, error)
        except UnsupportedEntryError as error:
            return Unusable("unsupported", error.message)

    def _equal_everywhere(self, held: Sources) -> bool:
        """Whether all ranks that saved have the same primitive or object there."""
        if {split_rank(path)[0] for path, _ in held} != self.saved_ranks:
            return False
        first = held[0][1]
        if isinstance(first, PrimitiveEntry):
            return all(
                isinstance(entry, PrimitiveEntry)
                and (entry.kind, entry.serialized_value) == (first.kind, first.serialized_value)
                for _, entry in held
            )
        objects = [(path, entry) for path, entry in held if isinstance(entry, ObjectEntry) and not entry.is_tensor]
        if len(objects) != len(held) or len({entry.obj_type for _, entry in objects}) != 1:
            return False
        return len(held) == 1 or self._same_objects(objects)

    # -- what nobody gets ----------------------------------------------------------------------------------------

    def iter_gone(self, world_size: int) -> Iterator[str]:
        """Paths under which ranks that are no more have left something of their own: tensors, and other values."""
        for path, groups in self._index.by_path.items():
            for group in groups:
                if group.replicated or isinstance(group.entries[0][1], SHARDED_ENTRIES) or self._is_replicated(path):
                    continue
                gone = [item for item in group.entries if (split_rank(item[0])[0] or 0) >= world_size]
                if gone and not self._is_repeated(group, gone, world_size):
                    yield path
                    break

    def _is_repeated(self, group: LogicalEntry, gone: Sources, world_size: int) -> bool:
        kept = [item for item in group.entries if (split_rank(item[0])[0] or 0) < world_size]
        if not kept or isinstance(group.entries[0][1], TENSOR_ENTRIES):
            return False
        if isinstance(group.entries[0][1], ObjectEntry):
            objects = [(path, entry) for path, entry in (*kept[:1], *gone) if isinstance(entry, ObjectEntry)]
            return not objects[0][1].is_tensor and self._same_objects(objects)
        return True  # a logical entry of primitives has one value


def _some_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"each of the ranks {ranks[0]} to {ranks[-1]}"
    return f"each of the ranks {', '.join(map(str, ranks[:10]))}{', …' if len(ranks) > 10 else ''}"


def replication_test(patterns: Collection[str]) -> Callable[[str], bool]:
    """Whether one of some globs fits a logical path, as torchsnapshot reads them."""
    from fnmatch import fnmatchcase

    return lambda path: any(fnmatchcase(path, pattern) for pattern in patterns)
