"""What lies in a checkpoint's directory, boiled down to what deciding about it takes. Pure: a listing in, facts out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME, MARKER_DIR, PIN_NAME, claim_of_path, partition_of_marker
from snapctl.storage import FileInfo
from snapctl.storage.local_paths import TEMPORARY_MARK

_SAVED_DIRS = frozenset({"batched", "sharded", "replicated"})
_RANK = re.compile(r"0|[1-9][0-9]*")
_TEMPORARY = re.compile(re.escape(TEMPORARY_MARK) + r"[0-9a-z]+\Z")
_SPECIAL = frozenset({MANIFEST_NAME, DELETING_NAME, PIN_NAME})
_OWN_DIR = ".snapctl"
_OWN_NAMES = frozenset({MARKER_DIR, _OWN_DIR, PIN_NAME, DELETING_NAME})
_CLOCK_NAME = "clock"


class Contents(msgspec.Struct, frozen=True, gc=False):
    """The files of one checkpoint. Folder objects (empty, their names end in a slash) are no files."""

    files: int
    size_bytes: int
    """What deleting them frees: links have no size of their own."""
    oldest_at: float | None
    newest_at: float | None
    """The earliest and the latest time of a file; None where there is none."""
    newest_saved_at: float | None
    """The latest time of a file that is no marker, claim, pin or manifest: of what a save writes."""
    newest_saved: str
    """Its path."""
    foreign: str | None
    """The path of something that no save leaves."""
    inner_checkpoint: str | None
    """The path of another checkpoint's manifest further down."""
    held: str | None
    """The path of the file that may not be deleted for longest, the announcement of a deletion left aside."""
    held_until: float
    deleting: FileInfo | None
    """The announcement of a deletion."""
    manifest: FileInfo | None
    pinned: bool
    dirs_changed_at: float | None = None
    """When a directory last got or lost a name; None where that is not told, or does not matter."""


def digest(files: Iterable[FileInfo]) -> Contents:
    """The facts of a listing (`Storage.list_tree` of the checkpoint's directory)."""
    count = size_bytes = 0
    newest_at = newest_saved_at = held_until = 0.0
    oldest_at = math.inf
    newest_saved = ""
    foreign: str | None = None
    inner: str | None = None
    held: str | None = None
    special: dict[str, FileInfo] = {}
    left_by_a_save: dict[str, bool] = {}  # by first directory: there are few, and very many files
    for file in files:
        path = file.path
        first, slash, rest = path.partition("/")
        if not slash and path in _SPECIAL:
            special[path] = file
        if file.held_until is not None and file.held_until > held_until and path != DELETING_NAME:
            held, held_until = path, file.held_until
        if not path or path.endswith("/"):
            continue
        count += 1
        size_bytes += 0 if file.is_link else file.size_bytes
        modified_at = file.modified_at
        if modified_at > newest_at:
            newest_at = modified_at
        if modified_at < oldest_at:
            oldest_at = modified_at
        if modified_at > newest_saved_at and is_saved_file(path):
            newest_saved, newest_saved_at = path, modified_at
        known = left_by_a_save.get(first + slash)
        if known is None:
            known = left_by_a_save[first + slash] = _is_left_by_a_save(first, slash)
        if not known and foreign is None:
            foreign = path
        if inner is None and slash and rest.endswith((MANIFEST_NAME, DELETING_NAME)) and _is_inner_manifest(rest):
            inner = path
    return Contents(
        files=count,
        size_bytes=size_bytes,
        oldest_at=oldest_at if count else None,
        newest_at=newest_at if count else None,
        newest_saved_at=newest_saved_at if newest_saved else None,
        newest_saved=newest_saved,
        foreign=foreign,
        inner_checkpoint=inner,
        held=held,
        held_until=held_until,
        deleting=special.get(DELETING_NAME),
        manifest=special.get(MANIFEST_NAME),
        pinned=PIN_NAME in special,
    )


def is_saved_file(path: str) -> bool:
    """Whether a file of a checkpoint is one that a save writes before the manifest: no marker, claim or pin, not the
    manifest, and nothing that only prepares one of those."""
    first, slash, rest = path.partition("/")
    if not slash:
        base = _TEMPORARY.sub("", path)
        return path not in (MANIFEST_NAME, DELETING_NAME) and base not in (PIN_NAME, _CLOCK_NAME)
    if first != MARKER_DIR:
        return True
    base = f"{MARKER_DIR}/{_TEMPORARY.sub('', rest)}"
    is_trace = partition_of_marker(base) is not None or claim_of_path(base) is not None
    return not (is_trace or base == f"{MARKER_DIR}/{_CLOCK_NAME}")


def is_own_file(path: str) -> bool:
    """Whether it is something that snapctl or evaluators add to a checkpoint: what goes last when one is deleted."""
    first = path.partition("/")[0]
    return first in _OWN_NAMES or (TEMPORARY_MARK in path and _TEMPORARY.search(path) is not None)


def _is_left_by_a_save(first: str, slash: str) -> bool:
    if slash:
        return first in _SAVED_DIRS or first in (MARKER_DIR, _OWN_DIR) or _RANK.fullmatch(first) is not None
    return first in _SPECIAL or _TEMPORARY.search(first) is not None


def _is_inner_manifest(rest: str) -> bool:
    return rest.rpartition("/")[2] in (MANIFEST_NAME, DELETING_NAME)
