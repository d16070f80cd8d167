"""What only gs:// has: generations, folder objects, credentials, servers that fail."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from snapctl.errors import (
    BucketNotFoundError,
    CredentialsError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    StorageError,
    UnavailableError,
)
from snapctl.storage import open_storage
from tests.support.servers import Bucket, Controlled


def _error_body(code: int, message: str) -> str:
    return json.dumps({"error": {"code": code, "message": message}})


def test_a_delete_insists_on_the_generation_that_was_listed(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    store = open_storage(f"{bucket.url}/run")
    old = store.write("f", b"1")
    new = store.write("f", b"2")
    with pytest.raises(PreconditionError):
        store.delete("f", version=old.version)
    assert store.delete("f", version=new.version) is True
    assert store.delete("f", version=new.version) is False


def test_a_read_is_pinned_to_its_generation(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    store = open_storage(f"{bucket.url}/run")
    info = store.write("f", b"12345")
    proxy.reset()
    assert store.read_range("f", 1, 3, version=info.version) == b"23"
    (request,) = proxy.stats(log=True)["log"]
    assert f"generation={info.version}" in request[1] and request[3] == "bytes=1-2"


def test_folder_objects_and_doubled_slashes_are_no_children(bucket: Bucket) -> None:
    for name in ("run1/", "run1/10/", "run1/10/.snapshot_metadata", "run1/30/", "run1//40/.snapshot_metadata"):
        bucket.write(name, b"{}" if name.endswith("metadata") else b"")
    listing = open_storage(f"{bucket.url}/run1").list_dir()
    assert (listing.files, listing.dirs) == ((), ("10", "30"))


def test_an_object_and_a_prefix_of_the_same_name_both_show(bucket: Bucket) -> None:
    bucket.write("run/10", b"an object named like a step")
    bucket.write("run/10/.snapshot_metadata", b"{}")
    listing = open_storage(f"{bucket.url}/run").list_dir()
    assert [file.path for file in listing.files] == ["10"]
    assert listing.dirs == ("10",)


def test_a_scan_jumps_over_blobs_that_nobody_wants(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    blobs = [(f"run/7/0/w{number:05}", 10) for number in range(12_000)]
    more = [(f"run/7/{name}", 5) for name in (".snapshot_metadata", "PINNED", "evaled_by/val_DONE", "sharded/x")]
    minigcs.seed(bucket.name, [*blobs, *more, ("run/8/.snapshot_metadata", 3)])
    store = open_storage(f"{bucket.url}/run")
    minigcs.reset()
    wanted = [".snapshot_metadata", "PINNED", "evaled_by/"]
    seven, eight = store.scan(["7", "8"], wanted)
    assert sorted(file.path for file in seven.files) == [".snapshot_metadata", "PINNED", "evaled_by/val_DONE"]
    assert [file.path for file in eight.files] == [".snapshot_metadata"]
    assert minigcs.stats()["n"] <= 4
    seven, eight = store.scan(["7", "8"], wanted, totals=True)
    assert (seven.file_count, seven.size_bytes) == (12_004, 120_020)
    assert (eight.file_count, eight.size_bytes) == (1, 3)


def test_a_tree_of_many_pages_is_listed_completely(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    names = [f"7/{rank}/layer.{number}" for rank in range(5) for number in range(700)]
    names += [f"7/batched/{number:04x}-{'f' * 8}" for number in range(0, 65536, 40)] + ["7/.snapshot_metadata"]
    minigcs.seed(bucket.name, [(f"run/{name}", 1) for name in names])
    found = [file.path for file in open_storage(f"{bucket.url}/run").list_tree("7")]
    assert found == sorted(names)


def test_the_bucket_itself_is_a_directory(bucket: Bucket) -> None:
    store = open_storage(bucket.url)
    assert (store.url, store.name, store.parent()) == (bucket.url, "", None)
    assert store.list_dir().dirs == ()
    store.write("10/x", b"1")
    assert store.list_dir().dirs == ("10",)


def test_a_missing_bucket_is_told_from_an_empty_prefix(bucket: Bucket) -> None:
    with pytest.raises(BucketNotFoundError, match="gs://no-such-bucket: no such bucket"):
        open_storage("gs://no-such-bucket/run").list_dir()
    with pytest.raises(FileNotFoundError, match="/run: not found"):
        open_storage(f"{bucket.url}/run").list_dir()


@pytest.mark.parametrize("url", ["gs://", "gs:///run"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidPathError):
        open_storage(url)


@pytest.mark.parametrize(
    ("code", "message", "kind", "says"),
    [
        (401, "Anonymous caller does not have storage.objects.list access", CredentialsError, "Anonymous caller"),
        (401, "Invalid Credentials", CredentialsError, "Invalid Credentials"),
        (403, "sa@p does not have storage.objects.list access", PermissionDeniedError, "sa@p does not have"),
        (400, "Bucket is a requester pays bucket but no user project provided.", CredentialsError, "project that pays"),
        (412, "x", PreconditionError, "exists already"),
        (418, "teapot", UnavailableError, "the server answers 418: teapot"),
    ],
)
def test_what_will_not_pass_by_waiting_is_said_at_once(
    proxied: tuple[Bucket, Controlled], code: int, message: str, kind: type[StorageError], says: str
) -> None:
    bucket, proxy = proxied
    proxy.configure(faults=[{"match": "storage/v1", "status": code, "body": _error_body(code, message)}])
    proxy.reset()
    with pytest.raises(kind, match=says) as caught:
        open_storage(f"{bucket.url}/run").list_dir()
    assert caught.value.url == f"{bucket.url}/run"
    assert proxy.stats()["n"] == 1, "it was not tried again"


@pytest.mark.parametrize(
    "fault", [{"status": 503, "body": "x"}, {"status": 429, "body": "x"}, {"status": 502}, {"drop": True}]
)
def test_a_hiccup_is_survived(proxied: tuple[Bucket, Controlled], fault: dict[str, object]) -> None:
    bucket, proxy = proxied
    store = open_storage(f"{bucket.url}/run")
    store.write("f", b"x")
    proxy.configure(faults=[{"match": "storage/v1", "n": 1, **fault}])
    assert [file.path for file in store.list_dir().files] == ["f"]


def test_an_answer_that_is_not_json_is_an_error_of_the_storage(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    proxy.configure(faults=[{"match": "storage/v1", "status": 200, "body": "<html>login</html>"}])
    with pytest.raises(StorageError, match="not what GCS would say"):
        open_storage(f"{bucket.url}/run").list_dir()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_dead_endpoints_are_given_up_within_fifteen_seconds(
    silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = [silent_server, "http://127.0.0.1:9", "http://no-such-host.invalid"]
    seconds: dict[str, float] = {}

    def ask(endpoint: str) -> None:
        store = open_storage("gs://bk/run", {"endpoint_url": endpoint, "token": "anon"})
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            store.list_dir()
        seconds[endpoint] = time.monotonic() - began

    threads = [threading.Thread(target=ask, args=(endpoint,)) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seconds) == sorted(endpoints)
    assert max(seconds.values()) < 15


def test_credentials_that_are_a_missing_file_are_refused_before_anything_is_sent(
    proxied: tuple[Bucket, Controlled], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy = proxied
    proxy.reset()
    for token in (str(tmp_path / "nix.json"), "key.json", "~/nix/key", "short"):
        with pytest.raises(CredentialsError, match="a credentials file that is not there") as caught:
            open_storage(f"{bucket.url}/run", {"token": token})
        assert token not in str(caught.value), "values are never shown"
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nix.json"))
    with pytest.raises(CredentialsError, match="GOOGLE_APPLICATION_CREDENTIALS names a file that is not there"):
        open_storage(f"{bucket.url}/run")
    assert proxy.stats()["n"] == 0


def test_unusable_credentials_are_an_error_without_their_content(tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key.json"
    key.write_text('{"type": "service_account", "private_key": "s3cret"}')
    with pytest.raises(CredentialsError) as caught:
        open_storage("gs://bk/run", {"token": str(key)})
    assert "s3cret" not in str(caught.value)
    key.write_text("not json s3cret")
    with pytest.raises(CredentialsError) as caught:
        open_storage("gs://bk/run", {"token": str(key)})
    assert "s3cret" not in str(caught.value)


def test_a_paying_project_goes_with_every_request(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    store = open_storage(f"{bucket.url}/run", {"requester_pays": "my-project"})
    proxy.reset()
    store.write("10/f", b"x")
    store.read("10/f")
    store.read_range("10/f", 0, 1)
    store.find_file("10/f")
    store.list_dir()
    store.list_tree()
    list(store.scan(["10"], ["f"]))
    store.delete("10/f")
    requests = [entry[1] for entry in proxy.stats(log=True)["log"]]
    assert len(requests) >= 8
    assert all("userProject=my-project" in request for request in requests)


def test_the_configuration_of_fsspec_is_honoured(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, snapctl, tmp_path: pathlib.Path
) -> None:
    bucket.write("run/10/.snapshot_metadata", b'{"version": "0.1.0", "world_size": 1, "manifest": {}}')
    monkeypatch.setenv("FSSPEC_GS_TOKEN", str(tmp_path / "nix.json"))
    done = snapctl("latest", f"{bucket.url}/run")
    assert done.code == 4 and "credentials file that is not there" in done.stderr
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    done = snapctl("latest", f"{bucket.url}/run", env=dict(os.environ))
    assert (done.code, done.stdout) == (0, f"{bucket.url}/run/10\n")
