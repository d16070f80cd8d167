"""Snapshots that attack: nothing of them runs, hangs, takes memory that no file holds, or reaches outside."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import time

import pytest

from tests.support.attacked import Done, attack
from tests.support.hostile import HOSTILE
from tests.support.isolated import run_isolated
from tests.support.results import add_facts
from tests.support.snapshots import local_writer, write_checkpoint

STEP = 20
MEMORY = 1 << 30
"""Address space beyond what is loaded: the largest file of them all has 64 MB, and threads take some for themselves."""
SECONDS_FOR_EACH = 10.0
SECRET = b"secret"


def tree_of(directory: pathlib.Path) -> dict[str, str]:
    """All that lies in a directory, with what it holds."""
    found = {}
    for path in sorted(directory.rglob("*")):
        what = os.readlink(path) if path.is_symlink() else "directory"
        if path.is_file() and not path.is_symlink():
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(directory))] = what
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_an_attack_comes_to_nothing(name: str, tmp_path: pathlib.Path) -> None:
    run, outside, output = (tmp_path / part for part in ("run", "outside", "output"))
    for directory in (run / str(STEP), outside, output):
        directory.mkdir(parents=True)
    (outside / "secret").write_bytes(SECRET)
    write_checkpoint(local_writer(run), 10)
    HOSTILE[name](run / str(STEP), outside)
    _age(run / str(STEP))
    before = tree_of(outside)
    has_torch = importlib.util.find_spec("torchsnapshot") is not None

    done = run_isolated(attack, str(run), STEP, str(output), has_torch, memory_bytes=MEMORY, seconds=100)

    assert not done.error, done.error
    found: list[Done] = done.value
    add_facts("fuzzing", attacks=1, commands=len(found))
    bad = [str(each) for each in found if each.complaint or each.seconds > SECONDS_FOR_EACH]
    assert not bad, "\n".join(bad)
    assert tree_of(outside) == before
    assert not list(tmp_path.rglob("*owned*"))
    assert sorted(os.listdir(tmp_path)) == ["output", "outside", "run"]
    assert (run / "10" / ".snapshot_metadata").exists()
    for path in output.iterdir():
        assert SECRET not in path.read_bytes() and "snapctl-tmp" not in path.name, path


def _age(checkpoint: pathlib.Path) -> None:
    """Two days old, so that a prune may touch it."""
    then = time.time() - 2 * 86400
    for path in [*checkpoint.rglob("*"), checkpoint]:
        os.utime(path, (then, then), follow_symlinks=False)
