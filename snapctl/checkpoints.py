"""Checkpoints: which directories count, what state they are in, when they were written.

A save directory holds checkpoints: its direct child directories whose names are canonical decimal numbers. Everything
else in it is left alone.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import msgspec

from snapctl.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    InvalidPathError,
    ManifestError,
    NoMatchError,
    SaveDirNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
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
from snapctl.save_record import SAVE_RECORD_PATH, SaveRecord, parse_save_record
from snapctl.storage import FileInfo, Listing, ScannedDir, Storage, collect_errors, open_storage, run_parallel

State = Literal["complete", "incomplete", "unreadable"]
Chooser = Callable[[Sequence["Checkpoint"]], Sequence["Checkpoint"]]

FUTURE_TOLERANCE_SECONDS = 300.0
EARLIEST_SAVE_TIME = 1640995200.0
"""2022-01-01: torchsnapshot is younger. Earlier times come from copies, images and broken clocks."""

_WANTED = (MANIFEST_NAME, DELETING_NAME, PIN_NAME, ".snapctl/", f"{MARKER_DIR}/")
_SIGNS_OF_A_CHECKPOINT = ("replicated", "sharded", "batched", MARKER_DIR, ".snapctl")
_PROBE_GROUPS = (1, 4, 16, 64)
PATIENCE_SECONDS = 6.0
"""After the first failure of the network or the server, no further object is asked for once so long has passed."""


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint as it was found at one moment."""

    step: int | None
    """None for a checkpoint whose directory's name is no number."""
    path: str
    """As it is printed."""
    state: State
    created_at: float | None = None
    """Seconds since the epoch: the recorded save time, else the manifest's by the storage; None if unknown or not
    plausible (see `plausible_time`)."""
    manifest: FileInfo | None = None
    """The manifest's file; its path is relative to the checkpoint."""
    deleting: FileInfo | None = None
    """The announcement of a deletion."""
    pin: Pin | None = None
    markers: tuple[Marker, ...] = ()
    """Sorted by partition."""
    claims: tuple[Claim, ...] = ()
    """The ruling claim of each partition that has one, live or not, sorted by partition."""
    record: SaveRecord | None = None
    """What the save recorded about itself, without the blobs' checksums; None if there is none or it is void."""
    size_bytes: int | None = None
    files: int | None = None
    """All that lies in the directory; None unless it was asked for."""
    side_files: tuple[FileInfo, ...] = ()
    """The files behind `markers`, `claims` and `pin`, and older claims, sorted by path."""
    is_link: bool = False
    """The directory is reached through a symbolic link."""
    error: StorageError | None = None
    """Why it is unreadable."""
    unread: tuple[str, ...] = ()
    """What could not be read of its markers, claims, pin and save record, or not be counted, one message each. Its
    state, and which markers there are, is known all the same."""
    warnings: tuple[str, ...] = ()

    @property
    def evaluated_by(self) -> tuple[str, ...]:
        """The partitions that have marked it, sorted."""
        return tuple(marker.partition for marker in self.markers)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics by partition, of the partitions that recorded any."""
        return {marker.partition: dict(marker.metrics) for marker in self.markers if marker.metrics}

    @property
    def problem(self) -> str | None:
        """Why it is unreadable, in a line."""
        return self.error.message if self.error is not None else None

    @property
    def pinned(self) -> bool:
        return self.pin is not None


def parse_step(name: str) -> int | None:
    """The step that a directory's name stands for: a canonical decimal number, or None.

    ``0`` and ``100`` are steps; ``0100``, ``+7``, ``1_000``, ``9²`` are not.
    """
    canonical = name.isdecimal() and name.isascii() and (name[0] != "0" or name == "0")
    return int(name) if canonical and len(name) <= 4000 else None


def plausible_time(seconds: float | None, now: float) -> float | None:
    """A time that can be relied on, or None: not before 2022, and not more than 5 minutes ahead of `now`."""
    if seconds is None or not EARLIEST_SAVE_TIME <= seconds <= now + FUTURE_TOLERANCE_SECONDS:
        return None
    return seconds


# -- which is which --------------------------------------------------------------------------------------------------


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
    if any(name in _SIGNS_OF_A_CHECKPOINT for name in listing.dirs) or _is_among_checkpoints(storage):
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
    for _, found in _probe(place, place.step_names[::-1]):
        if isinstance(found, FileInfo):
            return True
    if any(isinstance(found, StorageError) for found in place.probed.values()):
        return True  # not all could be looked at: whoever asks for a checkpoint will be told so
    storage = place.storage
    scanned = storage.scan(place.step_names, (DELETING_NAME,))
    return any(entry.files for entry in scanned)


def _probe(place: Place, names: Sequence[str]) -> Iterator[tuple[str, FileInfo | StorageError | None]]:
    """The manifests' files of children in the order given, in growing groups: the first ones matter most.

    When the storage has not answered for a while it is not asked for the rest: they end with the same error.
    """
    storage, patience = place.storage, _Patience()
    look = collect_errors(lambda name: storage.find_file(f"{name}/{MANIFEST_NAME}"))
    position, group = 0, iter(_PROBE_GROUPS)
    while position < len(names):
        part = names[position : position + next(group, _PROBE_GROUPS[-1])]
        todo = [name for name in part if name not in place.probed]
        if patience.is_over:
            place.probed.update((name, patience.last_error) for name in todo)
        else:
            place.probed.update(zip(todo, run_parallel(look, todo, jobs=storage.parallel_requests), strict=True))
        for name in part:
            found = place.probed[name]
            patience.note(found)
            yield name, found
        position += len(part)


class _Patience:
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
        return any(isinstance(found, FileInfo) for _, found in _probe(siblings, siblings.step_names[::-1]))
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
        CheckpointNotFoundError: there is no such step.
    """
    place = find_place(path, options)
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
        raise CheckpointNotFoundError(f"{place.storage.url}: no step {step}", hint=_nearest_steps(place, step))
    return place.storage.child(str(step))


