"""Markers and pins: what is written, what is kept, and that nothing is left where no checkpoint is."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import snapctl
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    InvalidPathError,
    RefusedError,
    StorageError,
    UnavailableError,
)
from snapctl.evaluation.claims import ClaimRefusedError, take_claim
from snapctl.evaluation.evals import assign_metrics, find_marker, find_pin, mark, mark_each, pin, remove_mark, unpin
from snapctl.markers import parse_marker, parse_pin
from snapctl.storage import FileInfo, Storage, open_storage, run_parallel
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, write_checkpoint

NOW = 1_800_000_000.0


@pytest.fixture
def checkpoint(save_dir: SaveDir) -> Storage:
    """A complete checkpoint, step 10."""
    write_checkpoint(save_dir.write, 10)
    return open_storage(f"{save_dir.url}/10")


def acting_between(storage: Storage, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets somebody else act directly after the next thing is written."""
    write = type(storage).write
    done: list[bool] = []

    def writes_then_acts(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        if not done:
            done.append(True)
            act()
        return found

    monkeypatch.setattr(type(storage), "write", writes_then_acts)


# -- markers ---------------------------------------------------------------------------------------------------------


def test_a_mark_is_a_json_file_with_the_time_and_the_metrics(checkpoint: Storage, save_dir: SaveDir) -> None:
    mark(checkpoint, "val", {"loss": 0.25, "acc": 1}, clock=lambda: NOW)
    body = json.loads(save_dir.read("10/evaled_by/val_DONE"))
    assert body == {
        "partition": "val",
        "finished_at": "2027-01-15T08:00:00.000Z",
        "metrics": {"loss": 0.25, "acc": 1.0},
        "host": os.uname().nodename,
    }
    assert save_dir.names("10/evaled_by") == ["10/evaled_by/val_DONE"]


def test_numbers_that_are_not_finite_are_strings_and_come_back(checkpoint: Storage, save_dir: SaveDir) -> None:
    mark(checkpoint, "val", {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert json.loads(save_dir.read("10/evaled_by/val_DONE"))["metrics"] == {
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    found = find_marker(checkpoint, "val")
    assert found is not None
    assert math.isnan(found.metrics["a"])
    assert (found.metrics["b"], found.metrics["c"]) == (math.inf, -math.inf)


def test_marking_again_keeps_the_first_time_and_the_other_metrics(checkpoint: Storage, save_dir: SaveDir) -> None:
    mark(checkpoint, "val", {"loss": 0.5, "acc": 0.9}, clock=lambda: NOW)
    mark(checkpoint, "val", {"loss": 0.25, "f1": 0.1}, clock=lambda: NOW + 3600)
    found = find_marker(checkpoint, "val")
    assert found is not None
    assert found.finished_at == NOW
    assert found.metrics == {"loss": 0.25, "acc": 0.9, "f1": 0.1}


def test_marking_again_with_nothing_new_writes_nothing(checkpoint: Storage) -> None:
    mark(checkpoint, "val", {"loss": math.nan})
    before = checkpoint.find_file("evaled_by/val_DONE")
    mark(checkpoint, "val", {"loss": math.nan}, clock=lambda: NOW)
    mark(checkpoint, "val", clock=lambda: NOW)
    assert checkpoint.find_file("evaled_by/val_DONE") == before


def test_an_empty_marker_of_an_older_job_is_a_mark_and_keeps_its_time(checkpoint: Storage, save_dir: SaveDir) -> None:
    save_dir.write("10/evaled_by/val_DONE", b"")
    file = checkpoint.find_file("evaled_by/val_DONE")
    assert file is not None
    mark(checkpoint, "val", clock=lambda: NOW)
    assert save_dir.read("10/evaled_by/val_DONE") == b""
    mark(checkpoint, "val", {"loss": 1.0}, clock=lambda: NOW)
    written = parse_marker("val", save_dir.read("10/evaled_by/val_DONE"))
    assert written.metrics == {"loss": 1.0}
    assert written.finished_at == pytest.approx(file.modified_at, abs=0.002)


def test_a_marker_that_cannot_be_understood_is_a_mark_and_is_replaced_by_new_metrics(
    checkpoint: Storage, save_dir: SaveDir
) -> None:
    save_dir.write("10/evaled_by/val_DONE", b"finished!")
    assert mark(checkpoint, "val").problem is not None
    assert save_dir.read("10/evaled_by/val_DONE") == b"finished!"
    assert mark(checkpoint, "val", {"loss": 1.0}).problem is None
    assert parse_marker("val", save_dir.read("10/evaled_by/val_DONE")).metrics == {"loss": 1.0}


def test_metrics_that_many_add_at_once_are_all_there(checkpoint: Storage) -> None:
    names = [f"m{number}" for number in range(8)]
    run_parallel(lambda name: mark(checkpoint, "val", {name: 1.0}), names, jobs=8)
    found = find_marker(checkpoint, "val")
    assert found is not None
    assert set(found.metrics) == set(names)


def test_a_checkpoint_that_is_not_there_is_refused_and_not_made(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    before = save_dir.names()
    with pytest.raises(CheckpointNotFoundError):
        mark(open_storage(f"{save_dir.url}/999"), "val")
    with pytest.raises(CheckpointNotFoundError):
        pin(open_storage(f"{save_dir.url}/999"))
    assert save_dir.names() == before


@pytest.mark.parametrize("manifest", [None, b""])
def test_an_incomplete_checkpoint_is_refused(save_dir: SaveDir, manifest: bytes | None) -> None:
    write_checkpoint(save_dir.write, 10, complete=False)
    if manifest is not None:
        save_dir.write("10/.snapshot_metadata", manifest)
    before = save_dir.names()
    with pytest.raises(CheckpointNotFoundError, match="incomplete"):
        mark(open_storage(f"{save_dir.url}/10"), "val")
    assert save_dir.names() == before


def test_a_checkpoint_that_goes_while_it_is_marked_leaves_no_ghost(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deletes_all_but_the_marker() -> None:
        save_dir.delete("10/.snapshot_metadata")
        save_dir.delete_dir("10/0")

    acting_between(checkpoint, deletes_all_but_the_marker, monkeypatch)
    with pytest.raises(CheckpointNotFoundError):
        mark(checkpoint, "val")
    assert save_dir.names() == []
    assert save_dir.root is None or os.listdir(save_dir.root) == []


def test_what_a_deleter_has_not_got_to_yet_is_left_to_it(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting_between(checkpoint, lambda: save_dir.delete("10/.snapshot_metadata"), monkeypatch)
    with pytest.raises(CheckpointNotFoundError):
        mark(checkpoint, "val")
    assert save_dir.names() == ["10/0/model/weight"]


def test_a_checkpoint_whose_whole_directory_goes_is_not_made_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    monkeypatch.setattr("snapctl.evaluation.evals.require_complete", lambda storage: shutil.rmtree(storage.url))
    with pytest.raises(CheckpointNotFoundError):
        mark(open_storage(tmp_path / "10"), "val")
    assert os.listdir(tmp_path) == []


def test_a_directory_of_that_name_is_no_marker_and_in_the_way(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    (tmp_path / "10/evaled_by/test_DONE").mkdir(parents=True)
    storage = open_storage(tmp_path / "10")
    assert find_marker(storage, "test") is None
    assert not snapctl.is_done_eval(str(tmp_path / "10"), "test")
    with pytest.raises(StorageError, match="something else is in its place"):
        mark(storage, "test")


def test_only_the_very_name_of_the_partition_counts(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10, markers=("VAL", "val2", "other"))
    for name in ("val_DONE.tmp", "val_done", "xval_DONE.snapctl-tmp-1"):
        save_dir.write(f"10/evaled_by/{name}", b"")
    assert not snapctl.is_done_eval(f"{save_dir.url}/10", "val")
    assert snapctl.is_done_eval(f"{save_dir.url}/10", "VAL")


@pytest.mark.parametrize("partition", ["", ".", "..", "../../x", "a/b", "x" * 201, "a\n", "\udcff"])
def test_a_name_that_would_lead_elsewhere_is_refused(save_dir: SaveDir, partition: str) -> None:
    write_checkpoint(save_dir.write, 10)
    before = save_dir.names()
    for call in (snapctl.mark_done_eval, snapctl.is_done_eval):
        with pytest.raises(InvalidOptionError):
            call(f"{save_dir.url}/10", partition)
    assert save_dir.names() == before


@pytest.mark.parametrize("partition", ["val_DONE", "p 1", "ü", "-x", "[a]*?", "x" * 200, "val_CLAIM.1", "%2F", "a&b=c"])
def test_odd_names_are_taken_literally(save_dir: SaveDir, partition: str) -> None:
    write_checkpoint(save_dir.write, 10)
    snapctl.mark_done_eval(f"{save_dir.url}/10", partition, metrics={"m": 1.0})
    assert snapctl.is_done_eval(f"{save_dir.url}/10", partition)
    assert f"10/evaled_by/{partition}_DONE" in save_dir.names("10/evaled_by")
    found = find_marker(open_storage(f"{save_dir.url}/10"), partition)
    assert found is not None
    assert (found.partition, found.metrics) == (partition, {"m": 1.0})


def test_a_save_directory_is_never_taken_for_its_latest_checkpoint(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    with pytest.raises(InvalidPathError, match="is a save directory"):
        snapctl.mark_done_eval(save_dir.url, "val")


def test_is_done_of_what_is_not_there_is_false(save_dir: SaveDir) -> None:
    assert not snapctl.is_done_eval(f"{save_dir.url}/10", "val")


def test_a_mark_is_removed_and_what_is_not_there_is_no_error(checkpoint: Storage, save_dir: SaveDir) -> None:
    mark(checkpoint, "val")
    assert remove_mark(checkpoint, "val")
    assert not remove_mark(checkpoint, "val")
    assert find_marker(checkpoint, "val") is None


def test_removing_a_mark_does_not_bring_back_the_claim_it_had_voided(checkpoint: Storage) -> None:
    claim = take_claim(checkpoint, "val", owner="a")
    mark(checkpoint, "val", owner="a")
    remove_mark(checkpoint, "val")
    assert take_claim(checkpoint, "val", owner="b").number > claim.number


def test_a_mark_by_who_was_overtaken_is_refused_and_without_an_owner_it_is_accepted(checkpoint: Storage) -> None:
    take_claim(checkpoint, "val", owner="b")
    with pytest.raises(ClaimRefusedError, match="'b' has claimed it since"):
        mark(checkpoint, "val", owner="a")
    assert find_marker(checkpoint, "val") is None
    mark(checkpoint, "val")
    assert find_marker(checkpoint, "val") is not None


def test_a_mark_by_the_holder_is_accepted_and_by_one_who_never_met_a_claim(checkpoint: Storage) -> None:
    take_claim(checkpoint, "val", owner="a")
    mark(checkpoint, "val", owner="a")
    mark(checkpoint, "test", owner="a")


def test_what_the_storage_refuses_for_one_partition_does_not_keep_the_others(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    (tmp_path / "10/evaled_by/b_DONE").mkdir(parents=True)
    results = mark_each(open_storage(tmp_path / "10"), {"a": {}, "b": {}, "c": {}})
    assert [name for name, result in results.items() if isinstance(result, StorageError)] == ["b"]
    assert snapctl.is_done_eval(str(tmp_path / "10"), "c")


def test_of_several_partitions_none_is_marked_if_one_was_taken_over(checkpoint: Storage) -> None:
    take_claim(checkpoint, "b", owner="somebody")
    with pytest.raises(ClaimRefusedError):
        mark_each(checkpoint, {"a": {}, "b": {}}, owner="me")
    assert find_marker(checkpoint, "a") is None


def test_a_mark_whose_answer_was_lost_is_made_once(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "lose": True, "n": 1}])
    snapctl.mark_done_eval(f"{bucket.url}/run/10", "val", metrics={"loss": 1.0})
    assert parse_marker("val", bucket.read("run/10/evaled_by/val_DONE")).metrics == {"loss": 1.0}


def test_a_mark_of_which_every_answer_was_lost_still_counts(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 2)
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "lose": True}])
    snapctl.mark_done_eval(f"{bucket.url}/run/10", "val", metrics={"loss": 1.0})


def test_a_storage_that_is_away_is_an_error(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 2)
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "drop": True}])
    with pytest.raises(UnavailableError):
        snapctl.mark_done_eval(f"{bucket.url}/run/10", "val")


def test_a_storage_without_exclusive_creation_still_takes_marks_and_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory://no-exclusive/run/10")
    storage.write(".snapshot_metadata", b"{}")
    storage.scheme = "sftp"
    mark(storage, "val", {"a": 1.0})
    mark(storage, "val", {"b": 2.0})
    pin(storage)
    found = find_marker(storage, "val")
    assert found is not None
    assert found.metrics == {"a": 1.0, "b": 2.0}
    with pytest.raises(RefusedError, match="cannot create a file exclusively"):
        take_claim(storage, "test")


# -- metrics as text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "partitions", "expected"),
    [
        (["loss=0.5"], ["val"], {"val": {"loss": 0.5}}),
        (["val/loss=0.5", "test/loss=1e3"], ["val", "test"], {"val": {"loss": 0.5}, "test": {"loss": 1000.0}}),
        (["val/loss=-.5"], ["val"], {"val": {"loss": -0.5}}),
        (["top5/acc=1"], ["val"], {"val": {"top5/acc": 1.0}}),
        (["val/top5/acc=+1."], ["val", "x"], {"val": {"top5/acc": 1.0}, "x": {}}),
        (["a=b=2"], ["val"], {"val": {"a=b": 2.0}}),
        (["x=inf", "y=-Infinity"], ["val"], {"val": {"x": math.inf, "y": -math.inf}}),
        (["x=1", "x=2"], ["val"], {"val": {"x": 2.0}}),
        ([], ["b", "a"], {"b": {}, "a": {}}),
    ],
)
def test_metrics_go_to_their_partition(pairs: list[str], partitions: list[str], expected: dict[str, Any]) -> None:
    assert assign_metrics(pairs, partitions) == expected


@pytest.mark.parametrize(
    "pair", ["loss", "=1", "loss=", "loss=x", "loss=1_0", "loss= 1", "loss=0x1", "loss=١", "a\x1b=1"]
)
def test_what_is_no_metric_is_refused(pair: str) -> None:
    with pytest.raises(InvalidOptionError):
        assign_metrics([pair], ["val"])


@pytest.mark.parametrize("pair", ["loss=1", "other/loss=1", "val/=1", "/loss=1"])
def test_with_several_partitions_a_metric_names_one_of_them(pair: str) -> None:
    with pytest.raises(InvalidOptionError, match="PARTITION/NAME"):
        assign_metrics([pair], ["val", "test"])


def test_metrics_of_numpy_are_numbers_and_text_is_not(checkpoint: Storage) -> None:
    numpy = pytest.importorskip("numpy")
    assert mark(checkpoint, "val", {"a": numpy.float32(0.5)}).metrics == {"a": 0.5}
    with pytest.raises(InvalidOptionError, match="is no number"):
        mark(checkpoint, "val", {"a": "many"})  # type: ignore[dict-item]


# -- pins ------------------------------------------------------------------------------------------------------------


def test_a_pin_says_who_when_and_why(checkpoint: Storage, save_dir: SaveDir) -> None:
    pin(checkpoint, "for the paper", owner="ann", clock=lambda: NOW)
    assert json.loads(save_dir.read("10/PINNED")) == {
        "note": "for the paper",
        "owner": "ann",
        "pinned_at": "2027-01-15T08:00:00.000Z",
    }


def test_pinning_again_keeps_the_time_and_the_owner_and_takes_the_new_note(checkpoint: Storage) -> None:
    pin(checkpoint, "a", owner="ann", clock=lambda: NOW)
    pin(checkpoint, owner="bob")
    found = pin(checkpoint, "b", owner="bob")
    assert (found.note, found.owner, found.pinned_at) == ("b", "ann", NOW)


def test_an_empty_pin_is_one_and_keeps_its_time(checkpoint: Storage, save_dir: SaveDir) -> None:
    save_dir.write("10/PINNED", b"")
    file = checkpoint.find_file("PINNED")
    assert file is not None
    assert find_pin(checkpoint) is not None
    pin(checkpoint, "a", clock=lambda: NOW)
    assert parse_pin(save_dir.read("10/PINNED")).pinned_at == pytest.approx(file.modified_at, abs=0.002)


def test_a_pin_is_removed_and_what_is_not_there_is_no_error(checkpoint: Storage) -> None:
    pin(checkpoint)
    assert unpin(checkpoint)
    assert not unpin(checkpoint)
    assert find_pin(checkpoint) is None


def test_an_incomplete_checkpoint_can_be_pinned(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10, complete=False)
    pin(open_storage(f"{save_dir.url}/10"))
    assert "10/PINNED" in save_dir.names()


def test_an_empty_directory_is_no_checkpoint_and_is_not_lost(tmp_path: pathlib.Path) -> None:
    (tmp_path / "10").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="is empty"):
        pin(open_storage(tmp_path / "10"))
    assert os.listdir(tmp_path / "10") == []


