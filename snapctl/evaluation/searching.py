"""Which checkpoint is waited for, and whether it is there: one look at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from snapctl.checkpoints import Checkpoint, look_at_checkpoint, read_manifest
from snapctl.durations import format_duration
from snapctl.errors import (
    CheckpointNotFoundError,
    DeadlineError,
    EvaluationTimeoutError,
    InvalidOptionError,
    ManifestError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.evaluation.pacing import Pace, Rounds
from snapctl.evaluation.watching import Look, Watch
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import MARKER_DIR, check_partition, marker_path, partition_of_marker
from snapctl.storage import FileInfo, Storage

Existing = Literal["none", "newest", "all"]
_TRIES = 5
"""A manifest that has been read so often, never changed and never parsed is not one that is being written."""
_FORGOTTEN_BEYOND = 20
"""What was handed out and is no longer there is forgotten when there are many of it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is waited for: at most one of the first three, else a checkpoint that was not there at the start."""

    newer_than: int | None = None
    at_least: int | None = None
    step: int | None = None
    evaluated_by: tuple[str, ...] = ()
    """Partitions that must have marked it."""
    not_evaluated_by: tuple[str, ...] = ()
    """Partitions that must not have."""

    def __post_init__(self) -> None:
        given = [value for value in (self.newer_than, self.at_least, self.step) if value is not None]
        if len(given) > 1:
            raise InvalidOptionError("at most one of newer than, at least, and a step can be waited for")
        for partition in (*self.evaluated_by, *self.not_evaluated_by):
            check_partition(partition)

    @property
    def includes_existing(self) -> bool:
        """Whether a checkpoint that is there already can be the answer."""
        return not (self.newer_than is None and self.at_least is None and self.step is None) or bool(
            self.not_evaluated_by
        )

    def fits(self, step: int) -> bool:
        """Whether a checkpoint of this step can be the answer."""
        if self.newer_than is not None:
            return step > self.newer_than
        if self.at_least is not None:
            return step >= self.at_least
        return self.step is None or step == self.step

    def __str__(self) -> str:
        if self.step is not None:
            what = f"step {self.step}"
        elif self.newer_than is not None:
            what = f"a checkpoint newer than step {self.newer_than}"
        elif self.at_least is not None:
            what = f"a checkpoint of step {self.at_least} or more"
        else:
            what = "a checkpoint" if self.not_evaluated_by else "a new checkpoint"
        if self.not_evaluated_by:
            what += f" not evaluated by {', '.join(self.not_evaluated_by)}"
        if self.evaluated_by:
            what += f" evaluated by {', '.join(self.evaluated_by)}"
        return what


def find_partitions_done(storage: Storage) -> frozenset[str]:
    """The partitions that have marked a checkpoint.

    Raises:
        CheckpointNotFoundError: it is no longer there, or no longer complete.
    """
    manifest = storage.find_file(MANIFEST_NAME)
    if manifest is None or manifest.size_bytes == 0:
        raise CheckpointNotFoundError(f"{storage.url}: went while its evaluation was waited for")
    try:
        files = storage.list_dir(MARKER_DIR).files
    except StorageNotFoundError:
        return frozenset()
    return frozenset(partition for file in files if (partition := partition_of_marker(file.path)) is not None)


class Search:
    """Looks for what is wanted, again and again. Each method is one look, or a part of it."""

    def __init__(self, storage: Storage, wanted: Wanted, pace: Pace, rounds: Rounds, *, existing: Existing) -> None:
        """
        Args:
            existing: which of the checkpoints that are there at the first look can be answers.
        """
        self.storage = storage
        self.wanted = wanted
        self.pending: list[str] = []
        """Checkpoints that may become answers: not evaluated yet, or with half a manifest. The oldest first."""
        self._pace = pace
        self._rounds = rounds
        self._existing = existing
        self._watch = Watch(storage, pace.clock)
        self._look: Look | None = None
        self._settled: dict[str, str] = {}
        """Versions of manifests that have been handed out, or never will be."""
        self._tries: dict[str, tuple[str, int]] = {}
        self._absent_since: float | None = None
        self._was_compared = False

    # -- one checkpoint ------------------------------------------------------------------------------------------

    def find_newest(self) -> Checkpoint | None:
        """The newest checkpoint that fits and whose manifest can be parsed, or None."""
        if self.wanted.step is not None:
            return self._find_step(self.wanted.step)
        look = self._look_around()
        names = self._unmarked(self._candidates(look), look)
        order = sorted(names, key=int) if self.wanted.includes_existing else self._watch.oldest_first(names, look)
        found = next((found for name in reversed(order) if (found := self.open(name)) is not None), None)
        self._name_later_written(look)
        if found is None:
            self.check_failed()
        else:
            self._name_newer_failed(look, found)
        return found

    def _name_newer_failed(self, look: Look, found: Checkpoint) -> None:
        for name, error in look.failed.items():
            if int(name) > (found.step or 0) and self.wanted.fits(int(name)) and name not in look.old:
                self._rounds.say_once(f"could not be looked at: {error.message}")

    def _find_step(self, step: int) -> Checkpoint | None:
        name = str(step)
        child = self.storage.child(name)
        manifest = child.find_file(MANIFEST_NAME)
        if manifest is not None and manifest.size_bytes > 0:
            return self._open(name, manifest)
        is_absent = not _exists(child)
        if is_absent or not self._watch.is_save_dir:
            look = self._look_around()
            self._judge_absence(step, look)
        else:
            self._absent_since = None
        return None

    def _judge_absence(self, step: int, look: Look) -> None:
        """Gives up on a step that is not there while saving has gone on beyond it, at two looks in a row."""
        newest = None if str(step) in look.names else self._watch.newest_by_time(look)
        if newest is None or int(newest) <= step:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._rounds.began
        else:
            interval, timeout = self._pace.interval_seconds, self._pace.timeout_seconds
            is_an_interval_apart = self._rounds.began - self._absent_since >= interval * 0.999
            if is_an_interval_apart or (timeout is not None and timeout < interval and self._rounds.is_last):
                raise CheckpointNotFoundError(
                    f"{self.storage.url}: no step {step}, and step {newest} has been saved since"
                )

    # -- all that come -------------------------------------------------------------------------------------------

    def find_ready(self) -> list[str]:
        """The directories of checkpoints that fit and have not been handed out, the oldest first; see `open`."""
        look = self._look_around()
        names = ready = self._unmarked(self._candidates(look), look)
        for partition in self.wanted.evaluated_by:
            marked = self._marked_by(partition, ready)
            ready = [name for name in ready if name in marked]
        self.pending = self._watch.oldest_first(names, look)
        self._name_later_written(look)
        return [name for name in self.pending if name in set(ready)]

    def find_newest_existing(self) -> Checkpoint | None:
        """The newest of those that are there at the first look; the others are not wanted any more."""
        look = self._look_around()
        names = [name for name in self._candidates(look) if name not in look.new]
        newest_first = sorted(names, key=int, reverse=True)
        found = next((found for name in newest_first if (found := self.open(name)) is not None), None)
        for name in names:
            self._settled.setdefault(name, look.complete[name].version)
        return found

    def _unmarked(self, names: Sequence[str], look: Look) -> list[str]:
        """Those that none of the unwanted partitions has marked; the others are settled."""
        for partition in self.wanted.not_evaluated_by:
            marked = self._marked_by(partition, names)
            for name in marked:
                self._settled[name] = look.complete[name].version
            names = [name for name in names if name not in marked]
        return list(names)

    def _marked_by(self, partition: str, names: Sequence[str]) -> set[str]:
        found = self.storage.find_each(names, marker_path(partition))
        for item in found.values():
            if isinstance(item, StorageError):
                raise item
        return {name for name, item in found.items() if item is not None}

    def open(self, name: str) -> Checkpoint | None:
        """The checkpoint of a directory that the last look has found; None if it cannot be handed out (yet)."""
        assert self._look is not None
        return self._open(name, self._look.complete[name])

    def check_failed(self) -> None:
        """Raises what has kept a possible answer from being looked at; of the others it is said once."""
        if self._look is None:
            return
        for name, error in self._look.failed.items():
            if not self.wanted.fits(int(name)):
                continue
            if name in self._settled or (self._existing != "all" and name in self._look.old):
                self._rounds.say_once(f"left out: {error.message}")
            else:
                raise error

    def expired(self, found: Checkpoint | None = None, done: Iterable[str] = ()) -> DeadlineError:
        """The error for what has not come in time."""
        if found is None and self.pending and self.wanted.evaluated_by:
            found = Checkpoint(int(self.pending[0]), self.storage.url_of(self.pending[0]), "complete")
            with contextlib.suppress(StorageError, CheckpointNotFoundError):
                done = find_partitions_done(self.storage.child(self.pending[0]))
        within = "" if self._pace.timeout_seconds is None else f" within {format_duration(self._pace.timeout_seconds)}"
        if found is not None:
            missing = tuple(name for name in dict.fromkeys(self.wanted.evaluated_by) if name not in set(done))
            marked = tuple(name for name in dict.fromkeys(self.wanted.evaluated_by) if name in set(done))
            but = f" (but by {', '.join(marked)})" if marked else ""
            return EvaluationTimeoutError(
                f"{found.path}: not evaluated by {', '.join(missing)}{within}{but}",
                step=found.step,
                done=marked,
                missing=missing,
            )
        kind = EvaluationTimeoutError if self.wanted.evaluated_by else DeadlineError
        missing = tuple(dict.fromkeys(self.wanted.evaluated_by))
        return kind(f"{self.storage.url}: {self.wanted} did not come{within}", step=self.wanted.step, missing=missing)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _look_around(self) -> Look:
        self._look = None
        look = self._look = self._watch.look()
        if len(self._settled) > 2 * len(look.names) + _FORGOTTEN_BEYOND:
            present = set(look.names)
            self._settled = {name: version for name, version in self._settled.items() if name in present}
            self._tries = {name: tries for name, tries in self._tries.items() if name in present}
        return look

    def _candidates(self, look: Look) -> list[str]:
        return [
            name
            for name, file in look.complete.items()
            if self.wanted.fits(int(name))
            and self._settled.get(name) != file.version
            and (self._existing != "none" or name in look.new)
        ]

    def _open(self, name: str, file: FileInfo) -> Checkpoint | None:
        child = self.storage.child(name)
        try:
            read_manifest(child, version=file.version)
        except CheckpointNotFoundError:
            self._drop(name)  # it was deleted, or is being saved again
            return None
        except ManifestError as error:
            self._note_unparsable(name, file, error)
            return None
        if any(child.find_file(marker_path(partition)) for partition in self.wanted.not_evaluated_by):
            self._settle(name, file.version)
            return None
        written = child.find_file(MANIFEST_NAME)
        if written is None:
            self._drop(name)
            return None
        # It may have been written to its end since it was listed: that would look like a second save.
        self._settle(name, written.version)
        return self.look_again(Checkpoint(int(name), child.url, "complete"))

    def look_again(self, found: Checkpoint) -> Checkpoint:
        """A checkpoint with its time, markers and metrics as they are now."""
        try:
            seen = look_at_checkpoint(self.storage.child(str(found.step)))
        except CheckpointNotFoundError:
            return found
        if seen.state == "unreadable":
            self._rounds.say_once(f"its markers could not be read: {seen.problem}")
            return found
        for warning in (*seen.warnings, *seen.unread):
            self._rounds.say_once(warning)
        return seen

    def _settle(self, name: str, version: str) -> None:
        self._settled[name] = version
        self._tries.pop(name, None)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self.pending:
            self.pending.remove(name)

    def _note_unparsable(self, name: str, file: FileInfo, error: ManifestError) -> None:
        """Half a manifest is looked at again; one that stays as it is, is said and left alone in the end."""
        version, tries = self._tries.get(name, (file.version, 0))
        tries = tries + 1 if version == file.version else 1
        self._tries[name] = (file.version, tries)
        if tries == 2:
            self._rounds.say_once(f"passed over: {error.message}")
        if tries >= _TRIES:
            self._settle(name, file.version)

    def _name_later_written(self, look: Look) -> None:
        """Says which checkpoints are late in time but not in step: a run that was begun again further down."""
        limit = self.wanted.newer_than
        if limit is None:
            return
        late = {name for name in look.new if int(name) < limit}
        if not self._was_compared:
            self._was_compared = True
            below = [name for name in look.complete if int(name) <= limit]
            newest = self._watch.newest_by_time(look, below)
            if newest is not None and int(newest) < max(int(name) for name in below):
                late.add(newest)
        for name in sorted(late, key=int):
            self._rounds.say_once(f"{self.storage.url_of(name)}: was written later, but its step is not above {limit}")


def _exists(storage: Storage) -> bool:
    try:
        storage.list_dir()
    except StorageNotFoundError:
        return False
    return True