def _nearest_steps(place: Place, step: int) -> str | None:
    nearest = sorted(place.step_names, key=lambda name: abs(int(name) - step))[:3]
    return f"there are: {', '.join(sorted(nearest, key=int))}" if nearest else None


# -- looking at checkpoints ------------------------------------------------------------------------------------------


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
    storage = place.storage
    chosen = list(place.step_names if names is None else names)
    now = storage.now(may_write=False) if now is None else now
    read = _read_details if details else _without_details
    base = storage.url_of("x")[:-1]

    def look(entry: ScannedDir) -> Checkpoint | None:
        if entry.error is not None and isinstance(entry.error, StorageNotFoundError):
            return None  # it vanished between the listing and the look
        name = entry.name
        judged = _judge(entry, int(name), base + name, now, is_link=name in place.linked_names)
        return read(judged, entry, lambda: storage.child(name), now)

    found = run_parallel(look, storage.scan(chosen, _WANTED, totals=totals), jobs=storage.parallel_requests)
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
        entry.files = [file for file in listing.files if file.path in _WANTED]
        for name in listing.dirs:
            if f"{name}/" in _WANTED:
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
    claims = _ruling_claims(entry.files)
    interesting = [file for file in entry.files if _is_worth_reading(file)]
    if not interesting and not claims:
        return found
    storage = open_child()
    markers = {marker.partition: marker for marker in found.markers}
    notes, unread = list(found.warnings), list(found.unread)
    ruling: list[Claim] = []

    def read(file: FileInfo) -> bytes | None:
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
            except StorageError as error:  # the manifest itself, to compare with
                unread.append(error.message)
    for partition, (number, file) in sorted(claims.items()):
        # One that is there and cannot be read counts as one of unknown owner.
        ruling.append(parse_claim(partition, number, read(file) or b"", file.modified_at))
    ordered = tuple(markers[partition] for partition in sorted(markers))
    return msgspec.structs.replace(
        found, markers=ordered, claims=tuple(ruling), warnings=tuple(notes), unread=tuple(unread)
    )


def _is_worth_reading(file: FileInfo) -> bool:
    if file.size_bytes == 0:
        return False  # what says nothing need not be read
    return file.path in (PIN_NAME, SAVE_RECORD_PATH) or partition_of_marker(file.path) is not None


