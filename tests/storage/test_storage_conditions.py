"""What evaluators, claimers and waiters ask of a storage: conditions, its clock, many looks at once, limits."""

from __future__ import annotations

import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable

import pytest

from snapctl.errors import PermissionDeniedError, PreconditionError, RefusedError, StorageError, UnavailableError
from snapctl.storage import FileInfo, Storage, open_storage, run_parallel, time_limit
from tests.support.servers import Bucket, Controlled, fault_proxy

Opener = Callable[[], Storage]


@pytest.fixture(params=["local", "gs", "minigcs", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Storage:
    """An empty directory of each kind."""
    match request.param:
        case "local":
            return open_storage(tmp_path)
        case "gs":
            return open_storage(f"{request.getfixturevalue('bucket').url}/run")
        case "minigcs":
            return open_storage(f"{Bucket(request.getfixturevalue('minigcs').endpoint, 'bk').url}/run")
        case _:
            return open_storage(f"memory://{uuid.uuid4().hex}/run")


def test_a_file_is_created_exclusively_once(storage: Storage) -> None:
    storage.write("10/a", b"first", exclusive=True)
    with pytest.raises(PreconditionError):
        storage.write("10/a", b"second", exclusive=True)
    assert storage.read("10/a") == b"first"


def test_only_the_version_that_was_read_is_replaced(storage: Storage) -> None:
    first = storage.write("10/a", b"1")
    second = storage.write("10/a", b"22", version=first.version)
    assert storage.read("10/a") == b"22"
    with pytest.raises(PreconditionError):
        storage.write("10/a", b"333", version=first.version)
    assert storage.read("10/a") == b"22"
    storage.delete("10/a", version=second.version)
    with pytest.raises(PreconditionError):
        storage.write("10/a", b"4444", version=second.version)
    assert storage.find_file("10/a") is None


def test_a_refused_replacement_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    storage = open_storage(tmp_path)
    first = storage.write("a", b"1")
    storage.write("a", b"22")
    with pytest.raises(PreconditionError):
        storage.write("a", b"333", version=first.version)
    assert os.listdir(tmp_path) == ["a"]


def test_of_many_that_add_to_a_file_none_undoes_another(tmp_path: pathlib.Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("a", b"")

    def add(letter: str) -> None:
        while True:
            found = storage.find_file("a")
            assert found is not None
            data = storage.read("a")
            try:
                if len(data) == found.size_bytes:
                    storage.write("a", data + letter.encode(), version=found.version)
                    return
            except PreconditionError:
                continue

    letters = "abcdefghijklmnop"
    run_parallel(add, letters, jobs=len(letters))
    assert sorted(storage.read("a").decode()) == sorted(letters)


def test_the_lock_of_a_stopped_process_does_not_hold_a_writer_for_ever(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr("snapctl.storage.local_files.LOCK_SECONDS", 0.05)
    storage = open_storage(tmp_path)
    found = storage.write("a", b"1")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UnavailableError):
            storage.write("a", b"22", version=found.version)
    finally:
        os.close(descriptor)
    storage.write("a", b"22", version=found.version)


def test_a_file_system_that_only_checks_and_then_writes_creates_nothing_exclusively() -> None:
    storage = open_storage("memory://x/run")
    storage.scheme = "sftp"
    with pytest.raises(RefusedError, match="cannot create a file exclusively"):
        storage.write("a", b"", exclusive=True)


def test_a_server_that_ignores_the_condition_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def ignores_mode(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self.open(path, mode="wb", data=value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", ignores_mode)
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    with pytest.raises(RefusedError):
        storage.write("a", b"", exclusive=True)
    assert storage.list_tree() == []


def test_the_storages_clock_goes_with_what_it_writes(storage: Storage) -> None:
    before = storage.write("10/a", b"x").modified_at
    found = storage.server_now()
    after = storage.write("10/b", b"x").modified_at
    assert before - 1.001 <= found <= after
    assert all("snapctl-tmp" not in file.path for file in storage.list_tree())


def test_the_storages_clock_is_not_the_machines(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    storage.write("a", b"x")
    assert abs(storage.server_now() - real()) < 60


def test_a_clock_that_cannot_be_read_is_an_error_and_never_the_machines_clock(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StorageError):
        open_storage(tmp_path / "none").server_now()


def test_one_file_of_many_directories_is_found_in_one_go(storage: Storage) -> None:
    for name in ("1", "2", "30"):
        storage.write(f"{name}/.snapshot_metadata", name.encode())
    storage.write("4/deep/.snapshot_metadata", b"no")
    found = storage.find_each(["30", "1", "4", "5"], ".snapshot_metadata")
    assert list(found) == ["30", "1", "4", "5"]
    thirty = found["30"]
    assert isinstance(thirty, FileInfo)
    assert (thirty.path, thirty.size_bytes) == (".snapshot_metadata", 2)
    assert found["4"] is None
    assert found["5"] is None
    alone = storage.find_file("30/.snapshot_metadata")
    assert alone is not None
    assert alone.version == thirty.version


def test_many_looks_cost_a_request_for_each_thousand_on_gcs(minigcs: Controlled) -> None:
    names = [str(step) for step in range(0, 100_000, 10)]
    objects = [f"ru[n]*/{name}/{inner}" for name in names for inner in (".snapshot_metadata", "0/w")]
    minigcs.seed("bk", [(name, 5) for name in objects if not name.startswith("ru[n]*/500/")])
    storage = open_storage("gs://bk/ru[n]*")
    minigcs.reset()
    found = storage.find_each(names, ".snapshot_metadata")
    assert minigcs.stats()["n"] == 10
    assert [name for name, item in found.items() if item is None] == ["500"]


def test_a_server_that_knows_no_globs_is_asked_one_by_one(minigcs: Controlled) -> None:
    names = [str(step) for step in range(101)]
    blobs = [(f"run/{name}/0/{number}", 1) for name in names for number in range(45)]
    manifests = [(f"run/{name}/.snapshot_metadata", 5) for name in names if name != "50"]
    minigcs.seed("bk", [*blobs, *manifests])
    minigcs.configure(noglob=True)
    found = open_storage("gs://bk/run").find_each(names, ".snapshot_metadata")
    assert [name for name, item in found.items() if not isinstance(item, FileInfo)] == ["50"]
    assert minigcs.stats()["n"] == 3 + len(names)


def test_a_partition_full_of_glob_characters_is_found_by_glob(minigcs: Controlled) -> None:
    names = [str(step) for step in range(101)]
    minigcs.seed("bk", [(f"run/{name}/evaled_by/{inner}_DONE", 0) for name in names for inner in ("[v]{*?", "avabcd")])
    minigcs.reset()
    found = open_storage("gs://bk/run").find_each(names, "evaled_by/[v]{*?_DONE")
    assert all(isinstance(item, FileInfo) for item in found.values())
    assert minigcs.stats()["n"] == 1


def test_a_look_that_fails_does_not_fail_the_others(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    for name in ("1", "2"):
        bucket.write(f"run/{name}/a", b"x")
    proxy.configure(faults=[{"match": "run%2F2%2Fa", "status": 403, "body": "{}"}])
    found = open_storage(f"{bucket.url}/run").find_each(["1", "2"], "a")
    assert isinstance(found["1"], FileInfo)
    assert isinstance(found["2"], PermissionDeniedError)


@pytest.mark.parametrize("status", [404, 412])
def test_a_deletion_whose_answer_was_lost_has_done_its_work(proxied: tuple[Bucket, Controlled], status: int) -> None:
    bucket, proxy = proxied
    storage = open_storage(f"{bucket.url}/run")
    file = storage.write("10/a", b"1")
    proxy.configure(
        faults=[
            {"match": "10%2Fa", "method": "DELETE", "lose": True, "n": 1},
            {"match": "10%2Fa", "method": "DELETE", "skip": 1, "n": 1, "status": status, "body": "{}"},
        ]
    )
    assert storage.delete("10/a", version=file.version)
    assert bucket.names() == []


@pytest.mark.parametrize("missing412", [False, True])
def test_a_batch_of_deletions_whose_answer_was_lost_has_done_its_work(
    minigcs: Controlled, monkeypatch: pytest.MonkeyPatch, missing412: bool
) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    minigcs.configure(missing412=missing412)
    with fault_proxy(minigcs.endpoint) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        storage = open_storage(f"{bucket.url}/run")
        for name in ("a", "b", "c"):
            storage.write(f"10/{name}", b"1")
        assert storage.delete_files([storage.find_file("10/a")]).deleted == 1  # finds out that there are batches
        files = storage.list_tree()
        proxy.configure(faults=[{"match": "/batch/", "method": "POST", "lose": True, "n": 1}])
        report = storage.delete_files(files)
    assert (report.deleted, report.changed, report.failed) == (2, [], [])
    assert bucket.names() == []


def test_a_deletion_that_finds_another_object_at_its_second_try_is_refused(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    storage = open_storage(f"{bucket.url}/run")
    file = storage.write("10/a", b"1")
    faults = [
        {"match": "10%2Fa", "method": "DELETE", "status": 503, "body": "{}", "n": 1},
        {"match": "10%2Fa", "method": "DELETE", "status": 412, "body": "{}", "n": 1},
    ]
    proxy.configure(faults=faults)
    with pytest.raises(PreconditionError):
        storage.delete("10/a", version=file.version)
    assert bucket.names() == ["run/10/a"]


def test_a_request_is_given_up_when_the_time_is_up(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    bucket.write("run/1/a", b"x")
    storage = open_storage(f"{bucket.url}/run")
    storage.list_dir()
    proxy.configure(faults=[{"match": ".", "hang": 60}])
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="no answer in time"), time_limit(0.2):
        storage.list_dir()
    with time_limit(0.2):
        found = storage.find_each(["1", "2"], "a")
    assert all(isinstance(item, UnavailableError) for item in found.values())
    for thread in threading.enumerate():
        if thread.name.startswith("snapctl-io"):
            thread.join(10)
            assert not thread.is_alive()
    assert time.monotonic() - started < 30


def test_a_limit_within_a_limit_ends_with_the_outer_one() -> None:
    from snapctl.storage.running import seconds_left

    assert seconds_left() is None
    with time_limit(0):
        with time_limit(1000):
            assert seconds_left() == 0
        with time_limit(None):
            assert seconds_left() == 0
    assert seconds_left() is None
