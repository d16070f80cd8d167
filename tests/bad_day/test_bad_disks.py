"""Disks that fill up or turn read-only in the middle, and clocks that jump: nothing is lost, nothing looks whole that
is not, and the next run goes on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchsnapshot")

from tests.support.command import snapctl as run_snapctl
from tests.support.deaths import SCENES, Saving, Scene
from tests.support.places import SaveDir
from tests.support.repository import SUPPORT
from tests.support.results import record_row
from tests.support.snapshots import write_checkpoint

ROUNDS = int(os.environ.get("SNAPCTL_SOAK_ROUNDS", "100"))
SEED = int(os.environ.get("SNAPCTL_SOAK_SEED", "0"))
PAGE = 4096
CLOCK = str(SUPPORT / "jumping_clock.py")

pytestmark = pytest.mark.torch
scenes = pytest.mark.parametrize("name", SCENES)


class Disk:
    """A file system of some megabytes, all for a test."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self, pages_left: int) -> None:
        """Leaves so many free pages."""
        free = os.statvfs(self.root).f_bavail
        with open(self._filler, "wb") as file:
            file.truncate(0)
            for _ in range(free - pages_left):
                file.write(bytes(PAGE))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def remount(self, how: str) -> bool:
        """``ro`` or ``rw``; False while somebody writes."""
        command = ["mount", "-o", f"remount,{how}", str(self.root)]
        return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def scene_on(disk: Disk, name: str, seed: str) -> Scene:
    run = disk.root / "run"
    run.mkdir()
    return SCENES[name](SaveDir(str(run), root=run), disk.root / "work", random.Random(seed))


def check_failure(scene: Scene, code: int, stderr: str) -> str:
    """How a run ended whose disk failed: as it would have, or with the storage's code and one line."""
    if isinstance(scene, Saving):
        assert code in (0, 1) and (code == 0 or "SaveError" in stderr or "Error" in stderr), (code, stderr)
    else:
        assert code in scene.after_a_normal_end | {4, 5}, (scene.arguments, code, stderr)
        assert "Traceback" not in stderr, stderr
    return f"exit {code}"


def run_on_full_disk(disk: Disk, name: str, seed: str, rounds: int) -> Counter[str]:
    """From no page left up to what is nearly enough."""
    scene = scene_on(disk, name, seed)
    streams = disk.root.with_name("streams")
    ends: Counter[str] = Counter()
    for number in range(rounds):
        scene.prepare()
        disk.fill(scene.rng.choice((0, 0, 1, 2, 3, 5, 8, 20, 100, 400)) if number else 0)
        death = scene.start(streams).finish()
        ends[check_failure(scene, death.code, death.stderr)] += 1
        scene.check()
        litter = [path.name for path in disk.root.rglob("*snapctl-tmp*")]
        assert not litter, litter
        disk.empty()
        scene.go_on(streams)
    return ends


def run_on_read_only_disk(disk: Disk, name: str, seed: str, rounds: int) -> Counter[str]:
    """It turns read-only at some moment; where somebody writes at that moment, a moment later."""
    scene = scene_on(disk, name, seed)
    streams = disk.root.with_name("streams")
    scene.prepare()
    usual = scene.start(streams).finish().seconds
    ends: Counter[str] = Counter()
    for _ in range(rounds):
        scene.prepare()
        doomed = scene.start(streams)
        time.sleep(scene.rng.uniform(0.0, usual))
        while doomed.process.is_alive() and not disk.remount("ro"):
            pass
        death = doomed.finish()
        assert disk.remount("rw")
        ends[check_failure(scene, death.code, death.stderr)] += 1
        scene.check()
        scene.go_on(streams)
    return ends


@scenes
def test_a_disk_that_is_full(name: str, disk: Disk) -> None:
    ends = run_on_full_disk(disk, name, name, 4)
    assert name == "prune" or ends.keys() - {"exit 0"}, "a full disk makes it fail"


def test_prune_makes_room_on_a_disk_without_any(disk: Disk) -> None:
    """Its announcement has to be written first."""
    assert run_on_full_disk(disk, "prune", "full", 1) == {"exit 0": 1}


@scenes
def test_a_disk_that_turns_read_only(name: str, disk: Disk) -> None:
    run_on_read_only_disk(disk, name, name, 3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@scenes
def test_soak_disks(name: str, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    full = run_on_full_disk(disk, name, f"{SEED} full {name}", ROUNDS)
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((disk.root / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (disk.root / "run").rmdir()
    read_only = run_on_read_only_disk(disk, name, f"{SEED} ro {name}", ROUNDS)
    with capsys.disabled():
        print(f"\n{name}: full: {dict(full)}, read-only: {dict(read_only)}")
    for what, ends in (("full disk", full), ("turned read-only", read_only)):
        told = ", ".join(f"{end}: {count}" for end, count in sorted(ends.items()))
        record_row("deaths", "disks", what=f"{name}, {what}", rounds=ends.total(), ended_with=told)


# -- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_a_clock_that_jumps_loses_nothing(seed: int, save_dir: SaveDir, tmp_path: pathlib.Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(save_dir.write, step, markers=("val",) if step == 10 else ())

    def run(*arguments: str) -> None:
        command = [sys.executable, CLOCK, str(seed), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0 and "Traceback" not in done.stderr, (arguments, done)

    run("mark-eval", f"{save_dir.url}/20", "val", "--metric", "loss=0.5")
    run("mark-eval", f"{save_dir.url}/20", "test", "--claim", "--ttl", "1h")
    assert run_snapctl("mark-eval", f"{save_dir.url}/20", "test", "--claim").code == 6, "it is held"
    run("pin", f"{save_dir.url}/10")
    began = time.monotonic()
    run("wait", save_dir.url, "--at-least", "30", "--timeout", "5s", "--interval", "1s")
    assert time.monotonic() - began < 10
    run("prune", save_dir.url, "--keep-last", "1", "--keep-within", "1d", "--yes")
    run("prune", save_dir.url, "--keep-last", "1", "--order", "step", "--incomplete-older-than", "1h", "--yes")
    steps = {name.partition("/")[0] for name in save_dir.names() if name.endswith("/.snapshot_metadata")}
    assert steps == {"10", "20", "30"}, "pinned, claimed, the newest"
