"""What a save does to a step's directory besides its blobs: clearing it first, the commit, tidying up after it."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from snapctl.checksums import crc32c
from snapctl.errors import (
    PermissionDeniedError,
    PreconditionError,
    SaveError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME, MARKER_DIR, claim_of_path, partition_of_marker
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum, SaveRecord, format_save_record
from snapctl.storage import DeletedFiles, FileInfo, Storage, parent_paths, run_parallel
from snapctl.storage.local_paths import TEMPORARY_MARK

RECORD_DIR = SAVE_RECORD_PATH.rpartition("/")[0]
ANNOUNCEMENT_PATH = f"{RECORD_DIR}/save.0.json"
"""Stands there while a save is under way, and goes when another one clears the step."""
_BLOB_DIR = re.compile(r"0|[1-9][0-9]*|replicated|sharded|replicated_sharded|batched")
_NOT_FOR_YAML = re.compile(
    "[^\\n\\x20-\\x7e\\xa0-\\u2027\\u202a-\\ud7ff\\ue000-\\ufefe\\uff00-\\ufffd\\U00010000-\\U0010ffff]"
)


def clear_step(storage: Storage, locations: Collection[str] = (), *, durable: bool = True) -> list[FileInfo]:
    """Makes a step's directory ready for being saved (again): no reader takes it for complete or evaluated any more.

    The manifest goes first, then announcements of deletions, markers and claims, and the record of the earlier save.
    A pin stays, and so do the old blobs for now. Nothing is written through a link: where the step is one, to a
    checkpoint of another run perhaps, the link goes, and what it leads to stays; so do links inside it that may lead to
    other directories.

    Args:
        locations: where the new blobs will be. An old one goes at once if it lies where one of them needs a directory,
            or in a directory where one of them will be.

    Returns:
        The files that are left.
    """
    _remove_link(storage)
    storage.delete_empty_dirs()  # one may stand where a blob will be
    storage.make_dir(durable=durable)
    files = storage.list_tree()
    found = {file.path for file in files}
    if MANIFEST_NAME in found:
        storage.delete(MANIFEST_NAME)
        if durable:
            storage.sync_dir()
    away = {file.path for file in files if file.is_link and not file.is_regular}
    stale = [path for path in sorted(found) if path in away or _belongs_to_the_earlier_save(path)]
    run_parallel(storage.delete, stale, jobs=storage.parallel_requests)
    for directory in (MARKER_DIR, RECORD_DIR):
        if any(path.startswith(f"{directory}/") for path in stale):
            if durable:
                storage.sync_dir(directory)
            storage.delete_empty_dirs(directory)
    in_the_way = find_obstacles(files, locations)
    if in_the_way:
        delete_blobs(storage, in_the_way)
    gone = {MANIFEST_NAME, *stale, *(file.path for file in in_the_way)}
    return [file for file in files if file.path not in gone]


def find_obstacles(files: Iterable[FileInfo], locations: Collection[str]) -> list[FileInfo]:
    """Old blobs that are files where new ones need directories, or lie in directories where new ones will be. Pure.

    A key that held a tensor may hold a dict of tensors by now, and the other way round.
    """
    new, above = set(locations), {path for location in locations for path in parent_paths(location)}
    return [
        file
        for file in plan_old_blobs(files, ())
        if file.path in above or any(path in new for path in parent_paths(file.path))
    ]


def _remove_link(storage: Storage) -> None:
    parent = storage.parent()
    if parent is not None:
        with contextlib.suppress(PreconditionError):  # it is none
            parent.delete_link(storage.name)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What says in a step's directory that a save is under way, and which."""

    body: bytes
    file: FileInfo


def announce(storage: Storage) -> Announcement:
    """Says that a save has begun."""
    body = msgspec.json.encode({"save": uuid.uuid4().hex})
    return Announcement(body, storage.write(ANNOUNCEMENT_PATH, body, durable=False))


def check_alone(storage: Storage, announced: Announcement) -> None:
    """Whether no other save (of a job that was started again while this one still lives, say) has begun meanwhile.

    Raises:
        SaveError: one has: the blobs are no longer all ours, and to commit them would make a checkpoint of two states.
    """
    if not _stands(storage, announced):
        raise SaveError(
            f"another save into {storage.url} has begun meanwhile",
            hint="is another job running that saves into the same directory?",
        )


def withdraw(storage: Storage, announced: Announcement, *, has_looked: bool = False) -> None:
    """The save is over. Who may not delete (a bucket with a retention policy) leaves it there: it harms nothing.

    Args:
        has_looked: `check_alone` has just been called.
    """
    if has_looked or _stands(storage, announced):
        with contextlib.suppress(PreconditionError, PermissionDeniedError):  # another one's by now; see above
            storage.delete(ANNOUNCEMENT_PATH, version=announced.file.version)


