"""Which checkpoints a policy keeps: rules, orders and guards."""

from __future__ import annotations

import itertools
import math
from datetime import datetime, timezone
from typing import Any

import pytest

from snapctl.markers import Marker
from snapctl.metrics import AmbiguousMetricError
from snapctl.pruning.periods import PERIODS, span_of
from snapctl.pruning.retention import Plan
from tests.support.plans import (
    DAY,
    HOUR,
    NOW,
    check_golden,
    complete,
    deleted,
    file,
    incomplete,
    kept,
    plan_of,
    reasons,
    render,
)


def run_of(steps: range, *, every: float = 6 * HOUR, until: float = NOW - HOUR) -> list[Any]:
    """An ordinary run: a checkpoint every six hours, the last one an hour ago."""
    return [complete(step, until - every * (len(steps) - 1 - n)) for n, step in enumerate(steps)]


# -- golden plans ----------------------------------------------------------------------------------------------------


def scored_run() -> list[Any]:
    losses = [9.0, 3.0, math.nan, 2.5, 2.5, 7.0, None, 0.0, math.inf, 4.0]
    run = run_of(range(0, 1000, 100))
    return [
        complete(subject.step, subject.checkpoint.created_at, metrics={} if loss is None else {"loss": loss})
        for subject, loss in zip(run, losses, strict=True)
    ]


def restarted_run() -> list[Any]:
    """A run of January, and one of today that began again at 0 in the same directory."""
    old = run_of(range(1000, 1600, 100), until=NOW - 20 * DAY)
    return old + run_of(range(0, 500, 100))


def damaged_run() -> list[Any]:
    run = run_of(range(0, 800, 100))
    run[7] = complete(700, NOW - HOUR, manifest_state="cut-off", problem="is neither JSON nor YAML")
    run[6] = complete(600, NOW - 7 * HOUR, manifest_state="not-looked-at", problem="permission denied")
    run[4] = complete(400, None)
    return [*run, incomplete(800, file("0/w", at=NOW - 60)), incomplete(50, file("0/w", at=NOW - 9 * DAY))]


GOLDEN_PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "last": (run_of(range(0, 1000, 100)), {"keep_last": (3,)}),
    "every": (run_of(range(0, 1000, 50)), {"keep_every": ("250", "100:300")}),
    "within": (run_of(range(0, 2000, 100)), {"keep_within": ("1d",)}),
    "calendar": (
        run_of(range(0, 12000, 100), every=9 * HOUR),
        {"keep_hourly": (2,), "keep_daily": (4,), "keep_weekly": (3,), "keep_monthly": (3,), "keep_yearly": (2,)},
    ),
    "best": (scored_run(), {"keep_best": ("loss:min:2", "val/loss:max:1"), "keep_unscored": True}),
    "restarted": (restarted_run(), {"keep_last": (2,), "keep_daily": (2,)}),
    "restarted-by-step": (restarted_run(), {"keep_last": (2,), "order": "step"}),
    "restarted-by-time": (restarted_run(), {"keep_last": (2,), "order": "time"}),
    "restarted-strict": (restarted_run(), {"keep_last": (2,), "strict_order": True}),
    "damaged": (damaged_run(), {"keep_last": (2,), "incomplete_older_than": "1d"}),
    "unmatched": (run_of(range(0, 500, 100)), {"keep_every": ("333",), "keep_step": (7,), "keep_best": ("acc:max:1",)}),
    "limited": (run_of(range(0, 1000, 100)), {"keep_last": (2,), "max_delete": "50%"}),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_the_plan_is_the_golden_one(name: str) -> None:
    subjects, terms = GOLDEN_PLANS[name]
    check_golden(f"prune-{name}", render(plan_of(subjects, **terms)))


# -- rules -----------------------------------------------------------------------------------------------------------


def test_every_nth_goes_by_the_number_of_the_step_and_not_by_its_position() -> None:
    subjects = [complete(step, NOW - DAY + step) for step in range(0, 2590, 10)]
    plan = plan_of(subjects, keep_last=(2,), keep_every=("1000",))
    assert kept(plan) == [0, 1000, 2000, 2570, 2580]