def _ruling_claims(files: Iterable[FileInfo]) -> dict[str, tuple[int, FileInfo]]:
    ruling: dict[str, tuple[int, FileInfo]] = {}
    for file in files:
        named = claim_of_path(file.path)
        if named is not None and named[1] >= ruling.get(named[0], (-1, file))[0]:
            ruling[named[0]] = (named[1], file)
    return ruling


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


# -- the newest ------------------------------------------------------------------------------------------------------


class LatestSearch(msgspec.Struct, frozen=True):
    """The newest checkpoint that answers, and what had to be passed over for it."""

    checkpoint: Checkpoint
    manifest: Manifest
    unparsable: tuple[str, ...] = ()
    """One message for each newer one whose content cannot be parsed."""
    not_looked_at: tuple[str, ...] = ()
    """One message for each newer one (with `compares_all`, for each) that the storage did not let us look at."""


def find_latest(place: Place, *, choose: Chooser | None = None, compares_all: bool = False) -> LatestSearch:
    """The newest complete checkpoint (by step) whose manifest can be parsed.

    Args:
        choose: which of the complete checkpoints (handed over with all details, the newest first) answer, in the order
            of preference, instead of all of them from the newest down.
        compares_all: `choose` compares the checkpoints with each other, so that any that cannot be looked at counts,
            and not only newer ones.

    Raises:
        NoMatchError: there are complete checkpoints, and none is chosen.
        CheckpointNotFoundError: there is no complete checkpoint.
        ManifestError: there are complete ones, and none can be parsed.
        StorageError: none could be looked at.
    """
    unparsable: list[str] = []
    failures: dict[int, StorageError] = {}
    bad_manifest: ManifestError | None = None
    patience = _Patience()
    candidates = _chosen(place, choose, failures) if choose else _newest_first(place, failures)
    for name, known in candidates:
        if patience.is_over:
            break
        storage = place.storage.child(name)
        try:
            manifest = read_manifest(storage)
            found = known or look_at_checkpoint(storage)
        except ManifestError as error:
            bad_manifest = error
            unparsable.append(error.message)
            continue
        except CheckpointNotFoundError:
            continue  # it was deleted meanwhile, or is being saved again
        except StorageError as error:
            failures[int(name)] = error
            patience.note(error)
            continue
        found = msgspec.structs.replace(found, is_link=name in place.linked_names)
        missed = tuple(
            error.message for step, error in sorted(failures.items()) if compares_all or step > (found.step or 0)
        )
        return LatestSearch(found, manifest, tuple(unparsable), missed)
    if failures:
        raise failures[max(failures)]
    if bad_manifest is not None:
        raise bad_manifest
    hint = f"{len(place.step_names)} incomplete: see snapctl list --all" if place.step_names else None
    raise CheckpointNotFoundError(f"{place.storage.url}: no complete checkpoint", hint=hint)


def _newest_first(place: Place, failures: dict[int, StorageError]) -> Iterator[tuple[str, Checkpoint | None]]:
    """The names of complete checkpoints from the newest down, one look at each at the most."""
    for name, manifest in _probe(place, place.step_names[::-1]):
        if isinstance(manifest, StorageError):
            failures[int(name)] = manifest
        elif manifest is not None and manifest.size_bytes > 0:
            yield name, None


def _chosen(
    place: Place, choose: Chooser, failures: dict[int, StorageError]
) -> Iterator[tuple[str, Checkpoint | None]]:
    """The chosen ones with all details."""
    found = sorted(find_checkpoints(place), key=lambda checkpoint: -(checkpoint.step or 0))
    complete = [checkpoint for checkpoint in found if checkpoint.state == "complete"]
    failures.update({c.step or 0: c.error for c in found if c.error is not None})
    chosen = choose(complete)
    if complete and not chosen and not failures:
        raise NoMatchError(f"{place.storage.url}: none of {len(complete)} complete checkpoints fits the filter")
    for checkpoint in chosen:
        yield str(checkpoint.step), checkpoint


# -- the names that training code knows ------------------------------------------------------------------------------


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
