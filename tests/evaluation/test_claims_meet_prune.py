"""Claimers and pinners against a prune that deletes the same checkpoints: one of the two must see the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from snapctl.checkpoints import look_at_checkpoint
from snapctl.errors import CheckpointNotFoundError, RefusedError, StorageNotFoundError
from snapctl.evaluation.claims import take_claim
from snapctl.evaluation.evals import mark, pin
from snapctl.pruning.policy import Policy
from snapctl.pruning.pruner import carry_out, prepare
from snapctl.storage import Storage, open_storage
from tests.support.places import SaveDir
from tests.support.servers import Bucket
from tests.support.snapshots import write_checkpoint

STEPS = (10, 20, 30)
REQUESTS = ("write", "delete", "find_file", "list_dir", "list_tree", "read", "server_now")


@pytest.fixture(params=["local", "minigcs"])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> SaveDir:
    """A save directory on a disk, and in a bucket that honours conditions."""
    if request.param == "local":
        (tmp_path / "run").mkdir()
        return SaveDir(str(tmp_path / "run"), root=tmp_path / "run")
    bucket = Bucket(request.getfixturevalue("minigcs").endpoint, "bk")
    return SaveDir(f"{bucket.url}/run", bucket=bucket)


@pytest.fixture
def hesitant(place: SaveDir, monkeypatch: pytest.MonkeyPatch) -> SaveDir:
    """Before each request everybody hesitates for a moment, so that all orders come about."""
    kind = type(open_storage(place.url))

    def hesitating(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Storage, *args: Any, **kwargs: Any) -> Any:
            time.sleep(random.random() ** 3 * 0.006)
            return original(self, *args, **kwargs)

        return call

    for name in REQUESTS:
        monkeypatch.setattr(kind, name, hesitating(getattr(kind, name)))
    return place


def test_what_was_claimed_or_pinned_is_never_deleted(hesitant: SaveDir) -> None:
    def prune() -> None:
        (prepared,) = prepare([hesitant.url], Policy(keep_last=1), dry_run=False)
        carry_out(prepared)

    usual = 60.0  # seconds that a prune takes: claims come at any moment of it, however fast the machine is
    for _ in range(3):
        for step in (*STEPS, 40):
            write_checkpoint(hesitant.write, step)
        began = time.perf_counter()
        prune()
        usual = min(usual, time.perf_counter() - began)
    kept = deleted = 0
    for round_number in range(15):
        for step in (*STEPS, 40):
            write_checkpoint(hesitant.write, step)
        held: set[int] = set()

        def claim(step: int, held: set[int] = held, number: int = round_number) -> None:
            storage = open_storage(f"{hesitant.url}/{step}")
            time.sleep(random.random() * usual * 1.2)
            try:
                if step == 30:
                    pin(storage)
                else:
                    take_claim(storage, f"p{number}")
                held.add(step)
            except (RefusedError, CheckpointNotFoundError):
                pass

        threads = [threading.Thread(target=prune), *(threading.Thread(target=claim, args=(step,)) for step in STEPS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for step in STEPS:
            names = hesitant.names(str(step))
            if step in held:
                assert f"{step}/.snapshot_metadata" in names, (round_number, step, names)
                assert f"{step}/0/model/weight" in names
            elif f"{step}/.snapshot_metadata" not in names:
                assert names == [], (round_number, step, names)
                deleted += 1
            if names:
                hesitant.delete_dir(str(step))
        kept += len(held)
    assert kept >= 3
    assert deleted >= 3


def test_a_claim_that_is_taken_back_does_not_hide_the_others(place: SaveDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(place.write, 10)
    storage = open_storage(f"{place.url}/10")
    take_claim(storage, "a", owner="somebody")
    mark(storage, "b", {"loss": 1.0})
    save = take_claim(storage, "c", owner="fleeting")
    read = type(storage).read

    def gone(self: Storage, path: str, **options: Any) -> bytes:
        if path.endswith(f"c_CLAIM.{save.number}"):
            raise StorageNotFoundError(path)
        return read(self, path, **options)

    monkeypatch.setattr(type(storage), "read", gone)
    found = look_at_checkpoint(storage)
    assert [(claim.partition, claim.owner) for claim in found.claims] == [("a", "somebody")]
    assert found.metrics == {"b": {"loss": 1.0}}
