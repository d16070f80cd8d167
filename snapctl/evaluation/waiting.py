"""Waiting for checkpoints, and for those who evaluate them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snapctl.checkpoints import Checkpoint
from snapctl.durations import format_duration
from snapctl.errors import (
    DeadlineError,
    EvaluationTimeoutError,
    FailureReportedError,
    InvalidOptionError,
    InvalidPathError,
)
from snapctl.evaluation.pacing import Pace, Rounds
from snapctl.evaluation.searching import Existing, Search, Wanted, find_partitions_done
from snapctl.storage import Storage, open_storage

__all__ = [
    "DeadlineError",
    "EvaluationTimeoutError",
    "FailureFile",
    "Pace",
    "Wanted",
    "checkpoints_iterator",
    "follow_checkpoints",
    "wait_for_checkpoint",
    "wait_for_evaluators",
    "watch_file",
]

Switch = Callable[[], bool]


def watch_file(path: str, options: Mapping[str, Any] | None = None) -> Switch:
    """A function that says whether a file is there by now.

    Args:
        path: local, or a URL.

    Raises:
        InvalidPathError: it cannot be a file's.
    """
    storage = open_storage(path, options)
    parent, name = storage.parent(), storage.name
    if parent is None or not name:
        raise InvalidPathError(f"{path}: not the path of a file")
    return lambda: parent.find_file(name) is not None


@dataclass(frozen=True, slots=True)
class FailureFile:
    """A file by which somebody reports that no checkpoint will come."""

    path: str
    exists: Switch

    def report(self) -> FailureReportedError:
        return FailureReportedError(f"{self.path}: is there, which reports a failure")


def wait_for_checkpoint(
    storage: Storage, wanted: Wanted, pace: Pace, *, fail_if: FailureFile | None = None
) -> Checkpoint:
    """Waits for one checkpoint, and then until all of `wanted.evaluated_by` have marked it.

    In each round the file of `fail_if` is looked for first, and a checkpoint that fits wins all the same. Once found,
    it stays the same one.

    Args:
        storage: the save directory; it need not exist yet.

    Raises:
        EvaluationTimeoutError: not evaluated in time.
        DeadlineError: none came in time.
        FailureReportedError: the file of `fail_if` is there.
        CheckpointNotFoundError: the step will not come any more, or the checkpoint went while evaluators were awaited.
        SaveDirNotFoundError: the bucket is not there.
        StorageError: the storage refused, or the last look failed.
    """
    rounds = Rounds(pace)
    search = Search(storage, wanted, pace, rounds, existing="all" if wanted.includes_existing else "none")
    found: Checkpoint | None = None
    done: frozenset[str] = frozenset()
    for _ in rounds:
        was_found, has_failed = found is not None, False
        with rounds.looking():
            has_failed = fail_if is not None and fail_if.exists()
            found = found or search.find_newest()
            if found is not None and wanted.evaluated_by:
                done = find_partitions_done(storage.child(str(found.step)))
            if found is not None and done.issuperset(wanted.evaluated_by):
                return search.look_again(found) if was_found else found
        if has_failed and fail_if is not None:
            raise fail_if.report()
        if found is not None and not was_found:
            missing = ", ".join(name for name in wanted.evaluated_by if name not in done)
            pace.note(f"{found.path}: waiting for evaluation by {missing}{_for_how_long(pace)}")
        elif found is None and rounds.is_first:
            pace.note(f"{storage.url}: waiting for {wanted}{_for_how_long(pace)}")
    raise rounds.failure or search.expired(found, done)


def follow_checkpoints(
    storage: Storage,
    wanted: Wanted,
    pace: Pace,
    *,
    existing: Existing | None = None,
    fail_if: FailureFile | None = None,
    stop_if: Switch | None = None,
) -> Iterator[Checkpoint]:
    """Each checkpoint as it becomes complete, those that became so between two looks oldest first.

    With `wanted.evaluated_by` each as soon as all of them have marked it. The timeout counts anew from each one, from
    when the caller comes back for more. One that is saved again comes again.

    Args:
        storage: the save directory; it need not exist yet.
        existing: which of those that are there already come first; None: all that fit, if `wanted` says which fit.
        stop_if: the iterator ends when this is so, and everything has been handed out.

    Raises:
        DeadlineError, EvaluationTimeoutError, FailureReportedError, SaveDirNotFoundError, StorageError: as
            `wait_for_checkpoint`.
    """
    rounds = Rounds(pace)
    if existing is None:
        existing = "all" if wanted.includes_existing else "none"
    search = Search(storage, wanted, pace, rounds, existing=existing)
    wants_newest = existing == "newest"
    for _ in rounds:
        has_failed = is_stopped = False
        newest: Checkpoint | None = None
        ready: list[str] = []
        with rounds.looking():
            has_failed = fail_if is not None and fail_if.exists()
            is_stopped = stop_if is not None and stop_if()
            if wants_newest:
                newest = search.find_newest_existing()
                wants_newest = False
            ready = search.find_ready() if newest is None else []
        if newest is not None:
            yield newest
            rounds.restart()
        for name in ready:
            found = None
            with rounds.looking():
                found = search.open(name)
            if found is not None:
                yield found
                rounds.restart()
        with rounds.looking():
            search.check_failed()
        if has_failed and fail_if is not None:
            raise fail_if.report()
        if is_stopped and rounds.failure is None and not search.pending:
            return
        if rounds.is_first:
            pace.note(f"{storage.url}: following, for {wanted}{_for_how_long(pace)}")
    raise rounds.failure or search.expired()


def _for_how_long(pace: Pace) -> str:
    return "" if pace.timeout_seconds is None else f", for {format_duration(pace.timeout_seconds)} at most"


# -- the names that training code knows ------------------------------------------------------------------------------


def checkpoints_iterator(
    save_dir: str,
    seconds_to_sleep: float = 30,
    timeout: float | None = 1800,
    *,
    storage_options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """The paths of checkpoints as they become complete.

    The newest at once, if there is one; then each that becomes complete after it, oldest first. One that is saved
    again comes again.

    Args:
        seconds_to_sleep: from the beginning of a look to the beginning of the next.
        timeout: the iterator ends when none came for so many seconds, not counting those that the caller spent
            between two; None: never.

    Raises:
        InvalidPathError: `save_dir` is a checkpoint.
        SaveDirNotFoundError: its bucket is not there. A directory that is not there yet is waited for.
        StorageError: the storage refused, or could not be looked at when the time was up.
    """
    pace = Pace(timeout, seconds_to_sleep, clock, sleep)
    try:
        for found in follow_checkpoints(open_storage(save_dir, storage_options), Wanted(), pace, existing="newest"):
            yield found.path
    except DeadlineError:
        return


def wait_for_evaluators(
    save_dir: str,
    partition_names: Iterable[str],
    global_step: int,
    timeout: float | None,
    *,
    seconds_to_sleep: float = 10,
    storage_options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until the checkpoint of a step is there and all of the partitions have marked it.

    Any step can be waited for, whether it is the newest or not. Nothing is asked for no partitions.

    Args:
        partition_names: any iterable; it is not changed.
        timeout: in seconds, for both; 0: look once; None: for ever.

    Raises:
        EvaluationTimeoutError: its `missing` names the partitions that have not marked it.
        CheckpointNotFoundError: the step is not there and will not come any more, or it went meanwhile.
        StorageError: the storage refused, or could not be looked at when the time was up.
    """
    if isinstance(partition_names, str):
        raise InvalidOptionError(f"partition_names is an iterable of names, not one name: {partition_names!r}")
    partitions = tuple(dict.fromkeys(partition_names))
    if not partitions:
        return
    wanted = Wanted(step=global_step, evaluated_by=partitions)
    storage = open_storage(save_dir, storage_options)
    wait_for_checkpoint(storage, wanted, Pace(timeout, seconds_to_sleep, clock, sleep))
