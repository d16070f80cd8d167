"""What a path is: a checkpoint, a save directory, or neither."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import msgspec

from snapctl.checkpoints.checkpoint import parse_step
from snapctl.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    InvalidPathError,
    SaveDirNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import (
    DELETING_NAME,
    MARKER_DIR,
)
from snapctl.storage import FileInfo, Listing, Storage, open_storage

SIGNS_OF_A_CHECKPOINT = ("replicated", "sharded", "batched", MARKER_DIR, ".snapctl")
_PROBE_GROUPS = (1, 4, 16, 64)
PATIENCE_SECONDS = 6.0
"""After the first failure of the network or the server, no further object is asked for once so long has passed."""


class Place(msgspec.Struct):
    """A path that is there, and what it is."""

    storage: Storage
    kind: Literal["checkpoint", "save_dir"]
    step_names: tuple[str, ...] = ()
    """Of a save directory: the names of its checkpoints, complete or not, ascending by step."""
    linked_names: frozenset[str] = frozenset()
    """Those of `step_names` that are symbolic links."""
    probed: dict[str, FileInfo | StorageError | None] = {}
    """The manifests that were looked for on the way here, from the newest down, so that nobody has to look again."""


def find_place(path: str, options: Mapping[str, Any] | None = None) -> Place:
    """What a path or URL is: a checkpoint or a save directory.

    Raises:
        SaveDirNotFoundError: it is not there.
        InvalidPathError: it is a file.
        StorageError: the storage did not answer, or did not allow to look.
    """
    return classify(open_storage(path, options))


def classify(storage: Storage) -> Place:
    """`find_place` for an opened directory."""
    try:
        listing = storage.list_dir()
    except BucketNotFoundError as error:
        raise SaveDirNotFoundError(error.message) from error
    except StorageNotFoundError as error:
        raise _missing(storage) from error
    names = {file.path for file in listing.files}
    if MANIFEST_NAME in names or DELETING_NAME in names:
        return Place(storage, "checkpoint")
    steps = step_names(listing)
    place = Place(storage, "save_dir", steps, listing.linked_dirs & set(steps))
    if steps and _has_complete_child(place):
        return place
    if any(name in SIGNS_OF_A_CHECKPOINT for name in listing.dirs) or _is_among_checkpoints(storage):
        place.kind = "checkpoint"
    return place


def step_names(listing: Listing) -> tuple[str, ...]:
    """The names of a save directory's checkpoints, ascending by step."""
    return tuple(sorted((name for name in listing.dirs if parse_step(name) is not None), key=int))


def _missing(storage: Storage) -> SaveDirNotFoundError | InvalidPathError:
    parent = storage.parent()
    if parent is not None and storage.scheme == "file":
        try:
            if parent.find_file(storage.name) is not None:
                return InvalidPathError(f"{storage.url}: is a file, not a directory")
        except StorageError:
            pass
    if storage.scheme == "file":
        return SaveDirNotFoundError(f"{storage.url}: no such directory")
    return SaveDirNotFoundError(f"{storage.url}: nothing lies under this prefix")


def _has_complete_child(place: Place) -> bool:
    """Whether a child with a number for a name has a manifest, or had one (`.deleting`); looks from the top."""
    for _, found in probe(place, place.step_names[::-1]):
        if isinstance(found, FileInfo):
            return True
    if any(isinstance(found, StorageError) for found in place.probed.values()):
        return True  # not all could be looked at: whoever asks for a checkpoint will be told so
    storage = place.storage
    scanned = storage.scan(place.step_names, (DELETING_NAME,))
    return any(entry.files for entry in scanned)


def probe(place: Place, names: Sequence[str]) -> Iterator[tuple[str, FileInfo | StorageError | None]]:
    """The manifests' files of children in the order given, in growing groups: the first ones matter most.

    After them all others at once, which costs an object store a few listings, however many they are. When the storage
    has not answered for a while it is not asked for the rest: they end with the same error.
    """
    storage, patience = place.storage, Patience()
    position, group = 0, iter(_PROBE_GROUPS)
    while position < len(names):
        part = names[position : position + next(group, len(names))]
        todo = [name for name in part if name not in place.probed]
        if patience.is_over:
            place.probed.update((name, patience.last_error) for name in todo)
        else:
            place.probed.update(storage.find_each(todo, MANIFEST_NAME))
        for name in part:
            found = place.probed[name]
            patience.note(found)
            yield name, found
        position += len(part)


