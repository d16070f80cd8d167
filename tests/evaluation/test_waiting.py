"""Waiting for checkpoints and evaluators, with a clock of our own, over real directories and a real fake-gcs-server."""

from __future__ import annotations

import os
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import snapctl
from snapctl.errors import (
    CheckpointNotFoundError,
    CredentialsError,
    DeadlineError,
    EvaluationTimeoutError,
    FailureReportedError,
    InvalidOptionError,
    InvalidPathError,
    PermissionDeniedError,
    SaveDirNotFoundError,
    UnavailableError,
)
from snapctl.evaluation.waiting import FailureFile, Pace, Wanted, follow_checkpoints, wait_for_checkpoint, watch_file
from snapctl.save_record import BlobSum, SaveRecord, format_save_record
from snapctl.storage import open_storage
from tests.support.clock import FakeClock
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, metadata, write_checkpoint


class Waiting:
    """One save directory, waited for under a fake clock."""

    def __init__(self, save_dir: SaveDir) -> None:
        self.dir = save_dir
        self.time = FakeClock()
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def pace(self, timeout: float | None = 100, interval: float = 10) -> Pace:
        return Pace(timeout, interval, self.time.clock, self.time.sleep, self.warnings.append, self.notes.append)

    def save(self, step: int, *, markers: Sequence[str] = (), complete: bool = True) -> None:
        write_checkpoint(self.dir.write, step, markers=markers, complete=complete)

    def save_at(self, seconds: float, step: int, **options: Any) -> None:
        self.time.at(seconds, lambda: self.save(step, **options))

    def mark_at(self, seconds: float, step: int, partition: str) -> None:
        self.time.at(seconds, lambda: self.dir.write(f"{step}/evaled_by/{partition}_DONE", b""))

    def wait(self, *, timeout: float | None = 100, interval: float = 10, **wanted: Any) -> int:
        """The step that is found."""
        found = wait_for_checkpoint(open_storage(self.dir.url), Wanted(**wanted), self.pace(timeout, interval))
        assert found.step is not None
        assert found.path == f"{self.dir.url}/{found.step}"
        return found.step

    def follow(self, *, timeout: float | None = 100, interval: float = 10, **wanted: Any) -> list[tuple[float, int]]:
        """When which step came, until the time is up."""
        found = []
        with pytest.raises(DeadlineError):
            for checkpoint in self.following(timeout=timeout, interval=interval, **wanted):
                found.append((self.time.elapsed, checkpoint.step or 0))
        return found

    def following(self, *, timeout: float | None = 100, interval: float = 10, **wanted: Any) -> Iterator[Any]:
        return follow_checkpoints(open_storage(self.dir.url), Wanted(**wanted), self.pace(timeout, interval))


@pytest.fixture
def waiting(save_dir: SaveDir) -> Waiting:
    return Waiting(save_dir)


@pytest.fixture
def local(tmp_path: pathlib.Path) -> Waiting:
    return Waiting(SaveDir(str(tmp_path), root=tmp_path))


def set_time(root: pathlib.Path | str, step: int, seconds_ago: float) -> None:
    when = time.time() - seconds_ago
    os.utime(pathlib.Path(root) / str(step) / ".snapshot_metadata", (when, when))


# -- a new checkpoint ------------------------------------------------------------------------------------------------


