"""The claim protocol, one situation at a time; see test_claims_interleaved.py and test_claims_processes.py for many."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import snapctl
from snapctl.checkpoints import look_at_checkpoint
from snapctl.errors import CheckpointNotFoundError, InvalidOptionError, PreconditionError, RefusedError, StorageError
from snapctl.evaluation.claims import (
    ClaimRefusedError,
    find_live_claim,
    release_claim_of,
    renew_claim_of,
    take_claim,
)
from snapctl.evaluation.evals import mark
from snapctl.markers import Claim
from snapctl.storage import FileInfo, Storage, open_storage, run_parallel
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, write_checkpoint


@pytest.fixture
def checkpoint(save_dir: SaveDir) -> Storage:
    """A complete checkpoint, step 10."""
    write_checkpoint(save_dir.write, 10)
    return open_storage(f"{save_dir.url}/10")


@pytest.fixture
def pass_time(checkpoint: Storage, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``pass_time(60)``: by the storage's clock it is a minute later than what was written says."""
    told = type(checkpoint).server_now
    passed = [0.0]
    monkeypatch.setattr(type(checkpoint), "server_now", lambda self: told(self) + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def acting_before(storage: Storage, method: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets somebody else act directly before the next call of a method of the storage."""
    original = getattr(type(storage), method)
    done: list[bool] = []

    def acts_and_calls(self: Storage, *args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(storage), method, acts_and_calls)


def claims_in(save_dir: SaveDir) -> list[str]:
    return [name.rpartition("/")[2] for name in save_dir.names("10/evaled_by") if "CLAIM" in name]


def test_a_claim_is_a_file_with_owner_nonce_and_ttl(checkpoint: Storage, save_dir: SaveDir) -> None:
    claim = take_claim(checkpoint, "val", owner="me", ttl_seconds=60)
    body = json.loads(save_dir.read("10/evaled_by/val_CLAIM.1"))
    assert body == {"owner": "me", "nonce": claim.nonce, "ttl": 60.0}
    assert claim.expires_at == claim.created_at + 60
    assert abs(claim.created_at - time.time()) < 60


def test_an_owner_is_fresh_and_random_unless_given(checkpoint: Storage) -> None:
    owners = {take_claim(checkpoint, partition).owner for partition in ("a", "b", "c")}
    assert len(owners) == 3
    assert all(owner and len(owner) == 16 for owner in owners)


def test_of_many_at_once_one_gets_it(checkpoint: Storage) -> None:
    def attempt(number: int) -> str | None:
        try:
            return take_claim(checkpoint, "val").owner
        except ClaimRefusedError:
            return None

    winners = [owner for owner in run_parallel(attempt, range(16), jobs=16) if owner]
    assert len(winners) == 1
    assert look_at_checkpoint(checkpoint).claims[0].owner == winners[0]


def test_a_live_claim_refuses_others_and_oneself(checkpoint: Storage) -> None:
    take_claim(checkpoint, "val", owner="a")
    for owner in ("a", "b"):
        with pytest.raises(ClaimRefusedError, match="is claimed by 'a' until") as caught:
            take_claim(checkpoint, "val", owner=owner)
        assert caught.value.facts["claimed_by"] == "a"
    take_claim(checkpoint, "test", owner="a")


def test_what_is_marked_is_not_claimed(checkpoint: Storage, save_dir: SaveDir) -> None:
    mark(checkpoint, "val")
    with pytest.raises(ClaimRefusedError, match="is evaluated already"):
        take_claim(checkpoint, "val")
    assert claims_in(save_dir) == []


def test_a_mark_voids_a_claim(checkpoint: Storage) -> None:
    take_claim(checkpoint, "val", owner="a")
    assert find_live_claim(checkpoint, "val", now=time.time()) is not None
    mark(checkpoint, "val")
    assert find_live_claim(checkpoint, "val", now=time.time()) is None
    with pytest.raises(ClaimRefusedError, match="is evaluated already"):
        renew_claim_of(checkpoint, "val", "a")


def test_an_abandoned_claim_is_taken_over_ten_seconds_after_its_time(
    checkpoint: Storage, save_dir: SaveDir, pass_time: Callable[[float], None]
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    pass_time(65)
    with pytest.raises(ClaimRefusedError):
        take_claim(checkpoint, "val", owner="b", ttl_seconds=3600)
    pass_time(7)  # GCS tells the time to the second
    assert take_claim(checkpoint, "val", owner="b", ttl_seconds=3600).number == 2
    assert claims_in(save_dir) == ["val_CLAIM.1", "val_CLAIM.2"]


def test_who_was_overtaken_can_neither_renew_nor_release(
    checkpoint: Storage, pass_time: Callable[[float], None]
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    pass_time(72)
    take_claim(checkpoint, "val", owner="b", ttl_seconds=3600)
    with pytest.raises(ClaimRefusedError, match="claimed by 'b'"):
        renew_claim_of(checkpoint, "val", "a")
    with pytest.raises(ClaimRefusedError, match="claimed by 'b'"):
        release_claim_of(checkpoint, "val", "a")


def test_a_renewed_claim_lasts_from_then_on(checkpoint: Storage, pass_time: Callable[[float], None]) -> None:
    first = take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    second = renew_claim_of(checkpoint, "val", "a", ttl_seconds=600)
    assert (second.number, second.owner) == (2, "a")
    assert second.expires_at >= first.expires_at + 540
    pass_time(100)
    with pytest.raises(ClaimRefusedError):
        take_claim(checkpoint, "val", owner="b")


def test_a_claim_that_ran_out_can_be_renewed_while_nobody_took_it_over(
    checkpoint: Storage, pass_time: Callable[[float], None]
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    pass_time(600)
    assert renew_claim_of(checkpoint, "val", "a", ttl_seconds=3600).number == 2


def test_a_released_claim_is_free_at_once(checkpoint: Storage) -> None:
    take_claim(checkpoint, "val", owner="a")
    release_claim_of(checkpoint, "val", "a")
    for act in (renew_claim_of, release_claim_of):
        with pytest.raises(ClaimRefusedError, match="nobody holds"):
            act(checkpoint, "val", "a")
    assert take_claim(checkpoint, "val", owner="b").number == 3


@pytest.mark.parametrize("act", [renew_claim_of, release_claim_of])
def test_what_nobody_claimed_is_neither_renewed_nor_released(checkpoint: Storage, act: Callable[..., Any]) -> None:
    with pytest.raises(ClaimRefusedError, match="nobody holds"):
        act(checkpoint, "val", "a")


@pytest.mark.parametrize("body", [b"", b"{", b'{"owner": 1}'])
def test_a_body_that_says_nothing_is_a_claim_of_two_hours(
    checkpoint: Storage, save_dir: SaveDir, body: bytes, pass_time: Callable[[float], None]
) -> None:
    save_dir.write("10/evaled_by/val_CLAIM.7", body)
    pass_time(7200)
    with pytest.raises(ClaimRefusedError, match="does not say by whom"):
        take_claim(checkpoint, "val")
    pass_time(12)
    assert take_claim(checkpoint, "val", ttl_seconds=86400).number == 8


def test_the_highest_number_rules_not_the_longest_name(checkpoint: Storage, save_dir: SaveDir) -> None:
    for number in (9, 10):
        save_dir.write(f"10/evaled_by/val_CLAIM.{number}", json.dumps({"owner": "x", "nonce": "y", "ttl": 0}).encode())
    for name in ("val_CLAIM.011", "val_CLAIM.x", "val_CLAIM.99.snapctl-tmp-1", "xval_CLAIM.50", "val_CLAIM.-3"):
        save_dir.write(f"10/evaled_by/{name}", b"")
    assert take_claim(checkpoint, "val").number == 11


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_clock_of_the_claimers_machine_does_not_matter(
    checkpoint: Storage, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    with pytest.raises(ClaimRefusedError):
        take_claim(checkpoint, "val", owner="b")
    assert abs(take_claim(checkpoint, "test").created_at - real()) < 60


def test_a_clock_that_cannot_be_read_takes_nothing_over(checkpoint: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)

    def fails(self: Storage) -> float:
        raise StorageError("no clock")

    monkeypatch.setattr(type(checkpoint), "server_now", fails)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(StorageError, match="no clock"):
        take_claim(checkpoint, "val")


@pytest.mark.parametrize("ttl", [0, -1, 604801, float("nan"), float("inf")])
def test_a_ttl_is_more_than_nothing_and_at_most_seven_days(checkpoint: Storage, ttl: float) -> None:
    with pytest.raises(InvalidOptionError):
        take_claim(checkpoint, "val", ttl_seconds=ttl)


@pytest.mark.parametrize("owner", ["", "a\nb", "\udcff", "x" * 201])
def test_an_owner_is_a_line_of_text(checkpoint: Storage, owner: str) -> None:
    with pytest.raises(InvalidOptionError):
        take_claim(checkpoint, "val", owner=owner)


def test_what_is_not_there_or_incomplete_is_not_claimed(save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    write_checkpoint(save_dir.write, 20, complete=False)
    before = save_dir.names()
    for step in (20, 30):
        with pytest.raises(CheckpointNotFoundError):
            take_claim(open_storage(f"{save_dir.url}/{step}"), "val")
    assert save_dir.names() == before


# -- somebody else in between ----------------------------------------------------------------------------------------


def test_who_is_faster_gets_it(checkpoint: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_storage(checkpoint.url)
    acting_before(checkpoint, "write", lambda: take_claim(other, "val", owner="b"), monkeypatch)
    with pytest.raises(ClaimRefusedError, match="was faster"):
        take_claim(checkpoint, "val", owner="a")
    assert look_at_checkpoint(checkpoint).claims[0].owner == "b"


def test_a_mark_between_the_look_and_the_claim_wins(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting_before(checkpoint, "write", lambda: save_dir.write("10/evaled_by/val_DONE", b""), monkeypatch)
    with pytest.raises(ClaimRefusedError, match="is evaluated already"):
        take_claim(checkpoint, "val")
    assert claims_in(save_dir) == []


def test_who_stalls_until_the_claim_ran_out_does_not_get_it(
    checkpoint: Storage, save_dir: SaveDir, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = type(checkpoint).write

    def write_and_stall(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        pass_time(61)
        return found

    monkeypatch.setattr(type(checkpoint), "write", write_and_stall)
    with pytest.raises(ClaimRefusedError, match="ran out before"):
        take_claim(checkpoint, "val", ttl_seconds=60)
    assert claims_in(save_dir) == []


def test_a_claim_above_ones_own_is_seen(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    higher = json.dumps({"owner": "b", "nonce": "n", "ttl": 3600}).encode()
    write = type(checkpoint).write

    def write_and_be_overtaken(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        save_dir.write("10/evaled_by/val_CLAIM.2", higher)
        return found

    monkeypatch.setattr(type(checkpoint), "write", write_and_be_overtaken)
    with pytest.raises(ClaimRefusedError, match="by somebody else meanwhile"):
        take_claim(checkpoint, "val", owner="a")
    assert claims_in(save_dir) == ["val_CLAIM.2"]


def test_a_judged_claim_whose_number_was_given_anew_is_seen(
    checkpoint: Storage, save_dir: SaveDir, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    pass_time(72)

    def a_takes_back_and_b_gets_its_number() -> None:
        save_dir.delete("10/evaled_by/val_CLAIM.1")
        save_dir.write("10/evaled_by/val_CLAIM.1", json.dumps({"owner": "b", "nonce": "n", "ttl": 86400}).encode())

    acting_before(checkpoint, "write", a_takes_back_and_b_gets_its_number, monkeypatch)
    with pytest.raises(ClaimRefusedError, match="by somebody else meanwhile"):
        take_claim(checkpoint, "val", owner="c", ttl_seconds=3600)
    assert claims_in(save_dir) == ["val_CLAIM.1"]


def test_a_claim_taken_back_while_it_is_looked_at_is_looked_for_again(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dir.write("10/evaled_by/val_CLAIM.1", b"")
    acting_before(checkpoint, "read", lambda: save_dir.delete("10/evaled_by/val_CLAIM.1"), monkeypatch)
    assert take_claim(checkpoint, "val").number == 1


def test_a_claim_that_meets_a_deletion_is_taken_back(checkpoint: Storage, save_dir: SaveDir) -> None:
    save_dir.write("10/.snapshot_metadata.deleting", b"x")
    before = save_dir.names()
    with pytest.raises(RefusedError, match="is being deleted"):
        take_claim(checkpoint, "val")
    assert save_dir.names() == before


def test_a_deletion_announced_after_the_claim_was_written_is_seen(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = type(checkpoint).write

    def write_and_announce(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        save_dir.write("10/.snapshot_metadata.deleting", b"x")
        return found

    monkeypatch.setattr(type(checkpoint), "write", write_and_announce)
    with pytest.raises(RefusedError, match="is being deleted"):
        take_claim(checkpoint, "val")
    assert claims_in(save_dir) == []


def test_a_deletion_older_than_an_hour_never_began(
    checkpoint: Storage, save_dir: SaveDir, pass_time: Callable[[float], None]
) -> None:
    save_dir.write("10/.snapshot_metadata.deleting", b"x")
    pass_time(3590)
    with pytest.raises(RefusedError):
        take_claim(checkpoint, "val", ttl_seconds=86400)
    pass_time(12)
    take_claim(checkpoint, "val", ttl_seconds=86400)


def test_a_live_claim_is_renewed_though_a_deletion_was_announced_since(
    checkpoint: Storage, save_dir: SaveDir, pass_time: Callable[[float], None]
) -> None:
    take_claim(checkpoint, "val", owner="a", ttl_seconds=60)
    save_dir.write("10/.snapshot_metadata.deleting", b"x")  # which the deleter will withdraw: it sees the claim
    renew_claim_of(checkpoint, "val", "a", ttl_seconds=60)
    pass_time(600)
    with pytest.raises(RefusedError, match="is being deleted"):
        renew_claim_of(checkpoint, "val", "a", ttl_seconds=3600)


def test_a_checkpoint_that_goes_while_it_is_claimed_leaves_no_ghost(
    checkpoint: Storage, save_dir: SaveDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = type(checkpoint).write

    def write_and_delete(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        save_dir.delete("10/.snapshot_metadata")
        save_dir.delete_dir("10/0")
        return found

    monkeypatch.setattr(type(checkpoint), "write", write_and_delete)
    with pytest.raises(CheckpointNotFoundError):
        take_claim(checkpoint, "val")
    assert save_dir.names() == []


# -- storages that do not do what they should ------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2])
def test_a_claim_whose_answer_was_lost_is_ones_own(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 2)  # with 2 lost answers the storage gives up
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "lose": True, "n": lost}])
    claim = snapctl.claim_eval(f"{bucket.url}/run/10", "val", owner="me")
    assert json.loads(bucket.read("run/10/evaled_by/val_CLAIM.1"))["nonce"] == claim.nonce


def test_a_claim_of_somebody_else_behind_a_lost_answer_is_not_ones_own(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 1)
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    storage = open_storage(f"{bucket.url}/run/10")
    proxy.configure(faults=[{"match": "/upload/", "drop": True}])
    somebody = json.dumps({"owner": "b", "nonce": "n", "ttl": 60}).encode()
    acting_before(storage, "write", lambda: bucket.write("run/10/evaled_by/val_CLAIM.1", somebody), monkeypatch)
    with pytest.raises(ClaimRefusedError):
        take_claim(storage, "val", owner="a")


def test_a_claim_that_never_arrived_is_refused(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 1)
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "drop": True}])
    with pytest.raises(ClaimRefusedError):
        snapctl.claim_eval(f"{bucket.url}/run/10", "val")


def test_where_links_fail_the_file_is_created_exclusively(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(local_writer(tmp_path), 10)

    def no_links(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    storage = open_storage(tmp_path / "10")
    take_claim(storage, "val")
    with pytest.raises(PreconditionError):
        storage.write("evaled_by/val_CLAIM.1", b"other", exclusive=True)
    assert os.listdir(tmp_path / "10/evaled_by") == ["val_CLAIM.1"]


def test_a_storage_without_times_has_no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/10")
    storage.write(".snapshot_metadata", b"{}")
    write = type(storage).write

    def timeless(self: Storage, path: str, data: bytes, **conditions: Any) -> FileInfo:
        found = write(self, path, data, **conditions)
        return FileInfo(found.path, found.size_bytes, 0.0, found.version)

    monkeypatch.setattr(type(storage), "write", timeless)
    with pytest.raises(RefusedError, match="tells no times"):
        take_claim(storage, "val")
    assert storage.find_file("evaled_by/val_CLAIM.1") is None


def test_claims_work_on_any_file_system_with_exclusive_creation() -> None:
    url = f"memory://{uuid.uuid4().hex}/run/10"
    open_storage(url).write(".snapshot_metadata", b"{}")
    claim = snapctl.claim_eval(url, "val", ttl=60)
    assert isinstance(claim, Claim)
    with pytest.raises(snapctl.ClaimRefusedError):
        snapctl.claim_eval(url, "val")
    assert snapctl.renew_claim(url, "val", claim.owner or "", ttl=60).number == 2
    snapctl.release_claim(url, "val", claim.owner or "")


def test_the_temporary_file_of_a_claimer_that_was_killed_is_no_claim(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    litter = tmp_path / "10/evaled_by/val_CLAIM.1.snapctl-tmp-0123456789ab"
    litter.parent.mkdir()
    litter.write_bytes(b"{}")
    assert take_claim(open_storage(tmp_path / "10"), "val").number == 1


def test_a_checkpoint_that_is_gone_is_said_to_be_that(tmp_path: pathlib.Path) -> None:
    """Whoever evaluates while others prune has to tell it from everything else."""
    write_checkpoint(local_writer(tmp_path), 20)
    for call in (
        lambda: snapctl.claim_eval(str(tmp_path / "10"), "val"),
        lambda: snapctl.renew_claim(str(tmp_path / "10"), "val", "me"),
        lambda: snapctl.release_claim(str(tmp_path / "10"), "val", "me"),
        lambda: snapctl.mark_done_eval(str(tmp_path / "10"), "val"),
    ):
        with pytest.raises(CheckpointNotFoundError):
            call()
