"""Looking at checkpoints: their state, their times, what lies beside the manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from snapctl.checkpoints.checkpoint import Checkpoint, State, parse_step, plausible_time
from snapctl.checkpoints.places import Place
from snapctl.errors import (
    CheckpointNotFoundError,
    ManifestError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.manifest import MANIFEST_NAME, Manifest, parse_manifest
from snapctl.markers import (
    DELETING_NAME,
    MARKER_DIR,
    PIN_NAME,
    Claim,
    Marker,
    Pin,
    claim_of_path,
    parse_claim,
    parse_marker,
    parse_pin,
    partition_of_marker,
)
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum, SaveRecord, parse_save_record
from snapctl.storage import FileInfo, ScannedDir, Storage, run_parallel

MAX_SIDE_FILE_BYTES = 16 << 20
"""No marker, claim or pin is larger: what is, is not read."""
WANTED = (MANIFEST_NAME, DELETING_NAME, PIN_NAME, ".snapctl/", f"{MARKER_DIR}/")
"""What `Storage.scan` is to look for in a checkpoint."""


def find_checkpoints(
    place: Place,
    *,
    totals: bool = False,
    details: bool = True,
    names: Iterable[str] | None = None,
    now: float | None = None,
) -> Iterator[Checkpoint]:
    """The checkpoints of a save directory in any state, ascending by step.

    Manifests are not parsed: what cannot be parsed is found when it is looked at.

    Args:
        totals: also count files and bytes.
        details: also read recorded save times, markers that are not empty, pins and claims; otherwise times are the
            storage's, and markers have no metrics.
        names: only these of its `step_names`.
        now: the time to judge times by; None: the storage's, or this machine's.
    """
    chosen = list(place.step_names if names is None else names)
    return judge_scanned(place, place.storage.scan(chosen, WANTED, totals=totals), details=details, now=now)


def judge_scanned(
    place: Place, entries: Iterable[ScannedDir], *, details: bool = True, now: float | None = None
) -> Iterator[Checkpoint]:
    """As `find_checkpoints`, of children that were scanned already (for `WANTED`), in the order given."""
    storage = place.storage
    now = storage.now(may_write=False) if now is None else now
    read = _read_details if details else _without_details
    base = storage.url_of("x")[:-1]

    def look(entry: ScannedDir) -> Checkpoint | None:
        if entry.error is not None and isinstance(entry.error, StorageNotFoundError):
            return None  # it vanished between the listing and the look
        name = entry.name
        judged = _judge(entry, int(name), base + name, now, is_link=name in place.linked_names)
        return read(judged, entry, lambda: storage.child(name), now)

    found = run_parallel(look, entries, jobs=storage.parallel_requests if details else 1)
    yield from (checkpoint for checkpoint in found if checkpoint is not None)


def look_at_checkpoint(storage: Storage, *, totals: bool = False, now: float | None = None) -> Checkpoint:
    """One checkpoint by its own directory, with all details; the manifest is not parsed.

    Raises:
        CheckpointNotFoundError: there is no such directory.
    """
    entry = ScannedDir(storage.name)
    now = storage.now(may_write=False) if now is None else now
    try:
        listing = storage.list_dir()
        entry.files = [file for file in listing.files if file.path in WANTED]
        for name in listing.dirs:
            if f"{name}/" in WANTED:
                with contextlib.suppress(StorageNotFoundError):  # it has vanished since it was listed
                    entry.files += storage.list_dir(name).files
    except StorageNotFoundError as error:
        raise CheckpointNotFoundError(f"{storage.url}: no such checkpoint") from error
    except StorageError as error:
        entry.error = error
    if totals and entry.error is None:
        try:
            files = [file for file in storage.list_tree() if not file.path.endswith("/")]
            entry.file_count, entry.size_bytes = len(files), sum(file.size_bytes for file in files)
        except StorageError as error:
            entry.totals_error = error
    found = _judge(entry, parse_step(storage.name), storage.url, now, is_link=False)
    return _read_details(found, entry, lambda: storage, now)


def _judge(entry: ScannedDir, step: int | None, url: str, now: float, *, is_link: bool) -> Checkpoint:
    """A checkpoint from what a listing shows of it."""
    files = {file.path: file for file in entry.files}
    manifest = files.get(MANIFEST_NAME)
    complete = manifest is not None and manifest.size_bytes > 0
    state: State = "unreadable" if entry.error is not None else "complete" if complete else "incomplete"
    return Checkpoint(
        step=step,
        path=url,
        state=state,
        created_at=plausible_time(manifest.modified_at, now) if complete and manifest is not None else None,
        manifest=manifest,
        deleting=files.get(DELETING_NAME),
        pin=Pin() if PIN_NAME in files else None,
        markers=tuple(Marker(partition) for partition in _partitions(files.values())) if len(files) > 1 else (),
        side_files=tuple(files[path] for path in sorted(files) if _is_side_file(path)) if len(files) > 1 else (),
        size_bytes=entry.size_bytes,
        files=entry.file_count,
        is_link=is_link,
        error=entry.error,
        unread=(entry.totals_error.message,) if entry.totals_error is not None else (),
    )


def _is_side_file(path: str) -> bool:
    return path == PIN_NAME or path.startswith(f"{MARKER_DIR}/")


def _partitions(files: Iterable[FileInfo]) -> list[str]:
    """The partitions whose markers are among the files, sorted; what cannot be a file to its writer marks nothing."""
    named = ((partition_of_marker(file.path), file) for file in files)
    return sorted(partition for partition, file in named if partition is not None and file.is_regular)


def _without_details(found: Checkpoint, entry: ScannedDir, open_child: Callable[[], Storage], now: float) -> Checkpoint:
    return found


def _read_details(found: Checkpoint, entry: ScannedDir, open_child: Callable[[], Storage], now: float) -> Checkpoint:
    """Reads the small files of a checkpoint, as far as there are any, each by itself: one failure hides no other."""
    claims = _claims_by_partition(entry.files)
    interesting = [file for file in entry.files if _is_worth_reading(file)]
    if not interesting and not claims:
        return found
    storage = open_child()
    markers = {marker.partition: marker for marker in found.markers}
    notes, unread = list(found.warnings), list(found.unread)
    ruling: list[Claim] = []

    def read(file: FileInfo) -> bytes | None:
        if file.size_bytes > MAX_SIDE_FILE_BYTES and file.path != SAVE_RECORD_PATH:
            unread.append(f"{storage.url_of(file.path)}: {file.size_bytes} bytes, too many to be what its name says")
            return None
        try:
            return storage.read(file.path) if file.size_bytes else b""
        except StorageNotFoundError:
            return None  # it vanished between the listing and the look
        except StorageError as error:
            unread.append(error.message)
            return None

    for file in interesting:
        data = read(file)
        partition = partition_of_marker(file.path)
        if data is None:
            continue
        if partition is not None:
            markers[partition] = parse_marker(partition, data)
            notes += [f"{found.path}: {problem}" for problem in [markers[partition].problem] if problem]
        elif file.path == PIN_NAME:
            found = msgspec.structs.replace(found, pin=parse_pin(data))
        elif found.state == "complete":
            try:
                found = _with_record(found, storage, data, now, notes)
            except StorageNotFoundError:
                continue  # the manifest vanished since it was listed: whoever needs it will be told so
            except StorageError as error:  # the manifest itself, to compare with
                unread.append(error.message)
    for partition, files in sorted(claims.items()):
        for number in sorted(files, reverse=True):
            failures = len(unread)
            data = read(files[number])
            # One that was taken back gives way to the one before; one that cannot be read is one of unknown owner.
            if data is not None or len(unread) > failures:
                ruling.append(parse_claim(partition, number, data or b"", files[number].modified_at))
                break
    ordered = tuple(markers[partition] for partition in sorted(markers))
    return msgspec.structs.replace(
        found, markers=ordered, claims=tuple(ruling), warnings=tuple(notes), unread=tuple(unread)
    )


def _is_worth_reading(file: FileInfo) -> bool:
    if file.size_bytes == 0:
        return False  # what says nothing need not be read
    return file.path in (PIN_NAME, SAVE_RECORD_PATH) or partition_of_marker(file.path) is not None


def _claims_by_partition(files: Iterable[FileInfo]) -> dict[str, dict[int, FileInfo]]:
    claims: dict[str, dict[int, FileInfo]] = {}
    for file in files:
        named = claim_of_path(file.path)
        if named is not None:
            claims.setdefault(named[0], {})[named[1]] = file
    return claims


def _with_record(found: Checkpoint, storage: Storage, data: bytes, now: float, notes: list[str]) -> Checkpoint:
    """Takes over what the save recorded, unless that speaks of another manifest than the one that stands there."""
    try:
        record = parse_save_record(data)
    except ValueError as error:
        notes.append(f"{storage.url_of(SAVE_RECORD_PATH)}: not a save record: {error}")
        return found
    if found.manifest is None or not record_matches(record, storage, found.manifest):
        notes.append(
            f"{found.path}: saved again by something else than snapctl: its recorded time and checksums are not used"
        )
        return found
    return msgspec.structs.replace(found, record=record, created_at=plausible_time(record.saved_at, now))


def record_matches(record: SaveRecord, storage: Storage, manifest: FileInfo) -> bool:
    """Whether a save record speaks of the manifest that stands there: its length and its CRC32C agree."""
    if record.manifest.size_bytes != manifest.size_bytes:
        return False
    crc32c = manifest.crc32c
    if crc32c is None:
        import google_crc32c

        crc32c = int(google_crc32c.value(storage.read(manifest.path)))
    return crc32c == record.manifest.crc32c


def read_blob_sums(
    storage: Storage, record: FileInfo | None, manifest: FileInfo | None
) -> tuple[Mapping[str, BlobSum] | None, list[str]]:
    """The checksums of blobs that a save recorded, by location; None where there are none, or void ones.

    Args:
        record, manifest: as they were listed; None for one that is not there.

    Returns:
        also what should be said about it, without the name of the checkpoint.
    """
    if record is None or manifest is None or not record.size_bytes:
        return None, []
    try:
        parsed = parse_save_record(storage.read(SAVE_RECORD_PATH, version=record.version), with_blobs=True)
    except ValueError as error:
        return None, [f"{SAVE_RECORD_PATH} is not a save record: {error}"]
    if not record_matches(parsed, storage, manifest):
        return None, ["saved again by something else than snapctl: its recorded checksums are not used"]
    return parsed.blobs, []


def read_manifest(storage: Storage, *, version: str = "") -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none, or an empty one.
        ManifestError: it cannot be parsed; the message names the file.
        StorageError: it could not be read.
    """
    try:
        data = storage.read(MANIFEST_NAME, version=version)
    except StorageNotFoundError as error:
        raise incomplete(storage) from error
    if not data:
        raise incomplete(storage)
    try:
        return parse_manifest(data)
    except ManifestError as error:
        raise ManifestError(f"{storage.url_of(MANIFEST_NAME)}: {error.message}", kind=error.kind) from error


def incomplete(storage: Storage) -> CheckpointNotFoundError:
    """The error for a checkpoint without a manifest."""
    why = "being saved, or left by a crash"
    with contextlib.suppress(StorageError):
        if storage.find_file(DELETING_NAME) is not None:
            why = "being deleted, or left half deleted"
    return CheckpointNotFoundError(
        f"{storage.url}: {MANIFEST_NAME} is missing or empty: the checkpoint is incomplete ({why})"
    )
