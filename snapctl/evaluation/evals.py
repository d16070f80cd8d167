"""Markers that say which partitions have been evaluated on a checkpoint, and pins that protect it from pruning."""

from __future__ import annotations

import contextlib
import getpass
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from snapctl.checkpoints import incomplete, open_checkpoint
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    PreconditionError,
    RefusedError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.evaluation.claims import (
    check_not_being_deleted,
    check_not_taken_over,
    require_complete,
    take_back,
    void_claims,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import (
    PIN_NAME,
    Marker,
    Pin,
    format_marker,
    format_pin,
    marker_path,
    parse_marker,
    parse_pin,
)
from snapctl.storage import FileInfo, Storage, open_storage

Clock = Callable[[], float]
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.ASCII | re.IGNORECASE)
_ATTEMPTS = 20
"""Somebody else changed the file between reading and writing it: so often in a row it is no accident."""


# -- markers ---------------------------------------------------------------------------------------------------------


def find_marker(storage: Storage, partition: str) -> Marker | None:
    """The marker of a partition on a checkpoint, or None.

    An empty one, as older jobs leave it, and one that cannot be understood say that the partition is done, and when.
    """
    path = marker_path(partition)
    file = storage.find_file(path)
    if file is None:
        return None
    try:
        return _parse_marker(partition, storage.read(path, version=file.version), file)
    except StorageNotFoundError:
        return None


def mark(
    storage: Storage,
    partition: str,
    metrics: Mapping[str, float] | None = None,
    *,
    owner: str | None = None,
    clock: Clock = time.time,
) -> Marker:
    """Marks a partition as evaluated on a checkpoint, which voids all claims on it.

    A marker that is there already keeps its time; new metrics replace those of the same name. Nothing but
    ``evaled_by/`` is ever created, and if the checkpoint is gone after writing, the marker goes, too.

    Args:
        storage: the checkpoint's directory.
        metrics: any finite or other number by name.
        owner: refuse if the partition was taken over from this claimer; None: mark it whoever holds it. A takeover
            between the look and the writing is not noticed.

    Returns:
        the marker as it stands now.

    Raises:
        CheckpointNotFoundError: the checkpoint is not there, or incomplete.
        ClaimRefusedError: it was taken over.
        InvalidOptionError: a name that cannot be used.
        StorageError: the storage failed.
    """
    path = marker_path(partition)
    wanted = check_metrics(metrics or {})
    require_complete(storage)
    if owner is not None:
        check_not_taken_over(storage, partition, owner)
    mine = Marker(partition, clock(), wanted, platform.node())

    def merge(file: FileInfo | None, data: bytes) -> bytes | None:
        if file is None:
            return format_marker(mine)
        old = _parse_marker(partition, data, file)
        if all(_is_same(old.metrics.get(name), value) for name, value in wanted.items()):
            return None
        return format_marker(
            msgspec.structs.replace(old, metrics={**old.metrics, **wanted}, host=old.host or mine.host, problem=None)
        )

    written = _update(storage, path, merge)
    if written is not None:
        _keep_if(storage, written, lambda: require_complete(storage))
    return find_marker(storage, partition) or mine


def mark_each(
    storage: Storage,
    metrics: Mapping[str, Mapping[str, float]],
    *,
    owner: str | None = None,
    clock: Clock = time.time,
) -> dict[str, Marker | StorageError]:
    """`mark` for several partitions; what the storage refuses for one does not keep the others from it.

    Args:
        metrics: by partition, of all that are to be marked.

    Raises:
        ClaimRefusedError: one of them was taken over; none has been marked.
        CheckpointNotFoundError, InvalidOptionError: as `mark`.
    """
    for partition, values in metrics.items():
        marker_path(partition)
        check_metrics(values)
    require_complete(storage)
    if owner is not None:
        for partition in metrics:
            check_not_taken_over(storage, partition, owner)
    results: dict[str, Marker | StorageError] = {}
    for partition, values in metrics.items():
        try:
            results[partition] = mark(storage, partition, values, owner=owner, clock=clock)
        except StorageError as error:
            results[partition] = error
    return results