def test_every_nth_ends_with_its_limit_and_a_zero_is_a_multiple() -> None:
    plan = plan_of(run_of(range(0, 1100, 100)), keep_every=("200:600",))
    assert kept(plan) == [0, 200, 400, 600, 1000]


def test_within_goes_back_from_the_newest_and_never_from_now() -> None:
    long_ago = run_of(range(0, 1000, 100), until=NOW - 300 * DAY)
    assert kept(plan_of(long_ago, keep_within=("13h",))) == [700, 800, 900]


def test_within_goes_back_from_the_highest_step_and_from_the_latest_time() -> None:
    # the highest step was written 20 days ago; from the latest time alone the whole old run would go
    plan = plan_of(restarted_run(), keep_within=("7h",))
    assert kept(plan) == [0, 100, 200, 300, 400, 1400, 1500]


def test_of_a_period_the_newest_is_kept_and_periods_without_a_checkpoint_do_not_count() -> None:
    times = [NOW - 40 * DAY, NOW - 40 * DAY + HOUR, NOW - 9 * DAY, NOW - 9 * DAY + HOUR, NOW - 2 * DAY]
    subjects = [complete(step, at) for step, at in enumerate(times)]
    assert kept(plan_of(subjects, keep_daily=(2,))) == [3, 4]
    assert kept(plan_of(subjects, keep_daily=(3,))) == [1, 3, 4]
    assert reasons(plan_of(subjects, keep_daily=(3,)), 3) == "keep-daily 3 (2027-01-06)"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("2024-12-30T00:00:00", ("2024-12-30 00h", "2024-12-30", "2025-W01", "2024-12", "2024")),
        ("2024-12-29T23:59:59", ("2024-12-29 23h", "2024-12-29", "2024-W52", "2024-12", "2024")),
        ("2027-01-03T12:30:00", ("2027-01-03 12h", "2027-01-03", "2026-W53", "2027-01", "2027")),
        ("2024-02-29T05:00:00", ("2024-02-29 05h", "2024-02-29", "2024-W09", "2024-02", "2024")),
    ],
)
def test_periods_are_utc_hours_and_days_iso_weeks_months_and_years(text: str, names: tuple[str, ...]) -> None:
    time = datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()
    assert tuple(span_of(time, period).name for period in PERIODS) == names
    for period in PERIODS:
        span = span_of(time, period)
        assert span.start <= time < span.end
        assert span_of(span.start, period) == span == span_of(span.end - 0.001, period)
        assert span_of(span.end, period).name != span.name


def test_the_best_are_the_finite_ones_zero_is_one_and_ties_go_to_the_higher_step() -> None:
    plan = plan_of(scored_run(), keep_best=("loss:min:3",))
    assert kept(plan) == [100 * n for n in (3, 4, 7, 9)]
    assert kept(plan_of(scored_run(), keep_best=("val/loss:max:1",))) == [0, 900]
    assert kept(plan_of(scored_run(), keep_best=("loss:min:2",))) == [400, 700, 900], "of the tie the higher step"


def test_unscored_ones_are_kept_whether_the_value_is_missing_or_no_finite_number() -> None:
    plan = plan_of(scored_run(), keep_best=("loss:min:1",), keep_unscored=True)
    assert kept(plan) == [200, 600, 700, 800, 900]


def test_a_metric_that_two_partitions_carry_must_be_named_with_one() -> None:
    two = complete(1)
    markers = (Marker("test", metrics={"loss": 1.0}), Marker("val", metrics={"loss": 2.0}))
    two = complete(1)
    checkpoint = type(two.checkpoint)(**{**_fields(two.checkpoint), "markers": markers})
    subjects = [type(two)(**{**_fields(two), "checkpoint": checkpoint}), complete(2)]
    with pytest.raises(AmbiguousMetricError, match="name one: test/loss or val/loss"):
        plan_of(subjects, keep_best=("loss:min:1",))
    assert kept(plan_of(subjects, keep_best=("test/loss:min:1",))) == [1, 2]


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_what_a_partition_has_not_marked_is_kept_until_it_has() -> None:
    subjects = [complete(1, marked=["val"]), complete(2, marked=["test"]), complete(3), complete(4, marked=["val"])]
    assert kept(plan_of(subjects, keep_unevaluated=("val",))) == [2, 3, 4]
    assert kept(plan_of(subjects, keep_unevaluated=("val", "test"))) == [1, 2, 3, 4]


