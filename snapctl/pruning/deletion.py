"""Deletes one checkpoint, so that it never looks complete and is not, whenever that is interrupted.

The protocol, for a complete checkpoint:

0. List it. What is under a hold, or retained, is not begun.
1. Announce: create ``.snapshot_metadata.deleting``, exclusively.
2. Look again whether all is as it was planned. If not, take the announcement back.
3. Delete the manifest, if it still is the one that was planned. From here on nothing looks complete.
4. Delete what was listed, each file only while it is still that very one; then what snapctl and evaluators had added;
   the announcement and the emptied directories last.

A run that finds an announcement without a manifest goes on at (4), with a listing of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Literal

import msgspec
from msgspec.structs import replace

from snapctl.checkpoints import Checkpoint, Place, look_at_checkpoint
from snapctl.errors import (
    CheckpointNotFoundError,
    NoSpaceError,
    PermissionDeniedError,
    PreconditionError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME, PIN_NAME, format_time
from snapctl.pruning.contents import Contents, digest, is_own_file
from snapctl.pruning.links import LinkWatch
from snapctl.pruning.listings import Listings
from snapctl.pruning.protection import (
    ANNOUNCEMENT_SECONDS,
    Clock,
    Subject,
    always_kept,
    claims_and_pins,
    is_leftover,
    judge_interrupted,
    judge_remains,
)
from snapctl.pruning.retention import Plan, Row
from snapctl.storage import DeletedFiles, FileInfo, Storage, run_parallel

BEGIN_WITHIN_SECONDS = 600.0
"""A deletion that has not begun so long after its announcement is not begun at all: the announcement gets old."""
_GOES_ON = "half deleted, the next prune goes on"
_ANOTHER_PRUNE = "another prune is deleting it"


class Outcome(msgspec.Struct, frozen=True):
    """What became of one checkpoint that was to be deleted."""

    status: Literal["deleted", "left", "failed"]
    """``left``: it was not, or no longer, to be deleted; ``failed``: it was, and could not be."""
    message: str | None = None
    freed_bytes: int = 0
    begun: bool = False
    """Its manifest is gone, or was not there."""
    is_held: bool = False
    """It may not be deleted yet: a hold, or retention."""
    is_gone: bool = False
    """Somebody else has deleted it."""


_GONE = Outcome("left", "gone already: somebody else deleted it", is_gone=True)


class _Stop(Exception):
    """The deletion ends here, with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _Announcement(msgspec.Struct):
    nonce: str
    host: str = ""
    pid: int = 0
    newest: float | None = None
    """The latest time of a file that the deleter had listed: a later one is none of what it was to delete."""


def parse_announcement(data: bytes) -> float | None:
    """The time of the latest file that a deleter had listed; None where the announcement does not say."""
    try:
        return msgspec.json.decode(data, type=_Announcement).newest
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # any content means the same