def _stands(storage: Storage, announced: Announcement) -> bool:
    try:
        return storage.read(ANNOUNCEMENT_PATH) == announced.body
    except StorageNotFoundError:
        return False


def _belongs_to_the_earlier_save(path: str) -> bool:
    return (
        path == DELETING_NAME
        or path.startswith(f"{RECORD_DIR}/")
        or partition_of_marker(path) is not None
        or claim_of_path(path) is not None
    )


def encode_manifest(metadata: Any) -> bytes:
    """The manifest's bytes: JSON with an indent of 2, as torchsnapshot writes it, but so that its reader can read it.

    Args:
        metadata: torchsnapshot's ``SnapshotMetadata``.
    """
    try:
        text = msgspec.json.format(msgspec.json.encode(metadata), indent=2).decode()
    except UnicodeEncodeError:  # a lone surrogate in a key or a string, which no UTF-8 can hold
        import dataclasses
        import json

        text = json.dumps(dataclasses.asdict(metadata), indent=2, ensure_ascii=False)
    # It reads JSON as YAML, which knows no surrogate pairs, and takes certain characters only when they are escaped.
    return _NOT_FOR_YAML.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode()


def merge_blobs(held: Sequence[Mapping[str, BlobSum]]) -> dict[str, BlobSum]:
    """The blobs of all ranks by location.

    Raises:
        SaveError: two ranks wrote different bytes to one location.
    """
    merged: dict[str, BlobSum] = {}
    writers: dict[str, int] = {}
    for rank, blobs in enumerate(held):
        for location, blob in blobs.items():
            if merged.setdefault(location, blob) != blob:
                raise SaveError(
                    f"ranks {writers[location]} and {rank} both wrote {location}, and not the same",
                    ranks=(writers[location], rank),
                )
            writers.setdefault(location, rank)
    return merged


def check_visible(storage: Storage, held: Sequence[Mapping[str, BlobSum]]) -> None:
    """Raises `SaveError` unless every rank's blobs can be seen from here: on disks that are not shared, they cannot."""
    sizes = {file.path: file.size_bytes for file in storage.list_tree()}
    for rank, blobs in enumerate(held):
        for location, blob in blobs.items():
            if sizes.get(location) != blob.size_bytes:
                found = "not there" if location not in sizes else f"{sizes[location]} bytes long"
                raise SaveError(
                    f"rank {rank} wrote {location}, {blob.size_bytes} bytes, which for rank 0 is {found}",
                    ranks=(rank,),
                    hint="the save directory must be storage that all ranks share",
                )


def blob_sum(data: bytes) -> BlobSum:
    """Length and checksum of bytes."""
    return BlobSum(len(data), crc32c(data))


def commit(storage: Storage, manifest: bytes, record: SaveRecord, *, durable: bool = True) -> None:
    """Makes a step complete: its record, then its manifest.

    Raises:
        SaveError: with `unknown` if nobody can tell whether the manifest is there.
        StorageError: it is not there.
    """
    storage.write(SAVE_RECORD_PATH, format_save_record(record), durable=durable)
    try:
        storage.write(MANIFEST_NAME, manifest, durable=durable)
    except Exception as error:
        # A request that nobody answered may have been carried out, or may still be.
        was_refused = isinstance(error, StorageError) and not isinstance(error, UnavailableError)
        has_looked = True
        try:
            found = storage.find_file(MANIFEST_NAME)
        except StorageError:
            found, has_looked = None, False
        if found is not None and found.size_bytes == len(manifest):
            return
        if isinstance(error, UnavailableError) or not (has_looked or was_refused):
            raise SaveError(f"the manifest may have been written or not: {error}", unknown=True) from error
        with contextlib.suppress(StorageError):
            storage.delete(SAVE_RECORD_PATH)
        raise


def plan_old_blobs(old: Iterable[FileInfo], kept: Iterable[str]) -> list[FileInfo]:
    """Which files of an earlier save of this step, whole or not, the new one leaves unneeded. Pure.

    Only what torchsnapshot writes, and unfinished files; nothing below a directory that holds checkpoints of its own
    (a run named by a number looks like a rank).
    """
    files = list(old)
    keep = set(kept)
    nested = {file.path.partition("/")[0] for file in files if file.path.endswith(f"/{MANIFEST_NAME}")}
    planned: list[FileInfo] = []
    for file in files:
        top, slash, _ = file.path.partition("/")
        if file.path in keep or top in nested or file.path.endswith("/"):
            continue
        if (slash and _BLOB_DIR.fullmatch(top)) or TEMPORARY_MARK in file.path:
            planned.append(file)
    return planned


def delete_blobs(storage: Storage, files: Sequence[FileInfo]) -> DeletedFiles:
    """Deletes files that are still the ones that were listed, and directories that become empty."""
    deleted = storage.delete_files(files)
    for top in sorted({file.path.partition("/")[0] for file in files if "/" in file.path}):
        storage.delete_empty_dirs(top)
    return deleted
