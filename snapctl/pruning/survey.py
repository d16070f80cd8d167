"""Looks at a save directory as far as a plan rests on it, and no further."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from snapctl.checkpoints import Place, find_checkpoints
from snapctl.errors import BucketNotFoundError, CredentialsError, ManifestError, StorageError, StorageNotFoundError
from snapctl.manifest import MANIFEST_NAME, Manifest, parse_manifest
from snapctl.markers import DELETING_NAME
from snapctl.pruning.contents import digest
from snapctl.pruning.deletion import parse_announcement
from snapctl.pruning.listings import Listings
from snapctl.pruning.protection import Clock, ManifestState, Subject
from snapctl.pruning.retention import Plan
from snapctl.storage import Storage, run_parallel
from snapctl.verification.wholeness import check_whole, list_checkpoint

_LOOK_JOBS = 8


class Survey:
    """What is known about the checkpoints of one save directory."""

    def __init__(
        self, place: Place, clock: Clock, *, links: Mapping[tuple[str, int], tuple[str, ...]], verified: bool
    ) -> None:
        self.place = place
        self.clock = clock
        self.listings = Listings()
        self._verified = verified
        self.warnings: list[str] = []
        self.subjects: dict[int, Subject] = {}
        for checkpoint in find_checkpoints(place, now=clock.now):
            step = checkpoint.step
            if step is not None:
                self.subjects[step] = Subject(step, checkpoint, links=links.get((place.storage.url, step), ()))
                self.warnings += checkpoint.warnings

    def complete(self, plan_of: Callable[[Collection[Subject]], Plan], *, on_look: Callable[[int], None]) -> Plan:
        """Makes a plan, and looks at what it rests on, until there is nothing left to look at.

        Args:
            plan_of: makes the plan, from what is known.
            on_look: called with how many more checkpoints have been looked at.

        Raises:
            CredentialsError: the storage no longer knows who asks; any other error makes only one checkpoint unknown.
        """
        rounds, before = 0, None
        while True:
            plan = plan_of(self.subjects.values())
            if not plan.unknown:
                return plan
            if plan.unknown == before:
                raise AssertionError(f"looked at {plan.unknown}, and know nothing more")
            before = plan.unknown
            to_list = {row.step for row in plan.deletions}
            todo = [*plan.unknown, *self._more(plan, 2**rounds if rounds else 0)]
            rounds += 1

            def look(step: int, to_list: Collection[int] = to_list) -> Subject:
                found = self._look(self.subjects[step], needs_listing=step in to_list)
                on_look(1)
                return found

            jobs = min(_LOOK_JOBS, self.place.storage.parallel_requests)
            for subject in run_parallel(look, todo, jobs=jobs):
                self.subjects[subject.step] = subject

    def _more(self, plan: Plan, count: int) -> list[int]:
        """The next newest ones: where one turned out to be unusable, more may be, and each would cost a round."""
        unknown = [
            step
            for step, subject in self.subjects.items()
            if subject.counts and subject.manifest_state == "unknown" and step not in plan.unknown
        ]
        return sorted(unknown, reverse=True)[:count]

    def _look(self, subject: Subject, *, needs_listing: bool) -> Subject:
        """One checkpoint: its manifest, and what lies in its directory."""
        storage = self.place.storage.child(str(subject.step))
        try:
            manifest: Manifest | None = None
            if subject.counts:
                subject, manifest = _parse(subject, storage)
            needs_listing = needs_listing and not subject.checkpoint.is_link
            judges_blobs = self._verified and manifest is not None
            if not needs_listing and not judges_blobs:
                return subject
            files = list_checkpoint(storage, manifest)
            if judges_blobs and manifest is not None:
                subject = replace(subject, passes=not check_whole(storage, manifest, files).problems)
            if needs_listing:
                self.listings.add(subject.step, files)
                contents = digest(files)
                if subject.checkpoint.state == "incomplete" or subject.manifest_state == "cut-off":
                    contents = replace(contents, dirs_changed_at=storage.find_dirs_time())
                subject = _with_announcement(replace(subject, contents=contents), storage)
        except (CredentialsError, BucketNotFoundError):
            raise
        except StorageNotFoundError:
            return replace(_gone(subject), contents=digest(()))
        except StorageError as error:
            return _not_looked_at(subject, error)
        return subject


def _parse(subject: Subject, storage: Storage) -> tuple[Subject, Manifest | None]:
    file = subject.checkpoint.manifest
    version = file.version if file is not None else ""
    try:
        data = storage.read(MANIFEST_NAME, version=version)
    except StorageNotFoundError:  # deleted or replaced since it was listed
        return _gone(subject), None
    if file is not None and len(data) != file.size_bytes:
        return replace(subject, manifest_state="unusable", problem="it is being written"), None
    try:
        return replace(subject, manifest_state="parsed"), parse_manifest(data)
    except ManifestError as error:
        state: ManifestState = "cut-off" if error.kind == "unparsable" else "unusable"
        return replace(subject, manifest_state=state, problem=error.message), None


def _gone(subject: Subject) -> Subject:
    """A checkpoint that somebody else deletes, or is saving again."""
    return replace(subject, checkpoint=replace(subject.checkpoint, state="incomplete", manifest=None, created_at=None))


def _with_announcement(subject: Subject, storage: Storage) -> Subject:
    """Of a half deleted one: what its deleter had seen."""
    if not subject.is_half_deleted:
        return subject
    try:
        return replace(subject, announced_newest=parse_announcement(storage.read(DELETING_NAME)))
    except StorageNotFoundError:  # its deleter is done
        return replace(subject, checkpoint=replace(subject.checkpoint, deleting=None))


def _not_looked_at(subject: Subject, error: StorageError) -> Subject:
    if subject.checkpoint.state == "complete":
        return replace(subject, manifest_state="not-looked-at", problem=error.message)
    unreadable = replace(subject.checkpoint, state="unreadable", error=error)
    return replace(subject, checkpoint=unreadable)
