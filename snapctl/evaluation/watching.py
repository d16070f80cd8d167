"""What is in a save directory, look after look, and what has come since the first.

A look costs a listing and a question for each manifest that can have changed: locally all of them, on object stores
those of the newest checkpoints and of the incomplete ones. What is remembered is one small value for each checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snapctl.checkpoints import (
    Place,
    classify,
    find_checkpoints,
    not_a_save_dir,
    plausible_time,
    step_names,
)
from snapctl.errors import (
    BucketNotFoundError,
    SaveDirNotFoundError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME
from snapctl.storage import FileInfo, Storage

NEWEST_WATCHED = 100
"""So many of the highest steps are looked at again on object stores; further down a second save is not noticed."""
_NAMES_PER_PAGE = 1000

_Found = dict[str, FileInfo | StorageError | None]
"""The manifests of directories."""


@dataclass(frozen=True, slots=True)
class Look:
    """A save directory at one moment."""

    names: tuple[str, ...]
    """Of its checkpoints' directories, complete or not, ascending by step."""
    complete: Mapping[str, FileInfo]
    """The manifests that are there and not empty, by directory; not those that could not be looked at."""
    new: frozenset[str]
    """Those of `complete` that were not there at the first look, or have been written again since."""
    failed: Mapping[str, StorageError]
    """Directories that could not be looked at."""
    old: frozenset[str]
    """Those of `failed` that were complete, or could not be looked at either, when the watch began."""


@dataclass(slots=True)
class _Start:
    """How it was when the watch began."""

    versions: dict[str, str]
    """Of the manifests that were there."""
    unsure: frozenset[str]
    """Directories that could not be looked at."""
    server_time: float
    """The storage's time when the watch began."""
    known_late: bool
    """The first looks failed: what was written meanwhile is new, by the storage's times."""