def test_a_pin_that_meets_a_deletion_is_taken_back(checkpoint: Storage, save_dir: SaveDir) -> None:
    save_dir.write("10/.snapshot_metadata.deleting", b"x")
    with pytest.raises(RefusedError, match="is being deleted"):
        pin(checkpoint)
    assert find_pin(checkpoint) is None


def test_a_deletion_that_is_announced_after_the_pin_sees_it(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting_between(checkpoint, lambda: save_dir.write("10/.snapshot_metadata.deleting", b"x"), monkeypatch)
    with pytest.raises(RefusedError):
        pin(checkpoint)
    assert find_pin(checkpoint) is None


def test_a_deletion_that_never_began_does_not_keep_a_pin_away(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    announced = tmp_path / "10/.snapshot_metadata.deleting"
    announced.write_bytes(b"x")
    an_hour_ago = announced.stat().st_mtime - 3601
    os.utime(announced, (an_hour_ago, an_hour_ago))
    pin(open_storage(tmp_path / "10"))
    assert (tmp_path / "10" / "PINNED").exists()


def test_a_pin_on_what_goes_meanwhile_leaves_no_ghost(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deletes_all_but_the_pin() -> None:
        save_dir.delete("10/.snapshot_metadata")
        save_dir.delete_dir("10/0")

    acting_between(checkpoint, deletes_all_but_the_pin, monkeypatch)
    with pytest.raises(CheckpointNotFoundError):
        pin(checkpoint)
    assert save_dir.names() == []
