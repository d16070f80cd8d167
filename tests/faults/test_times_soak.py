"""How long each command waits for a storage that fails, with the patience that it really has.

python -m pytest -m soak tests/faults/test_times_soak.py -n 8 (it mostly waits)
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.scene import COMMANDS, FAULTS, Fault, Scene, arguments_of
from tests.support.command import snapctl_here
from tests.support.results import order_rows, record_row
from tests.support.servers import Controlled, fault_proxy

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

BOUND_SECONDS = {"503": 6.0, "dropped": 6.0, "cut body": 6.0, "hang": 13.0}
"""From the first failure to the end, where everything fails from the beginning. docs/reliability.md says so."""
AT_ONCE_SECONDS = 2.0
LATER_SECONDS = 60.0
"""The same for a command that is in the middle of its work."""
SHOWN = ("401", "403", "404", "412", "503", "dropped", "hang", "cut body", "HTML with 200")
NAMES = (
    "list", "latest", "show", "verify --level data", "restore-weight", "wait", "mark-eval", "mark-eval --claim", "pin",
    "prune", "Snapshot.save", "Snapshot.restore",
)  # fmt: skip
HANG_SECONDS = 150.0


@pytest.fixture
def proxy(gcs_endpoint: str) -> Iterator[Controlled]:
    """One for each test: what hangs in it goes on for longer than the test."""
    with fault_proxy(gcs_endpoint) as found:
        yield found


def real(fault: Fault) -> Fault:
    """The proxy hangs for longer than anybody waits."""
    proxy = {**fault.proxy, "hang": HANG_SECONDS} if "hang" in fault.proxy else fault.proxy
    return Fault(fault.name, proxy, fault.exit_code, fault.passes)


def runner(name: str, scene: Scene, tmp: pathlib.Path) -> Callable[[], int]:
    """What runs a command or a call of the library, and returns its exit code (1 for an exception of the library)."""
    if not name.startswith("Snapshot"):
        (command,) = (command for command in COMMANDS if command.name == name)
        return lambda: snapctl_here(*arguments_of(command, scene, tmp)).code
    pytest.importorskip("torch")
    pytest.importorskip("torchsnapshot")
    return lambda: _call(name, scene)


def _call(name: str, scene: Scene) -> int:
    import torch
    import torchsnapshot

    from snapctl import Snapshot
    from snapctl.errors import SnapctlError

    tensors = {key: torch.zeros(2, 3) for key in ("weight", "bias", "scale")}
    state: dict[str, Any] = {"model": torchsnapshot.StateDict(**tensors)}
    try:
        if name == "Snapshot.save":
            Snapshot(scene.run, state).save(40).wait()
        else:
            Snapshot(scene.run, state).restore(f"{scene.run}/30")
    except SnapctlError:
        return 1
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_longer_than_the_page_says(scene: Scene, name: str, tmp_path: pathlib.Path) -> None:
    run = runner(name, scene, tmp_path)
    before = scene.listed()
    scene.fail(None)
    assert run() in (0, 6)
    requests = scene.settle()
    scene.reset(before=before)
    before = scene.listed()
    for fault in FAULTS:
        if fault.name not in SHOWN:
            continue
        scene.fail(real(fault))
        began = time.monotonic()
        code = run()
        seconds = time.monotonic() - began
        assert code != 0, fault.name
        assert seconds < BOUND_SECONDS.get(fault.name, AT_ONCE_SECONDS) + AT_ONCE_SECONDS, (fault.name, seconds)
        record_row("faults", "times", command=name, **{fault.name: round(seconds, 1)})
    for fault_name in ("503", "hang"):
        (fault,) = (fault for fault in FAULTS if fault.name == fault_name)
        worst = 0.0
        for position in sorted({1, requests // 2, requests - 1}):
            scene.fail(real(fault), skip=position)
            began = time.monotonic()
            run()
            worst = max(worst, time.monotonic() - began)
            scene.fail(None)
            scene.reset(before=before)
            before = scene.listed()
        record_row("faults", "times", command=name, **{f"{fault_name}, later": round(worst, 1)})
        assert worst < LATER_SECONDS, (fault_name, worst)
    order_rows("faults", "times", NAMES)