def test_a_step_that_is_named_is_kept() -> None:
    assert kept(plan_of(run_of(range(0, 500, 100)), keep_step=(0, 200))) == [0, 200, 400]


# -- times that cannot be relied on ----------------------------------------------------------------------------------


def test_a_copy_whose_times_are_all_the_same_is_judged_by_step() -> None:
    copy = [complete(step, NOW - DAY) for step in range(0, 1000, 100)]
    plan = plan_of(copy, keep_last=(2,), keep_daily=(1,))
    assert kept(plan) == [800, 900]
    assert plan.warnings == ()


def test_unknown_times_are_never_the_newest_and_never_go_by_time() -> None:
    subjects = [complete(1, NOW - DAY), complete(2, NOW - HOUR), complete(3, None), complete(4, None)]
    plan = plan_of(subjects, keep_last=(1,))
    assert kept(plan) == [2, 3, 4]
    assert "the newest (by time)" in reasons(plan, 2)
    assert reasons(plan, 3) == "nobody knows when it was written"


def test_by_step_alone_unknown_times_are_kept_only_by_rules_about_time() -> None:
    subjects = [complete(1, None), complete(2, NOW - HOUR), complete(3, NOW - 1)]
    assert deleted(plan_of(subjects, keep_last=(1,), order="step")) == [1, 2]
    assert deleted(plan_of(subjects, keep_last=(1,), keep_within=("1s",), order="step")) == [2]
    assert deleted(plan_of(subjects, keep_daily=(1,), order="step")) == [2]


def test_within_takes_no_unknown_time_for_its_reference() -> None:
    subjects = [complete(1, NOW - 9 * DAY), complete(2, NOW - 8 * DAY), complete(3, None)]
    plan = plan_of(subjects, keep_within=("1d",), order="step")
    assert kept(plan) == [1, 2, 3], "back from step 2, the highest of known time"


def test_a_reused_directory_loses_the_newest_of_neither_run() -> None:
    plan = plan_of(restarted_run(), keep_last=(2,))
    assert kept(plan) == [300, 400, 1400, 1500]
    (warning,) = plan.warnings
    assert "step 400 " in warning and "step 1000 " in warning, "the first pair"
    assert reasons(plan, 1400) == "keep-last 2 by step"
    assert reasons(plan, 300) == "keep-last 2 by time"


def test_the_newest_by_step_and_by_time_stay_whatever_the_order_is_called() -> None:
    for order in ("step", "time"):
        plan = plan_of(restarted_run(), keep_step=(0,), order=order)
        assert kept(plan) == [0, 400, 1500]


def test_a_strict_order_refuses_and_an_agreeing_one_does_not() -> None:
    assert "steps and times disagree" in plan_of(restarted_run(), keep_last=(2,), strict_order=True).refusals[0]
    agreeing = [*run_of(range(0, 500, 100)), complete(250, None)]
    assert plan_of(agreeing, keep_last=(2,), strict_order=True).refusals == ()


@pytest.mark.parametrize("order", ["step", "time"])
def test_who_chose_an_order_is_not_warned(order: str) -> None:
    assert plan_of(restarted_run(), keep_last=(2,), order=order).warnings == ()


# -- what takes no slot ----------------------------------------------------------------------------------------------


