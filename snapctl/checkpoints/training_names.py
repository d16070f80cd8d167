"""The names under which training code knows checkpoints: paths in, paths out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from snapctl.checkpoints.checkpoint import parse_step
from snapctl.checkpoints.latest import find_latest
from snapctl.checkpoints.looking import find_checkpoints
from snapctl.checkpoints.places import open_save_dir
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidPathError,
    SaveDirNotFoundError,
)
from snapctl.manifest import MANIFEST_NAME


def get_checkpoints(save_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the complete checkpoints of a save directory, ascending by step; ``[]`` for one that is not there.

    Raises:
        StorageError: it, or a checkpoint in it, could not be looked at: an answer without that one would be wrong.
    """
    try:
        place = open_save_dir(os.fspath(save_dir))
    except SaveDirNotFoundError:
        return []
    found = list(find_checkpoints(place, details=False))
    for checkpoint in found:
        if checkpoint.error is not None:
            raise checkpoint.error
    return [checkpoint.path for checkpoint in found if checkpoint.state == "complete"]


def get_checkpoint(
    save_dir: str | os.PathLike[str],
    global_step: int | None = None,
    missing_ok: bool = False,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """The path of one checkpoint of a save directory.

    Args:
        global_step: of this step; None: the newest complete one whose manifest can be parsed. A newer one that was
            passed over, because it cannot be parsed or could not be looked at, is named in a `UserWarning`.
        missing_ok: return ``""`` where there is none, instead of raising.
        storage_options: for fsspec.

    Raises:
        CheckpointNotFoundError: there is no such complete checkpoint.
        ManifestError: there are complete ones, and none can be parsed.
        StorageError: it could not be looked at, or none could.
    """
    try:
        place = open_save_dir(os.fspath(save_dir), storage_options)
        if global_step is None:
            latest = find_latest(place)
            for message in (*latest.unparsable, *latest.not_looked_at):
                warnings.warn(f"passed over: {message}", stacklevel=2)
            return latest.checkpoint.path
        name = str(global_step)
        manifest = place.storage.find_file(f"{name}/{MANIFEST_NAME}") if name in place.step_names else None
        if manifest is None or manifest.size_bytes == 0:
            raise CheckpointNotFoundError(f"{place.storage.url}: no complete checkpoint of step {global_step}")
        return place.storage.url_of(name)
    except (SaveDirNotFoundError, CheckpointNotFoundError):
        if missing_ok:
            return ""
        raise


def step_from_checkpoint(checkpoint: str | os.PathLike[str]) -> int:
    """The step of a checkpoint's path: the number that its last part is.

    Raises:
        InvalidPathError: it is no canonical decimal number, or there is no save directory before it.
    """
    path = os.fspath(checkpoint).rstrip("/")
    step = parse_step(path.rpartition("/")[2])
    if step is None or path.endswith(f"://{step}"):
        raise InvalidPathError(f"{path}: does not end in a step")
    return step