@dataclass(slots=True)
class Watch:
    """Looks at one save directory again and again. It may not be there yet."""

    storage: Storage
    clock: Callable[[], float] = time.monotonic
    is_save_dir: bool = False
    """A complete checkpoint has been seen in it."""
    _began: float = field(init=False)
    _known: dict[str, FileInfo] = field(default_factory=dict)
    _start: _Start | None = None
    _times: dict[tuple[str, str], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def look(self) -> Look:
        """Looks once.

        Raises:
            InvalidPathError: it is a checkpoint, not a save directory.
            SaveDirNotFoundError: its bucket is not there; a directory that is not there is just empty.
            PermissionDeniedError, CredentialsError: it may not be listed.
            StorageError: it could not be looked at, nor any of its checkpoints.
        """
        names, probed = self._list()
        found = self._find_manifests(names, probed)
        failed = {name: item for name, item in found.items() if isinstance(item, StorageError)}
        if failed and len(failed) == len(found):
            raise next(iter(failed.values()))
        self._remember(names, found)
        self.is_save_dir = self.is_save_dir or bool(self._known)
        if self._start is None:
            self._start = self._note_start(names, failed)
        start = self._start
        new = frozenset(name for name, file in self._known.items() if self._is_new(name, file, start))
        old = frozenset(name for name in failed if name in start.versions or name in start.unsure)
        return Look(names, dict(self._known), new, failed, old)

    def _list(self) -> tuple[tuple[str, ...], _Found]:
        """The directories of checkpoints, and the manifests that were looked for on the way."""
        if not self.is_save_dir:
            try:
                place = classify(self.storage)
            except SaveDirNotFoundError as error:
                if isinstance(error.__cause__, BucketNotFoundError):
                    raise
                return (), {}
            if place.kind == "checkpoint":
                raise not_a_save_dir(self.storage)
            return place.step_names, place.probed
        try:
            listing = self.storage.list_dir()
        except BucketNotFoundError as error:
            raise SaveDirNotFoundError(error.message) from error
        except StorageNotFoundError:
            return (), {}
        if any(file.path in (MANIFEST_NAME, DELETING_NAME) for file in listing.files):
            raise not_a_save_dir(self.storage)
        return step_names(listing), {}

    def _find_manifests(self, names: Sequence[str], probed: _Found) -> _Found:
        if self.storage.scheme == "file":
            return self.storage.find_each(names, MANIFEST_NAME)
        newest = [name for name in names[-NEWEST_WATCHED:] if name not in probed]
        others = [name for name in names[:-NEWEST_WATCHED] if name not in self._known and name not in probed]
        pages = -(-len(names) // _NAMES_PER_PAGE)
        if len(others) > 2 * pages:  # then one listing of all manifests costs less
            return {**probed, **self.storage.find_each([*others, *newest], MANIFEST_NAME)}
        found = self.storage.find_each(others, MANIFEST_NAME)
        return {**probed, **found, **self.storage.find_each(newest, MANIFEST_NAME)}

    def _remember(self, names: Iterable[str], found: _Found) -> None:
        for name in self._known.keys() - set(names):
            del self._known[name]
        for name, item in found.items():
            if isinstance(item, FileInfo) and item.size_bytes > 0:
                if self._known.get(name) != item:
                    self._known[name] = item
            elif not isinstance(item, StorageError):
                self._known.pop(name, None)

    def _note_start(self, names: Sequence[str], failed: Mapping[str, StorageError]) -> _Start:
        late = self.clock() - self._began
        return _Start(
            versions={name: file.version for name, file in self._known.items()},
            unsure=frozenset(failed),
            server_time=self.storage.now(may_write=False) - late if names else 0.0,
            known_late=late > 1.0,
        )

    def _is_new(self, name: str, file: FileInfo, start: _Start) -> bool:
        if name in start.unsure or (start.known_late and start.versions.get(name) == file.version):
            return file.modified_at >= start.server_time
        return start.versions.get(name) != file.version

    # -- times -------------------------------------------------------------------------------------------------

    def created_at(self, names: Sequence[str], look: Look) -> dict[str, float | None]:
        """When checkpoints were saved: what the save recorded, else the manifest's time; None if nobody knows.

        Records are read once for each version of a manifest.
        """
        if len(self._times) > 2 * len(look.complete) + NEWEST_WATCHED:
            current = {(name, file.version) for name, file in look.complete.items()}
            self._times = {key: when for key, when in self._times.items() if key in current}
        unread = [name for name in names if (name, look.complete[name].version) not in self._times]
        if unread:
            place = Place(self.storage, "save_dir", tuple(unread))
            for found in find_checkpoints(place):
                name = str(found.step)
                self._times[name, look.complete[name].version] = found.created_at
            for name in unread:  # vanished meanwhile
                self._times.setdefault((name, look.complete[name].version), None)
        return {name: self._times[name, look.complete[name].version] for name in names}

    def oldest_first(self, names: Iterable[str], look: Look) -> list[str]:
        """Names in the order in which they were saved; of equal times the higher step is the later."""
        by_step = sorted(names, key=int)
        by_manifest = sorted(by_step, key=lambda name: look.complete[name].modified_at)
        if by_manifest == by_step:
            return by_step
        times = self.created_at(by_step, look)  # copied, or begun again: the recorded times decide
        return sorted(by_step, key=lambda name: times[name] or 0.0)

    def newest_by_time(self, look: Look, among: Iterable[str] | None = None) -> str | None:
        """The checkpoint that was saved last; None if there is none of known time.

        A save is recorded before its manifest is written, so a manifest's time bounds the time of its checkpoint, and
        few records have to be read.
        """
        now = self.storage.now(may_write=False)
        bounds = [
            (when, int(name), name)
            for name in (look.complete if among is None else among)
            if (when := plausible_time(look.complete[name].modified_at, now)) is not None
        ]
        best: tuple[float, int, str] | None = None
        for when, step, name in sorted(bounds, reverse=True):
            if best is not None and (when, step) < best[:2]:
                break
            saved_at = self.created_at([name], look)[name]
            if saved_at is not None and (best is None or (saved_at, step) > best[:2]):
                best = (saved_at, step, name)
        return best[2] if best is not None else None
