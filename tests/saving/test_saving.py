"""A save by one rank, from the call to the commit, into any storage; and what it leaves when it fails."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import google_crc32c  # noqa: E402
import msgspec  # noqa: E402

from snapctl import SaveOptions, Snapshot  # noqa: E402
from snapctl.checkpoints import find_checkpoints, find_place, open_save_dir, read_manifest  # noqa: E402
from snapctl.errors import DamagedError, InvalidOptionError, NoSpaceError, SaveError  # noqa: E402
from snapctl.save_record import SAVE_RECORD_PATH, parse_save_record  # noqa: E402
from snapctl.saving import saver  # noqa: E402
from snapctl.saving.plugin import SnapctlPlugin  # noqa: E402
from snapctl.storage import FileInfo, LocalStorage, open_storage  # noqa: E402
from snapctl.verification.wholeness import check_whole, list_checkpoint  # noqa: E402
from tests.support.command import Finished, unprivileged  # noqa: E402
from tests.support.stored import read_stored  # noqa: E402

pytestmark = pytest.mark.torch


def state(value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"m": torchsnapshot.StateDict(w=torch.full((1000,), value), n=3, **more)}


def files_in(root: pathlib.Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


# -- the commit ------------------------------------------------------------------------------------------------------


def test_a_save_makes_a_complete_checkpoint_with_its_record(tmp_path: pathlib.Path) -> None:
    started = time.time()
    pending = Snapshot(tmp_path / "a/run", state()).save(7)
    assert pending.path == str(tmp_path / "a/run/7") and pending.step == 7
    pending.wait()
    assert pending.done()
    (found,) = find_checkpoints(open_save_dir(str(tmp_path / "a/run")))
    assert found.state == "complete" and not found.warnings
    assert found.record is not None and found.record.world_size == 1
    assert found.created_at is not None and started - 1 < found.created_at < time.time() + 1
    storage = LocalStorage(pending.path)
    record = parse_save_record(storage.read(SAVE_RECORD_PATH), with_blobs=True)
    blobs = record.blobs or {}
    assert set(blobs) == read_manifest(storage).blob_locations()
    for location, blob in blobs.items():
        data = (pathlib.Path(pending.path) / location).read_bytes()
        assert (blob.size_bytes, blob.crc32c) == (len(data), google_crc32c.value(data))
    (timings,) = record.ranks
    assert 0 < timings.blocked_seconds <= timings.durable_seconds < 30
    assert timings.size_bytes == sum(blob.size_bytes for blob in blobs.values())
    raw = json.loads(storage.read(SAVE_RECORD_PATH))
    assert raw["ranks"][0]["bytes_per_second"] == pytest.approx(timings.size_bytes / timings.durable_seconds, rel=0.01)


def test_everything_is_durable_before_the_manifest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync, link = os.fsync, os.link

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def give_name(source: str, target: str, **options: Any) -> None:
        synced.append(f"-> {target}")
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "link", give_name)
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    Snapshot(tmp_path / "run", state()).save(7).wait()
    root = str(tmp_path / "run/7")
    before = synced[: synced.index(f"-> {root}/.snapshot_metadata")]
    order = [
        str(tmp_path),
        str(tmp_path / "run"),
        f"{root}/0/m/w",
        f"{root}/0/m",
        f"{root}/0",
        root,
        f"{root}/.snapctl",
    ]
    assert set(order) <= set(before)
    assert before.index(f"{root}/0/m/w") < before.index(f"{root}/0/m")
    assert any(path.startswith(f"{root}/#") for path in before), "the manifest, which has no name yet"
    assert synced[-1] == root


def test_without_fsync_nothing_is_synced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    Snapshot(tmp_path, state(), options=SaveOptions(fsync=False)).save(7).wait()
    assert read_stored(tmp_path / "7")["0/m/w"][0] == 1


def test_without_checksums_none_are_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Snapshot(tmp_path, state(), options=SaveOptions(checksums=False)).save(7).wait()
    record = parse_save_record((tmp_path / "7" / SAVE_RECORD_PATH).read_bytes(), with_blobs=True)
    assert record.blobs == {} and record.ranks[0].size_bytes > 0


def test_no_reader_sees_the_checkpoint_before_it_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_back(monkeypatch, "write_blob")
    pending = Snapshot(tmp_path, state()).save(7)
    gate.reached.wait(30)
    assert not (tmp_path / "7/.snapshot_metadata").exists() and not pending.done()
    gate.set()
    pending.wait()
    assert (tmp_path / "7/.snapshot_metadata").exists()


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


class Gate(threading.Event):
    """Holds back whoever comes until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


