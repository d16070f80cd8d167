"""`verify` of several save directories: a verdict for each, whatever becomes of the others."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.command import Finished, unprivileged
from tests.support.places import SaveDir
from tests.support.snapshots import write_checkpoint

Snapctl = Callable[..., Finished]


def write_run(place: SaveDir, run: str, *steps: int) -> None:
    for step in steps:
        write_checkpoint(lambda path, data=b"": place.write(f"{run}/{path}", data), step)


def damage(place: SaveDir, checkpoint: str) -> None:
    blobs = [name for name in place.names(checkpoint) if ".snapshot_metadata" not in name]
    place.delete(blobs[0])


def documents(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_newest_of_each(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "x/b", 3)
    urls = [f"{save_dir.url}/a", f"{save_dir.url}/x/b"]
    for where in (urls, ["--recursive", save_dir.url]):
        done = snapctl_inside("verify", *where)
        assert (done.code, done.stderr) == (0, "")
        assert [line for line in done.stdout.splitlines() if line in urls] == urls
        done = snapctl_inside("verify", *where, "--json")
        assert (done.code, done.stderr) == (0, "")
        found = [(d["save_dir"], [(c["step"], c["verdict"]) for c in d["checkpoints"]]) for d in documents(done)]
        assert found == [(urls[0], [(2, "sound")]), (urls[1], [(3, "sound")])]


def test_all_of_each(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "b", 3)
    done = snapctl_inside("verify", "-r", save_dir.url, "--all", "--json")
    assert [[c["step"] for c in d["checkpoints"]] for d in documents(done)] == [[1, 2], [3]]


def test_damage_in_one_is_a_no_and_the_others_are_looked_at(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    for run in ("a", "b", "c"):
        write_run(save_dir, run, 1)
    damage(save_dir, "b/1")
    save_dir.write("d/5/replicated/w", b"x")
    done = snapctl_inside("verify", "-r", save_dir.url, "--json")
    assert done.code == 1
    verdicts = {d["save_dir"].rpartition("/")[2]: [c["verdict"] for c in d["checkpoints"]] for d in documents(done)}
    assert verdicts == {"a": ["sound"], "b": ["damaged"], "c": ["sound"], "d": []}
    (nothing,) = [d for d in documents(done) if d["save_dir"].endswith("/d")]
    assert nothing["error"]["exit_code"] == 3
    assert snapctl_inside("verify", "-r", save_dir.url).code == 1


def test_one_that_has_none_makes_5_and_only_such_3(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a/r", 1)
    save_dir.write("b/d/5/replicated/w", b"x")
    assert snapctl_inside("verify", "-r", save_dir.url).code == 5
    assert snapctl_inside("verify", "-r", f"{save_dir.url}/b").code == 3
    assert snapctl_inside("verify", f"{save_dir.url}/a/r", f"{save_dir.url}/nowhere").code == 5
    assert snapctl_inside("verify", f"{save_dir.url}/no", f"{save_dir.url}/nowhere").code == 3


def test_steps_are_for_one(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(SaveDir("", root=tmp_path), "a", 1)
    assert snapctl_inside("verify", "-r", str(tmp_path), "--step", "1").code == 2
    assert snapctl_inside("verify", str(tmp_path / "a"), str(tmp_path / "a"), "--step", "1").code == 2


def test_checkpoints_and_save_directories_may_be_mixed(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(SaveDir("", root=tmp_path), "a", 1, 2)
    done = snapctl_inside("verify", str(tmp_path / "a" / "1"), str(tmp_path / "a"), "--json")
    assert [[c["step"] for c in d["checkpoints"]] for d in documents(done)] == [[1], [2]]


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_what_may_not_be_entered_makes_5(extra: list[str], tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(SaveDir("", root=tmp_path), "a", 1)
    write_run(SaveDir("", root=tmp_path), "b", 1)
    (tmp_path / "b" / "1" / ".snapshot_metadata").chmod(0)
    (tmp_path / "secret").mkdir(mode=0)
    done = snapctl_inside("verify", "-r", str(tmp_path), *extra, before=unprivileged())
    assert done.code == 5
    assert "secret" in done.stdout + done.stderr