def test_what_cannot_be_parsed_takes_no_slot_and_stays() -> None:
    run = run_of(range(0, 500, 100))
    run[4] = complete(400, NOW - HOUR, manifest_state="unusable", problem="of version '9.0'")
    run[3] = complete(300, NOW - 7 * HOUR, manifest_state="cut-off", problem="is neither JSON nor YAML")
    plan = plan_of(run, keep_last=(2,))
    assert kept(plan) == [100, 200, 300, 400]
    assert reasons(plan, 400) == "cannot be parsed: of version '9.0'"
    assert "the newest" in reasons(plan, 200)


def test_incomplete_ones_are_left_alone_and_counted_for_nothing() -> None:
    plan = plan_of([*run_of(range(0, 300, 100)), incomplete(300, file("0/w"))], keep_last=(1,))
    assert kept(plan) == [200]
    assert deleted(plan) == [0, 100]
    assert [row.action for row in plan.rows] == ["delete", "delete", "keep", "leave"]


def test_with_verified_only_what_has_all_its_blobs_takes_a_slot() -> None:
    run = run_of(range(0, 500, 100))
    run[4] = complete(400, NOW - HOUR, passes=False)
    run[3] = complete(300, NOW - 7 * HOUR, passes=False)
    plan = plan_of(run, keep_last=(2,), verified=True)
    assert kept(plan) == [100, 200, 400], "and the newest of all stays, too"
    assert reasons(plan, 400) == "the newest (by step, by time)"
    assert "the newest (verified, by step, verified, by time)" in reasons(plan, 200)


def test_without_any_parsable_checkpoint_nothing_goes() -> None:
    run = [complete(n, NOW - n * DAY, manifest_state="unusable", problem="x") for n in range(3)]
    remains = incomplete(9, file("0/w", at=NOW - 9 * DAY), deleting_at=NOW - 8 * DAY)
    plan = plan_of([*run, remains], keep_last=(1,), incomplete_older_than="1d")
    assert deleted(plan) == []
    assert plan.refusals == ()


def test_when_none_is_verified_it_is_refused_and_when_that_is_allowed_nothing_goes_all_the_same() -> None:
    run = [complete(n, NOW - DAY + n, passes=False) for n in range(4)]
    plan = plan_of(run, keep_last=(1,), verified=True)
    assert plan.refusals == ("--verified: none of 4 complete checkpoints has all of its blobs",)
    allowed = plan_of(run, keep_last=(1,), verified=True, allow_unmatched=True)
    assert allowed.refusals == () and len(allowed.warnings) == 1
    assert deleted(allowed) == []


# -- guards ----------------------------------------------------------------------------------------------------------


def test_where_there_is_no_checkpoint_that_a_rule_could_keep_no_guard_refuses() -> None:
    remains = incomplete(5, file("0/w", at=NOW - 9 * DAY), contents=None)
    rules: list[dict[str, Any]] = [{"keep_best": ("val/loss:min:1",)}, {"keep_step": (7,)}, {"keep_every": ("1",)}]
    for rule in rules:
        plan = plan_of([remains], **rule, incomplete_older_than="1d")
        assert (plan.refusals, plan.warnings, deleted(plan)) == ((), (), [])


TYPOS: dict[str, dict[str, Any]] = {
    "keep-best": {"keep_best": ("accuracy:max:5",)},
    "keep-best of a partition": {"keep_best": ("vall/loss:max:5",)},
    "keep-step": {"keep_step": (5000,)},
    "keep-every": {"keep_every": ("333",)},
    "one of several": {"keep_step": (100,), "keep_every": ("333", "100:200")},
}


@pytest.mark.parametrize("name", TYPOS)
def test_a_rule_that_keeps_nothing_is_refused_while_something_would_go(name: str) -> None:
    plan = plan_of(scored_run(), **TYPOS[name])
    assert deleted(plan), "a naive prune deletes these"
    assert len(plan.refusals) == 1
    allowed = plan_of(scored_run(), **TYPOS[name], allow_unmatched=True)
    assert allowed.refusals == () and len(allowed.warnings) == 1
    nothing_goes = plan_of(scored_run(), **{"keep_last": (99,), **TYPOS[name]})
    assert nothing_goes.refusals == () and nothing_goes.warnings == ()