def assign_metrics(pairs: Iterable[str], partitions: Sequence[str]) -> dict[str, dict[str, float]]:
    """``NAME=VALUE`` texts as metrics by partition; ``PARTITION/NAME=VALUE`` when there are several partitions.

    Returns:
        an item for each of the partitions, in their order.

    Raises:
        InvalidOptionError: no such text, no number, or of none of the partitions.
    """
    assigned: dict[str, dict[str, float]] = {partition: {} for partition in partitions}
    for pair in pairs:
        name, equals, text = pair.rpartition("=")
        if not equals or not name or _NUMBER.fullmatch(text) is None:
            raise InvalidOptionError(f"a metric is given as NAME=VALUE with a number, not {pair!r}")
        partition, slash, rest = name.partition("/")
        if slash and rest and partition in assigned:
            name = rest
        elif len(assigned) == 1:
            partition = partitions[0]
        else:
            raise InvalidOptionError(
                f"with several partitions a metric is given as PARTITION/NAME=VALUE, with one of them, not {pair!r}"
            )
        assigned[partition][name] = float(text)
    return {partition: check_metrics(values) for partition, values in assigned.items()}


def remove_mark(storage: Storage, partition: str) -> bool:
    """Removes the marker of a partition; claims from before it stay void. False if there was none."""
    path = marker_path(partition)
    file = storage.find_file(path)
    if file is None:
        return False
    void_claims(storage, partition)
    return storage.delete(path)


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics as floats by name.

    Raises:
        InvalidOptionError: a name that is empty, not UTF-8, or has control characters in it, or a value that is no
            number.
    """
    checked = {}
    for name, value in metrics.items():
        if not name or any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in name):
            raise InvalidOptionError(f"not a name for a metric: {name!r}")
        try:
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidOptionError(f"the metric {name!r} is no number: {value!r}") from error
    return checked


def _parse_marker(partition: str, data: bytes, file: FileInfo) -> Marker:
    """A marker; where its content tells no time, the storage does."""
    marker = parse_marker(partition, data)
    return (
        marker
        if marker.finished_at is not None
        else msgspec.structs.replace(marker, finished_at=file.modified_at or None)
    )


def _is_same(old: float | None, new: float) -> bool:
    return old == new or (old is not None and old != old and new != new)


# -- pins ------------------------------------------------------------------------------------------------------------


def pin(storage: Storage, note: str | None = None, *, owner: str | None = None, clock: Clock = time.time) -> Pin:
    """Protects a checkpoint, complete or not, from pruning.

    A pin that is there already keeps its time and owner; a note replaces the one before.

    Returns:
        the pin as it stands now.

    Raises:
        RefusedError: the checkpoint is being deleted.
        CheckpointNotFoundError: it is not there, or there is nothing in it, or it went meanwhile.
        StorageError: the storage failed.
    """
    was_complete = _is_complete(storage)
    if not _children(storage):
        raise CheckpointNotFoundError(f"{storage.url}: is empty")
    mine = Pin(_checked_note(note), owner or _who(), clock())
    is_new = False

    def merge(file: FileInfo | None, data: bytes) -> bytes | None:
        nonlocal is_new
        is_new = file is None
        if file is None:
            return format_pin(mine)
        old = _parse_pin(data, file)
        return None if note is None or old.note == note else format_pin(msgspec.structs.replace(old, note=note))

    def look_again() -> None:
        if is_new:
            check_not_being_deleted(storage)
        if (was_complete and not _is_complete(storage)) or _children(storage) == [PIN_NAME]:
            raise incomplete(storage)

    written = _update(storage, PIN_NAME, merge)
    if written is not None:
        _keep_if(storage, written, look_again)
    return find_pin(storage) or mine


def find_pin(storage: Storage) -> Pin | None:
    """The pin of a checkpoint, or None."""
    file = storage.find_file(PIN_NAME)
    try:
        return None if file is None else _parse_pin(storage.read(PIN_NAME, version=file.version), file)
    except StorageNotFoundError:
        return None


def unpin(storage: Storage) -> bool:
    """Removes the pin of a checkpoint; False if there was none."""
    return storage.delete(PIN_NAME)


def _parse_pin(data: bytes, file: FileInfo) -> Pin:
    found = parse_pin(data)
    return found if found.pinned_at is not None else msgspec.structs.replace(found, pinned_at=file.modified_at or None)


def _checked_note(note: str | None) -> str | None:
    if note is not None and any(0xD800 <= ord(character) < 0xE000 for character in note):
        raise InvalidOptionError(f"a note is UTF-8: {note!r}")
    return note


def _is_complete(storage: Storage) -> bool:
    manifest = storage.find_file(MANIFEST_NAME)
    return manifest is not None and manifest.size_bytes > 0


def _children(storage: Storage) -> list[str]:
    try:
        listing = storage.list_dir()
    except StorageNotFoundError as error:
        raise CheckpointNotFoundError(f"{storage.url}: no such checkpoint") from error
    return [*(file.path for file in listing.files), *listing.dirs]


def _who() -> str:
    """``user@host``, as far as the system knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such account, and no environment
        user = "unknown"
    return f"{user}@{platform.node()}"


