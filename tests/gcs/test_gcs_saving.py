"""Saving into gs://: a fake-gcs-server, a GCS that honours conditions, and a proxy that fails and counts."""

from __future__ import annotations

import collections
import json
import os
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import google_crc32c  # noqa: E402

from snapctl import Snapshot  # noqa: E402
from snapctl.checkpoints import find_checkpoints, open_save_dir, read_manifest  # noqa: E402
from snapctl.errors import DamagedError, PermissionDeniedError, SaveError  # noqa: E402
from snapctl.save_record import SAVE_RECORD_PATH, parse_save_record  # noqa: E402
from snapctl.saving.plugin import SnapctlPlugin  # noqa: E402
from snapctl.storage import open_storage  # noqa: E402
from tests.support.servers import Bucket, Controlled  # noqa: E402

pytestmark = pytest.mark.torch


def state(value: float = 1.0, tensors: int = 3) -> dict[str, Any]:
    return {"m": torchsnapshot.StateDict(**{f"w{i}": torch.full((1000,), value + i) for i in range(tensors)})}


@pytest.mark.parametrize("batching", ["0", "1"])
def test_a_checkpoint_in_a_bucket_is_complete_and_read_by_torchsnapshot(
    batching: str, bucket: Bucket, entry_point: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", batching)
    loaded = Snapshot(f"{bucket.url}/run", state()).save(7).wait()
    assert loaded.read_object("0/m/w2").tolist() == [3.0] * 1000
    assert Snapshot.get_torch_snapshot(f"{bucket.url}/run").read_object("0/m/w0").tolist() == [1.0] * 1000
    (found,) = find_checkpoints(open_save_dir(f"{bucket.url}/run"))
    assert found.state == "complete" and found.record is not None and not found.warnings
    record = parse_save_record(bucket.read(f"run/7/{SAVE_RECORD_PATH}"), with_blobs=True)
    assert record.blobs is not None and set(record.blobs) == {
        name.removeprefix("run/7/") for name in bucket.names("run/7/") if "/." not in name
    }
    for location, blob in record.blobs.items():
        data = bucket.read(f"run/7/{location}")
        assert (blob.size_bytes, blob.crc32c) == (len(data), google_crc32c.value(data))


def test_storage_options_reach_an_endpoint_of_ones_own(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, entry_point: None
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    options = {"endpoint_url": bucket.endpoint, "token": "anon"}
    loaded = Snapshot(bucket.url, state(), storage_options=options).save(0).wait()
    assert loaded.read_object("0/m/w0")[0] == 1
    found = Snapshot.get_torch_snapshot(bucket.url, storage_options=options)
    assert found.read_object("0/m/w0")[0] == 1


@pytest.mark.parametrize("megabytes", [2, 68])
def test_a_large_blob_is_uploaded_whole_or_in_parts_and_its_checksum_agrees(
    megabytes: int, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snapctl.storage.gcs import uploads

    monkeypatch.setattr(uploads, "SINGLE_UPLOAD_BYTES", 40 << 20)
    monkeypatch.setattr(uploads, "UPLOAD_CHUNK_BYTES", 32 << 20)
    tensor = torch.arange(megabytes << 18, dtype=torch.float32)
    Snapshot(bucket.url, {"m": torchsnapshot.StateDict(w=tensor)}).save(1).wait()
    storage = open_storage(f"{bucket.url}/1")
    (location,) = read_manifest(storage).blob_locations()
    found = storage.find_file(location)
    assert found is not None and found.size_bytes == tensor.numel() * 4
    record = parse_save_record(storage.read(SAVE_RECORD_PATH), with_blobs=True)
    assert record.blobs is not None and record.blobs[location].crc32c == found.crc32c
    assert storage.read_range(location, found.size_bytes - 4, found.size_bytes) == tensor[-1:].numpy().tobytes()


def test_saving_again_leaves_only_the_new_objects(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    snapshot = Snapshot(f"{bucket.url}/run", state(1.0))
    snapshot.save(7).wait()
    for name in ("PINNED", "evaled_by/val_DONE", "evaled_by/", "7/", ".snapshot_metadata.deleting"):
        bucket.write(f"run/7/{name}")
    snapshot.state.update(state(5.0))
    snapshot.save(7).wait()
    snapshot.save(8).wait()  # by then step 7 is tidied up
    names = {name.removeprefix("run/7/") for name in bucket.names("run/7/")}
    wanted = read_manifest(open_storage(f"{bucket.url}/run/7")).blob_locations()
    assert names == wanted | {".snapshot_metadata", SAVE_RECORD_PATH, "PINNED", "evaled_by/", "7/"}


def test_a_first_save_costs_one_request_for_each_blob_and_six_more(
    proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy = proxied
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    proxy.reset()
    Snapshot(bucket.url, state(tensors=20)).save(7).wait()
    log = proxy.stats(log=True)["log"]
    methods = collections.Counter(line[0] for line in log)
    assert methods["POST"] == 23  # 20 blobs, the announcement, the record, the manifest
    assert 2 <= methods["GET"] <= 3  # what is there, and whether the announcement still stands; see below
    assert methods["DELETE"] <= 1  # of the announcement, for which nobody waits; an emulator is asked for it before


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_passing_failure_is_retried(size: int, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    proxy.configure(faults=[{"match": "/upload/", "method": "POST", "status": 503, "body": "busy", "n": 2}])
    Snapshot(bucket.url, {"m": torchsnapshot.StateDict(w=torch.arange(float(size)))}).save(7).wait()
    storage = open_storage(f"{bucket.url}/7")
    (location,) = read_manifest(storage).blob_locations()
    assert storage.read(location) == torch.arange(float(size)).numpy().tobytes()


@pytest.mark.parametrize("what", [r"\.snapshot_metadata", "batched", r"save\.json"])
def test_a_refused_upload_ends_the_save_and_leaves_no_manifest(what: str, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    body = json.dumps({"error": {"code": 403, "message": "no"}})
    proxy.configure(faults=[{"match": "/upload/", "bodymatch": what, "status": 403, "body": body}])
    with pytest.raises(SaveError, match="permission denied") as caught:
        Snapshot(f"{bucket.url}/run", state()).save(7).wait()
    assert isinstance(caught.value.__cause__, PermissionDeniedError) and not caught.value.unknown
    assert {name for name in bucket.names() if not name.endswith(SAVE_RECORD_PATH)} == set()


def test_an_answer_that_is_lost_after_the_commit_is_not_taken_for_a_failure(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    minigcs.configure(faults=[{"after": "upload", "status": 503, "n": 100}])
    with pytest.raises(SaveError):  # the blobs: nobody knows
        Snapshot(f"{bucket.url}/run", state()).save(7).wait()
    assert "run/7/.snapshot_metadata" not in bucket.names()


def test_a_bucket_that_is_not_there_is_said(bucket: Bucket) -> None:
    with pytest.raises(SaveError, match="no such bucket"):
        Snapshot("gs://not-there-at-all/run", state()).save(7).wait()


def test_bytes_that_arrive_changed_are_noticed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from snapctl.saving import plugin

    monkeypatch.setattr(plugin, "crc32c", lambda data: 7)  # as if the memory had changed on the way
    with pytest.raises(SaveError, match="that of what was sent 00000007") as caught:
        Snapshot(f"{bucket.url}/run", state()).save(7).wait()
    assert isinstance(caught.value.__cause__, DamagedError)
    assert bucket.names() == []


def test_torchsnapshot_alone_reaches_no_emulator() -> None:
    from torchsnapshot.storage_plugins import gcs

    assert "https://www.googleapis.com/" in pathlib.Path(gcs.__file__).read_text()
    assert os.environ.get("STORAGE_EMULATOR_HOST") is None


def test_the_plugin_deletes_what_torchsnapshot_asks_it_to(bucket: Bucket) -> None:
    import asyncio

    bucket.write("run/1/a/x", b"1")
    bucket.write("run/1/a/y/z", b"2")
    bucket.write("run/1/b", b"3")
    plugin = SnapctlPlugin(open_storage(f"{bucket.url}/run/1"))

    async def work() -> None:
        await plugin.delete("b")
        await plugin.delete_dir("a")
        await plugin.close()

    asyncio.run(work())
    assert bucket.names() == []
