"""Which checkpoints are to be verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from snapctl.checkpoints import (
    Place,
    find_newest_complete,
    find_place,
    incomplete,
    no_complete_checkpoint,
    no_such_step,
    parse_step,
)
from snapctl.errors import InvalidPathError, StorageError
from snapctl.manifest import MANIFEST_NAME
from snapctl.storage import FileInfo, Storage
from snapctl.verification.verdicts import Level


class Target(msgspec.Struct, frozen=True):
    """One checkpoint to be verified."""

    step: int | None
    storage: Storage
    files: list[FileInfo] | None = None
    """Its listing, if it is at hand."""
    error: StorageError | None = None
    """It could not be looked at."""

    @property
    def weight_bytes(self) -> int:
        """The size of its manifest, as far as it is known."""
        return next((file.size_bytes for file in self.files or () if file.path == MANIFEST_NAME), 0)


class Targets(msgspec.Struct, frozen=True):
    """The checkpoints that a path means, complete ones only."""

    storage: Storage
    """What the path itself is."""
    count: int
    """At most so many."""
    items: Iterator[Target]
    all_of: Place | None = None
    """The save directory all of whose checkpoints are meant: then one that vanishes meanwhile is none of them."""
    not_looked_at: tuple[StorageError, ...] = ()
    """Newer ones that could not be looked at, so that nobody knows whether they are complete."""


def find_targets(
    path: str,
    *,
    steps: Sequence[int] = (),
    every: bool = False,
    level: Level = "size",
    options: Mapping[str, Any] | None = None,
) -> Targets:
    """The checkpoint of a path; of a save directory those of some steps, all, or the newest complete one.

    Args:
        every: all complete ones of the save directory.
        level: what they will be verified for; a level that needs listings gets them at once, where that is cheaper.

    Raises:
        InvalidPathError: the wrong kind of path for `steps` or `every`.
        SaveDirNotFoundError, CheckpointNotFoundError: it is not there, or incomplete.
        StorageError: it could not be looked at.
    """
    return find_targets_in(find_place(path, options), steps=steps, every=every, level=level)


def find_targets_in(place: Place, *, steps: Sequence[int] = (), every: bool = False, level: Level = "size") -> Targets:
    """`find_targets` for a path that has been looked at already."""
    storage = place.storage
    if place.kind == "checkpoint":
        if steps or every:
            parent = storage.parent()
            hint = f"with --step or --all, pass the save directory: {parent.url}" if parent is not None else None
            raise InvalidPathError(f"{storage.url}: is a checkpoint, not a save directory", hint=hint)
        return Targets(storage, 1, iter([Target(parse_step(storage.name), storage)]))
    if every:
        names = place.step_names
        if not names:
            raise no_complete_checkpoint(place)
        return Targets(storage, len(names), _every(place, names, listed=level != "structure"), place)
    not_looked_at: tuple[StorageError, ...] = ()
    if steps:
        chosen = list(dict.fromkeys(str(step) for step in sorted(steps)))
        _check_complete(place, chosen)
    else:
        newest, not_looked_at = find_newest_complete(place)
        chosen = [newest]
    targets = [Target(int(name), storage.child(name)) for name in chosen]
    return Targets(storage, len(targets), iter(targets), None, not_looked_at)


def _check_complete(place: Place, names: Sequence[str]) -> None:
    for name in names:
        if name not in place.step_names:
            raise no_such_step(place, int(name))
    found = place.storage.find_files([f"{name}/{MANIFEST_NAME}" for name in names])
    for name in names:
        manifest = found.get(f"{name}/{MANIFEST_NAME}")
        if manifest is None or manifest.size_bytes == 0:
            raise incomplete(place.storage.child(name))


def _every(place: Place, names: Sequence[str], *, listed: bool) -> Iterator[Target]:
    """Of those that are listed only the complete ones; the others have to be looked at to know."""
    storage = place.storage
    if not listed:
        yield from (Target(int(name), storage.child(name)) for name in names)
        return
    for tree in storage.list_trees(names):
        target = Target(int(tree.name), storage.child(tree.name), tree.files, tree.error)
        if tree.error is not None or target.weight_bytes > 0:
            yield target