# -- writing small files that several may change ---------------------------------------------------------------------


def _update(storage: Storage, path: str, merge: Callable[[FileInfo | None, bytes], bytes | None]) -> FileInfo | None:
    """Brings a small file up to date, whoever else does the same; no one's change is lost.

    Args:
        merge: the new content, from the file and its content (None and nothing where there is none); None: it is
            right as it is.

    Returns:
        the file as it was written; None if nothing had to be.
    """
    tried: set[bytes] = set()
    for _ in range(_ATTEMPTS):
        file = storage.find_file(path)
        try:
            data = b"" if file is None else storage.read(path, version=file.version)
        except StorageNotFoundError:
            continue
        if file is not None and data in tried:
            return file  # written, and the answer was lost
        wanted = merge(file, data)
        if wanted is None:
            return None
        tried.add(wanted)
        try:
            return _write(storage, path, wanted, file)
        except PreconditionError:
            continue
        except StorageNotFoundError as error:
            _raise_if_gone(storage, error)
        except UnavailableError:
            if _content(storage, path) != wanted:
                raise
    raise StorageError(f"{storage.url_of(path)}: cannot be written: something else is in its place, or comes and goes")


def _write(storage: Storage, path: str, data: bytes, old: FileInfo | None) -> FileInfo:
    if old is not None:
        return storage.write(path, data, version=old.version)
    try:
        return storage.write(path, data, exclusive=True)
    except RefusedError:  # a storage without exclusive creation: of two at the same moment one loses its metrics
        return storage.write(path, data)


def _raise_if_gone(storage: Storage, error: StorageNotFoundError) -> None:
    """A directory is missing for the file: the checkpoint's own, or ``evaled_by/``, emptied and removed just now."""
    try:
        storage.list_dir()
    except StorageNotFoundError:
        raise CheckpointNotFoundError(f"{storage.url}: no such checkpoint") from error


def _content(storage: Storage, path: str) -> bytes | None:
    with contextlib.suppress(StorageNotFoundError):
        return storage.read(path)
    return None


def _keep_if(storage: Storage, written: FileInfo, look: Callable[[], None]) -> None:
    """Takes back what was written if a look at the checkpoint finds that it should not be there."""
    try:
        look()
    except (RefusedError, CheckpointNotFoundError, StorageNotFoundError) as error:
        take_back(storage, written)
        if isinstance(error, StorageNotFoundError):
            raise CheckpointNotFoundError(f"{storage.url}: no such checkpoint") from error
        raise


# -- the names that training code knows ------------------------------------------------------------------------------


def is_done_eval(
    checkpoint_path: str, eval_partition: str, *, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a partition has been evaluated on a checkpoint; False for a checkpoint that is not there.

    Raises:
        InvalidOptionError: not a partition's name.
        StorageError: it could not be looked at.
    """
    return open_storage(checkpoint_path, storage_options).find_file(marker_path(eval_partition)) is not None


def mark_done_eval(
    checkpoint_path: str,
    eval_partition: str,
    *,
    metrics: Mapping[str, float] | None = None,
    owner: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Marks a partition as evaluated on a checkpoint; `mark` by the checkpoint's path."""
    mark(open_checkpoint(checkpoint_path, None, storage_options), eval_partition, metrics, owner=owner)
