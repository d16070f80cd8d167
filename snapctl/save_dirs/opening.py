"""Opening all save directories below some roots, for commands that take several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from snapctl.checkpoints import Place
from snapctl.errors import SaveDirNotFoundError
from snapctl.save_dirs.finding import FoundSaveDir
from snapctl.save_dirs.summaries import find_below, open_found, path_of
from snapctl.storage import Storage, open_storage


class SaveDirs(msgspec.Struct, frozen=True):
    """The save directories below some roots."""

    roots: tuple[Storage, ...]
    places: tuple[Place, ...]
    """Each once, in the order in which they were found."""
    problems: tuple[str, ...] = ()
    """What could not be listed: there may be more."""


def open_all_below(roots: Sequence[str], options: Mapping[str, Any] | None = None) -> SaveDirs:
    """The save directories below some roots, these included.

    Raises:
        InvalidPathError: a root is a checkpoint.
        SaveDirNotFoundError: a root is not there, or there is no save directory below any of them.
        StorageError: a root could not be listed at all.
    """
    storages = [open_storage(root, options) for root in roots]
    places: dict[object, Place] = {}
    problems: dict[str, None] = {}
    for storage in storages:
        for found in find_below(storage):
            path, problem = path_of(storage, found)
            if problem is not None:
                problems[problem] = None
            if path is None or not isinstance(found, FoundSaveDir):
                continue
            place = open_found(storage, found)
            places.setdefault(place.storage.identify() or path, place)
    if not places:
        told = "".join(f" ({problem})" for problem in problems)
        raise SaveDirNotFoundError(f"no save directory below {', '.join(s.url for s in storages)}{told}")
    return SaveDirs(tuple(storages), tuple(places.values()), tuple(problems))