class Deleter:
    """Carries out the deletions of one plan. Several may be under way at a time."""

    def __init__(
        self,
        place: Place,
        plan: Plan,
        *,
        slack_seconds: float,
        incomplete_older_than_seconds: float | None,
        links: LinkWatch,
        listings: Listings,
        stop: Event | None = None,
        on_done: Callable[[int], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            plan: whose newest checkpoints must be there as long as anything is deleted.
            slack_seconds: how far the clock may be ahead of the storage's.
            incomplete_older_than_seconds: by which incomplete ones were judged.
            listings: of the checkpoints, as far as they are still fresh enough to be used.
            stop: when set, nothing more is begun.
            on_done: called with how many more files are deleted.
            monotonic: tells how long ago a deletion was announced.
        """
        self._place = place
        self._plan = plan
        self._slack_seconds = slack_seconds
        self._older_than = incomplete_older_than_seconds
        self._links = links
        self._listings = listings
        self._stop = stop
        self._on_done = on_done
        self._monotonic = monotonic

    def delete(self, row: Row) -> Outcome:
        """Deletes the checkpoint of a row, as far as that is still right."""
        if self._stop is not None and self._stop.is_set():
            return Outcome("left", "interrupted before it was begun")
        storage = self._place.storage.child(str(row.step))
        act = {
            "complete": self._delete_complete,
            "incomplete": self._delete_incomplete,
            "interrupted": self._go_on,
            "link": self._delete_link,
            None: self._refuse,
        }[row.how]
        try:
            return act(row, storage)
        except _Stop as stop:
            return stop.outcome
        except StorageError as error:
            return Outcome("failed", f"nothing was deleted: {error.message}")

    def _refuse(self, row: Row, storage: Storage) -> Outcome:
        raise AssertionError(f"step {row.step} is not to be deleted")

    def _now(self) -> Clock:
        return Clock(self._place.storage.read_clock(may_write=True).seconds, self._slack_seconds)

    # -- the four ways -----------------------------------------------------------------------------------------

    def _delete_link(self, row: Row, storage: Storage) -> Outcome:
        if not self._place.storage.delete_link(str(row.step)):
            return _GONE
        return Outcome("deleted", begun=True)

    def _delete_complete(self, row: Row, storage: Storage) -> Outcome:
        files, contents = self._list(row, storage)
        listed = replace(row.subject, contents=contents)
        if kept := always_kept(listed, self._now()):
            raise _Stop(Outcome("left", kept[0]))
        started = self._monotonic()
        announcement = self._announce(storage, row.checkpoint, contents)
        with self._taken_back_unless_begun(storage, announcement) as begun:
            self._look_again(row, storage, announcement)
            self._check_age(started)
            self._delete_manifest(storage, row.checkpoint.manifest)
            begun.set()
        return self._finish(storage, files, announcement, freed_bytes=_manifest_bytes(row.checkpoint))

    def _delete_incomplete(self, row: Row, storage: Storage) -> Outcome:
        files, contents = self._list(row, storage, fresh=True)
        self._judge_remains_again(row, replace(contents, dirs_changed_at=storage.find_dirs_time()))
        started = self._monotonic()
        announcement = self._announce(storage, row.checkpoint, contents)
        with self._taken_back_unless_begun(storage, announcement) as begun:
            self._look_again(row, storage, announcement)
            now_there = [file for file in storage.list_tree() if file.path != DELETING_NAME]
            if now_there != [file for file in files if file.path != DELETING_NAME]:
                raise _Stop(Outcome("left", "somebody is writing into it"))
            self._check_age(started)
            if contents.manifest is not None:
                self._delete_manifest(storage, contents.manifest)
            begun.set()
        return self._finish(storage, files, announcement, freed_bytes=_manifest_bytes(row.checkpoint))

    def _judge_remains_again(self, row: Row, contents: Contents) -> None:
        planned, found = row.checkpoint.manifest, contents.manifest
        if _version(planned) != _version(found):
            raise _Stop(Outcome("left", "it has a manifest now"))
        verdict, reason = judge_remains(replace(row.subject, contents=contents), self._older_than, self._now())
        if verdict != "delete":
            raise _Stop(Outcome("left", reason))

    def _go_on(self, row: Row, storage: Storage) -> Outcome:
        """Somebody's interrupted deletion."""
        files, contents = self._list(row, storage, fresh=True)
        if contents.manifest is not None or contents.deleting is None:
            raise _Stop(Outcome("left", "it is being saved again"))
        pin = row.checkpoint.pin
        if contents.pinned and pin is None:
            raise _Stop(Outcome("left", "half deleted, and pinned"))
        subject = replace(row.subject, contents=contents)
        subject = replace(subject, checkpoint=replace(row.checkpoint, deleting=contents.deleting))
        verdict, reason = judge_interrupted(subject, self._now())
        if verdict != "delete":
            raise _Stop(Outcome("left", reason))
        return self._finish(storage, files, contents.deleting, freed_bytes=0)

    # -- (0) ---------------------------------------------------------------------------------------------------

    def _list(self, row: Row, storage: Storage, *, fresh: bool = False) -> tuple[list[FileInfo], Contents]:
        known = self._listings.take(row.step)
        files = storage.list_tree(cuts=self._listings.cuts(row.step)) if fresh or known is None else known
        if not files:
            raise _Stop(_GONE)
        contents = row.subject.contents if files is known else None
        contents = contents if contents is not None else digest(files)
        if contents.held is not None and contents.held_until > self._now().now:
            until = format_time(contents.held_until)
            why = f"is retained until {until}" if until else "is under a hold"
            message = f"not begun: {storage.url_of(contents.held)} {why}"
            raise _Stop(Outcome("failed", message, is_held=True))
        return files, contents

    # -- (1) ---------------------------------------------------------------------------------------------------

    def _announce(self, storage: Storage, checkpoint: Checkpoint, contents: Contents) -> FileInfo:
        nonce = uuid.uuid4().hex
        body = msgspec.json.encode(_Announcement(nonce, socket.gethostname(), os.getpid(), contents.newest_at))
        for is_last in (False, True):
            try:
                return _create(storage, body)
            except StorageNotFoundError:
                raise _Stop(_GONE) from None
            except PreconditionError:
                standing = storage.find_file(DELETING_NAME)
                if standing is not None and _nonce_of(storage) == nonce:
                    return standing  # the answer to our own write was lost
                if is_last or not self._is_abandoned(storage, checkpoint, standing):
                    raise _Stop(Outcome("left", _ANOTHER_PRUNE)) from None
                if standing is not None:
                    with contextlib.suppress(PreconditionError):
                        storage.delete(DELETING_NAME, version=standing.version)
        raise AssertionError("unreachable")

    def _is_abandoned(self, storage: Storage, checkpoint: Checkpoint, standing: FileInfo | None) -> bool:
        """Whether an announcement that stands there is one that nothing followed upon."""
        if standing is None:
            return True
        if checkpoint.manifest is not None and storage.find_file(MANIFEST_NAME) is None:
            return False
        return self._now().earliest - standing.modified_at >= ANNOUNCEMENT_SECONDS

    @contextlib.contextmanager
    def _taken_back_unless_begun(self, storage: Storage, announcement: FileInfo) -> Iterator[Event]:
        """Removes the announcement again if the deletion does not begin; an interrupt leaves it to the next run."""
        begun = Event()
        try:
            yield begun
        except (_Stop, StorageError) as error:
            is_over = isinstance(error, _Stop) and error.outcome.begun
            if not begun.is_set() and not is_over:
                with contextlib.suppress(StorageError):  # then it goes when it is an hour old
                    storage.delete(DELETING_NAME, version=announcement.version)
                    if isinstance(error, _Stop) and error.outcome.is_gone:
                        storage.delete_empty_dirs()  # the announcement may have kept another prune from that
            raise

    # -- (2) ---------------------------------------------------------------------------------------------------

    def _look_again(self, row: Row, storage: Storage, announcement: FileInfo) -> None:
        """Raises `_Stop` unless all is as it was planned."""
        checks = [lambda: self._look_at_it(row, storage, announcement), self._look_at_newest]
        for objection in run_parallel(lambda check: check(), checks, jobs=storage.parallel_requests):
            if objection is not None:
                raise _Stop(Outcome("left", objection))

    def _look_at_it(self, row: Row, storage: Storage, announcement: FileInfo) -> str | None:
        clock = self._now()
        try:
            found = look_at_checkpoint(storage, now=clock.now)
        except CheckpointNotFoundError:
            raise _Stop(_GONE) from None
        if found.state == "unreadable":
            return f"could not be looked at: {found.problem}"
        if found.unread:
            return f"could not be looked at: {found.unread[0]}"
        if _version(found.manifest) != _version(row.checkpoint.manifest):
            if found.manifest is None:
                raise _Stop(_GONE)
            return "saved again: its manifest is another one"
        if _version(found.deleting) != announcement.version:
            return "somebody removed the announcement of its deletion"
        if kept := claims_and_pins(found, clock):
            return kept[0]
        if _markers(found) != _markers(row.checkpoint):
            return "its markers have changed"
        link = self._links.find_link_to(self._place, row.step)
        return f"{link} leads to it" if link is not None else None

    def _look_at_newest(self) -> str | None:
        storage = self._place.storage
        for step in self._plan.newest:
            manifest = storage.find_file(f"{step}/{MANIFEST_NAME}")
            if manifest is None or manifest.size_bytes == 0:
                return f"the newest checkpoint is gone: step {step}"
        return None

    def _check_age(self, announced_at: float) -> None:
        if self._monotonic() - announced_at > BEGIN_WITHIN_SECONDS:
            raise _Stop(Outcome("left", "its announcement got too old before the deletion began"))

    # -- (3) ---------------------------------------------------------------------------------------------------

    def _delete_manifest(self, storage: Storage, manifest: FileInfo | None) -> None:
        if manifest is None:
            raise _Stop(_GONE)
        try:
            if not storage.delete(MANIFEST_NAME, version=manifest.version):
                raise _Stop(_GONE)
        except PreconditionError:
            raise _Stop(Outcome("left", "saved again: its manifest is another one")) from None
        except StorageError as error:
            is_there = self._manifest_is_there(storage)
            if is_there:
                raise
            if is_there is None:
                message = f"nobody can tell whether its deletion has begun: {error.message}"
                raise _Stop(Outcome("failed", message, begun=True)) from error
        storage.sync_dir()

    def _manifest_is_there(self, storage: Storage) -> bool | None:
        """None where the storage does not say."""
        try:
            return storage.find_file(MANIFEST_NAME) is not None
        except StorageError:
            return None

    # -- (4) ---------------------------------------------------------------------------------------------------

    def _finish(
        self, storage: Storage, files: Sequence[FileInfo], announcement: FileInfo, *, freed_bytes: int
    ) -> Outcome:
        saved: list[FileInfo] = []
        own: list[FileInfo] = []
        for file in files:
            if file.path not in (MANIFEST_NAME, DELETING_NAME):
                (own if is_own_file(file.path) else saved).append(file)
        for part in (saved, own):
            try:
                report = storage.delete_files(part, stop=self._stop, on_done=self._on_done)
            except StorageError as error:
                return Outcome("failed", f"{_GOES_ON}: {error.message}", freed_bytes, begun=True)
            freed_bytes += report.deleted_bytes
            if (outcome := _trouble(report, len(saved) + len(own), freed_bytes)) is not None:
                return outcome
        message = None
        storage.delete_empty_dirs()  # all but the checkpoint's own, in which the announcement still stands
        try:
            storage.delete(DELETING_NAME, version=announcement.version)
        except PreconditionError:
            return Outcome("left", "being saved again: its deletion was announced anew", freed_bytes, begun=True)
        except PermissionDeniedError as error:  # retained like any new object of the bucket
            message = f"deleted, but for the announcement of that, which may not go yet: {error.message}"
        except StorageError as error:
            return Outcome("failed", f"its announcement is left: {error.message}", freed_bytes, begun=True)
        storage.delete_empty_dirs()
        return Outcome("deleted", message, freed_bytes, begun=True)


def _create(storage: Storage, body: bytes) -> FileInfo:
    """Creates the announcement; without content where that does not fit: a full disk is what people prune for."""
    try:
        return storage.write(DELETING_NAME, body, exclusive=True, durable=False)
    except NoSpaceError:
        return storage.write(DELETING_NAME, b"", exclusive=True, durable=False)


def _trouble(report: DeletedFiles, total: int, freed_bytes: int) -> Outcome | None:
    """Why a deletion ends before its end; None if it does not."""
    if report.changed:
        message = f"stopped: it is being saved again ({report.changed[0]} was replaced)"
        return Outcome("left", message, freed_bytes, begun=True)
    if report.failed:
        first = report.failed[0].message
        message = f"{_GOES_ON}: {len(report.failed)} of {total} files could not be deleted"
        return Outcome("failed", f"{message}: {first}", freed_bytes, begun=True)
    if report.unfinished:
        return Outcome("left", f"interrupted, {_GOES_ON}", freed_bytes, begun=True)
    return None


def remove_leftover(place: Place, subject: Subject, clock: Clock) -> str | None:
    """Takes an old announcement away from a checkpoint that is whole; returns what was in the way, if anything."""
    if not is_leftover(subject, clock) or subject.checkpoint.deleting is None:
        return None
    storage = place.storage.child(str(subject.step))
    try:
        storage.delete(DELETING_NAME, version=subject.checkpoint.deleting.version)
    except PreconditionError:
        return None
    except StorageError as error:
        return error.message
    return None


def _nonce_of(storage: Storage) -> str | None:
    try:
        return msgspec.json.decode(storage.read(DELETING_NAME), type=_Announcement).nonce
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError):
        return None


def _version(file: FileInfo | None) -> str | None:
    return None if file is None else file.version


def _manifest_bytes(checkpoint: Checkpoint) -> int:
    return 0 if checkpoint.manifest is None else checkpoint.manifest.size_bytes


def _markers(checkpoint: Checkpoint) -> set[tuple[str, str]]:
    """The markers' files; claims come and go, and pins are looked at by themselves."""
    done = {f"{marker.partition}_DONE" for marker in checkpoint.markers}
    return {
        (file.path, file.version)
        for file in checkpoint.side_files
        if file.path != PIN_NAME and file.path.partition("/")[2] in done
    }
