"""Prunes save directories: gathers what plans rest on, and carries plans out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Event
from typing import Any

import msgspec
from msgspec.structs import replace

from snapctl.checkpoints import Place, open_save_dir
from snapctl.errors import CredentialsError, InvalidOptionError, StorageError
from snapctl.pruning.deletion import Deleter, Outcome, remove_leftover
from snapctl.pruning.links import LinkWatch
from snapctl.pruning.plan_file import PlanLine, deviations, match_lines, plan_from_lines
from snapctl.pruning.policy import DeleteLimit, Policy
from snapctl.pruning.protection import ANNOUNCEMENT_SECONDS, Clock, Subject
from snapctl.pruning.retention import Plan, Row, plan_prune
from snapctl.pruning.survey import Survey
from snapctl.storage import Storage, run_parallel

CLOCK_SLACK_SECONDS = 300.0
"""How far a machine's clock may be ahead of the storage's."""
_DELETE_JOBS = 4

Progress = Callable[[int], None]


def ignore_progress(count: int) -> None:
    """Tells nobody."""


class Prepared(msgspec.Struct, frozen=True):
    """A save directory with its plan, ready to be carried out."""

    place: Place
    plan: Plan
    policy: Policy
    """Of a plan from a file only what it says about the whole directory."""
    survey: Survey
    links: LinkWatch
    lines: Mapping[int, PlanLine] | None = None
    """Of a plan from a file, by step."""
    left_by_plan_file: tuple[Row, ...] = ()
    """What a plan from a file wanted to delete, and must be left alone."""

    @property
    def clock(self) -> Clock:
        return self.survey.clock


class Pruned(msgspec.Struct):
    """What became of a save directory."""

    prepared: Prepared
    outcomes: dict[int, Outcome] = msgspec.field(default_factory=dict)
    """By step, of the rows that were to be deleted."""
    warnings: list[str] = msgspec.field(default_factory=list)
    soft_delete_seconds: float | None = None
    """For how long the storage keeps, and bills, what was deleted."""

    @property
    def left_of_plan_file(self) -> list[Outcome]:
        """What a plan from a file wanted to delete, and was left alone when its turn came; what was gone is none."""
        if self.prepared.lines is None:
            return []
        return [outcome for outcome in self.outcomes.values() if outcome.status == "left" and not outcome.is_gone]

    @property
    def deleted(self) -> int:
        return sum(outcome.status == "deleted" for outcome in self.outcomes.values())

    @property
    def freed_bytes(self) -> int:
        return sum(outcome.freed_bytes for outcome in self.outcomes.values())

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.status == "failed"]


def nothing_could_be_done(results: Iterable[Pruned]) -> bool:
    """Whether every deletion failed before it had begun."""
    tried = [outcome for result in results for outcome in result.outcomes.values() if outcome.status != "left"]
    return bool(tried) and all(o.status == "failed" and not o.begun and not o.is_held for o in tried)


# -- planning --------------------------------------------------------------------------------------------------------


def open_places(paths: Sequence[str], options: Mapping[str, Any]) -> list[Place]:
    """The save directories, each once, in the order given.

    Raises:
        InvalidPathError, SaveDirNotFoundError, StorageError: as `open_save_dir`, for the first that cannot be had:
            without it nobody knows its links, nor whether the others were meant.
    """
    places: dict[object, Place] = {}
    for path in paths:
        place = open_save_dir(path, options)
        places.setdefault(place.storage.identify() or place.storage.url, place)
    return list(places.values())


def read_clock(place: Place, *, may_write: bool, now: float | None = None) -> Clock:
    """The time to judge by.

    Args:
        may_write: a temporary file may be written to learn the storage's time.
        now: pretend that it is so late.
    """
    found = place.storage.read_clock(may_write=may_write and now is None)
    exact = found.is_storage_clock and now is None
    return Clock(found.seconds if now is None else now, 0.0 if exact else CLOCK_SLACK_SECONDS)


def prepare(
    paths: Sequence[str],
    policy: Policy,
    options: Mapping[str, Any] | None = None,
    *,
    dry_run: bool,
    now: float | None = None,
    on_look: Progress = ignore_progress,
) -> list[Prepared]:
    """Makes the plans of save directories; changes nothing (but writes a temporary file to learn the time).

    Args:
        dry_run: nothing will be carried out: nothing at all is written.
        now: plan as if it were so late; only with `dry_run`.

    Raises:
        InvalidOptionError: several partitions carry a metric, and none was named.
        StorageError: a save directory could not be listed. Then none is planned.
    """
    if now is not None and not dry_run:
        raise InvalidOptionError("another time than now is only for rehearsals: --now goes with --dry-run")
    places = open_places(paths, options or {})
    return prepare_places(places, policy, dry_run=dry_run, now=now, on_look=on_look)


def prepare_places(
    places: Sequence[Place],
    policy: Policy,
    *,
    dry_run: bool,
    now: float | None = None,
    on_look: Progress = ignore_progress,
    roots: Sequence[Storage] = (),
    failures: list[StorageError] | None = None,
) -> list[Prepared]:
    """`prepare` for save directories that are open already, each once.

    Args:
        roots: directories above them: the symbolic links in them protect checkpoints, too.
        failures: takes why save directories could not be listed; the others are planned all the same.
    """

    def plan_of(place: Place, clock: Clock, subjects: Collection[Subject]) -> Plan:
        return plan_prune(subjects, policy, save_dir=place.storage.url, clock=clock)

    watch = LinkWatch(places, roots)
    return _prepare(places, policy, plan_of, watch, dry_run=dry_run, now=now, on_look=on_look, failures=failures)


def prepare_from_lines(
    paths: Sequence[str],
    lines: Sequence[PlanLine],
    options: Mapping[str, Any] | None = None,
    *,
    max_delete: DeleteLimit | None = None,
    dry_run: bool,
    on_look: Progress = ignore_progress,
) -> list[Prepared]:
    """As `prepare`, for plans that were made earlier.

    Raises:
        InvalidOptionError: a path in the plan is not directly in one of the save directories.
        StorageError: as `prepare`.
    """
    places = open_places(paths, options or {})
    return prepare_lines(places, lines, options, max_delete=max_delete, dry_run=dry_run, on_look=on_look)


def prepare_lines(
    places: Sequence[Place],
    lines: Sequence[PlanLine],
    options: Mapping[str, Any] | None = None,
    *,
    max_delete: DeleteLimit | None = None,
    dry_run: bool,
    on_look: Progress = ignore_progress,
    roots: Sequence[Storage] = (),
    failures: list[StorageError] | None = None,
) -> list[Prepared]:
    """`prepare_from_lines` for save directories that are open already; `roots` and `failures` as `prepare_places`."""
    by_place = match_lines(lines, [place.storage for place in places], options or {})

    def plan_of(place: Place, clock: Clock, subjects: Collection[Subject]) -> Plan:
        url = place.storage.url
        return plan_from_lines(subjects, by_place[url], max_delete=max_delete, save_dir=url, clock=clock)

    policy = Policy(verified=any(line.verified for line in lines), max_delete=max_delete)
    watch = LinkWatch(places, roots)
    prepared = _prepare(places, policy, plan_of, watch, dry_run=dry_run, now=None, on_look=on_look, failures=failures)
    return [
        replace(each, lines=lines, left_by_plan_file=deviations(each.plan, lines))
        for each in prepared
        for lines in [by_place[each.place.storage.url]]
    ]


def _prepare(
    places: Sequence[Place],
    policy: Policy,
    plan_of: Callable[[Place, Clock, Collection[Subject]], Plan],
    watch: LinkWatch,
    *,
    dry_run: bool,
    now: float | None,
    on_look: Progress,
    failures: list[StorageError] | None,
) -> list[Prepared]:
    targets = watch.find_targets()
    prepared = []
    for place in places:
        try:
            clock = read_clock(place, may_write=not dry_run, now=now)
            survey = Survey(place, clock, links=targets, verified=policy.verified)
        except CredentialsError:
            raise
        except StorageError as error:
            if failures is None:
                raise
            failures.append(error)
            continue
        plan = survey.complete(lambda subjects, p=place, c=clock: plan_of(p, c, subjects), on_look=on_look)  # type: ignore[misc]
        survey.warnings += watch.warnings
        watch.warnings = []
        prepared.append(Prepared(place, plan, policy, survey, watch))
    return prepared


# -- carrying out ----------------------------------------------------------------------------------------------------


def carry_out(
    prepared: Prepared,
    *,
    on_deleted: Progress = ignore_progress,
    into: Pruned | None = None,
) -> Pruned:
    """Carries a plan out: the lowest steps first, a few at a time. One failure does not stop the others.

    Args:
        on_deleted: called with how many more files are deleted, from several threads.
        into: is filled in meanwhile, for who wants to know what was done up to an interrupt.
    """
    result = into if into is not None else Pruned(prepared)
    stop = Event()
    place, clock = prepared.place, prepared.clock

    def delete(row: Row) -> None:
        line = (prepared.lines or {}).get(row.step)
        deleter = Deleter(
            place,
            prepared.plan,
            slack_seconds=clock.slack_seconds,
            incomplete_older_than_seconds=(
                prepared.policy.incomplete_older_than_seconds if line is None else line.incomplete_older_than_seconds
            ),
            links=prepared.links,
            listings=prepared.survey.listings,
            stop=stop,
            on_done=on_deleted,
        )
        result.outcomes[row.step] = deleter.delete(row)

    def ask_for_how_long() -> None:
        result.soft_delete_seconds = place.storage.soft_delete_seconds()

    works: list[Callable[[], None]] = [functools.partial(delete, row) for row in prepared.plan.deletions]
    if works:
        works.insert(0, ask_for_how_long)
    try:
        run_parallel(lambda work: work(), works, jobs=_DELETE_JOBS)
        _tidy_up(prepared, result)
    finally:
        stop.set()
    return result


def _tidy_up(prepared: Prepared, result: Pruned) -> None:
    """Takes old announcements away from checkpoints that are whole, and directories that dead ones left empty."""
    for row in prepared.plan.rows:
        if row.action == "leave" and row.checkpoint.state == "incomplete" and not row.checkpoint.is_link:
            prepared.place.storage.delete_stale_dirs(str(row.step), prepared.clock.earliest - ANNOUNCEMENT_SECONDS)
        if row.action != "keep":
            continue
        problem = remove_leftover(prepared.place, row.subject, prepared.clock)
        if problem is not None:
            result.warnings.append(f"the leftover of a deletion that never began stays: {problem}")
