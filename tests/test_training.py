"""The class that training code uses."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

from snapctl import Snapshot  # noqa: E402
from snapctl.errors import CheckpointNotFoundError, InvalidPathError, RestoreError, SaveDirNotFoundError  # noqa: E402
from snapctl.save_record import SAVE_RECORD_PATH, RestoreTimings, parse_save_record  # noqa: E402
from tests.support.stored import read_manifest  # noqa: E402

pytestmark = pytest.mark.torch


def new_state() -> dict[str, Any]:
    return {"m": torchsnapshot.StateDict(w=torch.arange(6.0))}


def test_step_and_walltime_are_kept_in_the_state_and_saved(tmp_path: pathlib.Path) -> None:
    state = new_state()
    snapshot = Snapshot(tmp_path, state)
    assert (snapshot.step, snapshot.walltime) == (0, 0.0)
    snapshot.step = 12
    snapshot.walltime = 3.5
    assert dict(state["extra_state"]) == {"step": 12, "walltime": 3.5}
    snapshot.save(12).wait()
    manifest = read_manifest(tmp_path / "12")
    assert manifest["0/extra_state/step"]["serialized_value"] == "12"
    assert manifest["0/extra_state/walltime"]["readable"] == "3.5"


def test_an_extra_state_of_ones_own_is_kept(tmp_path: pathlib.Path) -> None:
    extra = torchsnapshot.StateDict(step=5, epoch=2)
    snapshot = Snapshot(tmp_path, {"extra_state": extra})
    assert (snapshot.step, snapshot.walltime, snapshot.state["extra_state"]["epoch"]) == (5, 0.0, 2)
    snapshot.state["extra_state"] = torchsnapshot.StateDict(step=9, walltime=1.0)
    assert snapshot.step == 9


def test_save_returns_something_to_wait_for_that_gives_a_snapshot(tmp_path: pathlib.Path, entry_point: None) -> None:
    loaded = Snapshot(tmp_path, new_state()).save(3).wait()
    assert isinstance(loaded, torchsnapshot.Snapshot)
    assert loaded.read_object("0/m/w").tolist() == list(range(6))


def test_a_save_records_the_restore_that_its_state_comes_from(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, new_state()).save(3).wait()
    assert recorded(tmp_path / "3") is None
    snapshot = Snapshot(tmp_path, new_state())
    began = time.time()
    snapshot.restore(tmp_path / "3")
    for step in (4, 5):
        snapshot.save(step).wait()
        restored = recorded(tmp_path / str(step))
        assert restored is not None and (restored.step, restored.world_size) == (3, 1)
        assert restored.size_bytes == 6 * 4
        assert 0 < restored.restored_seconds < 60
        assert began - 1 < restored.restored_at < time.time() + 1
    with pytest.raises(SaveDirNotFoundError):
        snapshot.restore(tmp_path / "9")
    snapshot.save(6).wait()
    assert recorded(tmp_path / "6") == restored, "nothing of the state was touched"
    snapshot.state["m"] = Stubborn()
    with pytest.raises(RestoreError):
        snapshot.restore(tmp_path / "6")
    snapshot.state["m"] = new_state()["m"]
    snapshot.save(7).wait()
    assert recorded(tmp_path / "7") is None, "it is half of one and half of the other"


class Stubborn(torchsnapshot.StateDict):  # type: ignore[misc]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("no")

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(6)}


def recorded(checkpoint: pathlib.Path) -> RestoreTimings | None:
    return parse_save_record((checkpoint / SAVE_RECORD_PATH).read_bytes()).restored


def test_torchsnapshot_reads_a_checkpoint_through_our_storage(tmp_path: pathlib.Path, entry_point: None) -> None:
    snapshot = Snapshot(tmp_path, new_state())
    snapshot.save(3).wait()
    snapshot.step = 10
    snapshot.save(10).wait()
    newest = Snapshot.get_torch_snapshot(str(tmp_path))
    assert newest.read_object("0/extra_state/step") == 10
    assert Snapshot.get_torch_snapshot(str(tmp_path), 3).read_object("0/extra_state/step") == 0
    assert Snapshot.get_torch_snapshot(str(tmp_path / "3")).read_object("0/extra_state/step") == 0
    into = torchsnapshot.StateDict(w=torch.zeros(6))
    newest.restore({"m": into})
    assert into["w"].tolist() == list(range(6))


def test_torchsnapshot_writes_through_our_storage_too(tmp_path: pathlib.Path, entry_point: None) -> None:
    torchsnapshot.Snapshot.take(f"snapctl://{tmp_path}/5", new_state())
    assert torchsnapshot.Snapshot(str(tmp_path / "5")).read_object("0/m/w").tolist() == list(range(6))
    assert not list(tmp_path.rglob("*snapctl-tmp*"))


def test_a_short_blob_is_an_error_and_not_uninitialised_memory(tmp_path: pathlib.Path, entry_point: None) -> None:
    Snapshot(tmp_path, new_state()).save(3).wait()
    (slab,) = (tmp_path / "3/batched").iterdir()
    slab.write_bytes(slab.read_bytes()[:-4])
    with pytest.raises(OSError, match="20 bytes of 24"):
        Snapshot.get_torch_snapshot(str(tmp_path)).read_object("0/m/w")


def test_what_is_not_there_raises_or_is_an_empty_path(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SaveDirNotFoundError):
        Snapshot.get_torch_snapshot(str(tmp_path / "none"))
    assert Snapshot.get_torch_snapshot(str(tmp_path / "none"), missing_ok=True).path == ""
    Snapshot(tmp_path, new_state()).save(3).wait()
    with pytest.raises(CheckpointNotFoundError):
        Snapshot.get_torch_snapshot(str(tmp_path), 4)
    assert Snapshot.get_torch_snapshot(str(tmp_path), 4, True).path == ""


def test_an_unknown_scheme_is_refused_at_once() -> None:
    with pytest.raises(InvalidPathError, match="unknown scheme"):
        Snapshot("nope://x", {})


def test_importing_snapctl_loads_no_torch() -> None:
    code = "import sys, snapctl; snapctl.SnapctlError; assert 'Snapshot' in dir(snapctl); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
