"""What holds for every run and every policy."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapctl.markers import Claim, Marker
from snapctl.metrics import AmbiguousMetricError
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.protection import Subject, live_claims
from snapctl.pruning.retention import Plan, plan_prune
from tests.support.plans import CLOCK, DAY, HOUR, NOW, complete, deleted, file, incomplete

TIMES = st.one_of(
    st.none(),
    st.sampled_from([NOW - DAY, NOW - 8 * DAY, NOW]),
    st.floats(NOW - 400 * DAY, NOW, allow_nan=False).map(lambda time: round(time, 3)),
)
METRICS = st.one_of(
    st.none(), st.just({}), st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, 0.5]).map(lambda x: {"loss": x})
)


@st.composite
def complete_ones(draw: st.DrawFn, step: int) -> Subject:
    state = draw(st.sampled_from(["parsed"] * 6 + ["cut-off", "unusable", "not-looked-at"]))
    facts: dict[str, Any] = {
        "manifest_state": state,
        "problem": None if state == "parsed" else "as it is",
        "passes": draw(st.booleans()),
        "pin": draw(st.sampled_from([False] * 9 + [True])),
        "links": draw(st.sampled_from([()] * 9 + [("/run/best",)])),
        "metrics": draw(METRICS),
        "marked": draw(st.sampled_from([[], [], ["test"]])),
    }
    if draw(st.sampled_from([False] * 9 + [True])):
        facts["claims"] = [Claim("test", 1, "me", "n", 7200, NOW - HOUR)]
    return complete(step, draw(TIMES), **facts)


@st.composite
def incomplete_ones(draw: st.DrawFn, step: int) -> Subject:
    at = NOW - draw(st.sampled_from([60.0, 30 * HOUR, 90 * DAY]))
    path = draw(st.sampled_from(["0/w", "batched/x", "README", "7/.snapshot_metadata"]))
    announced = draw(st.sampled_from([None, None, NOW - HOUR, NOW - 100 * DAY]))
    return incomplete(step, file(path, at=at), deleting_at=announced)


@st.composite
def runs(draw: st.DrawFn) -> list[Subject]:
    steps = draw(st.lists(st.integers(0, 60), max_size=14, unique=True))
    kinds = [draw(st.sampled_from(["complete"] * 7 + ["incomplete"])) for _ in steps]
    return [
        draw(complete_ones(step) if kind == "complete" else incomplete_ones(step))
        for step, kind in zip(steps, kinds, strict=True)
    ]


COUNTS = st.lists(st.integers(1, 6), max_size=1).map(tuple)
RULES: dict[str, st.SearchStrategy[Any]] = {
    "keep_last": COUNTS,
    "keep_every": st.lists(st.sampled_from(["1", "7", "10", "10:30", "55"]), max_size=2).map(tuple),
    "keep_within": st.lists(st.sampled_from(["1h", "1d", "9d", "500d"]), max_size=1).map(tuple),
    "keep_hourly": COUNTS,
    "keep_daily": COUNTS,
    "keep_weekly": COUNTS,
    "keep_monthly": COUNTS,
    "keep_yearly": COUNTS,
    "keep_best": st.lists(st.sampled_from(["loss:min:1", "val/loss:max:2", "acc:max:1"]), max_size=2).map(tuple),
    "keep_step": st.lists(st.integers(0, 60), max_size=2).map(tuple),
    "keep_unevaluated": st.sampled_from([(), (), ("test",), ("val",)]),
}
WAYS: dict[str, st.SearchStrategy[Any]] = {
    "order": st.sampled_from(["both", "step", "time"]),
    "verified": st.booleans(),
    "incomplete_older_than": st.sampled_from([None, "1d"]),
}


@st.composite
def terms_of(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(sorted(RULES)), max_size=4, unique=True))
    rules = {name: draw(RULES[name]) for name in chosen}
    return {**rules, **{name: draw(way) for name, way in WAYS.items()}, "allow_unmatched": True}


def plan_of(subjects: list[Subject], terms: dict[str, Any]) -> Plan:
    return plan_prune(subjects, make_policy(PolicyTerms(**terms)), save_dir="/run", clock=CLOCK)


def usable(subjects: list[Subject]) -> list[Subject]:
    return [s for s in subjects if s.checkpoint.state == "complete" and s.manifest_state == "parsed"]


@given(runs(), terms_of(), st.randoms())
def test_every_checkpoint_is_in_the_plan_once_whatever_the_order_of_the_listing(
    subjects: list[Subject], terms: dict[str, Any], random: Any
) -> None:
    plan = plan_of(subjects, terms)
    assert [row.step for row in plan.rows] == sorted(subject.step for subject in subjects)
    assert all(row.reasons for row in plan.rows)
    shuffled = list(subjects)
    random.shuffle(shuffled)
    assert plan_of(shuffled, terms) == plan


@given(runs(), terms_of(), st.data())
@settings(max_examples=300)
def test_adding_a_rule_never_deletes_more(subjects: list[Subject], terms: dict[str, Any], data: st.DataObject) -> None:
    before = plan_of(subjects, terms)
    name = data.draw(st.sampled_from(sorted(RULES)))
    more = {**terms, name: (*terms.get(name, ()), *data.draw(RULES[name]))}
    assert set(deleted(plan_of(subjects, more))) <= set(deleted(before))
    if more.get("keep_best"):
        unscored = plan_of(subjects, {**more, "keep_unscored": True})
        assert set(deleted(unscored)) <= set(deleted(before))


@given(runs(), terms_of())
def test_the_newest_usable_one_stays_by_step_and_by_time(subjects: list[Subject], terms: dict[str, Any]) -> None:
    going = set(deleted(plan_of(subjects, terms)))
    found = usable(subjects)
    assume(found)
    assert max(subject.step for subject in found) not in going
    timed = [(s.checkpoint.created_at, s.step) for s in found if s.checkpoint.created_at is not None]
    if timed:
        assert max(timed)[1] not in going
    if terms["verified"]:
        sound = [s for s in found if s.passes]
        assert not sound or max(s.step for s in sound) not in going


@given(runs(), terms_of())
def test_what_cannot_be_used_takes_no_slot(subjects: list[Subject], terms: dict[str, Any]) -> None:
    with_them = {row.step: row.action for row in plan_of(subjects, terms).rows}
    without = plan_of(usable(subjects), terms)
    assert {row.step: row.action for row in without.rows} == {s.step: with_them[s.step] for s in usable(subjects)}


@given(runs(), terms_of())
def test_what_is_always_kept_is_kept(subjects: list[Subject], terms: dict[str, Any]) -> None:
    going = set(deleted(plan_of(subjects, terms)))
    for subject in subjects:
        checkpoint = subject.checkpoint
        is_claimed = bool(live_claims(checkpoint, CLOCK))
        if checkpoint.pin is not None or subject.links or is_claimed or subject.was_not_looked_at:
            assert subject.step not in going
        if checkpoint.state == "complete" and subject.manifest_state == "unusable":
            assert subject.step not in going
        if checkpoint.created_at is None and subject.counts and terms["order"] != "step":
            assert subject.step not in going


@given(runs(), terms_of())
def test_what_either_order_keeps_is_kept_by_both(subjects: list[Subject], terms: dict[str, Any]) -> None:
    going = {order: set(deleted(plan_of(subjects, {**terms, "order": order}))) for order in ("both", "step", "time")}
    assert going["both"] <= going["step"] & going["time"] | {
        s.step for s in subjects if s.checkpoint.state != "complete" or s.manifest_state == "cut-off"
    }


@given(runs(), terms_of())
@settings(max_examples=300)
def test_looking_only_where_it_matters_makes_the_plan_of_who_knows_everything(
    subjects: list[Subject], terms: dict[str, Any]
) -> None:
    truth = {subject.step: subject for subject in subjects}
    known = {s.step: Subject(s.step, s.checkpoint, links=s.links) for s in subjects}
    while (plan := plan_of(list(known.values()), terms)).unknown:
        asked = [step for step in plan.unknown if known[step] != truth[step]]
        assert asked, "it asks for what it knows"
        known.update((step, truth[step]) for step in asked)
    everything = plan_of(subjects, terms)
    spared = {s.step for s in subjects if s.manifest_state == "cut-off"}  # kept unread, where a rule keeps it anyway
    assert set(deleted(plan)) <= set(deleted(everything))
    assert set(deleted(everything)) - set(deleted(plan)) <= spared
    assert all(known[step] == truth[step] for step in deleted(plan))


@given(runs(), terms_of())
def test_a_plan_never_frees_what_it_has_not_counted(subjects: list[Subject], terms: dict[str, Any]) -> None:
    plan = plan_of(subjects, terms)
    assert plan.freed_bytes == sum(row.size_bytes or 0 for row in plan.deletions)
    assert all(row.how is not None and row.size_bytes is not None for row in plan.deletions)


@given(runs(), terms_of())
def test_two_partitions_with_one_metric_stop_the_plan_and_are_never_guessed(
    subjects: list[Subject], terms: dict[str, Any]
) -> None:
    found = usable(subjects)
    assume(found)
    markers = (Marker("test", metrics={"loss": 1.0}), Marker("val", metrics={"loss": 2.0}))
    both = replace(found[0], checkpoint=replace(found[0].checkpoint, markers=markers))
    subjects = [both if subject is found[0] else subject for subject in subjects]
    try:
        plan = plan_of(subjects, {**terms, "keep_best": ("loss:min:1",)})
    except AmbiguousMetricError:
        return
    assert terms["verified"] and not both.passes, "only one that does not count may be passed over"
    assert plan.rows
