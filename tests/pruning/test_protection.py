"""What is never deleted whatever the rules say, and what dead saves and deletions leave."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapctl.errors import StorageError
from snapctl.markers import Claim
from snapctl.pruning.protection import Clock, Subject, always_kept, is_leftover
from tests.support.plans import (
    CLOCK,
    DAY,
    HOUR,
    NOW,
    complete,
    contents,
    deleted,
    file,
    incomplete,
    plan_of,
    reasons,
)

AFTER = [complete(900, NOW - HOUR), complete(1000, NOW - 60)]
"""Complete checkpoints after whatever is judged."""


def fate(subject: Subject, *, clock: Clock = CLOCK, **terms: Any) -> str:
    """What becomes of one checkpoint that no rule keeps."""
    plan = plan_of([subject, *AFTER], keep_last=(1,), clock=clock, **terms)
    (row,) = [row for row in plan.rows if row.step == subject.step]
    return f"{row.action}: {'; '.join(row.reasons)}"


def test_what_nothing_speaks_for_goes() -> None:
    assert fate(complete(5)) == "delete: no rule keeps it"


# -- always kept -----------------------------------------------------------------------------------------------------


def test_a_pinned_one_stays() -> None:
    assert fate(complete(5, pin=True)) == "keep: pinned"


def claim(*, age: float, ttl: float = 7200.0, partition: str = "val") -> Claim:
    return Claim(partition, 3, "evaluator-1", "n", ttl, NOW - age)


@pytest.mark.parametrize(
    ("age", "ttl", "action"),
    [(0, 60, "keep"), (7205, 7200, "keep"), (7211, 7200, "delete"), (1, 0, "delete"), (-100, 60, "keep")],
)
def test_one_under_a_live_claim_stays_ten_seconds_longer_than_it_says(age: float, ttl: float, action: str) -> None:
    assert fate(complete(5, claims=[claim(age=age, ttl=ttl)])).startswith(action)


def test_a_claim_says_who_holds_it_and_until_when() -> None:
    kept = fate(complete(5, claims=[claim(age=0, ttl=60)]))
    assert kept == "keep: claimed for val by evaluator-1 until 2027-01-15T08:01:00.000Z"


def test_a_mark_voids_the_claims_on_its_partition_and_no_others() -> None:
    live = claim(age=0)
    assert fate(complete(5, claims=[live], marked=["val"])).startswith("delete")
    assert fate(complete(5, claims=[live], marked=["test"])).startswith("keep")


def test_by_the_clock_of_the_machine_claims_live_five_minutes_longer() -> None:
    late = complete(5, claims=[claim(age=7400)])
    assert fate(late).startswith("delete")
    assert fate(late, clock=Clock(NOW, slack_seconds=300)).startswith("keep")


def test_what_a_link_leads_to_stays() -> None:
    assert fate(complete(5, links=("/run/best",))) == "keep: /run/best leads to it"


@pytest.mark.parametrize(
    ("path", "age", "action"),
    [
        ("0/w", 60, "keep"),
        ("batched/x", 23 * HOUR, "keep"),
        ("0/w", 25 * HOUR, "delete"),
        (".snapctl/save.1.json", 60, "keep"),
        ("0/w.snapctl-tmp-0123456789ab", 60, "keep"),
        ("README", 60, "keep"),
        ("evaled_by/results.csv", 60, "keep"),
        ("evaled_by/val_DONE", 60, "delete"),
        ("evaled_by/val_CLAIM.7", 60, "delete"),
        ("evaled_by/val_DONE.snapctl-tmp-0123456789ab", 60, "delete"),
        ("PINNED.snapctl-tmp-0123456789ab", 60, "delete"),
        ("clock.snapctl-tmp-0123456789ab", 60, "delete"),
        ("0/", 60, "delete"),
    ],
)
def test_one_that_is_being_saved_again_stays(path: str, age: float, action: str) -> None:
    old = complete(5, NOW - 30 * DAY)
    again = replace(old, contents=contents(file(path, at=NOW - age), file(".snapshot_metadata", at=NOW - 30 * DAY)))
    assert fate(again).startswith(action), "a naive prune deletes the blobs of the new save"
    if action == "keep":
        assert fate(again) == f"keep: being saved again: {path} is younger than the manifest"


def test_a_young_file_that_is_older_than_the_manifest_is_no_save() -> None:
    fresh = complete(5, NOW - 600, blobs_at=NOW - 601)
    assert fate(fresh).startswith("delete")


def test_by_the_clock_of_the_machine_a_save_takes_five_minutes_longer() -> None:
    again = complete(5, NOW - 30 * DAY, blobs_at=NOW - DAY - 200)
    assert fate(again).startswith("delete")
    assert fate(again, clock=Clock(NOW, slack_seconds=300)).startswith("keep")


def test_what_could_not_be_looked_at_stays() -> None:
    seen = complete(5)
    hidden = replace(
        seen, checkpoint=replace(seen.checkpoint, state="unreadable", error=StorageError("permission denied"))
    )
    assert fate(hidden) == "keep: could not be looked at: permission denied"
    assert fate(complete(5, manifest_state="not-looked-at", problem="HTTP 503")).startswith("keep")
    assert hidden.was_not_looked_at


@pytest.mark.parametrize("state", ["cut-off", "unusable"])
def test_a_complete_one_that_does_not_parse_stays(state: str) -> None:
    damaged = complete(5, manifest_state=state, problem="as it is")
    assert fate(damaged) == "keep: cannot be parsed: as it is"
    assert damaged.state == "unreadable"


def test_one_that_holds_another_checkpoint_stays() -> None:
    outer = replace(complete(5), contents=contents(file(".snapshot_metadata"), file("3/.snapshot_metadata")))
    assert fate(outer) == "keep: another checkpoint lies in it: 3/.snapshot_metadata"


def test_every_reason_is_said() -> None:
    subject = complete(5, pin=True, claims=[claim(age=0)], links=("/run/best",))
    assert len(always_kept(subject, CLOCK)) == 3


# -- links that are steps --------------------------------------------------------------------------------------------


def test_a_step_that_is_a_link_goes_as_a_link_and_frees_nothing() -> None:
    plan = plan_of([complete(5, link=True), *AFTER], keep_last=(1,))
    row = plan.deletions[0]
    assert (row.step, row.how, row.size_bytes) == (5, "link", 0)


def test_an_unfinished_deletion_behind_a_link_is_left_alone() -> None:
    half = incomplete(5, file("0/w"), deleting_at=NOW - HOUR)
    linked = replace(half, checkpoint=replace(half.checkpoint, is_link=True))
    assert fate(linked) == "leave: half deleted, behind a link"


def test_what_a_dead_save_left_behind_a_link_is_left_alone() -> None:
    dead = incomplete(5, file("0/w", at=NOW - 9 * DAY))
    linked = replace(dead, checkpoint=replace(dead.checkpoint, is_link=True))
    assert fate(linked, incomplete_older_than="1d") == "leave: incomplete, behind a link"


# -- announced deletions ---------------------------------------------------------------------------------------------


def test_one_that_another_prune_has_announced_is_left_to_it_for_an_hour() -> None:
    assert fate(complete(5, deleting_at=NOW - 600)) == "leave: another prune announced its deletion 10m ago"
    assert fate(complete(5, deleting_at=NOW + 30)).startswith("leave")
    assert fate(complete(5, deleting_at=NOW - 3599)).startswith("leave")
    assert fate(complete(5, deleting_at=NOW - 3600)).startswith("delete")


def test_an_old_announcement_beside_a_manifest_is_a_leftover() -> None:
    assert is_leftover(complete(5, deleting_at=NOW - 3600), CLOCK)
    assert not is_leftover(complete(5, deleting_at=NOW - 3599), CLOCK)
    assert not is_leftover(complete(5), CLOCK)
    assert not is_leftover(complete(5, deleting_at=NOW - DAY, link=True), CLOCK)
    empty = incomplete(5, file(".snapshot_metadata", size=0), deleting_at=NOW - DAY)
    assert not is_leftover(empty, CLOCK)


def test_an_announced_one_still_counts_as_whole() -> None:
    newest = complete(2000, NOW - 30, deleting_at=NOW - 10)
    plan = plan_of([*AFTER, newest], keep_last=(1,))
    assert "the newest" in reasons(plan, 2000)


def test_an_interrupted_deletion_goes_on_whoever_began_it_and_no_rule_is_asked() -> None:
    half = incomplete(5, file("0/w", at=NOW - DAY), deleting_at=NOW - 60)
    plan = plan_of([half, *AFTER], keep_step=(5,), keep_last=(9,))
    assert deleted(plan) == [5]
    assert plan.deletions[0].how == "interrupted"


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("0/w", "leave"),
        ("batched/x", "leave"),
        ("evaled_by/val_DONE", "delete"),
        ("evaled_by/val_CLAIM.1", "delete"),
        ("0/", "delete"),
    ],
)
def test_a_half_deleted_one_with_a_younger_blob_is_being_saved_again(path: str, action: str) -> None:
    half = incomplete(5, file("0/old", at=NOW - DAY), file(path, at=NOW - 10), deleting_at=NOW - 60)
    assert fate(half).startswith(action), "a naive prune deletes the new save"


def test_what_its_deleter_had_not_seen_is_being_saved_again_even_if_it_is_older_than_the_announcement() -> None:
    half = incomplete(5, file("0/w", at=NOW - 70), deleting_at=NOW - 60)
    assert fate(half).startswith("delete")
    assert fate(replace(half, announced_newest=NOW - DAY)).startswith("leave")
    assert fate(replace(half, announced_newest=NOW - 70)).startswith("delete")


def test_a_half_deleted_one_that_is_pinned_or_linked_to_or_holds_another_is_left_alone() -> None:
    half = incomplete(5, file("0/w", at=NOW - DAY), deleting_at=NOW - 60)
    pinned = replace(half, checkpoint=replace(half.checkpoint, pin=complete(1, pin=True).checkpoint.pin))
    assert fate(pinned) == "leave: half deleted, and pinned"
    assert fate(replace(half, links=("/run/best",))) == "leave: half deleted, and /run/best leads to it"
    inner = incomplete(5, file("3/.snapshot_metadata", at=NOW - DAY), deleting_at=NOW - 60)
    assert "another checkpoint lies in it" in fate(inner)


def test_one_of_which_only_a_retained_announcement_is_left_counts_as_deleted() -> None:
    announced = file(".snapshot_metadata.deleting", at=NOW - 60, held_until=NOW + DAY)
    half = incomplete(5, deleting_at=NOW - 60)
    half = replace(half, checkpoint=replace(half.checkpoint, deleting=announced), contents=contents(announced))
    assert fate(half) == "leave: deleted; its announcement may not go before 2027-01-16T08:00:00.000Z"
    released = replace(announced, held_until=NOW - 1)
    assert fate(replace(half, checkpoint=replace(half.checkpoint, deleting=released))).startswith("delete")


# -- what dead saves leave -------------------------------------------------------------------------------------------

OLD = NOW - 9 * DAY


def test_incomplete_ones_stay_unless_it_is_asked_for() -> None:
    dead = incomplete(5, file("0/w", at=OLD))
    assert fate(dead) == "leave: incomplete"
    assert fate(dead, incomplete_older_than="1d") == "delete: incomplete, unchanged for 9d"


@pytest.mark.parametrize(
    "paths",
    [
        ["0/w", "12/model/w", "batched/x", "sharded/a/b", "replicated/c"],
        ["0/w", "evaled_by/val_DONE", "evaled_by/notes.txt", ".snapctl/save.0.json"],
        ["0/w", ".snapshot_metadata.snapctl-tmp-0123456789ab", "0/"],
        ["evaled_by/val_DONE"],
    ],
)
def test_nothing_but_what_a_save_leaves_may_go(paths: list[str]) -> None:
    assert fate(incomplete(5, *(file(path, at=OLD) for path in paths)), incomplete_older_than="1d").startswith("delete")


@pytest.mark.parametrize(
    "path",
    ["README.md", "events.out.tfevents.1", "model/w", "00/w", "src/train.py", "PINNED.txt", "step_5/w", "٣/w"],
)
def test_what_holds_something_else_stays(path: str) -> None:
    found = fate(incomplete(5, file("0/w", at=OLD), file(path, at=OLD)), incomplete_older_than="1d")
    assert found == f"leave: incomplete, holds something else than a save: {path}"


@pytest.mark.parametrize("path", ["9/.snapshot_metadata", "0/a/b/.snapshot_metadata", "7/.snapshot_metadata.deleting"])
def test_a_run_that_is_named_by_a_number_holds_checkpoints_and_stays(path: str) -> None:
    run = incomplete(5, file("100/0/w", at=OLD), file(path, at=OLD))
    assert fate(run, incomplete_older_than="1d").startswith("leave"), "a naive prune deletes a whole other run"


def test_an_empty_manifest_is_none_and_goes_with_the_rest() -> None:
    dead = incomplete(5, file("0/w", at=OLD), file(".snapshot_metadata", at=OLD, size=0))
    assert fate(dead, incomplete_older_than="1d").startswith("delete")


def test_an_empty_directory_and_one_of_folder_objects_alone_stay() -> None:
    assert fate(incomplete(5), incomplete_older_than="1d") == "leave: incomplete, empty"
    assert fate(incomplete(5, file("0/", at=OLD, size=0)), incomplete_older_than="1d").endswith("empty")


@pytest.mark.parametrize("path", ["0/w", "evaled_by/val_DONE", ".snapctl/save.0.json"])
def test_no_file_may_have_changed_for_so_long(path: str) -> None:
    alive = incomplete(5, file("0/old", at=OLD), file(path, at=NOW - 23 * HOUR))
    assert fate(alive, incomplete_older_than="1d") == "leave: incomplete, changed 23h ago"
    assert fate(alive, incomplete_older_than="22h").startswith("delete")


def test_by_the_clock_of_the_machine_files_count_as_changed_for_five_minutes_longer() -> None:
    dead = incomplete(5, file("0/w", at=NOW - DAY - 200))
    assert fate(dead, incomplete_older_than="1d").startswith("delete")
    assert fate(dead, incomplete_older_than="1d", clock=Clock(NOW, slack_seconds=300)).startswith("leave")


@pytest.mark.parametrize("at", [0.0, 315_532_800.0, NOW + DAY])
def test_files_whose_times_cannot_be_stay(at: float) -> None:
    odd = incomplete(5, file("0/w", at=OLD), file("0/v", at=at))
    assert fate(odd, incomplete_older_than="1d").startswith("leave"), "a naive prune takes the epoch for very old"


def test_pinned_claimed_and_linked_ones_stay() -> None:
    dead = incomplete(5, file("0/w", at=OLD))
    pin = complete(1, pin=True).checkpoint.pin
    for kept in (
        replace(dead, checkpoint=replace(dead.checkpoint, pin=pin)),
        replace(dead, checkpoint=replace(dead.checkpoint, claims=(claim(age=0),))),
        replace(dead, links=("/run/best",)),
        incomplete(5, file("0/w", at=OLD), file("PINNED", at=OLD)),
    ):
        assert fate(kept, incomplete_older_than="1d").startswith("leave")


@pytest.mark.parametrize(
    ("others", "goes"),
    [
        ([complete(9, NOW - HOUR)], True),
        ([complete(4, NOW - HOUR)], False),
        ([complete(9, OLD - DAY)], False),
        ([complete(9, OLD)], False),
        ([complete(4, NOW - HOUR), complete(9, OLD - DAY)], False),
        ([complete(9, None)], False),
        ([complete(9, NOW - HOUR, manifest_state="unusable", problem="x"), complete(1, NOW - HOUR)], False),
        ([incomplete(9, file("0/w", at=NOW - HOUR)), complete(1, NOW - HOUR)], False),
        ([complete(9, OLD - DAY), complete(8, NOW - HOUR)], True),
    ],
)
def test_there_must_be_a_complete_one_of_a_higher_step_and_a_later_time(others: list[Subject], goes: bool) -> None:
    dead = incomplete(5, file("0/w", at=OLD))
    plan = plan_of([dead, *others], keep_last=(9,), incomplete_older_than="1d")
    assert (deleted(plan) == [5]) == goes


def test_the_later_one_must_have_been_parsed() -> None:
    dead, later = incomplete(5, file("0/w", at=OLD)), complete(9, NOW - HOUR)
    unread = replace(later, manifest_state="unknown")
    plan = plan_of([dead, unread], keep_last=(9,), incomplete_older_than="1d")
    assert 9 in plan.unknown


def test_one_whose_manifest_is_cut_off_goes_like_an_incomplete_one() -> None:
    cut = complete(5, OLD, manifest_state="cut-off", problem="is neither JSON nor YAML")
    assert fate(cut).startswith("keep")
    assert fate(cut, incomplete_older_than="1d") == "delete: cannot be parsed (cut off), unchanged for 9d"
    young = complete(5, NOW - HOUR, manifest_state="cut-off", problem="is neither JSON nor YAML")
    assert fate(young, incomplete_older_than="1d").startswith("keep")


@pytest.mark.parametrize("state", ["unusable", "not-looked-at"])
def test_one_of_an_unknown_version_or_that_may_not_be_read_never_goes(state: str) -> None:
    subject = complete(5, OLD, manifest_state=state, problem="as it is")
    assert fate(subject, incomplete_older_than="1d").startswith("keep")
