"""What storages say: values that name files and what became of them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from snapctl.errors import (
    StorageError,
)

FileIdentity: TypeAlias = tuple[int, int]
"""Device and inode: the same for one file under all its names."""


class FileInfo(msgspec.Struct, frozen=True, gc=False):
    """One file or object, as the storage saw it at one moment."""

    path: str
    """Relative to the storage that listed it."""
    size_bytes: int
    modified_at: float
    """Seconds since the epoch by the storage's clock: the mtime locally, ``timeCreated`` of the live generation on
    GCS (any change of metadata moves ``updated``). 0.0 where the storage keeps no time."""
    version: str = ""
    """Identifies this very object: the generation on GCS, ``inode:size:mtime_ns`` locally; empty where unknown."""
    crc32c: int | None = None
    """CRC32C (Castagnoli) of the content, where the storage keeps one."""
    is_link: bool = False
    """A symbolic link (local only); the other fields are then those of what it leads to, where that exists."""
    is_regular: bool = True
    """False for a link that leads nowhere, a FIFO, a device (local only): nothing can be read from it."""
    held_until: float | None = None
    """It cannot be deleted before this time (retention); infinity while an object is under a hold."""


class Listing(msgspec.Struct, frozen=True):
    """The direct children of a directory, each sorted by name."""

    files: tuple[FileInfo, ...]
    dirs: tuple[str, ...]
    """Names of sub-directories; a symbolic link to a directory counts as one."""
    linked_dirs: frozenset[str] = frozenset()
    """Those of `dirs` that are symbolic links."""


class ScannedDir(msgspec.Struct, gc=False):
    """What `Storage.scan` found in one child directory."""

    name: str
    files: list[FileInfo] = []
    """The wanted files; paths are relative to the child directory."""
    file_count: int | None = None
    """All files at any depth, folder objects of no bytes excluded. None unless totals were asked for."""
    size_bytes: int | None = None
    error: StorageError | None = None
    """It could not be looked at; a `StorageNotFoundError` if it vanished meanwhile."""
    totals_error: StorageError | None = None
    """Not all of it could be counted."""


class StorageTime(NamedTuple):
    """A moment by the storage's clock, or by this machine's where the storage's could not be read."""

    seconds: float
    """Since the epoch."""
    is_storage_clock: bool


class DeletedFiles(msgspec.Struct):
    """What became of the files given to `Storage.delete_files`."""

    deleted: int = 0
    deleted_bytes: int = 0
    gone: int = 0
    """Somebody else had deleted them; that is success, too."""
    changed: list[str] = msgspec.field(default_factory=list)
    """Paths where another object stands in place of the one that was listed; it was not touched."""
    failed: list[StorageError] = msgspec.field(default_factory=list)
    """One error for each file that is still there."""
    unfinished: int = 0
    """Not tried: it was stopped, or a change was seen."""

    def count(self, size_bytes: int, outcome: bool) -> None:
        """Counts one file that is no longer there."""
        if outcome:
            self.deleted += 1
            self.deleted_bytes += size_bytes
        else:
            self.gone += 1


class ListedTree(msgspec.Struct, gc=False):
    """What `Storage.list_trees` found below one child directory."""

    name: str
    files: list[FileInfo] = []
    """Sorted by path; paths are relative to the child directory. Empty where there is nothing."""
    error: StorageError | None = None
    """It could not be listed."""


class WalkFailure(msgspec.Struct, gc=False):
    """A directory that `Storage.walk` could not list, or not to its end."""

    path: str
    """Relative, without a slash at the end; empty for the storage itself."""
    error: StorageError
