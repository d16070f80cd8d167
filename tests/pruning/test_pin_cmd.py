"""``snapctl pin``: exit codes and the two streams."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from tests.support.command import Finished
from tests.support.places import SaveDir
from tests.support.snapshots import local_writer, write_checkpoint

Run = Callable[..., Finished]


@pytest.fixture
def snapctl(snapctl_inside: Run) -> Run:
    return snapctl_inside


def test_a_checkpoint_is_pinned_with_a_note_and_freed_again(snapctl: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    done = snapctl("pin", save_dir.url, "--step", "10", "--note", "for the paper", "--json")
    assert (done.code, done.stderr) == (0, "")
    body = json.loads(save_dir.read("10/PINNED"))
    assert done.json == {"path": f"{save_dir.url}/10", "step": 10, "pinned": True, **body}
    assert body["note"] == "for the paper"
    assert snapctl("list", save_dir.url, "--json").json["checkpoints"][0]["pinned"] is True
    again = snapctl("pin", f"{save_dir.url}/10")
    assert (again.code, again.stdout) == (0, "")
    assert json.loads(save_dir.read("10/PINNED")) == body
    for _ in range(2):
        freed = snapctl("pin", f"{save_dir.url}/10", "--remove", "--json")
        assert (freed.code, freed.json["pinned"]) == (0, False)
    assert "10/PINNED" not in save_dir.names()


def test_what_is_not_there_is_not_pinned(snapctl: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    before = save_dir.names()
    for arguments in ([f"{save_dir.url}/999"], [save_dir.url, "--step", "999"]):
        assert snapctl("pin", *arguments).code == 3
    assert snapctl("pin", save_dir.url).code == 2
    assert save_dir.names() == before


def test_a_pin_on_what_is_being_deleted_is_taken_back(snapctl: Run, tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    (tmp_path / "10/.snapshot_metadata.deleting").touch()
    done = snapctl("pin", f"{tmp_path}/10")
    assert (done.code, done.stdout, done.stderr) == (6, "", f"error: {tmp_path}/10: is being deleted\n")
    assert not (tmp_path / "10/PINNED").exists()


@pytest.mark.parametrize("arguments", [("--remove", "--note", "x"), ("--step", "x")])
def test_what_makes_no_sense_is_a_usage_error(snapctl: Run, tmp_path: pathlib.Path, arguments: tuple[str, ...]) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    assert snapctl("pin", f"{tmp_path}/10", *arguments).code == 2
