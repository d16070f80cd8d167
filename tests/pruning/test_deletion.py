"""One checkpoint is deleted: the protocol, interrupted and disturbed at every step of it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from functools import partial
from threading import Event

import pytest

from snapctl.errors import NoSpaceError, PermissionDeniedError, PreconditionError, UnavailableError
from snapctl.pruning.deletion import BEGIN_WITHIN_SECONDS, Deleter, Outcome
from snapctl.pruning.pruner import Pruned, carry_out
from tests.support.saves import (
    GcsSaveDir,
    LocalSaveDir,
    SaveDir,
    check_sound,
    fill,
    prepare_watched,
    prune_watched,
    steps_that_look_complete,
    write_claim,
)
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import write_checkpoint
from tests.support.watched import CHANGES, Killed, Watch

MANIFEST = ".snapshot_metadata"
DELETING = ".snapshot_metadata.deleting"


@pytest.fixture(params=["local", "gcs"])
def save_dir(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> SaveDir:
    if request.param == "local":
        return LocalSaveDir(tmp_path / "run")
    bucket: Bucket = request.getfixturevalue("bucket")
    return GcsSaveDir(bucket)


@pytest.fixture
def local(tmp_path: pathlib.Path) -> LocalSaveDir:
    return LocalSaveDir(tmp_path / "run")


def below(save_dir: SaveDir, step: int) -> list[str]:
    return [name for name in save_dir.names() if name.partition("/")[0] == str(step)]


def outcome_of(result: Pruned, step: int) -> Outcome:
    return result.outcomes[step]


# -- the protocol ----------------------------------------------------------------------------------------------------


def test_it_announces_looks_again_deletes_the_manifest_then_the_blobs_and_the_announcement_last(
    save_dir: SaveDir,
) -> None:
    save_dir.write("100/.snapctl/save.0.json", b"{}")
    write_checkpoint(save_dir.write, 100, {"a": _array(), "b": _array()}, markers=("val",))
    fill(save_dir, 200)
    before = save_dir.names()
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    assert save_dir.names() == before, "planning changes nothing"
    watch.log.clear()
    result = carry_out(prepared)
    assert outcome_of(result, 100).status == "deleted"
    changes = watch.changes()
    assert changes[:3] == [("write", f"100/{DELETING}"), ("delete", f"100/{MANIFEST}"), ("sync_dir", "100")]
    looked = [entry for entry in watch.log if entry[0] in ("list_dir", "find_file")]
    between = watch.log[watch.log.index(changes[0]) : watch.log.index(changes[1])]
    assert ("find_file", f"200/{MANIFEST}") in between, "the newest is looked at again"
    assert any(entry in between for entry in looked if entry[0] == "list_dir")
    rest = [path for operation, path in changes[3:]]
    assert rest == [
        "100/0/model/a",
        "100/0/model/b",
        "100/.snapctl/save.0.json",
        "100/evaled_by/val_DONE",
        "100",
        f"100/{DELETING}",
        "100",
    ]
    assert steps_that_look_complete(save_dir) == [200]
    assert below(save_dir, 100) == []


def _array() -> object:
    import numpy as np

    return np.zeros(4, "f4")


def test_what_was_freed_is_counted(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    size = sum(len(save_dir.read(name)) for name in below(save_dir, 100))
    result = prune_watched(save_dir, Watch(), keep_last=(1,))
    assert (result.deleted, result.freed_bytes) == (1, size)
    assert result.prepared.plan.freed_bytes == size


# -- interrupted -----------------------------------------------------------------------------------------------------


def count_changes(save_dir: SaveDir) -> int:
    watch = Watch()
    prune_watched(save_dir, watch, keep_last=(1,))
    return len(watch.changes())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_nothing_looks_complete_that_is_not_and_the_next_run_finishes(
    save_dir: SaveDir, after: bool
) -> None:
    fill(save_dir, 100, 200, markers=("val",))
    points = count_changes(save_dir)
    assert points >= 7
    for number in range(1, points + 1):
        fill(save_dir, 100, markers=("val",))
        fill(save_dir, 200)
        watch = Watch()
        prepared = prepare_watched(save_dir, watch, keep_last=(1,))
        watch.log.clear()
        watch.kill_at(number, after=after)
        with pytest.raises(Killed):
            carry_out(prepared)
        check_sound(save_dir)
        left = below(save_dir, 100)
        begun = f"100/{MANIFEST}" not in left
        watch = Watch()
        result = prune_watched(save_dir, watch, keep_last=(1,))
        if begun:
            assert below(save_dir, 100) == [] or below(save_dir, 100) == ["100/"], f"after change {number}"
        elif f"100/{DELETING}" in left:  # announced, and not begun: whole, and left to the other for an hour
            assert result.outcomes == {}
            assert below(save_dir, 100) == left
            save_dir.delete(f"100/{DELETING}")
            prune_watched(save_dir, Watch(), keep_last=(1,))
        check_sound(save_dir)
        assert steps_that_look_complete(save_dir) == [200]


def test_an_announcement_that_nothing_followed_upon_goes_after_an_hour(local: LocalSaveDir) -> None:
    fill(local, 100, 200, 300)
    local.write(f"100/{DELETING}", b"anything")
    local.write(f"300/{DELETING}", b"")
    result = prune_watched(local, Watch(), keep_last=(2,))
    assert result.outcomes == {}, "it is less than an hour old"
    assert f"300/{DELETING}" in local.names()
    local.age(f"100/{DELETING}", 3700)
    local.age(f"300/{DELETING}", 3700)
    result = prune_watched(local, Watch(), keep_last=(2,))
    assert outcome_of(result, 100).status == "deleted"
    assert below(local, 100) == []
    assert below(local, 300) == [f"300/{MANIFEST}", "300/0/model/weight"], "the leftover went, and nothing else"


def test_a_rehearsal_and_a_refused_run_leave_leftovers_where_they_are(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    local.write(f"200/{DELETING}")
    local.age(f"200/{DELETING}", 7200)
    prepare_watched(local, Watch(), keep_last=(1,))
    assert f"200/{DELETING}" in local.names()


# -- disturbed between the plan and the act --------------------------------------------------------------------------


def pin(save_dir: SaveDir) -> None:
    save_dir.write("100/PINNED", b"")


def claim(save_dir: SaveDir) -> None:
    write_claim(save_dir, 100)


def mark(save_dir: SaveDir) -> None:
    save_dir.write("100/evaled_by/test_DONE", b"")


def mark_again(save_dir: SaveDir) -> None:
    save_dir.write("100/evaled_by/val_DONE", b'{"metrics": {"loss": 0.1}}')


def unmark(save_dir: SaveDir) -> None:
    save_dir.delete("100/evaled_by/val_DONE")


def save_again(save_dir: SaveDir) -> None:
    import numpy as np

    write_checkpoint(save_dir.write, 100, {"weight": np.ones((9, 9), "f4")}, markers=("val",))


def lose_the_newest(save_dir: SaveDir) -> None:
    save_dir.delete(f"200/{MANIFEST}")


def empty_the_newest(save_dir: SaveDir) -> None:
    save_dir.write(f"200/{MANIFEST}", b"")


def take_the_announcement_away(save_dir: SaveDir) -> None:
    save_dir.delete(f"100/{DELETING}")


DISTURBANCES: dict[str, tuple[Callable[[SaveDir], None], str]] = {
    "pin": (pin, "pinned"),
    "claim": (claim, "claimed for val by evaluator"),
    "mark": (mark, "its markers have changed"),
    "mark again": (mark_again, "its markers have changed"),
    "unmark": (unmark, "its markers have changed"),
    "save again": (save_again, "saved again: its manifest is another one"),
    "lose the newest": (lose_the_newest, "the newest checkpoint is gone: step 200"),
    "empty the newest": (empty_the_newest, "the newest checkpoint is gone: step 200"),
    "take the announcement away": (take_the_announcement_away, "somebody removed the announcement of its deletion"),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_what_changed_since_the_plan_is_left_alone_and_nothing_of_it_is_touched(save_dir: SaveDir, name: str) -> None:
    disturb, complaint = DISTURBANCES[name]
    write_checkpoint(save_dir.write, 100, markers=() if name == "claim" else ("val",))
    fill(save_dir, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    seen: list[list[str]] = []

    def act() -> None:
        disturb(save_dir)
        seen.append([name for name in below(save_dir, 100) if name != f"100/{DELETING}"])

    watch.once("write", f"100/{DELETING}", act, after=True)
    result = carry_out(prepared)
    outcome = outcome_of(result, 100)
    assert (outcome.status, outcome.begun) == ("left", False)
    assert complaint in (outcome.message or "")
    assert below(save_dir, 100) == seen[0], "a naive prune deletes it"
    check_sound(save_dir)


def test_a_claim_that_is_not_live_does_not_save_it(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("write", f"100/{DELETING}", lambda: write_claim(save_dir, 100, ttl=0), after=True)
    result = carry_out(prepared)
    assert outcome_of(result, 100).status == "deleted"
    assert all("CLAIM" in name or name == "100/" for name in below(save_dir, 100)), "what was not listed is not touched"


def test_a_manifest_that_is_gone_before_its_turn_is_success_of_another(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    for moment, after in (("write", True), ("delete", False)):
        fill(save_dir, 100)
        fill(save_dir, 200)
        watch = Watch()
        prepared = prepare_watched(save_dir, watch, keep_last=(1,))
        path = f"100/{DELETING}" if moment == "write" else f"100/{MANIFEST}"
        watch.once(moment, path, lambda: save_dir.delete(f"100/{MANIFEST}"), after=after)
        outcome = outcome_of(carry_out(prepared), 100)
        assert (outcome.status, outcome.is_gone, outcome.begun) == ("left", True, False)
        assert below(save_dir, 100) == ["100/0/model/weight"], "only one's own announcement is taken back"


def test_a_checkpoint_that_is_gone_altogether_leaves_no_ghost(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    prepared = prepare_watched(save_dir, Watch(), keep_last=(1,))
    save_dir.delete("100")
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.is_gone) == ("left", True)
    assert below(save_dir, 100) == []


def test_no_directory_is_left_of_what_another_prune_deletes_meanwhile(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,))

    def delete_all_but_the_announcement() -> None:
        local.delete(f"100/{MANIFEST}")
        local.delete("100/0")

    watch.once("write", f"100/{DELETING}", delete_all_but_the_announcement, after=True)
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.is_gone) == ("left", True)
    assert not (local.root / "100").exists()


def test_a_manifest_that_was_replaced_at_the_last_moment_is_left(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,))
    watch.once("delete", f"100/{MANIFEST}", lambda: save_again(local))
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.begun) == ("left", False)
    assert steps_that_look_complete(local) == [100, 200]
    check_sound(local)


def test_a_new_link_saves_it(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,))
    watch.once("write", f"100/{DELETING}", lambda: os.symlink("100", local.root / "best"), after=True)
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.status == "left"
    assert (outcome.message or "").endswith("/best leads to it")
    assert steps_that_look_complete(local) == [100, 200]


def test_a_deletion_that_has_not_begun_ten_minutes_after_its_announcement_is_not_begun(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    prepared = prepare_watched(save_dir, Watch(), keep_last=(1,))
    times = iter([0.0, BEGIN_WITHIN_SECONDS + 1])
    deleter = _deleter(prepared, monotonic=lambda: next(times))
    outcome = deleter.delete(prepared.plan.deletions[0])
    assert (outcome.status, outcome.begun) == ("left", False)
    assert "too old" in (outcome.message or "")
    assert below(save_dir, 100) == [f"100/{MANIFEST}", "100/0/model/weight"]


def _deleter(prepared: object, **options: object) -> Deleter:
    return Deleter(
        prepared.place,  # type: ignore[attr-defined]
        prepared.plan,  # type: ignore[attr-defined]
        slack_seconds=0.0,
        incomplete_older_than_seconds=None,
        links=prepared.links,  # type: ignore[attr-defined]
        listings=prepared.survey.listings,  # type: ignore[attr-defined]
        **options,  # type: ignore[arg-type]
    )


# -- two prunes ------------------------------------------------------------------------------------------------------


def test_what_another_prune_has_announced_meanwhile_is_left_to_it(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    save_dir.write(f"100/{DELETING}", b"of another")
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.message) == ("left", "another prune is deleting it")
    assert save_dir.read(f"100/{DELETING}") == b"of another"
    assert steps_that_look_complete(save_dir) == [100, 200]


def test_of_two_prunes_whose_steps_mingle_one_deletes_and_the_other_leaves_it(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    moments = [(operation, after) for operation in ("write", "delete", "list_tree") for after in (False, True)]
    for operation, after in moments:
        fill(save_dir, 100)
        fill(save_dir, 200)
        first, second = Watch(), Watch()
        mine = prepare_watched(save_dir, first, keep_last=(1,))
        others = Pruned(prepare_watched(save_dir, second, keep_last=(1,)))
        path = {"write": f"100/{DELETING}", "delete": f"100/{MANIFEST}", "list_tree": "100"}[operation]
        first.once(operation, path, partial(carry_out, others.prepared, into=others), after=after)
        results = [others, carry_out(mine)]
        assert sum(result.deleted for result in results) == 1
        assert all(not result.failed for result in results), "no error"
        check_sound(save_dir)
        assert below(save_dir, 100) == []
        assert steps_that_look_complete(save_dir) == [200]


def test_two_that_go_on_with_one_interrupted_deletion_both_succeed(save_dir: SaveDir) -> None:
    fill(save_dir, 200)
    for path in ("0/a", "0/b", "evaled_by/val_DONE", DELETING):
        save_dir.write(f"100/{path}", b"x")
    first = Watch()
    mine = prepare_watched(save_dir, first, keep_last=(1,))
    others = prepare_watched(save_dir, Watch(), keep_last=(1,))
    first.once("delete", "100/0/a", lambda: carry_out(others) and None, after=True)
    outcome = outcome_of(carry_out(mine), 100)
    assert outcome.status == "deleted"
    assert below(save_dir, 100) == []


def test_the_announcement_of_a_lost_answer_is_known_by_its_nonce(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))

    def lose() -> None:
        raise PreconditionError("exists already")

    watch.once("write", f"100/{DELETING}", lose, after=True)
    assert outcome_of(carry_out(prepared), 100).status == "deleted"


# -- storage that fails ----------------------------------------------------------------------------------------------


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_if_it_cannot_be_announced_nothing_is_touched_and_the_others_go_on(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 150, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("write", f"100/{DELETING}", fail(PermissionDeniedError("no")))
    result = carry_out(prepared)
    assert (outcome_of(result, 100).status, outcome_of(result, 100).begun) == ("failed", False)
    assert outcome_of(result, 150).status == "deleted"
    assert steps_that_look_complete(save_dir) == [100, 200]
    assert f"100/{DELETING}" not in save_dir.names()


def test_a_full_disk_does_not_keep_it_from_being_announced(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("write", f"100/{DELETING}", fail(NoSpaceError("no space left")))
    assert outcome_of(carry_out(prepared), 100).status == "deleted"


@pytest.mark.parametrize("operation", ["list_dir", "find_file"])
def test_if_it_cannot_be_looked_at_again_the_announcement_is_taken_back(save_dir: SaveDir, operation: str) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    path = "100" if operation == "list_dir" else f"200/{MANIFEST}"
    watch.once(operation, path, fail(UnavailableError("HTTP 503")))
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.begun is False and outcome.status in ("failed", "left")
    assert below(save_dir, 100) == [f"100/{MANIFEST}", "100/0/model/weight"]


def test_if_the_manifest_cannot_be_deleted_nothing_else_is(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("delete", f"100/{MANIFEST}", fail(PermissionDeniedError("no")))
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.begun) == ("failed", False)
    assert below(save_dir, 100) == [f"100/{MANIFEST}", "100/0/model/weight"]


def test_if_the_answer_was_lost_and_the_manifest_is_gone_it_goes_on(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("delete", f"100/{MANIFEST}", fail(UnavailableError("no answer")), after=True)
    assert outcome_of(carry_out(prepared), 100).status == "deleted"
    assert below(save_dir, 100) == []


def test_an_answer_that_is_lost_on_the_way_does_not_look_like_a_deletion_by_another(
    proxied: tuple[Bucket, Controlled],
) -> None:
    bucket, proxy = proxied
    save_dir = GcsSaveDir(bucket)
    fill(save_dir, 100, 200)
    lost = {"match": r"100%2F.snapshot_metadata(\?|$)", "method": "DELETE", "lose": True, "n": 1}
    prepared = prepare_watched(save_dir, Watch(), keep_last=(1,))
    proxy.configure(faults=[lost])
    assert outcome_of(carry_out(prepared), 100).status == "deleted", "aiohttp itself asks again, and gets a 404"
    assert below(save_dir, 100) == []


def test_if_nobody_can_tell_whether_the_manifest_is_gone_the_announcement_stays(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    broken = Event()

    def before(operation: str, path: str) -> None:
        if (operation, path) == ("find_file", f"100/{MANIFEST}") and broken.is_set():
            raise UnavailableError("no answer")

    def after(operation: str, path: str) -> None:
        if (operation, path) == ("delete", f"100/{MANIFEST}"):
            broken.set()
            raise UnavailableError("no answer")

    watch.before, watch.after = before, after
    outcome = outcome_of(carry_out(prepared), 100)
    assert (outcome.status, outcome.begun) == ("failed", True)
    assert f"100/{DELETING}" in save_dir.names()
    prune_watched(save_dir, Watch(), keep_last=(1,))
    assert below(save_dir, 100) == []


def test_a_blob_that_may_not_be_deleted_is_said_and_the_rest_goes(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 100, {"a": _array(), "b": _array(), "c": _array()}, markers=("val",))
    fill(save_dir, 150, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))

    def forbid(operation: str, path: str) -> None:
        if (operation, path) == ("delete", "100/0/model/b"):
            raise PermissionDeniedError("permission denied: 100/0/model/b")

    watch.before = forbid
    result = carry_out(prepared)
    outcome = outcome_of(result, 100)
    assert (outcome.status, outcome.begun) == ("failed", True)
    assert outcome_of(result, 150).status == "deleted"
    assert steps_that_look_complete(save_dir) == [200]
    watch.before = lambda operation, path: None
    prune_watched(save_dir, Watch(), keep_last=(1,))
    assert below(save_dir, 100) == [], "the next run finishes"


def test_an_announcement_that_may_not_go_yet_counts_as_deleted_and_is_said(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200)
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("delete", f"100/{DELETING}", fail(PermissionDeniedError("retained until tomorrow")))
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.status == "deleted"
    assert "retained until tomorrow" in (outcome.message or "")
    assert below(save_dir, 100) == [f"100/{DELETING}"]


# -- a save into the same step meanwhile -----------------------------------------------------------------------------


def change_points(save_dir: SaveDir) -> list[tuple[str, str]]:
    fill(save_dir, 100, 200)
    watch = Watch()
    prune_watched(save_dir, watch, keep_last=(1,))
    return watch.changes()


@pytest.mark.parametrize("same_names", [True, False], ids=["over the old blobs", "beside the old blobs"])
def test_a_save_into_the_same_step_survives_whenever_it_comes(save_dir: SaveDir, same_names: bool) -> None:
    for operation, path in change_points(save_dir):
        for after in (False, True):
            fill(save_dir, 100)
            fill(save_dir, 200)
            watch = Watch()
            prepared = prepare_watched(save_dir, watch, keep_last=(1,))
            watch.once(operation, path, lambda: _save(save_dir, same_names), after=after)
            carry_out(prepared)
            assert 100 in steps_that_look_complete(save_dir), f"{operation} {path}, {after=}"
            check_sound(save_dir)
            assert _saved_value(save_dir, same_names) == b"\x07" * 400
            save_dir.delete("100")


def _save(save_dir: SaveDir, same_names: bool) -> None:
    import numpy as np

    write_checkpoint(save_dir.write, 100, {"weight" if same_names else "other": np.full(400, 7, "u1")})


def _saved_value(save_dir: SaveDir, same_names: bool) -> bytes:
    return save_dir.read("100/0/model/" + ("weight" if same_names else "other"))


def test_a_save_that_has_only_begun_when_a_dead_deletion_is_found_survives(save_dir: SaveDir) -> None:
    fill(save_dir, 200)
    save_dir.write("100/0/old", b"x")
    save_dir.write(f"100/{DELETING}", b"")
    save_dir.write("100/0/new", b"y")
    result = prune_watched(save_dir, Watch(), keep_last=(1,))
    assert result.outcomes == {}
    assert below(save_dir, 100) == [f"100/{DELETING}", "100/0/new", "100/0/old"]


def test_a_save_that_begins_while_a_dead_deletion_is_gone_on_with_survives(save_dir: SaveDir) -> None:
    fill(save_dir, 200)
    for path in ("0/a", "0/b", DELETING):
        save_dir.write(f"100/{path}", b"x")
    watch = Watch()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("list_tree", "100", lambda: save_dir.write("100/0/a", b"new"))
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.status == "left"
    assert save_dir.read("100/0/a") == b"new"


# -- what dead saves leave -------------------------------------------------------------------------------------------


def prune_remains(local: LocalSaveDir, watch: Watch) -> Pruned:
    return prune_watched(local, watch, keep_last=(1,), incomplete_older_than="1d")


def dead_save(local: LocalSaveDir) -> None:
    for path in ("0/a", "0/b", ".snapctl/save.0.json", MANIFEST):
        local.write(f"50/{path}", b"" if path == MANIFEST else b"x")
    local.age("50", 3 * 86400)


def test_the_remains_of_a_dead_save_go_by_the_same_protocol(local: LocalSaveDir) -> None:
    fill(local, 100)
    dead_save(local)
    watch = Watch()
    result = prune_remains(local, watch)
    assert outcome_of(result, 50).status == "deleted"
    assert [entry for entry in watch.changes() if entry[1].startswith("50/")][:2] == [
        ("write", f"50/{DELETING}"),
        ("delete", f"50/{MANIFEST}"),
    ]
    assert below(local, 50) == []


def test_what_is_being_copied_with_its_old_times_is_no_remains(local: LocalSaveDir) -> None:
    fill(local, 100)
    dead_save(local)
    os.utime(local.root / "50" / "0")  # as cp -a and rsync -a leave it while they are at it
    result = prune_remains(local, Watch())
    assert result.outcomes == {}, "a copy that goes on would end complete, and without its first blobs"
    (row,) = [row for row in result.prepared.plan.rows if row.step == 50]
    assert row.reasons[0].startswith("incomplete, changed ")
    dead_save(local)
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,), incomplete_older_than="1d")
    watch.once("list_tree", "50", lambda: os.utime(local.root / "50" / "0"))
    assert outcome_of(carry_out(prepared), 50).status == "left"


def revive(local: LocalSaveDir) -> None:
    local.write("50/0/c", b"alive")


def complete_it(local: LocalSaveDir) -> None:
    write_checkpoint(local.write, 50)


@pytest.mark.parametrize("disturb", [revive, complete_it, lambda local: local.write("50/PINNED")])
@pytest.mark.parametrize("moment", ["list_tree 50", f"write 50/{DELETING}"])
def test_remains_that_come_to_life_are_left_alone(
    local: LocalSaveDir, moment: str, disturb: Callable[[LocalSaveDir], None]
) -> None:
    fill(local, 100)
    dead_save(local)
    watch = Watch()
    (prepared,) = [prepare_watched(local, watch, keep_last=(1,), incomplete_older_than="1d")]
    operation, path = moment.split(" ")
    watch.once(operation, path, lambda: disturb(local), after=operation == "write")
    outcome = outcome_of(carry_out(prepared), 50)
    assert (outcome.status, outcome.begun) == ("left", False)
    assert {"50/0/a", "50/0/b"} <= set(local.names()), "a naive prune deletes what is being saved"
    assert f"50/{DELETING}" not in local.names()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_the_remains_go_in_the_next_run(local: LocalSaveDir, after: bool) -> None:
    fill(local, 100)
    dead_save(local)
    watch = Watch()
    prune_remains(local, watch)
    for number in range(1, len(watch.changes()) + 1):
        dead_save(local)
        dying = Watch()
        prepared = prepare_watched(local, dying, keep_last=(1,), incomplete_older_than="1d")
        dying.log.clear()
        dying.kill_at(number, after=after)
        with pytest.raises(Killed):
            carry_out(prepared)
        if (local.root / "50" / DELETING).exists() and (local.root / "50" / MANIFEST).exists():
            local.age("50", 2 * 86400)  # announced beside an (empty) manifest: for an hour another's
        prune_remains(local, Watch())
        assert below(local, 50) in ([], ["50/"])


# -- links -----------------------------------------------------------------------------------------------------------


def test_a_step_that_is_a_link_is_unlinked_and_what_it_leads_to_stays(local: LocalSaveDir) -> None:
    elsewhere = LocalSaveDir(local.root.parent / "elsewhere")
    fill(elsewhere, 7)
    fill(local, 200)
    os.symlink(elsewhere.root / "7", local.root / "100")
    before = elsewhere.names()
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,))
    watch.log.clear()
    result = carry_out(prepared)
    assert outcome_of(result, 100).status == "deleted"
    assert watch.changes() == [("delete_link", "100")]
    assert elsewhere.names() == before
    assert result.freed_bytes == 0


def test_a_link_that_became_a_directory_is_left(local: LocalSaveDir) -> None:
    fill(local, 7, 200)
    os.rename(local.root / "7", local.root.parent / "7")
    os.symlink(local.root.parent / "7", local.root / "100")
    prepared = prepare_watched(local, Watch(), keep_last=(1,))
    (local.root / "100").unlink()
    fill(local, 100)
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.status == "failed"
    assert steps_that_look_complete(local) == [100, 200]


def test_links_inside_a_checkpoint_are_removed_and_never_followed(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    precious = local.root.parent / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"x")
    os.symlink(precious, local.root / "100" / "0" / "dir")
    os.symlink(precious / "data", local.root / "100" / "0" / "file")
    os.symlink("nowhere", local.root / "100" / "0" / "dangling")
    local.age("100", 5 * 86400)
    os.utime(precious / "data", (1.7e9, 1.7e9))
    os.utime(precious, (1.7e9, 1.7e9))
    result = prune_watched(local, Watch(), keep_last=(1,))
    assert outcome_of(result, 100).status == "deleted"
    assert below(local, 100) == []
    assert (precious / "data").read_bytes() == b"x"


def test_a_directory_that_became_a_link_is_not_followed(local: LocalSaveDir) -> None:
    fill(local, 100, 200)
    watch = Watch()
    prepared = prepare_watched(local, watch, keep_last=(1,))
    moved = local.root.parent / "moved"

    def swap() -> None:
        os.rename(local.root / "100" / "0", moved)
        os.symlink(moved, local.root / "100" / "0")

    watch.once("delete", f"100/{MANIFEST}", swap, after=True)
    outcome = outcome_of(carry_out(prepared), 100)
    assert outcome.status == "left"
    assert (moved / "model" / "weight").exists(), "a naive prune follows the link out of the checkpoint"


# -- stopping --------------------------------------------------------------------------------------------------------


def test_a_stop_ends_it_between_two_files_and_the_next_run_goes_on(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 100, {str(n): _array() for n in range(5)})
    fill(save_dir, 200)
    watch, stop = Watch(), Event()
    prepared = prepare_watched(save_dir, watch, keep_last=(1,))
    watch.once("delete", "100/0/model/1", stop.set, after=True)
    outcome = _deleter(prepared, stop=stop).delete(prepared.plan.deletions[0])
    assert (outcome.status, outcome.begun) == ("left", True)
    assert "interrupted" in (outcome.message or "")
    assert _deleter(prepared, stop=stop).delete(prepared.plan.deletions[0]).message == "interrupted before it was begun"
    prune_watched(save_dir, Watch(), keep_last=(1,))
    assert below(save_dir, 100) == []


def test_only_the_plans_own_operations_change_anything(save_dir: SaveDir) -> None:
    fill(save_dir, 100, 200, 300)
    before = [name for name in save_dir.names() if not name.startswith("100/")]
    watch = Watch()
    prune_watched(save_dir, watch, keep_last=(2,))
    assert all(path.partition("/")[0] == "100" for operation, path in watch.log if operation in CHANGES)
    assert save_dir.names() == before
