"""`Snapshot.save` and `Snapshot.restore` × every way in which a storage fails, from each of their requests on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

from snapctl import Snapshot  # noqa: E402
from snapctl.checkpoints import read_manifest  # noqa: E402
from snapctl.errors import RestoreError, SaveError, SnapctlError, StorageError  # noqa: E402
from snapctl.saving import saver  # noqa: E402
from snapctl.storage import open_storage  # noqa: E402
from snapctl.verification.wholeness import check_whole, list_checkpoint  # noqa: E402
from tests.faults.scene import FAULTS, Fault, Scene, positions  # noqa: E402
from tests.support.results import add_facts  # noqa: E402

EVERY_POSITION = bool(os.environ.get("SNAPCTL_EVERY_FAULT"))
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hasty")]


@pytest.fixture(autouse=True)
def _plain_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", "1")
    monkeypatch.setattr(saver, "WATCH_SECONDS", 0.01)


def state(value: float) -> dict[str, Any]:
    tensors = {f"w{number}": torch.full((4, 5), value + number) for number in range(3)}
    return {"model": torchsnapshot.StateDict(**tensors)}


def save(scene: Scene, value: float = 7.0) -> SaveError | None:
    """Saves step 40; returns what it raised."""
    try:
        Snapshot(scene.run, state(value)).save(40).wait()
    except SaveError as error:
        return error
    return None


def requests_of(scene: Scene, work: Callable[[], object]) -> int:
    scene.fail(None)
    assert work() is None
    return scene.settle()


def check_saved(scene: Scene, what: str) -> None:
    """Step 40 is there, whole, past the proxy."""
    storage = open_storage(f"{scene.run}/40", {"endpoint_url": scene.bucket.endpoint, "token": "anon"})
    manifest = read_manifest(storage)
    assert not check_whole(storage, manifest, list_checkpoint(storage, manifest)).problems, what


def judge_save(scene: Scene, before: dict[str, Any], error: SaveError | None, what: str) -> None:
    now = scene.listed()
    others = {name: stored for name, stored in now.items() if not name.startswith("run/40/")}
    assert others == before, (what, "the other checkpoints are none of its business")
    is_complete = "run/40/.snapshot_metadata" in now
    if error is None:
        assert is_complete, what
    else:
        assert not is_complete or error.unknown, (what, error)
        assert "\n" not in str(error) and "step 40" in str(error), (what, error)
    if is_complete:
        check_saved(scene, what)


@each_fault
def test_a_save_is_whole_or_not_there(scene: Scene, fault: Fault) -> None:
    before = scene.listed()
    total = requests_of(scene, lambda: save(scene))
    for count in (None, 1):
        for position in positions(total, fault, every=EVERY_POSITION):
            what = f"{fault.name}, {count or 'all'} from request {position} of {total}"
            scene.reset(before=before)
            before = scene.listed()
            scene.fail(fault, skip=position, count=count)
            error = save(scene)
            scene.settle()
            judge_save(scene, before, error, what)
            if fault.passes and count == 1:
                assert error is None, (what, error)
            scene.fail(None)
            assert save(scene, 8.0) is None, what
            judge_save(scene, before, None, what)
            add_facts("faults", saves=1)


def restore(scene: Scene, wanted: dict[str, Any]) -> SnapctlError | None:
    try:
        Snapshot(scene.run, wanted).restore(f"{scene.run}/40")
    except (RestoreError, StorageError, SnapctlError) as error:
        return error
    return None


def judge_restore(wanted: dict[str, Any], error: SnapctlError | None, what: str) -> None:
    values = [wanted["model"][f"w{number}"].unique().tolist() for number in range(3)]
    if error is None:
        assert values == [[7.0], [8.0], [9.0]], (what, values)
        return
    old, new = [[0.0], [1.0], [2.0]], [[7.0], [8.0], [9.0]]
    touched = set(getattr(error, "loaded", ())) | set(getattr(error, "incomplete", ()))
    if "model" not in touched:
        assert values == old, (what, values, error)
    for number, value in enumerate(values):
        assert value in (old[number], new[number]), (what, "neither old nor new", value)
    assert "Traceback" not in str(error), what


@each_fault
def test_a_restore_is_right_or_says_what_it_left(scene: Scene, fault: Fault) -> None:
    assert save(scene) is None
    before = scene.listed()
    total = requests_of(scene, lambda: restore(scene, state(0.0)))
    for count in (None, 1):
        for position in positions(total, fault, every=EVERY_POSITION):
            what = f"{fault.name}, {count or 'all'} from request {position} of {total}"
            scene.fail(fault, skip=position, count=count)
            wanted = state(0.0)
            error = restore(scene, wanted)
            judge_restore(wanted, error, what)
            if fault.passes and count == 1:
                assert error is None, (what, error)
            if count is None and position == 0:
                assert error is not None, what
            add_facts("faults", restores=1)
    scene.settle()
    assert scene.listed() == before


def test_a_save_that_hangs_ends_in_the_time_that_the_page_says(scene: Scene) -> None:
    scene.fail(FAULTS[[fault.name for fault in FAULTS].index("hang")])
    began = time.monotonic()
    assert save(scene) is not None
    assert time.monotonic() - began < saver.GRACE_SECONDS + 3