def test_every_nth_that_only_keeps_step_0_is_refused_once_the_run_is_long_enough() -> None:
    short = run_of(range(0, 900, 100))
    assert plan_of(short, keep_every=("1000",)).refusals == (), "the first thousand has not been reached"
    long = run_of(range(0, 1250, 125))
    assert plan_of(long, keep_every=("1000",)).refusals == ()
    missed = [complete(step, NOW - DAY + step) for step in (0, 400, 900, 1300)]
    assert len(plan_of(missed, keep_every=("1000",)).refusals) == 1


def test_a_step_that_is_incomplete_or_damaged_does_not_answer_keep_step() -> None:
    for subject in (incomplete(50, file("0/w")), complete(50, manifest_state="unusable", problem="x")):
        assert len(plan_of([*run_of(range(100, 400, 100)), subject], keep_step=(50,)).refusals) == 1


@pytest.mark.parametrize(("limit", "refused"), [("8", False), ("7", True), ("80%", False), ("79%", True), ("0", True)])
def test_more_deletions_than_allowed_are_refused(limit: str, refused: bool) -> None:
    plan = plan_of(run_of(range(0, 1000, 100)), keep_last=(2,), max_delete=limit)
    assert len(deleted(plan)) == 8
    assert bool(plan.refusals) == refused


def test_the_percentage_is_of_the_complete_ones_and_what_is_half_deleted_does_not_count() -> None:
    half = [incomplete(n, file("0/w"), deleting_at=NOW - HOUR) for n in (1, 2, 3)]
    plan = plan_of([*run_of(range(100, 500, 100)), *half], keep_last=(2,), max_delete="50%")
    assert deleted(plan) == [1, 2, 3, 100, 200]
    assert plan.refusals == ()


# -- what is open ----------------------------------------------------------------------------------------------------


def lazily(subjects: list[Any], **terms: Any) -> tuple[Plan, set[int]]:
    """A plan made of what it asks for, and the steps that it asked for."""
    truth = {subject.step: subject for subject in subjects}
    known = {s.step: type(s)(s.step, s.checkpoint, links=s.links) for s in subjects}
    asked: set[int] = set()
    for _ in range(1000):
        plan = plan_of(known.values(), **terms)
        if not plan.unknown:
            return plan, asked
        assert not asked.issuperset(plan.unknown), "it asks for what it knows"
        asked.update(plan.unknown)
        known.update((step, truth[step]) for step in plan.unknown)
    raise AssertionError("it never stops asking")


def test_a_plan_asks_only_for_what_it_rests_on() -> None:
    plan, asked = lazily(run_of(range(0, 1000, 100)), keep_every=("100",))
    assert kept(plan) == list(range(0, 1000, 100))
    assert asked == {900}, "the newest; what a rule without slots keeps need not be parsed"


def test_a_plan_asks_further_down_when_the_newest_turn_out_unusable() -> None:
    run = run_of(range(0, 1000, 100))
    for n in (7, 8, 9):
        run[n] = complete(n * 100, NOW - n, manifest_state="unusable", problem="x")
    plan, asked = lazily(run, keep_last=(2,), keep_every=("100",))
    assert asked == {500, 600, 700, 800, 900}
    assert "the newest" in reasons(plan, 600)


def test_nothing_is_deleted_that_was_not_looked_at() -> None:
    plan, asked = lazily(run_of(range(0, 1000, 100)), keep_last=(1,))
    assert asked.issuperset(deleted(plan))
    assert len(deleted(plan)) == 9


def test_each_row_says_why() -> None:
    for subjects, terms in GOLDEN_PLANS.values():
        plan = plan_of(subjects, **terms)
        assert all(row.reasons and all(row.reasons) for row in plan.rows)
        assert [row.step for row in plan.rows] == sorted(subject.step for subject in subjects)
        for order in itertools.islice(itertools.permutations(subjects), 0, 500, 100):
            assert plan_of(order, **terms) == plan
