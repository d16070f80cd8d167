"""prune on object stores: a real fake-gcs-server, and the small GCS that honours conditions in batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from snapctl.storage import cuts_of, open_storage
from tests.support.command import Finished, snapctl_here
from tests.support.saves import GcsSaveDir, check_sound, fill, steps_that_look_complete, write_claim
from tests.support.servers import Bucket, Controlled, fault_proxy
from tests.support.snapshots import metadata, tensor_entry, write_checkpoint

MANIFEST = ".snapshot_metadata"
DELETING = ".snapshot_metadata.deleting"
Run = Callable[..., Finished]


@pytest.fixture
def snapctl() -> Run:
    """In this process: importing gcsfs anew costs half a second each time."""
    return snapctl_here


OLD = "2024-05-01T00:00:00.000Z"


@pytest.fixture
def remote(bucket: Bucket) -> GcsSaveDir:
    return GcsSaveDir(bucket)


@pytest.fixture
def mini(minigcs: Controlled) -> GcsSaveDir:
    return GcsSaveDir(Bucket(minigcs.endpoint, "bk"))


def below(save_dir: GcsSaveDir, step: int) -> list[str]:
    return [name for name in save_dir.names() if name.startswith(f"{step}/")]


def large(server: Controlled, save_dir: GcsSaveDir, step: int, blobs: int) -> None:
    """A checkpoint of many blobs."""
    locations = [f"0/model/p{number:05d}" for number in range(blobs)]
    server.seed("bk", [(f"run/{step}/{location}", 4) for location in locations], created=OLD)
    entries = {location: tensor_entry(location, [4], "uint8") for location in locations}
    save_dir.write(f"{step}/{MANIFEST}", metadata(entries))


# -- what is deleted -------------------------------------------------------------------------------------------------


def test_only_the_step_itself_goes_and_not_what_shares_its_prefix(snapctl: Run, remote: GcsSaveDir) -> None:
    fill(remote, 1, 10, 100, 1000)
    other = GcsSaveDir(remote.bucket, "run1-old")
    fill(other, 1, 10)
    remote.write("1.backup/x", b"x")
    done = snapctl("prune", remote.url, "--keep-step", "10", "--keep-step", "100", "--yes")
    assert done.code == 0, done.stderr
    assert steps_that_look_complete(remote) == [10, 100, 1000]
    assert steps_that_look_complete(other) == [1, 10]
    assert "1.backup/x" in remote.names()


@pytest.mark.parametrize("server", ["remote", "mini"])
def test_folder_objects_go_with_the_checkpoint_and_odd_names_are_taken_literally(
    snapctl: Run, server: str, request: pytest.FixtureRequest
) -> None:
    save_dir: GcsSaveDir = request.getfixturevalue(server)
    for name in ("", "10/", "10/0/", "10//x", "10/./x", "10/0/a[b]*?#%2F", "10/0/ü\n"):
        save_dir.write(name)
    fill(save_dir, 10, 20)
    save_dir.write("30/")
    save_dir.write("/40/.snapshot_metadata", b"{}")
    done = snapctl("prune", save_dir.url, "--keep-last", "1", "--yes")
    assert done.code == 0, done.stderr
    left = [name for name in save_dir.names() if not name.startswith("20/")]
    assert left == ["", "/40/.snapshot_metadata", "30/"]


def test_a_bucket_itself_can_be_pruned(snapctl: Run, remote: GcsSaveDir) -> None:
    whole = GcsSaveDir(remote.bucket, "")
    write_checkpoint(remote.bucket.write, 1)
    write_checkpoint(remote.bucket.write, 2)
    remote.bucket.write("1old/x", b"x")
    assert snapctl("prune", remote.bucket.url, "--keep-last", "1", "--yes").code == 0
    assert whole.bucket.names() == ["1old/x", f"2/{MANIFEST}", "2/0/model/weight"]


def test_what_it_prints_and_its_document_have_gs_paths(snapctl: Run, remote: GcsSaveDir) -> None:
    fill(remote, 1, 2)
    url = remote.url.replace("gs://", "GCS://") + "//"
    found = snapctl("prune", url, "--keep-last", "1", "--yes", "--json").json
    assert found["save_dir"] == remote.url
    assert found["delete"][0]["path"] == f"{remote.url}/1"
    assert found["delete"][0]["deleted"] is True


def test_a_plan_made_on_one_machine_is_carried_out_on_another(snapctl: Run, remote: GcsSaveDir, tmp_path: Any) -> None:
    fill(remote, 1, 2, 3)
    file = str(tmp_path / "plan")
    assert snapctl("prune", remote.url, "--keep-last", "1", "--plan", file).code == 0
    fill(remote, 2)
    done = snapctl("prune", remote.url + "/", "--apply", file, "--yes")
    assert done.code == 6
    assert steps_that_look_complete(remote) == [2, 3]
    assert "its manifest is another one" in done.stderr


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_large_checkpoint_costs_a_batch_for_a_hundred_objects(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    large(minigcs, mini, 100, 4999)
    fill(mini, 200)
    minigcs.reset()
    assert snapctl("prune", mini.url, "--keep-last", "1", "--yes").code == 0
    log = minigcs.stats(log=True)["log"]
    assert below(mini, 100) == []
    assert sum("/batch/" in line[1] for line in log) <= 51, "and one to find out whether conditions are honoured"
    assert len(log) <= 50 + 6 + 25
    assert minigcs.stats()["maxinflight"] <= 16


def test_what_is_gone_already_is_success_and_is_not_counted_as_freed(minigcs: Controlled, mini: GcsSaveDir) -> None:
    for number in range(250):
        mini.write(f"1/x{number:03d}", b"abc")
    storage = open_storage(f"{mini.url}/1")
    files = storage.list_tree()
    for number in range(0, 250, 2):
        mini.delete(f"1/x{number:03d}")
    result = storage.delete_files(files)
    assert (result.deleted, result.gone, result.changed, result.failed) == (125, 125, [], [])
    assert result.deleted_bytes == 375
    assert below(mini, 1) == []


@pytest.mark.parametrize("server", ["remote", "mini"])
def test_an_object_that_was_replaced_is_not_deleted_and_no_more_batches_are_begun(
    server: str, request: pytest.FixtureRequest
) -> None:
    save_dir: GcsSaveDir = request.getfixturevalue(server)
    for number in range(300):
        save_dir.write(f"1/x{number:03d}", b"abc")
    storage = open_storage(f"{save_dir.url}/1")
    files = storage.list_tree()
    save_dir.write("1/x007", b"new")
    result = storage.delete_files(files)
    assert result.changed == ["x007"], "a naive batch deletes the new one"
    assert save_dir.read("1/x007") == b"new"
    assert result.deleted + result.unfinished == 299


def test_a_server_that_ignores_conditions_is_found_out_by_one_object_that_goes_anyway(remote: GcsSaveDir) -> None:
    for number in range(20):
        remote.write(f"1/x{number:03d}", b"abc")
    storage = open_storage(f"{remote.url}/1")
    files = storage.list_tree()
    remote.write("1/x000", b"new")
    result = storage.delete_files(files)
    assert remote.read("1/x000") == b"new"
    assert result.changed == ["x000"]


def test_calls_of_a_batch_that_the_server_was_too_busy_for_are_sent_again(
    minigcs: Controlled, mini: GcsSaveDir
) -> None:
    for number in range(150):
        mini.write(f"1/x{number:03d}", b"abc")
    minigcs.configure(
        faults=[{"inbatch": "x00[1-5]$", "status": 503, "n": 7}, {"inbatch": "x1", "status": 429, "n": 9}]
    )
    result = open_storage(f"{mini.url}/1").delete_files(open_storage(f"{mini.url}/1").list_tree())
    assert (result.deleted, result.failed) == (150, [])
    assert below(mini, 1) == []


def test_a_batch_whose_answer_was_lost_has_done_its_work(minigcs: Controlled, mini: GcsSaveDir) -> None:
    for number in range(150):
        mini.write(f"1/x{number:03d}", b"abc")
    storage = open_storage(f"{mini.url}/1")
    files = storage.list_tree()
    minigcs.configure(faults=[{"after": "/batch/", "status": 503, "n": 3}])
    result = storage.delete_files(files)
    assert (result.deleted, result.gone, result.failed) == (150, 0, [])


def test_one_blob_that_may_not_be_deleted_is_5_and_the_others_go(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    write_checkpoint(mini.write, 100, {name: np.zeros(2, "f4") for name in "abc"}, markers=("val",))
    fill(mini, 150, 200)
    minigcs.configure(faults=[{"inbatch": "100/0/model/b", "status": 403, "n": 1000}])
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes", "--json")
    assert done.code == 5
    (failed,) = [row for row in done.json["delete"] if row["error"]]
    assert failed["step"] == 100
    assert "1 of 4 files could not be deleted" in failed["error"] and "permission denied" in failed["error"]
    assert steps_that_look_complete(mini) == [200]
    assert below(mini, 100) == [f"100/{DELETING}", "100/0/model/b", "100/evaled_by/val_DONE"]
    minigcs.configure(faults=[])
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes", "--json")
    assert done.code == 0
    assert done.json["delete"][0]["reason"] == "half deleted: its deletion goes on"
    assert below(mini, 100) == []


def test_a_lost_answer_to_the_deletion_of_the_manifest_is_no_error(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    fill(mini, 100, 200)
    minigcs.configure(faults=[{"after": r"100%2F\.snapshot_metadata\?ifGenerationMatch", "status": 503, "n": 1}])
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes")
    assert done.code == 0, done.stderr
    assert "deleted 1 checkpoint" in done.stdout
    assert below(mini, 100) == []


def test_the_paying_project_goes_with_every_request_and_every_call_of_a_batch(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    fill(mini, 100, 200)
    with fault_proxy(minigcs.endpoint) as proxy:
        proxy.configure(faults=[{"match": "/batch/", "bodymatch": "userProject=my-project", "status": 503, "n": 1}])
        done = snapctl(
            "prune",
            mini.url,
            "--keep-last",
            "1",
            "--yes",
            "--storage-option",
            "requester_pays=my-project",
            env={"STORAGE_EMULATOR_HOST": proxy.endpoint},
        )
        assert done.code == 0, done.stderr
        log = proxy.stats(log=True)["log"]
    assert next(line[2] for line in log if "/batch/" in line[1]) == 503, "it was in the body"
    assert all("userProject=my-project" in line[1] for line in log)


# -- holds and retention ---------------------------------------------------------------------------------------------

FUTURE = "2099-01-01T00:00:00Z"
HOLDS: dict[str, tuple[dict[str, Any], bool]] = {
    "temporary hold": ({"temporaryHold": True}, True),
    "event-based hold": ({"eventBasedHold": True}, True),
    "retention": ({"retentionExpirationTime": FUTURE}, True),
    "retention that is over": ({"retentionExpirationTime": "2024-01-01T00:00:00Z"}, False),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_is_under_a_hold_is_not_begun_and_said_with_5(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir, name: str
) -> None:
    fields, is_held = HOLDS[name]
    fill(mini, 100, 150, 200)
    before = below(mini, 100)
    minigcs.configure(held=[{"match": "100/0/model/weight", "fields": fields}] if is_held else [])
    if not is_held:
        minigcs.configure(held=[])
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes", "--json")
    assert done.code == (5 if is_held else 0)
    if is_held:
        assert below(mini, 100) == before, "a naive prune deletes all the rest of it"
        (failed,) = [row for row in done.json["delete"] if row["error"]]
        assert failed["error"].startswith(f"not begun: {mini.url}/100/0/model/weight is ")
    assert steps_that_look_complete(mini) == ([100, 200] if is_held else [200])


def test_of_a_retained_bucket_the_announcement_stays_and_that_counts_as_deleted(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    fill(mini, 100, 200)
    retained = {"match": r"\.deleting$", "fields": {"retentionExpirationTime": FUTURE}}
    minigcs.configure(held=[retained])
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes")
    assert done.code == 0, done.stderr
    assert "deleted 1 checkpoint" in done.stdout
    assert "which may not go yet" in done.stderr
    assert below(mini, 100) == [f"100/{DELETING}"]
    again = snapctl("prune", mini.url, "--keep-last", "1", "--yes", "--json")
    assert again.code == 0
    (left,) = again.json["left_alone"]
    assert left["reason"] == "deleted; its announcement may not go before 2099-01-01T00:00:00.000Z"
    minigcs.configure(held=[])
    assert snapctl("prune", mini.url, "--keep-last", "1", "--yes").code == 0
    assert below(mini, 100) == []


def test_the_final_line_says_for_how_long_what_was_deleted_is_still_billed(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    fill(mini, 100, 200)
    minigcs.configure(bucket={"softDeletePolicy": {"retentionDurationSeconds": "604800"}})
    done = snapctl("prune", mini.url, "--keep-last", "1", "--yes")
    assert done.stdout.splitlines()[-1].endswith(" (soft delete: restorable, and billed, for another 7d)")
    minigcs.configure(bucket={"softDeletePolicy": {"retentionDurationSeconds": "0"}})
    fill(mini, 100)
    done = snapctl("prune", mini.url, "--keep-last", "1", "--order", "step", "--yes")
    assert "soft delete" not in done.stdout


# -- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "body"), [(403, '{"error": {"message": "no"}}'), (503, "busy")])
def test_a_manifest_or_marker_that_cannot_be_read_keeps_its_checkpoint_with_5(
    snapctl: Run, proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch, status: int, body: str
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.RETRY_SECONDS", 0.0)
    bucket, proxy = proxied
    save_dir = GcsSaveDir(bucket)
    fill(save_dir, 10, 20, 30, 40)
    save_dir.write("20/evaled_by/val_DONE", b'{"metrics": {}}')
    faults = [r"download.*%2F10%2F\.snapshot_metadata", r"download.*%2F20%2Fevaled_by", r"download.*%2F40%2F\.snapshot"]
    proxy.configure(faults=[{"match": match, "status": status, "body": body} for match in faults])
    done = snapctl("prune", save_dir.url, "--keep-last", "1", "--yes", timeout=110)
    assert done.code == 5
    assert steps_that_look_complete(save_dir) == [10, 20, 30, 40], "30 is the newest that could be read"
    assert done.stderr.count("kept: could not be looked at: ") == 3


@pytest.mark.parametrize("status", [401, 403])
def test_a_listing_that_fails_ends_it_with_4_at_once_and_nothing_is_deleted(
    snapctl: Run, proxied: tuple[Bucket, Controlled], status: int
) -> None:
    bucket, proxy = proxied
    save_dir = GcsSaveDir(bucket)
    fill(save_dir, 10, 20)
    proxy.configure(faults=[{"match": ".", "status": status, "body": '{"error": {"message": "no"}}'}])
    began = time.monotonic()
    done = snapctl("prune", save_dir.url, "--keep-last", "1", "--yes")
    assert done.code == 4
    assert time.monotonic() - began < 10
    assert steps_that_look_complete(save_dir) == [10, 20]
    assert done.stderr.count("\n") <= 2


def test_a_missing_bucket_and_an_empty_prefix_are_3(snapctl: Run, remote: GcsSaveDir) -> None:
    missing = snapctl("prune", "gs://no-such-bucket-here/run", "--keep-last", "1", "--yes")
    assert (missing.code, "no such bucket" in missing.stderr) == (3, True)
    empty = snapctl("prune", remote.url, "--keep-last", "1", "--yes")
    assert (empty.code, "nothing lies under this prefix" in empty.stderr) == (3, True)


def test_objects_that_vanish_under_its_hands_are_no_error(snapctl: Run, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    save_dir = GcsSaveDir(bucket)
    write_checkpoint(save_dir.write, 10, {f"t{n}": np.zeros(2, "f4") for n in range(6)})
    fill(save_dir, 20)
    # the server has deleted it when the answer says that it was not there
    proxy.configure(faults=[{"match": "model%2Ft[135]", "method": "DELETE", "status": 404, "body": "{}"}])
    done = snapctl("prune", save_dir.url, "--keep-last", "1", "--yes")
    assert done.code == 0, done.stderr
    assert "deleted 1 checkpoint" in done.stdout


def test_a_claim_is_judged_by_the_clock_of_the_server(snapctl: Run, remote: GcsSaveDir) -> None:
    fill(remote, 10, 20, 30)
    write_claim(remote, 10)
    write_claim(remote, 20, ttl=0)
    for options in (["--dry-run"], ["--yes"]):
        done = snapctl("prune", remote.url, "--keep-last", "1", "--json", *options)
        assert [row["step"] for row in done.json["delete"]] == [20]
    assert steps_that_look_complete(remote) == [10, 30]


def test_ctrl_c_stops_it_within_a_second_even_while_the_server_does_not_answer(
    snapctl: Run, minigcs: Controlled, mini: GcsSaveDir
) -> None:
    large(minigcs, mini, 100, 3000)
    fill(mini, 200)
    minigcs.configure(latency=0.05, faults=[{"match": "/batch/", "hang": 60, "skip": 8}])
    command = [sys.executable, "-m", "snapctl", "prune", mini.url, "--keep-last", "1", "--yes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    while minigcs.stats()["inflight"] < 10:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - began < 5  # a second, and not the minute of the server; the machine may be busy
    assert b"the next prune goes on" in errors
    check_sound(mini)
    minigcs.configure(latency=0, faults=[])
    assert snapctl("prune", mini.url, "--keep-last", "1", "--yes").code == 0
    assert below(mini, 100) == []


def test_two_prunes_at_once_on_a_bucket(remote: GcsSaveDir) -> None:
    fill(remote, *range(10, 150, 10))
    command = [sys.executable, "-m", "snapctl", "prune", remote.url, "--keep-last", "2", "--yes", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    deleted = [sum(row["deleted"] for row in json.loads(out)["delete"]) for out, _ in results]
    assert sum(deleted) >= 12
    assert {name.partition("/")[0] for name in remote.names()} == {"130", "140"}


# -- listings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[], ["a"], [f"0/w{n:05d}" for n in range(2500)], [f"{n}/x/y" for n in range(1200)]])
def test_a_listing_is_the_same_wherever_it_is_cut(minigcs: Controlled, mini: GcsSaveDir, names: list[str]) -> None:
    minigcs.seed("bk", [(f"run/1/{name}", 1) for name in [*names, "batched/f00", "batched/0a", "z", ""]])
    storage = open_storage(f"{mini.url}/1")
    expected = sorted([*names, "batched/f00", "batched/0a", "z", ""])
    right, wrong = cuts_of(sorted(names)), cuts_of(sorted(names) * 3)
    for cuts in ([], right, wrong, ["0", "batched/", "zz"], ["\udcff", "", "../x", "/"]):
        assert [file.path for file in storage.list_tree(cuts=cuts)] == expected


def test_a_small_checkpoint_is_listed_with_one_request(minigcs: Controlled, mini: GcsSaveDir) -> None:
    fill(mini, 1)
    storage = open_storage(f"{mini.url}/1")
    storage.list_tree()
    minigcs.reset()
    assert len(storage.list_tree()) == 2
    assert minigcs.stats()["n"] == 1