def hold_back(monkeypatch: pytest.MonkeyPatch, name: str) -> Gate:
    gate = Gate()
    original = getattr(LocalStorage, name)

    def wait(*args: Any, **options: Any) -> Any:
        gate.reached.set()
        gate.wait(30)
        return original(*args, **options)

    monkeypatch.setattr(LocalStorage, name, wait)
    return gate


def test_one_log_line_tells_how_it_went(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snapctl.saving")
    Snapshot(tmp_path, state()).save(7).wait()
    end = time.monotonic() + 5
    while not caplog.records and time.monotonic() < end:
        time.sleep(0.01)
    (line,) = [record for record in caplog.records if record.name == "snapctl.saving"]
    fields = line.snapctl  # type: ignore[attr-defined]
    assert fields["step"] == 7 and fields["bytes"] >= 4000
    assert set(fields) >= {
        "path",
        "rank",
        "blocked_seconds",
        "durable_seconds",
        "committed_seconds",
        "bytes_per_second",
    }
    assert all(f"{key}={value}" in line.getMessage() for key, value in fields.items())


# -- saving again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["0", "1"])
def test_saving_again_into_a_step_leaves_only_the_new_checkpoint_and_its_pin(
    batching: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, snapctl: Callable[..., Finished]
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", batching)
    Snapshot(tmp_path, state(1.0, old=torch.ones(5))).save(7).wait()
    for name in ("PINNED", "evaled_by/val_DONE", "evaled_by/val_CLAIM.0", ".snapshot_metadata.deleting", "0/m/stray"):
        (tmp_path / "7" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "7" / name).touch()
    again = Snapshot(tmp_path, state(2.0))
    again.save(7).wait()
    again.save(8).wait()  # the old blobs of step 7 have gone by now
    found = files_in(tmp_path / "7")
    kept = {".snapshot_metadata", SAVE_RECORD_PATH, "PINNED"}
    assert found == kept | read_manifest(LocalStorage(str(tmp_path / "7"))).blob_locations()
    assert read_stored(tmp_path / "7")["0/m/w"][0] == 2
    assert snapctl("list", str(tmp_path), "--json").json["checkpoints"][0]["pinned"]


def test_torchsnapshot_alone_leaves_old_blobs_and_markers(tmp_path: pathlib.Path) -> None:
    for value in (1.0, 2.0):
        torchsnapshot.Snapshot.take(str(tmp_path / "7"), state(value))
        (tmp_path / "7/evaled_by").mkdir(exist_ok=True)
        (tmp_path / "7/evaled_by/val_DONE").touch()
    assert len(list((tmp_path / "7/batched").iterdir())) == 2
    assert (tmp_path / "7/evaled_by/val_DONE").exists()


def test_what_a_key_holds_may_change_its_kind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    held = torchsnapshot.StateDict()
    snapshot = Snapshot(url, {"m": held})
    one = torch.ones(2)
    for value in (one, {"a": {"b": one}}, {"a": one}, [one], (1,), one):
        held["x"] = value
        path = snapshot.save(1).wait().path.removeprefix("snapctl://")
        storage = open_storage(path)
        manifest = read_manifest(storage)
        assert not check_whole(storage, manifest, list_checkpoint(storage, manifest)).problems


def test_the_old_manifest_is_gone_before_the_first_new_blob(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot(tmp_path, state(1.0)).save(7).wait()
    seen: list[bool] = []
    original = LocalStorage.write_blob

    def look(self: LocalStorage, path: str, data: Any, **options: Any) -> FileInfo:
        seen.append((tmp_path / "7/.snapshot_metadata").exists())
        return original(self, path, data, **options)

    monkeypatch.setattr(LocalStorage, "write_blob", look)
    Snapshot(tmp_path, state(2.0)).save(7).wait()
    assert seen == [False]


def test_a_blob_is_never_written_into_an_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy made of hard links, and a reader that has the old file open, keep the old bytes."""
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    Snapshot(tmp_path, state(1.0)).save(7).wait()
    os.link(tmp_path / "7/0/m/w", tmp_path / "copy")
    Snapshot(tmp_path, state(2.0)).save(7).wait()
    assert torch.frombuffer(bytearray((tmp_path / "copy").read_bytes()), dtype=torch.float32)[0] == 1
    assert read_stored(tmp_path / "7")["0/m/w"][0] == 2


def test_a_save_waits_for_the_one_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_back(monkeypatch, "write_blob")
    snapshot = Snapshot(tmp_path, state())
    first = snapshot.save(1)
    threading.Timer(0.1, gate.set).start()
    second = snapshot.save(2)
    assert first.done()
    second.wait()
    assert {"1", "2"} == {path.name for path in tmp_path.iterdir()}


def test_two_snapshots_of_one_process_do_not_save_one_step_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_back(monkeypatch, "write_blob")
    first = Snapshot(tmp_path, state(1.0)).save(1)
    threading.Timer(0.1, gate.set).start()
    second = Snapshot(tmp_path, state(2.0)).save(1)
    assert first.done()
    second.wait()
    assert read_stored(tmp_path / "1")["0/m/w"][0] == 2


def test_of_two_jobs_that_save_one_step_at_once_one_is_whole_and_the_other_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")  # both write 1/0/m/w
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to("run")  # so that they do not know of each other, as two jobs do not
    gate = Gate()
    seal = SnapctlPlugin.seal

    def wait(plugin: SnapctlPlugin) -> None:
        seal(plugin)
        if "alias" not in plugin.storage.url:
            gate.reached.set()
            gate.wait(30)

    monkeypatch.setattr(SnapctlPlugin, "seal", wait)
    first = Snapshot(tmp_path / "run", state(1.0)).save(1)
    gate.reached.wait(30)
    Snapshot(tmp_path / "alias", state(2.0)).save(1).wait()
    gate.set()
    with pytest.raises(SaveError, match=r"step 1 was not saved: another save into .*/run/1 has begun meanwhile"):
        first.wait()
    assert read_stored(tmp_path / "run/1")["0/m/w"][0] == 2
    storage = LocalStorage(str(tmp_path / "run/1"))
    assert check_whole(storage, read_manifest(storage), list_checkpoint(storage, read_manifest(storage))).problems == ()
    assert files_in(tmp_path / "run/1") == {".snapshot_metadata", ".snapctl/save.json", "0/m/w"}


def test_the_older_of_two_jobs_stops_writing_blobs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    monkeypatch.setattr(saver, "LOOK_SECONDS", 0.0)
    gate = Gate()
    write = SnapctlPlugin._write
    calls: list[str] = []

    def wait(plugin: SnapctlPlugin, path: str, data: Any) -> None:
        if "alias" not in plugin.storage.url:
            gate.reached.set()
            gate.wait(30)
        write(plugin, path, data)
        calls.append(plugin.storage.url)

    monkeypatch.setattr(SnapctlPlugin, "_write", wait)
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to("run")
    first = Snapshot(tmp_path / "run", state(1.0)).save(1)
    gate.reached.wait(30)
    Snapshot(tmp_path / "alias", state(2.0)).save(1).wait()
    gate.set()
    with pytest.raises(SaveError, match="another save into"):
        first.wait()
    assert calls == [str(tmp_path / "alias/1")]
    assert read_stored(tmp_path / "run/1")["0/m/w"][0] == 2


def test_what_goes_wrong_in_tidying_up_does_not_hold_up_the_next_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    snapshot = Snapshot(tmp_path, state())
    snapshot.save(1).wait()
    monkeypatch.setattr(saver, "delete_blobs", refuse)
    again = snapshot.save(1)
    again.wait()
    assert again._released.wait(30)
    assert "can't start new thread" in caplog.text
    monkeypatch.undo()
    snapshot.save(2).wait()


# -- failures --------------------------------------------------------------------------------------------------------


def fail_blobs(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after: int = 0) -> None:
    original = LocalStorage.write_blob
    calls: list[str] = []

    def write(self: LocalStorage, path: str, data: Any, **options: Any) -> FileInfo:
        calls.append(path)
        if len(calls) > after:
            raise error
        return original(self, path, data, **options)

    monkeypatch.setattr(LocalStorage, "write_blob", write)


def test_a_failed_write_is_raised_and_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    fail_blobs(monkeypatch, NoSpaceError("/x: no space left on device"), after=2)
    snapshot = Snapshot(tmp_path, {"m": torchsnapshot.StateDict(**{f"w{i}": torch.ones(9) for i in range(9)})})
    with pytest.raises(SaveError, match="step 7 was not saved: NoSpaceError: /x: no space left on device") as caught:
        snapshot.save(7).wait()
    assert isinstance(caught.value.__cause__, NoSpaceError) and not caught.value.unknown
    assert isinstance(caught.value, RuntimeError)  # what code that waits for torchsnapshot catches
    assert files_in(tmp_path) == set()
    monkeypatch.undo()
    snapshot.save(7).wait()
    assert read_stored(tmp_path / "7")["0/m/w3"][0] == 1


def test_a_failure_that_nobody_waits_for_is_logged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_blobs(monkeypatch, NoSpaceError("/x: no space left on device"))
    gate = hold_back(monkeypatch, "write_blob")
    snapshot = Snapshot(tmp_path, state())
    first = snapshot.save(7)
    gate.reached.wait(30)
    monkeypatch.undo()
    gate.set()
    snapshot.save(8).wait()  # the earlier failure is not this one's
    assert "step 7 was not saved: NoSpaceError: /x: no space left on device" in caplog.text
    assert first.done()
    with pytest.raises(SaveError):
        first.wait()


def test_an_error_in_the_state_is_raised_by_save(tmp_path: pathlib.Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("not now")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(SaveError, match="step 7 was not saved: ValueError: not now") as caught:
        Snapshot(tmp_path, {"b": Broken()}).save(7)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(SaveError, match="Expected Stateful in app_state for key x"):
        Snapshot(tmp_path, {"x": {"a": 1}}).save(7)
    assert list(tmp_path.iterdir()) == []


def test_a_save_by_a_signal_handler_during_a_save_is_refused_and_does_not_hang(tmp_path: pathlib.Path) -> None:
    class Handler:
        def state_dict(self) -> dict[str, Any]:
            with pytest.raises(SaveError, match="a save is being staged already by this very thread"):
                Snapshot(tmp_path, state()).save(8)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    Snapshot(tmp_path, {"h": Handler()}).save(7).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_an_interrupt_while_staging_is_an_interrupt(tmp_path: pathlib.Path) -> None:
    class Interrupted:
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        Snapshot(tmp_path, {"b": Interrupted()}).save(7)


def test_a_storage_with_another_checksum_is_not_believed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalStorage.write_blob

    def write(self: LocalStorage, path: str, data: Any, **options: Any) -> FileInfo:
        return msgspec.structs.replace(original(self, path, data, **options), crc32c=1)

    monkeypatch.setattr(LocalStorage, "write_blob", write)
    with pytest.raises(SaveError, match="the storage's CRC32C is 00000001") as caught:
        Snapshot(tmp_path, state()).save(7).wait()
    assert isinstance(caught.value.__cause__, DamagedError)
    assert not (tmp_path / "7/.snapshot_metadata").exists()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 2 MB."""
    target = tmp_path / "small"
    target.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", target]).returncode:
        pytest.skip("cannot mount a file system here")
    yield target
    subprocess.run(["umount", "-l", target], check=True)


def test_on_a_full_disk_the_last_checkpoint_stays_and_room_is_made(small_disk: pathlib.Path) -> None:
    Snapshot(small_disk, state()).save(1).wait()
    with pytest.raises(SaveError, match="No space left on device"):
        Snapshot(small_disk, state(more=torch.ones(3, 200_000))).save(2).wait()
    assert read_stored(small_disk / "1")["0/m/w"][0] == 1
    assert not list((small_disk / "2").rglob("*")) if (small_disk / "2").exists() else True
    Snapshot(small_disk, state(2.0)).save(3).wait()


def test_a_directory_that_may_not_be_written_is_said(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"[Nn]ot a directory"):
        Snapshot(tmp_path / "file", state()).save(1)
    save_dir = tmp_path / "ro"
    save_dir.mkdir()
    save_dir.chmod(0o555)
    code = (
        "import sys, torch, torchsnapshot\n"
        "from snapctl import Snapshot\n"
        "try:\n"
        "    Snapshot(sys.argv[1], {'m': torchsnapshot.StateDict(w=torch.ones(3))}).save(1).wait()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, type(error.__cause__).__name__, error)\n"
    )
    command = [*unprivileged(), sys.executable, "-c", code, str(save_dir / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("SaveError PermissionDeniedError step 1 was not saved: "), done
    assert f"{save_dir}/run/1: Permission denied" in done.stdout


@pytest.mark.parametrize("step", [-1, 1.5, "7", True, None])
def test_a_step_is_an_integer_from_0_on(step: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidOptionError, match="a step is an integer from 0 on"):
        Snapshot(tmp_path, state()).save(step)


def test_the_state_is_let_go_when_it_is_saved(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    gate = hold_back(monkeypatch, "write_blob")
    snapshot = Snapshot(tmp_path, state(big=torch.ones(50)))
    tensor = weakref.ref(snapshot.state["m"]["big"])
    pending = snapshot.save(1)
    del snapshot
    gc.collect()
    assert tensor() is None
    gate.set()
    pending.wait()


# -- other storages --------------------------------------------------------------------------------------------------


def test_any_file_system_of_fsspec_will_do(entry_point: None) -> None:
    snapshot = Snapshot("memory://saving/run", state())
    loaded = snapshot.save(7).wait()
    storage = open_storage("memory://saving/run/7")
    assert {file.path.split("/")[0] for file in storage.list_tree()} == {".snapctl", ".snapshot_metadata", "batched"}
    assert loaded.path == "snapctl://memory://saving/run/7"
    assert find_place("memory://saving/run").step_names == ("7",)


def test_a_file_system_of_fsspec_gets_its_directories_and_no_half_written_files(tmp_path: pathlib.Path) -> None:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    written: list[str] = []

    class Shared(LocalFileSystem):  # type: ignore[misc]
        """Like ``sftp://``: no directories made by writing, and files that grow while they are written."""

        protocol = "sharedfs"

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
            written.append(str(path))
            super().pipe_file(path, value, mode=mode, **options)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + str(path).removeprefix("sharedfs://").lstrip("/")

    fsspec.register_implementation("sharedfs", Shared, clobber=True)
    snapshot = Snapshot(f"sharedfs://{str(tmp_path)[1:]}/a/run", state(1.0))
    snapshot.save(7).wait()
    snapshot.state.update(state(2.0))
    snapshot.save(7).wait()
    snapshot.save(8).wait()
    assert read_stored(tmp_path / "a/run/7")["0/m/w"][0] == 2
    assert len(list((tmp_path / "a/run/7/batched").iterdir())) == 1
    assert all(".snapctl-tmp-" in path for path in written if "batched" not in path)
    assert not list(tmp_path.rglob("*.snapctl-tmp-*"))


# -- the end of the process ------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, logging, torch, torchsnapshot
from snapctl import Snapshot
from snapctl.storage import LocalStorage
original = LocalStorage.write_blob
def slow(self, *args, **options):
    time.sleep(float(sys.argv[2]))
    return original(self, *args, **options)
LocalStorage.write_blob = slow
pending = Snapshot(sys.argv[1], {"m": torchsnapshot.StateDict(w=torch.ones(1000))}).save(7)
print("saved", flush=True)
exec(sys.argv[3])
"""


def run_script(*arguments: str, interrupt: bool = False) -> tuple[int, str]:
    import signal

    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    if interrupt:
        time.sleep(1.3)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("end", ["", "raise ValueError('later')"])
def test_a_pending_save_is_finished_before_the_process_ends(end: str, tmp_path: pathlib.Path) -> None:
    run_script(str(tmp_path), "0.5", end)
    assert read_stored(tmp_path / "7")["0/m/w"][0] == 1


def test_a_pending_save_that_is_given_up_is_said_to_be_lost(tmp_path: pathlib.Path) -> None:
    _, errors = run_script(str(tmp_path), "60", "", interrupt=True)
    assert f"waiting for the save of {tmp_path}/7 before exiting" in errors
    assert f"the save of {tmp_path}/7 is lost" in errors
    assert not (tmp_path / "7/.snapshot_metadata").exists()


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(tmp_path: pathlib.Path) -> None:
    code = "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join(5); "
    code += "sys.exit(0 if p.exitcode == 0 else 9)"
    assert run_script(str(tmp_path), "3", code)[0] == 0
