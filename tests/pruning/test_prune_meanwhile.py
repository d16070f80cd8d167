"""Two prunes and a trainer in one directory at the same time: no error, and what looks complete is."""

from __future__ import annotations

import pathlib
import random
import threading
import time

from snapctl.checksums import crc32c
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.pruner import carry_out, prepare
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum, SaveRecord, format_save_record
from snapctl.storage import open_storage
from tests.support.saves import LocalSaveDir, check_sound, steps_that_look_complete
from tests.support.snapshots import metadata, tensor_entry

BLOBS = 4
SAVES = 60


def save(url: str, step: int) -> None:
    """As `Snapshot.save` writes a checkpoint: blobs, record, manifest."""
    storage = open_storage(url).child(str(step))
    storage.make_dir(durable=False)
    names = [f"0/model/w{number}" for number in range(BLOBS)]
    for name in names:
        storage.write_blob(name, b"12345678", durable=False)
    keys = [name.rpartition("/")[2] for name in names]
    entries = {name: tensor_entry(name, [2]) for name in names}
    manifest = metadata({"0/model": {"type": "dict", "keys": keys}, **entries})
    record = SaveRecord(time.time(), 1, BlobSum(len(manifest), crc32c(manifest)))
    storage.write(SAVE_RECORD_PATH, format_save_record(record), durable=False)
    storage.write(".snapshot_metadata", manifest, durable=False)


def test_two_prunes_and_a_trainer_that_saves_into_the_same_steps(tmp_path: pathlib.Path) -> None:
    local = LocalSaveDir(tmp_path / "run")
    is_over = threading.Event()
    trouble: list[object] = []
    deleted: list[int] = []

    def prune(verified: bool) -> None:
        policy = make_policy(PolicyTerms(keep_last=(1,), verified=verified))
        try:
            while not is_over.is_set():
                (prepared,) = prepare([local.url], policy, dry_run=False)
                result = carry_out(prepared)
                trouble.extend([*prepared.plan.not_looked_at, *result.failed])
                deleted.append(result.deleted)
        except BaseException as error:
            trouble.append(error)

    prunes = [threading.Thread(target=prune, args=(verified,), daemon=True) for verified in (False, True)]
    for each in prunes:
        each.start()
    chosen = random.Random(7)
    try:
        for _ in range(SAVES):
            save(local.url, chosen.randint(1, 5))
            time.sleep(0.005)
    finally:
        is_over.set()
        for each in prunes:
            each.join()
    assert trouble == []
    assert sum(deleted) > 0
    check_sound(local)
    assert steps_that_look_complete(local), "the newest one is always there"
