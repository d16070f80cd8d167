"""Which checkpoints a policy keeps, which go, and why. Pure: checkpoints and rules in, a plan out.

A plan can rest on what nobody has looked at yet (whether a manifest parses, what a directory holds). Such a plan takes
the best for granted and says in `Plan.unknown` where to look; with the answers it is made again, until nothing is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from snapctl.checkpoints import Checkpoint, State
from snapctl.durations import format_duration
from snapctl.manifest import no_garbage_collection
from snapctl.markers import format_time
from snapctl.metrics import metric_value, names_partition, rank_by_metric
from snapctl.pruning.periods import Period, span_of
from snapctl.pruning.policy import Policy
from snapctl.pruning.protection import (
    Clock,
    Subject,
    always_kept,
    judge_interrupted,
    judge_remains,
    other_prune,
)

Action = Literal["keep", "delete", "leave"]
How = Literal["complete", "incomplete", "interrupted", "link"]

NO_RULE_KEEPS_IT = "no rule keeps it"


class Row(msgspec.Struct, frozen=True, gc=False):
    """What is to become of one checkpoint."""

    subject: Subject
    action: Action
    """``leave``: it is none that rules speak of (incomplete, or somebody else is at it)."""
    reasons: tuple[str, ...]
    how: How | None = None
    """For ``delete``: how it is to be done."""

    @property
    def checkpoint(self) -> Checkpoint:
        return self.subject.checkpoint

    @property
    def step(self) -> int:
        return self.subject.step

    @property
    def state(self) -> State:
        return self.subject.state

    @property
    def size_bytes(self) -> int | None:
        """What deleting it frees; None where nobody has counted."""
        if self.checkpoint.is_link:
            return 0
        return self.subject.contents.size_bytes if self.subject.contents is not None else None


class Plan(msgspec.Struct, frozen=True):
    """What is to become of every checkpoint of a save directory."""

    save_dir: str
    rows: tuple[Row, ...]
    """Ascending by step; every checkpoint once."""
    newest: tuple[int, ...] = ()
    """The steps of the newest ones, by step and by time: they must be there as long as anything is deleted."""
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    """Why it must not be carried out: what guards say."""
    unknown: tuple[int, ...] = ()
    """Steps that have to be looked at before the plan can be relied on."""

    @property
    def deletions(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.action == "delete")

    @property
    def freed_bytes(self) -> int:
        """What carrying it out frees."""
        return sum(row.size_bytes or 0 for row in self.deletions)

    @property
    def not_looked_at(self) -> tuple[Row, ...]:
        """What the storage did not let us look at, and is kept for that."""
        return tuple(row for row in self.rows if row.subject.was_not_looked_at and row.action != "delete")


class Ranking(msgspec.Struct):
    """The checkpoints that rules speak of, in the orders that they are judged by."""

    counting: list[Subject]
    """Complete, and parsable as far as anybody knows; ascending by step."""
    by_step: list[Subject]
    """Those that take slots, the highest step first."""
    by_time: list[Subject]
    """Those of them whose time is known, the latest first; of equal times the higher step."""
    newest: list[tuple[Subject, str]]
    """The newest ones and why they are; they are kept whatever the rules say."""
    relied_on: set[int] = msgspec.field(default_factory=set)
    """Steps whose soundness a decision rests on."""


def rank(subjects: Sequence[Subject], policy: Policy) -> Ranking:
    """Sorts the checkpoints that count (`subjects` ascending by step)."""
    counting = [subject for subject in subjects if subject.counts]
    slots = [subject for subject in counting if subject.passes is not False] if policy.verified else counting
    ranking = Ranking(counting, slots[::-1], _by_time(slots), [])
    newest: dict[int, list[str]] = {}
    named = [(_first(ranking.by_step), "by step"), (_first(ranking.by_time), "by time")]
    if policy.verified:
        named = [(subject, f"verified, {order}") for subject, order in named]
        named += [(_first(counting[::-1]), "by step"), (_first(_by_time(counting)), "by time")]
    by_step = {subject.step: subject for subject in counting}
    for subject, order in named:
        if subject is not None:
            newest.setdefault(subject.step, []).append(order)
    ranking.newest = [(by_step[step], f"the newest ({', '.join(orders)})") for step, orders in newest.items()]
    ranking.relied_on.update(newest)
    return ranking


def _by_time(subjects: Iterable[Subject]) -> list[Subject]:
    timed = [subject for subject in subjects if subject.checkpoint.created_at is not None]
    return sorted(timed, key=lambda subject: subject.checkpoint.created_at or 0.0)[::-1]  # stable: ties by step


def _first(subjects: Sequence[Subject]) -> Subject | None:
    return subjects[0] if subjects else None


# -- the plan --------------------------------------------------------------------------------------------------------


@no_garbage_collection()
def plan_prune(subjects: Iterable[Subject], policy: Policy, *, save_dir: str, clock: Clock) -> Plan:
    """What a policy makes of the checkpoints of a save directory.

    Args:
        subjects: its checkpoints, each once, in any order.
        save_dir: as it is printed.
        clock: for claims and for what is being written; rules never look at it.

    Raises:
        AmbiguousMetricError: several partitions carry a metric that was named without one.
    """
    ordered = sorted(subjects, key=lambda subject: subject.step)
    ranking = rank(ordered, policy)
    kept = _Kept(ranking)
    _apply_rules(kept, policy)
    rows = [_judge(subject, kept, policy, clock) for subject in ordered]
    warnings, refusals = _guards(rows, kept, policy)
    rows = _without_base(rows, ranking)
    order_warning = _disagreement(ranking)
    if order_warning and policy.strict_order:
        refusals.append(order_warning)
    elif order_warning and policy.order == "both":
        warnings.append(f"{order_warning}: what either order keeps is kept")
    return finish_plan(rows, ranking, policy, save_dir=save_dir, warnings=warnings, refusals=refusals)


def finish_plan(
    rows: Sequence[Row],
    ranking: Ranking,
    policy: Policy,
    *,
    save_dir: str,
    warnings: Iterable[str],
    refusals: Iterable[str],
) -> Plan:
    """A plan of finished rows: checks how many go, and collects what has to be looked at."""
    limits = [message for message in [_over_limit(rows, policy)] if message]
    unknown = {row.step for row in rows if row.action == "delete" and not _is_known(row)}
    for subject in ranking.counting:
        is_open = subject.manifest_state == "unknown" or (policy.verified and subject.passes is None)
        if is_open and subject.step in ranking.relied_on:
            unknown.add(subject.step)
    return Plan(
        save_dir=save_dir,
        rows=tuple(rows),
        newest=tuple(sorted(subject.step for subject, _ in ranking.newest)),
        warnings=tuple(warnings),
        refusals=(*refusals, *limits),
        unknown=tuple(sorted(unknown, reverse=True)),
    )


def _is_known(row: Row) -> bool:
    """Whether all that its deletion rests on has been looked at."""
    if row.how == "link":
        return row.subject.manifest_state != "unknown"
    return row.subject.contents is not None and (row.how != "complete" or row.subject.manifest_state != "unknown")


def _over_limit(rows: Sequence[Row], policy: Policy) -> str | None:
    if policy.max_delete is None:
        return None
    complete = sum(row.checkpoint.state == "complete" for row in rows)
    allowed = policy.max_delete.allowed(complete)
    going = sum(row.action == "delete" and row.how != "interrupted" for row in rows)
    if going <= allowed:
        return None
    of = f" = {allowed} of {complete}" if policy.max_delete.is_percent else ""
    return f"{going} checkpoints would be deleted, more than --max-delete {policy.max_delete}{of}"


def _judge(subject: Subject, kept: _Kept, policy: Policy, clock: Clock) -> Row:
    """One row of the plan."""
    state = subject.checkpoint.state
    if state == "incomplete" or subject.manifest_state == "cut-off":
        return judge_incomplete(subject, kept.ranking, policy, clock)
    reasons = [*kept.reasons.get(subject.step, ()), *always_kept(subject, clock)]
    if reasons:
        return Row(subject, "keep", tuple(reasons))
    if (busy := other_prune(subject, clock)) is not None:
        return Row(subject, "leave", (busy,))
    return Row(subject, "delete", (NO_RULE_KEEPS_IT,), "link" if subject.checkpoint.is_link else "complete")


def judge_incomplete(subject: Subject, ranking: Ranking, policy: Policy, clock: Clock) -> Row:
    """A row for what is no checkpoint that rules speak of: incomplete, half deleted, or with a manifest cut off."""
    if subject.is_half_deleted:
        action, reason = judge_interrupted(subject, clock)
        return Row(subject, action, (reason,), "interrupted" if action == "delete" else None)
    verdict, reason = judge_remains(subject, policy.incomplete_older_than_seconds, clock)
    if verdict == "delete":
        later = _later_checkpoint(subject, ranking)
        if later is not None:
            ranking.relied_on.add(later)
            return Row(subject, "delete", (reason,), "incomplete")
        reason = f"{reason}, but no complete checkpoint is of a higher step and a later time"
    return Row(subject, "keep" if subject.checkpoint.state == "complete" else "leave", (reason,))


def _later_checkpoint(subject: Subject, ranking: Ranking) -> int | None:
    """The step of a complete checkpoint that is higher and later than anything in this one; a parsed one if possible.

    Walks from the latest down: the first one is nearly always the answer.
    """
    newest_at = subject.contents.newest_at if subject.contents is not None else None
    if subject.contents is None:
        return subject.step  # not listed yet: taken for granted, and asked for by the row itself
    found: int | None = None
    for other in ranking.by_time:
        created_at = other.checkpoint.created_at
        if newest_at is None or created_at is None or created_at <= newest_at:
            break
        if other.step > subject.step:
            if other.manifest_state == "parsed":
                return other.step
            found = found if found is not None else other.step
    return found


def _without_base(rows: Sequence[Row], ranking: Ranking) -> list[Row]:
    """The rows; nothing goes where there is no checkpoint that could be relied on instead."""
    if ranking.by_step:
        return list(rows)
    reason = "nothing is deleted: there is no complete checkpoint to rely on"
    return [
        replace(row, action="keep" if row.checkpoint.state == "complete" else "leave", reasons=(reason,), how=None)
        if row.action == "delete"
        else row
        for row in rows
    ]


# -- rules -----------------------------------------------------------------------------------------------------------


class _Kept:
    """What rules keep, and why."""

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.reasons: dict[int, list[str]] = {}
        self.matches: dict[str, int] = {}
        """For rules that can miss: how many checkpoints each keeps (for keep-every: but step 0)."""

    def add(self, step: int, reason: str) -> None:
        self.reasons.setdefault(step, []).append(reason)

    def add_by_order(self, rule: str, by_order: Mapping[str, Mapping[int, str]]) -> None:
        """What a rule keeps in each order that it is judged by: ``{order: {step: detail}}``."""
        for order, found in by_order.items():
            others = [name for name in by_order if name != order]
            for step, detail in found.items():
                self.ranking.relied_on.add(step)
                if all(step in by_order[name] for name in others):
                    if order == next(iter(by_order)):
                        self.add(step, f"{rule}{detail}")
                else:
                    self.add(step, f"{rule}{detail} by {order}")


def _apply_rules(kept: _Kept, policy: Policy) -> None:
    ranking = kept.ranking
    for subject, reason in ranking.newest:
        kept.add(subject.step, reason)
    orders: dict[str, list[Subject]] = {}
    if policy.order != "time":
        orders["step"] = ranking.by_step
    if policy.order != "step":
        orders["time"] = ranking.by_time
    if policy.keep_last:
        count = policy.keep_last
        last = {order: dict.fromkeys((s.step for s in found[:count]), "") for order, found in orders.items()}
        kept.add_by_order(f"keep-last {count}", last)
    for period, count in policy.keep_periods:
        newest = {order: _newest_of_periods(found, period, count) for order, found in orders.items()}
        kept.add_by_order(f"keep-{period} {count}", newest)
    _apply_time_rules(kept, policy)
    _apply_step_rules(kept, policy)
    _apply_metric_rules(kept, policy)


def _newest_of_periods(newest_first: Sequence[Subject], period: Period, count: int) -> dict[int, str]:
    """The first of each of so many periods, and which that is."""
    seen: set[float] = set()
    found: dict[int, str] = {}
    start = end = 0.0  # of the period looked at last: most of its neighbours are in it, too
    for subject in newest_first:
        time = subject.checkpoint.created_at
        if time is None or start <= time < end:
            continue
        start, end, name = span_of(time, period)
        if start not in seen:
            seen.add(start)
            found[subject.step] = f" ({name})"
            if len(seen) == count:
                break
    return found


def _apply_time_rules(kept: _Kept, policy: Policy) -> None:
    ranking = kept.ranking
    within = policy.keep_within_seconds
    if within is not None:
        # back from both ends: what a run that was started again wrote last, and what was written last of all
        timed = (s for s in ranking.by_step if s.checkpoint.created_at is not None)
        references = [subject for subject in (next(timed, None), _first(ranking.by_time)) if subject is not None]
        ranking.relied_on.update(subject.step for subject in references)
        since = min((s.checkpoint.created_at or 0.0 for s in references), default=0.0) - within
        rule = f"keep-within {format_duration(within)}"
        for subject in ranking.counting:
            time = subject.checkpoint.created_at
            if time is not None and time >= since:
                kept.add(subject.step, rule)
    if policy.order != "step" or within is not None or policy.keep_periods:
        for subject in ranking.counting:
            if subject.checkpoint.created_at is None:
                kept.add(subject.step, "nobody knows when it was written")


def _apply_step_rules(kept: _Kept, policy: Policy) -> None:
    counting = kept.ranking.counting
    for rule in policy.keep_every:
        name = f"keep-every {rule}"
        found = [subject.step for subject in counting if rule.keeps(subject.step)]
        for step in found:
            kept.add(step, name)
        _note_matches(kept, name, [step for step in found if step != 0])
    present = {subject.step for subject in counting}
    for step in policy.keep_steps:
        found = [step] if step in present else []
        for there in found:
            kept.add(there, f"keep-step {step}")
        _note_matches(kept, f"keep-step {step}", found)


def _note_matches(kept: _Kept, name: str, steps: Sequence[int]) -> None:
    kept.matches[name] = len(steps)
    if steps:  # that the rule matches at all rests on this one
        kept.ranking.relied_on.add(steps[-1])


def _apply_metric_rules(kept: _Kept, policy: Policy) -> None:
    ranking = kept.ranking
    by_step = {subject.step: subject for subject in ranking.by_step}
    for rule in policy.keep_best:
        ranked = rank_by_metric([subject.checkpoint for subject in ranking.by_step], rule.metric)
        name = f"keep-best {rule}"
        for checkpoint in ranked[: rule.count]:
            step = checkpoint.step if checkpoint.step is not None else -1
            ranking.relied_on.add(by_step[step].step)
            kept.add(step, f"{name} ({metric_value(checkpoint, rule.metric):.6g})")
        kept.matches[name] = len(ranked[: rule.count])
        if policy.keep_unscored:
            scored = {checkpoint.step for checkpoint in ranked}
            named = names_partition((subject.checkpoint for subject in ranking.counting), rule.metric)
            for subject in ranking.counting:
                if subject.step in scored:
                    continue
                was_ranked = subject.step in by_step
                if was_ranked or metric_value(subject.checkpoint, rule.metric, named=named) is None:
                    kept.add(subject.step, f"keep-unscored {rule.metric.text}")
    for partition in policy.keep_unevaluated:
        for subject in ranking.counting:
            if all(marker.partition != partition for marker in subject.checkpoint.markers):
                kept.add(subject.step, f"keep-unevaluated {partition}")


# -- guards ----------------------------------------------------------------------------------------------------------


def _guards(rows: Sequence[Row], kept: _Kept, policy: Policy) -> tuple[list[str], list[str]]:
    """``(warnings, refusals)``: a rule that keeps nothing is more often a typo than meant."""
    counting = kept.ranking.counting
    if not counting or all(row.action != "delete" or row.how == "interrupted" for row in rows):
        return [], []  # nothing will be deleted that a rule could have kept
    highest = counting[-1].step
    unmatched: list[str] = []
    for rule in policy.keep_every:
        if kept.matches[f"keep-every {rule}"] == 0 and highest >= rule.every:
            unmatched.append(f"--keep-every {rule} keeps nothing (but step 0): no checkpoint's step is a multiple")
    for best in policy.keep_best:
        if kept.matches[f"keep-best {best}"] == 0:
            unmatched.append(f"--keep-best {best} keeps nothing: no checkpoint has a finite value of it")
    for step in policy.keep_steps:
        if kept.matches[f"keep-step {step}"] == 0:
            unmatched.append(f"--keep-step {step} keeps nothing: there is no such complete checkpoint")
    if policy.verified and counting and not kept.ranking.by_step:
        unmatched.append(f"--verified: none of {len(counting)} complete checkpoints has all of its blobs")
    return (unmatched, []) if policy.allow_unmatched else ([], unmatched)


def _disagreement(ranking: Ranking) -> str | None:
    """The first pair of checkpoints whose steps and times disagree."""
    before: Subject | None = None
    for subject in ranking.counting:
        time = subject.checkpoint.created_at
        if time is None:
            continue
        last = before.checkpoint.created_at if before is not None else None
        if before is not None and last is not None and time < last:
            ranking.relied_on.update((before.step, subject.step))
            return (
                f"steps and times disagree: step {before.step} ({format_time(last)}) was written "
                f"after step {subject.step} ({format_time(time)})"
            )
        before = subject
    return None