class Patience:
    """For how long objects are asked for one after another while the storage does not answer."""

    def __init__(self) -> None:
        self.last_error: StorageError | None = None
        self._give_up_at: float | None = None

    def note(self, found: object) -> None:
        """One more answer: a failure of the network or the server, or anything else."""
        if isinstance(found, UnavailableError):
            self.last_error = found
            self._give_up_at = self._give_up_at or time.monotonic() + PATIENCE_SECONDS

    @property
    def is_over(self) -> bool:
        return self._give_up_at is not None and time.monotonic() > self._give_up_at


def _is_among_checkpoints(storage: Storage) -> bool:
    """Whether it is named like a step and stands beside a complete checkpoint."""
    parent = storage.parent()
    if parse_step(storage.name) is None or parent is None:
        return False
    try:
        siblings = Place(parent, "save_dir", step_names(parent.list_dir()))
        return any(isinstance(found, FileInfo) for _, found in probe(siblings, siblings.step_names[::-1]))
    except StorageError:
        return False


def open_save_dir(path: str, options: Mapping[str, Any] | None = None) -> Place:
    """A save directory.

    Raises:
        InvalidPathError: it is a checkpoint; the message names the save directory to pass.
        SaveDirNotFoundError, StorageError: as `find_place`.
    """
    place = find_place(path, options)
    if place.kind == "checkpoint":
        raise not_a_save_dir(place.storage)
    return place


def not_a_save_dir(storage: Storage) -> InvalidPathError:
    """The error for a checkpoint where a save directory is needed."""
    parent = storage.parent()
    hint = f"its save directory is {parent.url}" if parent is not None else None
    return InvalidPathError(f"{storage.url}: is a checkpoint, not a save directory", hint=hint)


@overload
def open_checkpoint(
    path: str,
    step: int | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    allow_save_dir: Literal[False] = False,
) -> Storage: ...


@overload
def open_checkpoint(
    path: str, step: int | None = None, options: Mapping[str, Any] | None = None, *, allow_save_dir: bool
) -> Storage | Place: ...


def open_checkpoint(
    path: str, step: int | None = None, options: Mapping[str, Any] | None = None, *, allow_save_dir: bool = False
) -> Storage | Place:
    """The directory of one checkpoint, complete or not.

    Args:
        path: the checkpoint's own path, or with `step` its save directory.
        allow_save_dir: return the `Place` of a save directory without `step` instead of raising.

    Raises:
        InvalidPathError: a save directory without `step`, or a checkpoint with one.
        CheckpointNotFoundError: there is no such step, or nothing at the checkpoint's own path.
        SaveDirNotFoundError: there is no such save directory.
    """
    try:
        place = find_place(path, options)
    except SaveDirNotFoundError as error:
        if step is not None or allow_save_dir:
            raise
        raise CheckpointNotFoundError(error.message, hint=error.hint) from error
    if step is None:
        if place.kind == "checkpoint":
            return place.storage
        if allow_save_dir:
            return place
        raise InvalidPathError(
            f"{place.storage.url}: is a save directory, not a checkpoint", hint="name the checkpoint, or add --step N"
        )
    if place.kind == "checkpoint":
        parent = place.storage.parent()
        hint = f"with --step, pass the save directory: {parent.url}" if parent is not None else None
        raise InvalidPathError(f"{place.storage.url}: is a checkpoint already", hint=hint)
    if str(step) not in place.step_names:
        raise no_such_step(place, step)
    return place.storage.child(str(step))


def no_such_step(place: Place, step: int) -> CheckpointNotFoundError:
    """The error for a step that a save directory does not have; its hint names the nearest."""
    nearest = sorted(place.step_names, key=lambda name: abs(int(name) - step))[:3]
    hint = f"there are: {', '.join(sorted(nearest, key=int))}" if nearest else None
    return CheckpointNotFoundError(f"{place.storage.url}: no step {step}", hint=hint)
