"""Every writing command and the save are killed at random moments: a few times here, often with ``-m soak``."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchsnapshot")

from tests.support.deaths import BUSY_SECONDS, SCENES, kill_again_and_again
from tests.support.places import SaveDir
from tests.support.results import add_facts, record_row

KILLS = int(os.environ.get("SNAPCTL_SOAK_KILLS", "200"))
SEED = int(os.environ.get("SNAPCTL_SOAK_SEED", "0"))

pytestmark = pytest.mark.torch
signals = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])


@signals
@pytest.mark.parametrize("name", SCENES)
def test_a_few_deaths(name: str, number: signal.Signals, save_dir: SaveDir, tmp_path: pathlib.Path) -> None:
    scene = SCENES[name](save_dir, tmp_path / "work", random.Random(f"{name} {number}"))
    kill_again_and_again(scene, number, 3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@signals
@pytest.mark.parametrize("name", SCENES)
def test_soak_many_deaths(name: str, number: signal.Signals, save_dir: SaveDir, tmp_path: pathlib.Path) -> None:
    began = time.monotonic()
    scene = SCENES[name](save_dir, tmp_path / "work", random.Random(f"{SEED} {name} {number}"))
    tally = kill_again_and_again(scene, number, KILLS)
    if number == signal.SIGTERM:
        assert tally.longest_seconds < BUSY_SECONDS
    moments = ", ".join(f"{moment}: {count}" for moment, count in tally.moments.most_common())
    where = "a bucket" if save_dir.bucket else "a disk"
    row = f"{name}, {number.name}, {where}"
    print(f"\n{row}: {tally.kills} deaths ({moments}); {time.monotonic() - began:.0f} s")
    record_row("deaths", "kills", what=row, deaths=tally.kills, moments=moments)
    add_facts("deaths", total=tally.kills)
