"""Which directories are checkpoints, in what state, and how old; on local directories, memory:// and gs://."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c
import pytest

import snapctl as library
from snapctl.checkpoints import (
    classify,
    find_checkpoints,
    find_latest,
    find_place,
    look_at_checkpoint,
    open_checkpoint,
    open_save_dir,
    parse_step,
    plausible_time,
    read_manifest,
)
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidPathError,
    ManifestError,
    NoMatchError,
    SaveDirNotFoundError,
)
from snapctl.storage import Storage, open_storage
from tests.support.servers import Bucket
from tests.support.snapshots import local_writer, metadata, write_checkpoint


@dataclass
class SaveDir:
    """A save directory somewhere, and how to write into it."""

    url: str
    write: Callable[..., None]

    def storage(self) -> Storage:
        return open_storage(self.url)


@pytest.fixture(params=["local", "memory", "gs"])
def save_dir(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> SaveDir:
    if request.param == "local":
        return SaveDir(f"{tmp_path}/run", local_writer(tmp_path / "run"))
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/run"
        store = open_storage(url)
        return SaveDir(url, lambda path, data=b"": store.write(path, data))
    bucket: Bucket = request.getfixturevalue("bucket")
    return SaveDir(f"{bucket.url}/run", lambda path, data=b"": bucket.write(f"run/{path}", data))


def states(save_dir: SaveDir) -> dict[int | None, str]:
    return {found.step: found.state for found in find_checkpoints(open_save_dir(save_dir.url))}


@pytest.mark.parametrize(
    ("name", "step"),
    [("0", 0), ("7", 7), ("100", 100), ("12345678901234567890", 12345678901234567890)]
    + [(name, None) for name in ("0100", "+7", "-1", "1_000", "٣", "9²", "", " 7", "7 ", "7.0", "1e3", "best", "７")],
)
def test_only_canonical_decimal_numbers_are_steps(name: str, step: int | None) -> None:
    assert parse_step(name) == step


def test_steps_are_in_the_order_of_numbers_and_junk_is_left_alone(save_dir: SaveDir) -> None:
    for step in (1000, 9, 100, 10):
        write_checkpoint(save_dir.write, step)
    for name in ("best", "100.backup", "foo-5", "0100", "+7"):
        write_checkpoint(save_dir.write, 5, name=name)
    for name in (".DS_Store", "README.md", "20.tmp-1/0/model/weight", ".ipynb_checkpoints/x", "77"):
        save_dir.write(name, b"x")
    assert list(states(save_dir)) == [9, 10, 100, 1000]
    assert library.get_checkpoints(save_dir.url) == [f"{save_dir.url}/{step}" for step in (9, 10, 100, 1000)]
    assert library.get_checkpoint(save_dir.url) == f"{save_dir.url}/1000"


def test_complete_is_a_manifest_that_is_not_empty(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    write_checkpoint(save_dir.write, 20, complete=False)
    write_checkpoint(save_dir.write, 30, complete=False)
    save_dir.write("30/.snapshot_metadata", b"")
    write_checkpoint(save_dir.write, 40, complete=False)
    save_dir.write("40/.snapshot_metadata.deleting", b"x")
    save_dir.write("50/.snapshot_metadata/not-a-file", b"x")
    assert states(save_dir) == {
        10: "complete",
        20: "incomplete",
        30: "incomplete",
        40: "incomplete",
        50: "incomplete",
    }


def test_a_path_is_told_to_be_a_checkpoint_or_a_save_directory(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    write_checkpoint(save_dir.write, 20, complete=False)
    save_dir.write("30/0/w", b"x")
    save_dir.write("40/.snapshot_metadata.deleting", b"")
    save_dir.write("50/x", b"")
    kinds = {name: classify(save_dir.storage().child(name)).kind for name in ("10", "20", "30", "40", "50")}
    assert set(kinds.values()) == {"checkpoint"}, kinds
    assert classify(save_dir.storage()).kind == "save_dir"


def test_a_checkpoint_of_a_number_of_ranks_is_no_save_directory(save_dir: SaveDir) -> None:
    """Its rank directories are called 0, 1, 2, …: they must never be taken for steps."""
    for rank in range(3):
        save_dir.write(f"best/{rank}/model/w", b"x")
    save_dir.write("best/.snapshot_metadata", metadata({}))
    with pytest.raises(InvalidPathError, match="is a checkpoint, not a save directory") as caught:
        open_save_dir(f"{save_dir.url}/best")
    assert caught.value.hint == f"its save directory is {save_dir.url}"


@pytest.mark.parametrize("sign", ["replicated", "sharded", "batched", "evaled_by", ".snapctl"])
def test_an_incomplete_checkpoint_shows_by_what_a_save_leaves(save_dir: SaveDir, sign: str) -> None:
    save_dir.write("new/0/w", b"x")
    save_dir.write(f"new/{sign}/x", b"x")
    assert find_place(f"{save_dir.url}/new").kind == "checkpoint"


def test_a_run_named_by_a_number_is_a_save_directory(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10, name="2024/10")
    place = open_save_dir(f"{save_dir.url}/2024")
    assert place.step_names == ("10",)


def test_a_save_directory_whose_newest_are_all_half_deleted_is_still_one(save_dir: SaveDir) -> None:
    save_dir.write("10/.snapshot_metadata.deleting", b"")
    save_dir.write("20/0/w", b"")
    assert classify(save_dir.storage()).kind == "save_dir"


def test_what_is_not_there_is_neither(save_dir: SaveDir) -> None:
    with pytest.raises(SaveDirNotFoundError):
        find_place(f"{save_dir.url}/nix")
    assert library.get_checkpoints(f"{save_dir.url}/nix") == []
    assert library.get_checkpoint(f"{save_dir.url}/nix", missing_ok=True) == ""
    with pytest.raises(FileNotFoundError):
        library.get_checkpoint(f"{save_dir.url}/nix")


def test_a_step_of_a_save_directory_is_opened_and_a_missing_one_is_named(save_dir: SaveDir) -> None:
    for step in (10, 20, 30):
        write_checkpoint(save_dir.write, step)
    opened = open_checkpoint(save_dir.url, 20)
    assert isinstance(opened, Storage) and opened.url == f"{save_dir.url}/20"
    with pytest.raises(CheckpointNotFoundError, match="no step 25") as caught:
        open_checkpoint(save_dir.url, 25)
    assert caught.value.hint == "there are: 10, 20, 30"
    with pytest.raises(InvalidPathError, match="is a save directory"):
        open_checkpoint(save_dir.url)
    with pytest.raises(InvalidPathError, match="is a checkpoint already"):
        open_checkpoint(f"{save_dir.url}/20", 20)


def test_the_latest_passes_over_what_cannot_be_parsed(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    write_checkpoint(save_dir.write, 20)
    save_dir.write("30/.snapshot_metadata", b'{"version": "0.1')
    write_checkpoint(save_dir.write, 40, complete=False)
    found = find_latest(open_save_dir(save_dir.url))
    assert found.checkpoint.step == 20
    assert len(found.unparsable) == 1 and "/30/.snapshot_metadata" in found.unparsable[0]
    assert library.get_checkpoint(save_dir.url) == f"{save_dir.url}/20"
    assert library.get_checkpoint(save_dir.url, global_step=10) == f"{save_dir.url}/10"
    with pytest.raises(CheckpointNotFoundError):
        library.get_checkpoint(save_dir.url, global_step=40)


def test_there_is_no_latest_where_none_parses_or_none_is_complete(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 40, complete=False)
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        find_latest(open_save_dir(save_dir.url))
    save_dir.write("30/.snapshot_metadata", b"broken: [")
    with pytest.raises(ManifestError):
        find_latest(open_save_dir(save_dir.url))


def test_a_chooser_says_which_answer(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10, markers=["val"])
    write_checkpoint(save_dir.write, 20)
    place = open_save_dir(save_dir.url)
    found = find_latest(place, choose=lambda newest: [c for c in newest if "val" in c.evaluated_by])
    assert found.checkpoint.step == 10
    with pytest.raises(NoMatchError):
        find_latest(place, choose=lambda newest: [])


def test_markers_claims_and_pins_are_read(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    body = {"partition": "val", "finished_at": "2026-11-30T12:00:00Z", "metrics": {"auc": 0.5, "bad": "NaN"}}
    save_dir.write("10/evaled_by/val_DONE", json.dumps(body).encode())
    save_dir.write("10/evaled_by/test_DONE", b"")
    save_dir.write("10/evaled_by/odd_DONE", b"not json")
    save_dir.write("10/evaled_by/train_done", b"")
    save_dir.write("10/evaled_by/val_DONE.tmp", b"")
    save_dir.write("10/evaled_by/dir_DONE/x", b"")
    for number in (2, 10, 9):
        claim = {"owner": f"w{number}", "nonce": "n", "ttl": 60}
        save_dir.write(f"10/evaled_by/val_CLAIM.{number}", json.dumps(claim).encode())
    save_dir.write("10/PINNED", b'{"note": "keep me"}')
    for found in (
        next(find_checkpoints(open_save_dir(save_dir.url))),
        look_at_checkpoint(save_dir.storage().child("10")),
    ):
        assert found.evaluated_by == ("odd", "test", "val")
        assert found.metrics["val"]["auc"] == 0.5 and str(found.metrics["val"]["bad"]) == "nan"
        assert [(claim.partition, claim.number, claim.owner) for claim in found.claims] == [("val", 10, "w10")]
        assert found.pin is not None and found.pin.note == "keep me"
        assert len(found.warnings) == 1 and "'odd'" in found.warnings[0]


def save_record(manifest: bytes, saved_at: str) -> bytes:
    crc = base64.b64encode(google_crc32c.value(manifest).to_bytes(4, "big")).decode()
    sums = {"size_bytes": len(manifest), "crc32c": crc}
    ranks = [{"rank": 0, "blocked_seconds": 0.5, "durable_seconds": 2.5, "bytes": 24}]
    body = {"format_version": 1, "saved_at": saved_at, "world_size": 1, "ranks": ranks, "blobs": {}, "manifest": sums}
    return json.dumps(body).encode()


def test_the_recorded_save_time_counts_unless_something_else_saved_again(save_dir: SaveDir) -> None:
    manifest = metadata({})
    save_dir.write("10/.snapshot_metadata", manifest)
    save_dir.write("10/.snapctl/save.json", save_record(manifest, "2025-01-02T03:04:05Z"))
    save_dir.write("20/.snapshot_metadata", manifest)
    save_dir.write("20/.snapctl/save.json", save_record(manifest[:-1] + b"]", "2025-01-02T03:04:05Z"))
    save_dir.write("30/.snapshot_metadata", manifest)
    save_dir.write("30/.snapctl/save.json", b"{}")
    ten, twenty, thirty = find_checkpoints(open_save_dir(save_dir.url))
    assert ten.created_at == 1735787045.0
    assert ten.record is not None and ten.record.ranks[0].blocked_seconds == 0.5
    for found in (twenty, thirty):
        assert found.created_at is not None and abs(found.created_at - time.time()) < 60
        assert found.record is None and len(found.warnings) == 1


@pytest.mark.parametrize(
    ("seconds", "known"), [(0.0, False), (1640995199.0, False), (1640995200.0, True), (2e9, True), (2e9 + 301, False)]
)
def test_times_before_2022_and_in_the_future_are_unknown(seconds: float, known: bool) -> None:
    assert (plausible_time(seconds, now=2e9) is not None) == known
    assert plausible_time(None, now=2e9) is None


def test_an_mtime_that_cannot_be_is_unknown(tmp_path: pathlib.Path) -> None:
    for step, when in ((10, 1.0), (20, time.time() + 3600), (30, time.time() - 3600)):
        write_checkpoint(local_writer(tmp_path), step)
        os.utime(tmp_path / f"{step}/.snapshot_metadata", (when, when))
    assert [found.created_at is None for found in find_checkpoints(open_save_dir(str(tmp_path)))] == [True, True, False]


def test_a_link_to_a_directory_counts_by_its_name(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path / "elsewhere"), 7)
    run = tmp_path / "run"
    write_checkpoint(local_writer(run), 10)
    (run / "20").symlink_to(tmp_path / "elsewhere" / "7")
    (run / "latest").symlink_to(run / "10")
    (run / "30").symlink_to(run / "nowhere")
    found = list(find_checkpoints(open_save_dir(str(run))))
    assert [(c.step, c.state, c.is_link) for c in found] == [(10, "complete", False), (20, "complete", True)]
    assert library.get_checkpoint(str(run)) == f"{run}/20"


def test_folder_objects_are_no_checkpoints(bucket: Bucket) -> None:
    for step in (10, 20):
        write_checkpoint(lambda path, data=b"": bucket.write(f"run1/{path}", data), step)
    for name in ("run1/", "run1/10/", "run1/10/0/", "run1/30/", "run1/10/evaled_by/"):
        bucket.write(name)
    bucket.write("run1//40/.snapshot_metadata", metadata({}))
    found = {c.step: c.state for c in find_checkpoints(open_save_dir(f"{bucket.url}/run1"))}
    assert found == {10: "complete", 20: "complete", 30: "incomplete"}


def test_a_bucket_is_a_save_directory(bucket: Bucket) -> None:
    write_checkpoint(bucket.write, 10)
    assert library.get_checkpoints(bucket.url) == [f"{bucket.url}/10"]


def test_an_object_named_like_a_step_is_none(bucket: Bucket) -> None:
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    bucket.write("run/20", b"x")
    assert library.get_checkpoints(f"{bucket.url}/run") == [f"{bucket.url}/run/10"]


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidPathError, match="is a file"):
        find_place(str(tmp_path / "file"))


def test_the_manifest_of_an_incomplete_checkpoint_is_named_as_missing(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 30, complete=False)
    with pytest.raises(CheckpointNotFoundError, match=r"30: \.snapshot_metadata is missing or empty"):
        read_manifest(save_dir.storage().child("30"))


@pytest.mark.parametrize("path", ["/a/10", "/a/10/", "gs://b/10", "10", "gs://b/run//10//"])
def test_the_step_of_a_checkpoints_path(path: str) -> None:
    assert library.step_from_checkpoint(path) == 10


@pytest.mark.parametrize("path", ["/a/b", "", "/a/010", "gs://b/10/0/x"])
def test_a_path_without_a_step_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="does not end in a step"):
        library.step_from_checkpoint(path)


def test_file_systems_are_inferred(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    local, gcs, memory = (library.infer_fs(path) for path in (str(tmp_path), bucket.url, "memory://x"))
    assert [library.is_local_fs(fs) for fs in (local, gcs, memory)] == [True, False, False]
    assert [library.is_gcs_fs(fs) for fs in (local, gcs, memory)] == [False, True, False]
    gcs.pipe_file(f"{bucket.name}/x", b"1")
    assert bucket.read("x") == b"1"


def test_a_listing_is_fresh_every_time(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    assert states(save_dir) == {10: "complete"}
    write_checkpoint(save_dir.write, 20)
    save_dir.write("10/evaled_by/val_DONE", b"")
    ten, twenty = find_checkpoints(open_save_dir(save_dir.url))
    assert (ten.evaluated_by, twenty.step) == (("val",), 20)
