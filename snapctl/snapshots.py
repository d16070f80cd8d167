"""One checkpoint, opened: where it lies and what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapctl.checkpoints import Place, find_latest, open_checkpoint, parse_step, read_manifest
from snapctl.manifest import Manifest
from snapctl.storage import Storage


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A checkpoint whose manifest has been read."""

    storage: Storage
    path: str
    """As it is printed."""
    step: int | None
    """None for a checkpoint whose directory's name is no number."""
    manifest: Manifest
    warnings: tuple[str, ...] = ()
    """What was passed over on the way to it."""
    is_unsure: bool = False
    """The storage did not let us look at a newer one, which may be the latest."""


def open_snapshot(path: str, step: int | None = None, options: Mapping[str, Any] | None = None) -> OpenSnapshot:
    """The checkpoint of a path; of a save directory the one of a step, or the latest.

    Raises:
        SaveDirNotFoundError, CheckpointNotFoundError: it is not there, or incomplete.
        InvalidPathError: the wrong kind of path for `step`.
        ManifestError: its manifest cannot be used.
        StorageError: the storage did not let us look.
    """
    opened = open_checkpoint(path, step, options, allow_save_dir=True)
    if isinstance(opened, Place):
        latest = find_latest(opened)
        passed_over = tuple(f"passed over: {message}" for message in (*latest.unparsable, *latest.not_looked_at))
        storage = opened.storage.child(str(latest.checkpoint.step))
        return OpenSnapshot(
            storage, storage.url, latest.checkpoint.step, latest.manifest, passed_over, bool(latest.not_looked_at)
        )
    return OpenSnapshot(opened, opened.url, parse_step(opened.name), read_manifest(opened))
