"""How save directories stand, a few figures each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import msgspec

from snapctl.checkpoints import (
    SIGNS_OF_A_CHECKPOINT,
    Checkpoint,
    Place,
    State,
    classify,
    find_checkpoints,
    judge_scanned,
    not_a_save_dir,
)
from snapctl.errors import InvalidPathError, StorageError
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME
from snapctl.save_dirs.finding import Found, FoundSaveDir, UnreadableDir, find_save_dirs
from snapctl.save_record import SAVE_RECORD_PATH
from snapctl.storage import ScannedDir, Storage

READ_JOBS = 32
"""So many save directories at a time have what their newest checkpoint recorded read."""
MAX_WAITING = 2 * READ_JOBS


class PartitionSummary(msgspec.Struct, frozen=True):
    """What a partition has evaluated."""

    partition: str
    checkpoints: int
    newest_step: int
    """Of those that it has marked and that are complete."""


class SaveDirSummary(msgspec.Struct, frozen=True):
    """How a save directory stood at one moment."""

    path: str
    """As it is printed."""
    now: float
    """The moment, in seconds since the epoch by the storage's clock."""
    counts: Mapping[State, int]
    """Checkpoints by state."""
    size_bytes: Mapping[State, int]
    """All that lies in them; what is reached through symbolic links excluded."""
    files: int
    pinned: int
    newest: Checkpoint | None
    """The complete one of the highest step, with what it recorded."""
    evaluations: tuple[PartitionSummary, ...] = ()
    """Sorted by partition."""
    problems: tuple[str, ...] = ()
    """What could not be looked at, so that the figures may lack something."""
    warnings: tuple[str, ...] = ()

    @property
    def newest_age_seconds(self) -> float | None:
        """How old the newest is; None where there is none, or nobody knows."""
        if self.newest is None or self.newest.created_at is None:
            return None
        return max(0.0, self.now - self.newest.created_at)

    @property
    def newest_evaluated_step(self) -> int | None:
        """The highest step that any partition has marked."""
        return max((found.newest_step for found in self.evaluations), default=None)


class Unreadable(msgspec.Struct, frozen=True):
    """A directory that nobody could look into: there may be save directories below it."""

    path: str
    """As it is printed."""
    problem: str


Summary: TypeAlias = SaveDirSummary | Unreadable


def summarize_save_dir(place: Place) -> SaveDirSummary:
    """How one save directory stands.

    Raises:
        StorageError: it could not be listed.
    """
    now = place.storage.now(may_write=False)
    checkpoints = list(find_checkpoints(place, totals=True, details=False, now=now))
    newest = _newest(checkpoints)
    names = [] if newest is None else [str(newest.step)]
    return _summarize(place, checkpoints, list(find_checkpoints(place, names=names, now=now)), now)


def iter_summaries(root: Storage) -> Iterator[Summary]:
    """How the save directories below a directory stand, itself included, one after another as they are found.

    Raises:
        InvalidPathError: it is a checkpoint.
        SaveDirNotFoundError: it is not there.
        StorageError: it could not be listed at all.
    """
    waiting: deque[Future[Summary]] = deque()
    pool = ThreadPoolExecutor(min(READ_JOBS, root.parallel_requests), thread_name_prefix="snapctl-io")
    try:
        now: float | None = None
        for found in find_below(root):
            now = root.now(may_write=False) if now is None else now
            waiting.append(pool.submit(_summary_of, root, found, now))
            while waiting and (waiting[0].done() or len(waiting) > MAX_WAITING):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def find_below(root: Storage) -> Iterator[Found]:
    """The save directories below a directory; raises like `iter_summaries`."""
    is_checkpoint = classify(root).kind == "checkpoint"
    if is_checkpoint:
        listing = root.list_dir()
        has_manifest = any(file.path in (MANIFEST_NAME, DELETING_NAME) for file in listing.files)
        if has_manifest or not any(name in SIGNS_OF_A_CHECKPOINT for name in listing.dirs):
            raise not_a_save_dir(root)
    for found in find_save_dirs(root):
        is_checkpoint = False  # directories that are only named like those of a save
        yield found
    if is_checkpoint:
        raise not_a_save_dir(root)