def test_what_was_not_there_at_the_start_is_found_within_an_interval(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save_at(25, 20)
    assert waiting.wait() == 20
    assert waiting.time.elapsed == 30


def test_a_restarted_run_may_begin_below(waiting: Waiting) -> None:
    waiting.save(1000)
    waiting.save_at(5, 10)
    assert waiting.wait() == 10


def test_an_incomplete_one_that_becomes_complete_is_new(waiting: Waiting) -> None:
    waiting.save(1000)
    waiting.save(10, complete=False)
    waiting.save_at(5, 10)
    assert waiting.wait() == 10


def test_one_that_is_written_again_is_new(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save(20)
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", metadata({"0/x": {"type": "list"}})))
    assert waiting.wait() == 10


def test_of_several_new_ones_the_last_written_is_found(local: Waiting) -> None:
    def two() -> None:
        local.save(10)
        local.save(5)
        set_time(local.dir.url, 10, 60)

    local.time.at(5, two)
    assert local.wait() == 5


def test_nothing_new_is_a_timeout_that_says_what_was_waited_for(waiting: Waiting) -> None:
    waiting.save(10)
    with pytest.raises(DeadlineError, match="a new checkpoint did not come within 1m40s") as caught:
        waiting.wait()
    assert waiting.time.elapsed == 100
    assert caught.value.facts == {"step": None, "done": [], "missing": []}
    assert waiting.notes == [f"{waiting.dir.url}: waiting for a new checkpoint, for 1m40s at most"]


def test_the_deadline_is_looked_at(waiting: Waiting) -> None:
    waiting.save_at(3.9, 5)
    assert waiting.wait(timeout=4, interval=10) == 5
    assert waiting.time.elapsed == 4


def test_a_directory_that_is_not_there_yet_is_waited_for(save_dir: SaveDir) -> None:
    waiting = Waiting(SaveDir(f"{save_dir.url}/later", save_dir.root and save_dir.root / "later", save_dir.bucket))
    waiting.time.at(35, lambda: write_checkpoint(save_dir.write, "later/7"))
    found = wait_for_checkpoint(open_storage(waiting.dir.url), Wanted(), waiting.pace())
    assert (found.step, waiting.time.elapsed) == (7, 40)


def test_a_bucket_that_is_not_there_is_said_at_once(bucket: Bucket) -> None:
    fake = FakeClock()
    for wanted in (Wanted(), Wanted(step=5), Wanted(at_least=1)):
        with pytest.raises(SaveDirNotFoundError, match="no such bucket"):
            wait_for_checkpoint(
                open_storage(f"gs://none-{uuid.uuid4().hex}/run"), wanted, Pace(100, 10, fake.clock, fake.sleep)
            )
    assert fake.slept == []


def test_a_checkpoint_or_a_file_instead_of_a_save_directory_is_refused_at_once(local: Waiting) -> None:
    local.save(10)
    local.save(20, complete=False)
    (pathlib.Path(local.dir.url) / "20" / "replicated").mkdir()
    for path in ("10", "20", "10/0/model/weight"):
        for wanted in (Wanted(), Wanted(step=0)):
            with pytest.raises(InvalidPathError):
                wait_for_checkpoint(open_storage(f"{local.dir.url}/{path}"), wanted, local.pace())
    assert local.time.slept == []


def test_what_turns_out_to_be_a_checkpoint_is_refused_then(local: Waiting) -> None:
    local.time.at(15, lambda: local.save(30))
    with pytest.raises(InvalidPathError, match="is a checkpoint"):
        wait_for_checkpoint(open_storage(f"{local.dir.url}/30"), Wanted(), local.pace())
    assert local.time.elapsed == 20


def test_a_save_directory_that_goes_away_and_comes_back_is_waited_for(local: Waiting) -> None:
    local.save(10)
    local.time.at(15, lambda: local.dir.delete_dir("10") or os.rmdir(local.dir.url))
    local.save_at(35, 5)
    assert local.wait() == 5


# -- half a manifest -------------------------------------------------------------------------------------------------


def test_half_a_manifest_is_not_handed_out_and_looked_at_again(waiting: Waiting) -> None:
    whole = metadata({"0/x": {"type": "list"}})
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", whole[: len(whole) // 2]))
    waiting.time.at(25, lambda: waiting.dir.write("10/.snapshot_metadata", whole))
    assert waiting.wait() == 10
    assert waiting.time.elapsed == 30
    assert [warning for warning in waiting.warnings if "passed over" in warning] == waiting.warnings


def test_an_empty_manifest_is_none(waiting: Waiting) -> None:
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", b""))
    waiting.save_at(45, 10)
    assert waiting.wait() == 10
    assert waiting.time.elapsed == 50
    assert waiting.warnings == []


def test_half_a_manifest_at_the_start_that_is_finished_later_is_new(waiting: Waiting) -> None:
    whole = metadata({"0/x": {"type": "list"}})
    waiting.dir.write("10/.snapshot_metadata", whole[:40])
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", whole))
    assert waiting.wait() == 10


def test_a_newer_one_that_never_parses_gives_way_to_the_next_and_is_said_once(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.dir.write("20/.snapshot_metadata", b'{"version": ')
    assert waiting.wait(at_least=5) == 10
    with pytest.raises(DeadlineError):
        waiting.wait(at_least=15, timeout=300)
    assert len(waiting.warnings) == 1
    assert "passed over" in waiting.warnings[0]


def test_a_manifest_written_to_its_end_while_it_is_read_is_handed_out_once(
    local: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snapctl.evaluation import searching

    whole = metadata({"0/x": {"type": "list"}})
    read_manifest = searching.read_manifest

    def finish_and_read(storage: Any, **options: Any) -> Any:
        local.dir.write("10/.snapshot_metadata", whole)
        monkeypatch.setattr(searching, "read_manifest", read_manifest)
        return read_manifest(storage, **options)

    monkeypatch.setattr(searching, "read_manifest", finish_and_read)
    local.time.at(5, lambda: local.dir.write("10/.snapshot_metadata", whole[:50]))
    assert local.follow() == [(10, 10)]


# -- conditions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "step"),
    [
        ({"at_least": 20}, 30),
        ({"newer_than": 20}, 30),
        ({"newer_than": 29}, 30),
        ({"step": 20}, 20),
        ({"at_least": 0}, 30),
    ],
)
def test_what_fits_and_is_there_is_found_at_once(waiting: Waiting, wanted: dict[str, int], step: int) -> None:
    for there in (10, 20, 30):
        waiting.save(there)
    assert waiting.wait(**wanted) == step
    assert waiting.time.slept == []
    assert waiting.notes == []


def test_newer_means_above_and_at_least_means_from(waiting: Waiting) -> None:
    waiting.save(30)
    waiting.save_at(12, 31)
    assert waiting.wait(newer_than=30) == 31
    assert waiting.wait(at_least=31) == 31


def test_any_step_can_be_waited_for(waiting: Waiting) -> None:
    waiting.save(5)
    waiting.save(20, complete=False)
    waiting.save_at(12, 20)
    assert waiting.wait(step=20) == 20


def test_at_most_one_condition_is_taken() -> None:
    with pytest.raises(InvalidOptionError, match="at most one"):
        Wanted(newer_than=1, step=2)
    with pytest.raises(InvalidOptionError):
        Wanted(evaluated_by=("a/b",))


def test_the_newest_that_a_partition_has_not_marked_is_found(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save(20)
    waiting.save(30, markers=("val",))
    assert waiting.wait(not_evaluated_by=("val",)) == 20
    assert waiting.wait(not_evaluated_by=("val",), at_least=15) == 20
    with pytest.raises(DeadlineError, match="not evaluated by val did not come"):
        waiting.wait(not_evaluated_by=("val",), at_least=25)


def test_a_late_checkpoint_below_newer_than_is_named(local: Waiting) -> None:
    local.save(100)
    local.save_at(15, 50)
    local.save_at(35, 110)
    assert local.wait(newer_than=100) == 110
    assert local.warnings == [f"{local.dir.url}/50: was written later, but its step is not above 100"]


def test_a_run_begun_again_further_down_before_the_start_is_named(local: Waiting) -> None:
    for step, ago in ((40, 30), (50, 20), (90, 400), (100, 300)):
        local.save(step)
        set_time(local.dir.url, step, ago)
    local.save_at(35, 110)
    assert local.wait(newer_than=100) == 110
    assert local.warnings == [f"{local.dir.url}/50: was written later, but its step is not above 100"]


# -- a step that will not come ---------------------------------------------------------------------------------------


def test_a_step_that_is_absent_while_saving_has_gone_on_is_given_up_at_the_second_look(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save(30)
    with pytest.raises(CheckpointNotFoundError, match="no step 20, and step 30 has been saved since"):
        waiting.wait(step=20)
    assert waiting.time.elapsed == 10


def test_with_a_timeout_below_the_interval_it_is_given_up_at_the_deadline(waiting: Waiting) -> None:
    waiting.save(30)
    with pytest.raises(CheckpointNotFoundError):
        waiting.wait(step=20, timeout=4, interval=10)
    assert waiting.time.elapsed == 4


def test_at_a_single_look_it_is_a_timeout(waiting: Waiting) -> None:
    waiting.save(30)
    with pytest.raises(DeadlineError) as caught:
        waiting.wait(step=20, timeout=0)
    assert caught.value.step == 20


def test_two_looks_less_than_an_interval_apart_do_not_count(waiting: Waiting) -> None:
    waiting.save_at(8, 30)
    with pytest.raises(DeadlineError):  # seen at 10 and at the deadline, 15
        waiting.wait(step=20, timeout=15, interval=10)


def test_an_absent_step_is_waited_for_while_only_lower_ones_are_saved(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save_at(55, 20)
    assert waiting.wait(step=20) == 20


def test_the_newest_counts_by_time_not_by_step(local: Waiting) -> None:
    local.save(30)
    set_time(local.dir.url, 30, 300)
    local.save(10)  # a run begun again further down: 20 will come
    local.save_at(55, 20)
    assert local.wait(step=20) == 20


def test_the_recorded_time_counts_for_a_copy(local: Waiting) -> None:
    import google_crc32c

    for step, saved_at in ((30, 1_700_000_000.0), (10, 1_750_000_000.0)):
        local.save(step)
        manifest = local.dir.read(f"{step}/.snapshot_metadata")
        record = SaveRecord(saved_at, 1, BlobSum(len(manifest), google_crc32c.value(manifest)))
        local.dir.write(f"{step}/.snapctl/save.json", format_save_record(record))
    set_time(local.dir.url, 10, 50)  # 30 was copied after 10
    local.save_at(55, 20)
    assert local.wait(step=20) == 20


def test_a_directory_that_is_there_without_a_manifest_is_being_saved(waiting: Waiting) -> None:
    waiting.save(30)
    waiting.save(20, complete=False)
    waiting.save_at(55, 20)
    assert waiting.wait(step=20) == 20


def test_one_absence_in_between_is_not_enough(local: Waiting) -> None:
    local.save(30)
    local.time.at(5, lambda: local.save(20, complete=False))
    local.time.at(15, lambda: local.dir.delete_dir("20"))
    local.time.at(25, lambda: local.save(20, complete=False))
    local.save_at(45, 20)
    assert local.wait(step=20) == 20


# -- evaluators ------------------------------------------------------------------------------------------------------


def test_it_waits_until_every_partition_has_marked_the_checkpoint(waiting: Waiting) -> None:
    waiting.save(20)
    waiting.mark_at(12, 20, "val")
    waiting.mark_at(25, 20, "test")
    assert waiting.wait(step=20, evaluated_by=("val", "test")) == 20
    assert waiting.time.elapsed == 30
    assert waiting.notes == [f"{waiting.dir.url}/20: waiting for evaluation by val, test, for 1m40s at most"]


def test_once_found_it_stays_the_same_checkpoint(waiting: Waiting) -> None:
    waiting.save_at(5, 20)
    waiting.save_at(15, 30, markers=("val",))
    waiting.mark_at(25, 20, "val")
    assert waiting.wait(evaluated_by=("val",)) == 20


def test_the_answer_has_the_metrics_that_came_meanwhile(waiting: Waiting) -> None:
    waiting.save(20)
    body = b'{"partition": "val", "metrics": {"loss": 0.5}}'
    waiting.time.at(5, lambda: waiting.dir.write("20/evaled_by/val_DONE", body))
    wanted = Wanted(step=20, evaluated_by=("val",))
    found = wait_for_checkpoint(open_storage(waiting.dir.url), wanted, waiting.pace())
    assert found.metrics == {"val": {"loss": 0.5}}


def test_the_timeout_names_who_is_missing_and_who_is_done(waiting: Waiting) -> None:
    waiting.save(20, markers=("val",))
    for name in ("val_DONE.tmp", "train_done", "TEST_DONE"):
        waiting.dir.write(f"20/evaled_by/{name}", b"")
    if waiting.dir.root is not None:
        (waiting.dir.root / "20/evaled_by/test_DONE").mkdir()
    with pytest.raises(
        EvaluationTimeoutError, match=r"not evaluated by test, train within 1m40s \(but by val\)"
    ) as caught:
        waiting.wait(step=20, evaluated_by=("test", "val", "train", "test"))
    assert caught.value.facts == {"step": 20, "done": ["val"], "missing": ["test", "train"]}
    assert isinstance(caught.value, TimeoutError)


def test_a_timeout_before_the_checkpoint_came_names_all(waiting: Waiting) -> None:
    with pytest.raises(EvaluationTimeoutError) as caught:
        waiting.wait(step=20, evaluated_by=("a", "b"))
    assert caught.value.facts == {"step": 20, "done": [], "missing": ["a", "b"]}


def test_the_timeout_is_for_both_phases_together(waiting: Waiting) -> None:
    waiting.save_at(85, 20)
    with pytest.raises(EvaluationTimeoutError):
        waiting.wait(evaluated_by=("val",))
    assert waiting.time.elapsed == 100


def test_one_that_vanishes_while_evaluators_are_awaited_is_not_there(waiting: Waiting) -> None:
    waiting.save(20)
    waiting.time.at(15, lambda: waiting.dir.delete("20/.snapshot_metadata"))
    with pytest.raises(CheckpointNotFoundError, match="went while"):
        waiting.wait(step=20, evaluated_by=("val",))
    assert waiting.time.elapsed == 20


# -- files that report -----------------------------------------------------------------------------------------------


def failure_file(waiting: Waiting) -> FailureFile:
    return FailureFile(f"{waiting.dir.url}/FAILED", watch_file(f"{waiting.dir.url}/FAILED"))


def test_the_file_of_a_failure_ends_it(waiting: Waiting) -> None:
    waiting.time.at(15, lambda: waiting.dir.write("FAILED", b""))
    with pytest.raises(FailureReportedError, match="FAILED"):
        wait_for_checkpoint(open_storage(waiting.dir.url), Wanted(), waiting.pace(), fail_if=failure_file(waiting))
    assert waiting.time.elapsed == 20


def test_a_checkpoint_that_fits_wins_over_the_file_of_a_failure(waiting: Waiting) -> None:
    waiting.time.at(15, lambda: waiting.dir.write("FAILED", b""))
    waiting.save_at(16, 10)
    found = wait_for_checkpoint(open_storage(waiting.dir.url), Wanted(), waiting.pace(), fail_if=failure_file(waiting))
    assert found.step == 10


def test_the_file_of_a_failure_ends_waiting_for_evaluators_unless_they_are_done(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.time.at(15, lambda: waiting.dir.write("FAILED", b""))
    wanted = Wanted(step=10, evaluated_by=("val",))
    with pytest.raises(FailureReportedError):
        wait_for_checkpoint(open_storage(waiting.dir.url), wanted, waiting.pace(), fail_if=failure_file(waiting))
    waiting.dir.write("10/evaled_by/val_DONE", b"")
    wait_for_checkpoint(open_storage(waiting.dir.url), wanted, waiting.pace(), fail_if=failure_file(waiting))


def test_the_file_is_looked_at_before_the_checkpoints(local: Waiting) -> None:
    looks: list[str] = []

    def exists() -> bool:
        looks.append("file")
        local.save(10)  # between the two: it must be seen in this very round
        return True

    found = wait_for_checkpoint(
        open_storage(local.dir.url), Wanted(at_least=0), local.pace(), fail_if=FailureFile("x", exists)
    )
    assert (found.step, looks) == (10, ["file"])


def test_a_directory_is_not_the_file(local: Waiting) -> None:
    (pathlib.Path(local.dir.url) / "FAILED").mkdir()
    assert not watch_file(f"{local.dir.url}/FAILED")()
    with pytest.raises(InvalidPathError):
        watch_file("/")


# -- following -------------------------------------------------------------------------------------------------------


def test_each_is_handed_out_as_it_becomes_complete(waiting: Waiting) -> None:
    waiting.save(10)
    for seconds, step in ((5, 20), (25, 30), (45, 5)):
        waiting.save_at(seconds, step)
    assert waiting.follow() == [(10, 20), (30, 30), (50, 5)]
    assert waiting.time.elapsed == 150


def test_none_is_missed_between_two_looks_and_the_oldest_comes_first(local: Waiting) -> None:
    def three() -> None:
        for step, ago in ((40, 10), (20, 30), (30, 20)):
            local.save(step)
            set_time(local.dir.url, step, ago)

    local.time.at(5, three)
    assert [step for _, step in local.follow()] == [20, 30, 40]


def test_of_equal_times_the_higher_step_is_the_later(local: Waiting) -> None:
    when = time.time() - 100

    def three() -> None:
        for step in (30, 9, 100):
            local.save(step)
            os.utime(pathlib.Path(local.dir.url) / f"{step}/.snapshot_metadata", (when, when))

    local.time.at(5, three)
    assert [step for _, step in local.follow()] == [9, 30, 100]


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        ({}, [40]),
        ({"newer_than": 10}, [20, 30, 40]),
        ({"at_least": 10}, [10, 20, 30, 40]),
        ({"not_evaluated_by": ("val",)}, [10, 30, 40]),
        ({"not_evaluated_by": ("val", "test"), "at_least": 20}, [40]),
        ({"at_least": 100}, []),
    ],
)
def test_existing_ones_come_first_where_a_condition_says_which(
    waiting: Waiting, wanted: dict[str, Any], steps: list[int]
) -> None:
    waiting.save(10)
    waiting.save(20, markers=("val",))
    waiting.save(30, markers=("test",))
    waiting.save_at(15, 40)
    assert [step for _, step in waiting.follow(**wanted)] == steps


def test_one_that_is_saved_again_comes_again(waiting: Waiting) -> None:
    waiting.save_at(5, 10)
    waiting.time.at(35, lambda: waiting.dir.write("10/.snapshot_metadata", metadata({"0/x": {"type": "list"}})))
    assert waiting.follow() == [(10, 10), (40, 10)]


def test_one_marked_by_others_meanwhile_is_not_handed_out(waiting: Waiting) -> None:
    for step in (10, 20, 30):
        waiting.save(step)
    found = []
    with pytest.raises(DeadlineError):
        for checkpoint in waiting.following(not_evaluated_by=("val",)):
            found.append(checkpoint.step)
            waiting.dir.write("20/evaled_by/val_DONE", b"")
    assert found == [10, 30]


def test_with_evaluators_each_comes_when_they_have_marked_it(waiting: Waiting) -> None:
    waiting.save_at(5, 10)
    waiting.save_at(6, 20)
    waiting.mark_at(15, 20, "val")
    waiting.mark_at(45, 10, "val")
    assert waiting.follow(evaluated_by=("val",)) == [(20, 20), (50, 10)]


def test_the_timeout_of_a_follower_names_the_oldest_that_is_not_evaluated(waiting: Waiting) -> None:
    waiting.save_at(5, 10)
    waiting.save_at(6, 20)
    waiting.mark_at(15, 10, "a")
    with pytest.raises(EvaluationTimeoutError) as caught:
        list(waiting.following(evaluated_by=("a", "b")))
    assert caught.value.facts == {"step": 10, "done": ["a"], "missing": ["b"]}


def test_the_time_of_who_works_on_a_checkpoint_does_not_count(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.save_at(1000, 20)
    found = []
    with pytest.raises(DeadlineError):
        for checkpoint in waiting.following(at_least=0):
            found.append(checkpoint.step)
            if checkpoint.step == 10:
                waiting.time.advance(2000)
    assert found == [10, 20]
    assert 2100 <= waiting.time.elapsed <= 2111


def test_it_ends_when_the_file_is_there_and_all_is_handed_out(waiting: Waiting) -> None:
    waiting.save_at(12, 10)
    waiting.save_at(14, 20)
    waiting.time.at(15, lambda: waiting.dir.write("DONE", b""))
    stop = watch_file(f"{waiting.dir.url}/DONE")
    found = list(follow_checkpoints(open_storage(waiting.dir.url), Wanted(), waiting.pace(), stop_if=stop))
    assert [checkpoint.step for checkpoint in found] == [10, 20]
    assert waiting.time.elapsed == 20


def test_what_is_completed_between_the_file_and_the_look_is_handed_out(local: Waiting) -> None:
    def stop() -> bool:
        local.save(10)
        return True

    found = list(follow_checkpoints(open_storage(local.dir.url), Wanted(at_least=0), local.pace(), stop_if=stop))
    assert [checkpoint.step for checkpoint in found] == [10]


def test_half_a_manifest_is_still_waited_for_when_the_file_is_there(waiting: Waiting) -> None:
    whole = metadata({"0/x": {"type": "list"}})
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", whole[:50]))
    waiting.time.at(15, lambda: waiting.dir.write("10/.snapshot_metadata", whole))
    stop = lambda: waiting.time.elapsed >= 5  # noqa: E731
    found = list(follow_checkpoints(open_storage(waiting.dir.url), Wanted(), waiting.pace(), stop_if=stop))
    assert [checkpoint.step for checkpoint in found] == [10]


def test_a_manifest_that_never_parses_does_not_hold_the_end(waiting: Waiting) -> None:
    waiting.time.at(5, lambda: waiting.dir.write("10/.snapshot_metadata", b'{"version": '))
    stop = lambda: waiting.time.elapsed >= 5  # noqa: E731
    assert list(follow_checkpoints(open_storage(waiting.dir.url), Wanted(), waiting.pace(), stop_if=stop)) == []
    assert waiting.time.elapsed == 50


def test_what_is_not_evaluated_yet_holds_the_end(waiting: Waiting) -> None:
    waiting.save(10)
    waiting.mark_at(25, 10, "val")
    wanted = Wanted(at_least=0, evaluated_by=("val",))
    found = list(follow_checkpoints(open_storage(waiting.dir.url), wanted, waiting.pace(), stop_if=lambda: True))
    assert [checkpoint.step for checkpoint in found] == [10]


def test_a_failure_ends_a_follower_after_what_is_there(waiting: Waiting) -> None:
    waiting.save_at(5, 10)
    waiting.time.at(6, lambda: waiting.dir.write("FAILED", b""))
    found = []
    with pytest.raises(FailureReportedError):
        for checkpoint in follow_checkpoints(
            open_storage(waiting.dir.url), Wanted(), waiting.pace(), fail_if=failure_file(waiting)
        ):
            found.append(checkpoint.step)
    assert found == [10]


def test_one_that_is_deleted_before_its_turn_is_left_out(waiting: Waiting) -> None:
    for step in (10, 20, 30):
        waiting.save(step)
    found = []
    with pytest.raises(DeadlineError):
        for checkpoint in waiting.following(at_least=0):
            found.append(checkpoint.step)
            if checkpoint.step == 10:
                waiting.dir.delete_dir("20")
    assert found == [10, 30]


# -- storages that fail ----------------------------------------------------------------------------------------------


@pytest.fixture
def behind_proxy(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> tuple[Waiting, Callable[..., None]]:
    """A save directory in a bucket with step 10, and a function that sets the proxy's faults."""
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 1)
    bucket, proxy = proxied
    waiting = Waiting(SaveDir(f"{bucket.url}/run", bucket=bucket))
    waiting.save(10)
    return waiting, lambda *faults: proxy.configure(faults=list(faults))


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"drop": True}, {"status": 200, "body": "<html>"}])
def test_a_storage_that_is_away_for_a_while_is_survived_and_said_once(
    behind_proxy: tuple[Waiting, Callable[..., None]], fault: dict[str, Any]
) -> None:
    waiting, set_faults = behind_proxy
    waiting.time.at(5, lambda: set_faults({"match": "/o", **fault}))
    waiting.time.at(55, set_faults)
    waiting.save_at(35, 20)
    assert waiting.wait() == 20
    assert waiting.time.elapsed == 60
    assert len(waiting.warnings) == 1


def test_a_storage_that_is_away_at_the_deadline_is_the_reason(
    behind_proxy: tuple[Waiting, Callable[..., None]],
) -> None:
    waiting, set_faults = behind_proxy
    waiting.time.at(95, lambda: set_faults({"match": "/o", "status": 503}))
    with pytest.raises(UnavailableError):
        waiting.wait()
    assert waiting.time.elapsed == 100


def follow_fake_clock(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the storage's time pass with the fake clock, from now on."""
    from snapctl.storage.gcs import GcsStorage

    time.sleep(0.01)
    began = time.time()
    monkeypatch.setattr(GcsStorage, "now", lambda self, *, may_write: began + waiting.time.elapsed)
    time.sleep(0.01)


def test_a_storage_that_came_back_before_the_deadline_is_not_the_reason(
    behind_proxy: tuple[Waiting, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, set_faults = behind_proxy
    follow_fake_clock(waiting, monkeypatch)
    set_faults({"match": "/o", "status": 503})
    waiting.time.at(95, set_faults)
    with pytest.raises(DeadlineError):
        waiting.wait()


def test_what_was_saved_while_the_first_looks_failed_is_new(
    behind_proxy: tuple[Waiting, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, set_faults = behind_proxy
    follow_fake_clock(waiting, monkeypatch)
    set_faults({"match": "/o", "status": 503})
    waiting.save_at(20, 20)
    waiting.time.at(35, set_faults)
    assert waiting.follow() == [(40, 20)]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("wanted", [{}, {"at_least": 5}, {"step": 10}, {"step": 20}])
def test_who_is_refused_is_told_at_once(
    behind_proxy: tuple[Waiting, Callable[..., None]], status: int, wanted: dict[str, Any]
) -> None:
    waiting, set_faults = behind_proxy
    set_faults({"match": "/o", "status": status, "body": "{}"})
    with pytest.raises(PermissionDeniedError if status == 403 else CredentialsError):
        waiting.wait(**wanted)
    assert waiting.time.slept == []


def test_who_may_list_but_not_read_is_told_when_there_is_something_to_read(
    behind_proxy: tuple[Waiting, Callable[..., None]],
) -> None:
    waiting, set_faults = behind_proxy
    set_faults({"match": "run%2F20%2F", "status": 403, "body": "{}"})
    waiting.save_at(15, 20)
    with pytest.raises(PermissionDeniedError):
        waiting.wait()
    assert waiting.time.elapsed == 20


def test_an_old_one_that_may_not_be_read_does_not_keep_a_new_one(
    behind_proxy: tuple[Waiting, Callable[..., None]],
) -> None:
    waiting, set_faults = behind_proxy
    waiting.save(5)
    set_faults({"match": "run%2F5%2F", "status": 403, "body": "{}"})
    waiting.save_at(15, 20)
    assert waiting.wait() == 20
    assert len(waiting.warnings) == 1
    assert waiting.wait(at_least=5) == 20


def test_a_newer_one_that_cannot_be_looked_at_is_said(behind_proxy: tuple[Waiting, Callable[..., None]]) -> None:
    waiting, set_faults = behind_proxy
    waiting.save_at(5, 20)
    waiting.save_at(6, 30)
    waiting.time.at(7, lambda: set_faults({"match": "run%2F30%2F", "status": 503, "body": "{}"}))
    assert waiting.wait() == 20
    assert len(waiting.warnings) == 1
    assert "could not be looked at: " in waiting.warnings[0]


def test_one_that_could_not_be_looked_at_at_first_is_not_new_when_it_can(
    behind_proxy: tuple[Waiting, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, set_faults = behind_proxy
    waiting.save(5)
    follow_fake_clock(waiting, monkeypatch)
    set_faults({"match": "run%2F5%2F", "status": 503, "body": "{}"})
    waiting.time.at(15, set_faults)
    with pytest.raises(DeadlineError):
        waiting.wait()


def test_a_server_that_hangs_is_given_up_at_the_deadline(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    storage = open_storage(f"{bucket.url}/run")
    storage.list_dir()
    proxy.configure(faults=[{"match": ".", "hang": 60}])
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="no answer in time"):
        wait_for_checkpoint(storage, Wanted(), Pace(0.2, 0.1))
    assert 1 <= time.monotonic() - started < 5


# -- the names that training code knows ------------------------------------------------------------------------------


def iterate(waiting: Waiting, *, timeout: float | None = 100) -> list[tuple[float, str]]:
    fake = waiting.time
    paths = snapctl.checkpoints_iterator(waiting.dir.url, 10, timeout, clock=fake.clock, sleep=fake.sleep)
    return [(fake.elapsed, path.rpartition("/")[2]) for path in paths]


def test_the_iterator_gives_the_newest_at_once_and_then_all_that_come(waiting: Waiting) -> None:
    for step in (10, 20, 30):
        waiting.save(step)
    waiting.save_at(15, 40)
    waiting.save_at(16, 5)
    assert sorted(iterate(waiting)) == [(0, "30"), (20, "40"), (20, "5")]
    assert waiting.time.elapsed == 120


def test_the_iterator_over_what_is_not_there_yet_waits_and_ends(waiting: Waiting) -> None:
    assert iterate(waiting) == []
    assert waiting.time.elapsed == 100
    waiting.save_at(115, 10)
    assert [step for _, step in iterate(waiting)] == ["10"]


def test_the_iterator_passes_over_a_newest_that_does_not_parse_until_it_does(waiting: Waiting) -> None:
    whole = metadata({"0/x": {"type": "list"}})
    waiting.save(10)
    waiting.dir.write("20/.snapshot_metadata", whole[:50])
    waiting.time.at(15, lambda: waiting.dir.write("20/.snapshot_metadata", whole))
    assert iterate(waiting) == [(0, "10"), (20, "20")]


def test_the_iterator_ends_with_the_reason_when_the_storage_is_away(
    behind_proxy: tuple[Waiting, Callable[..., None]],
) -> None:
    waiting, set_faults = behind_proxy
    waiting.time.at(15, lambda: set_faults({"match": "/o", "status": 503}))
    with pytest.raises(UnavailableError):
        iterate(waiting)


def wait_for(waiting: Waiting, names: Any, step: int, timeout: float | None = 100) -> None:
    fake = waiting.time
    snapctl.wait_for_evaluators(
        waiting.dir.url, names, step, timeout, seconds_to_sleep=10, clock=fake.clock, sleep=fake.sleep
    )


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda names: (name for name in names)])
def test_evaluators_of_a_step_that_is_no_longer_the_newest_are_waited_for(
    waiting: Waiting, kind: Callable[..., Any]
) -> None:
    waiting.save(20)
    waiting.save(30)
    waiting.mark_at(12, 20, "val")
    waiting.mark_at(25, 20, "test")
    wait_for(waiting, kind(["val", "test", "val"]), 20)
    assert waiting.time.elapsed == 30


def test_the_callers_list_stays_as_it_is(waiting: Waiting) -> None:
    waiting.save(20, markers=("a", "b"))
    names = ["a", "b", "a"]
    wait_for(waiting, names, 20)
    assert names == ["a", "b", "a"]


def test_no_partitions_are_done_at_once(waiting: Waiting) -> None:
    wait_for(waiting, [], 999)
    assert waiting.time.slept == []


def test_one_name_instead_of_names_is_refused(waiting: Waiting) -> None:
    with pytest.raises(InvalidOptionError):
        wait_for(waiting, "val", 20)


def test_missing_evaluators_are_named_when_the_time_is_up(waiting: Waiting) -> None:
    waiting.save(20, markers=("val",))
    with pytest.raises(snapctl.EvaluationTimeoutError, match="test, train") as caught:
        wait_for(waiting, ["val", "test", "train"], 20, timeout=7)
    assert (caught.value.done, caught.value.missing) == (("val",), ("test", "train"))
    assert waiting.time.elapsed == 7


def test_a_step_that_will_not_come_is_not_waited_for(waiting: Waiting) -> None:
    waiting.save(30)
    with pytest.raises(CheckpointNotFoundError):
        wait_for(waiting, ["val"], 20)


def test_storage_options_reach_every_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 1)
    options = {"endpoint_url": "http://127.0.0.1:1", "token": "anon"}
    url = f"gs://bucket-{uuid.uuid4().hex}/run"
    for call in (
        lambda: snapctl.is_done_eval(f"{url}/1", "val", storage_options=options),
        lambda: snapctl.mark_done_eval(f"{url}/1", "val", storage_options=options),
        lambda: snapctl.claim_eval(f"{url}/1", "val", storage_options=options),
        lambda: snapctl.renew_claim(f"{url}/1", "val", "me", storage_options=options),
        lambda: snapctl.release_claim(f"{url}/1", "val", "me", storage_options=options),
        lambda: next(snapctl.checkpoints_iterator(url, timeout=0, storage_options=options)),
        lambda: snapctl.wait_for_evaluators(url, ["val"], 1, 0, storage_options=options),
    ):
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            call()


def test_the_default_clock_is_a_real_one(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    started = time.monotonic()
    assert list(snapctl.checkpoints_iterator(str(tmp_path), 0.01, 0.05)) == [f"{tmp_path}/10"]
    with pytest.raises(TimeoutError):
        snapctl.wait_for_evaluators(str(tmp_path), ["val"], 10, 0.05, seconds_to_sleep=0.01)
    assert 0.1 <= time.monotonic() - started < 5