def path_of(root: Storage, found: Found) -> tuple[str | None, str | None]:
    """The path of a save directory as it is printed, None if it is none that can be named; and what the problem is."""
    if isinstance(found, UnreadableDir):
        return None, found.error.message
    try:
        storage = _open_below(root, found.path)
    except InvalidPathError as error:
        return None, f"{root.url_of(found.path)}: {error.message}"
    return storage.url, found.error.message if found.error is not None else None


def open_found(root: Storage, found: FoundSaveDir) -> Place:
    """A save directory, with the checkpoints that the walk has seen.

    Raises:
        InvalidPathError: as `path_of` says.
    """
    names = tuple(entry.name for entry in found.entries)
    return Place(_open_below(root, found.path), "save_dir", names, found.linked_names)


def _open_below(root: Storage, path: str) -> Storage:
    """Raises `InvalidPathError` for a path that only objects can have: with an empty part, ``.`` or ``..``."""
    return root.child(path) if path else root


def _summary_of(root: Storage, found: Found, now: float) -> Summary:
    path, problem = path_of(root, found)
    if isinstance(found, UnreadableDir) or path is None:
        return Unreadable(root.url_of(found.path), problem or "")
    place = open_found(root, found)
    checkpoints = list(judge_scanned(place, found.entries, details=False, now=now))
    newest = _newest(checkpoints)
    entries = [entry for entry in found.entries if newest is not None and entry.name == str(newest.step)]
    detailed = list(judge_scanned(place, [_of_the_save(place, entry) for entry in entries], now=now))
    return _summarize(place, checkpoints, detailed, now, found.error)


def _of_the_save(place: Place, entry: ScannedDir) -> ScannedDir:
    """What tells when it was saved, and how that went: what the storage says of the manifest now (its time, and the
    checksum that the save record must speak of), and the save record."""
    try:
        manifest = place.storage.child(entry.name).find_file(MANIFEST_NAME)
    except StorageError as error:
        return msgspec.structs.replace(entry, totals_error=entry.totals_error or error)
    record = [file for file in entry.files if file.path == SAVE_RECORD_PATH]
    return msgspec.structs.replace(entry, files=record if manifest is None else [manifest, *record])


def _newest(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    complete = (found for found in checkpoints if found.state == "complete")
    return max(complete, key=lambda found: found.step or 0, default=None)


def _summarize(
    place: Place,
    checkpoints: Sequence[Checkpoint],
    detailed: Sequence[Checkpoint],
    now: float,
    error: StorageError | None = None,
) -> SaveDirSummary:
    counts: dict[State, int] = {"complete": 0, "incomplete": 0, "unreadable": 0}
    sizes: dict[State, int] = dict.fromkeys(counts, 0)
    marked: dict[str, list[int]] = {}
    problems = [] if error is None else [error.message]
    for found in checkpoints:
        counts[found.state] += 1
        if not found.is_link:
            sizes[found.state] += found.size_bytes or 0
        problems += [found.problem] if found.problem else []
        problems += found.unread
        if found.state == "complete":
            for partition in found.evaluated_by:
                marked.setdefault(partition, []).append(found.step or 0)
    newest = detailed[0] if detailed else _newest(checkpoints)
    read = detailed[0] if detailed else None
    return SaveDirSummary(
        path=place.storage.url,
        now=now,
        counts=counts,
        size_bytes=sizes,
        files=sum(found.files or 0 for found in checkpoints if not found.is_link),
        pinned=sum(found.pinned for found in checkpoints),
        newest=newest,
        evaluations=tuple(PartitionSummary(name, len(steps), max(steps)) for name, steps in sorted(marked.items())),
        problems=tuple(dict.fromkeys([*problems, *(read.unread if read else ())])),
        warnings=read.warnings if read else (),
    )
