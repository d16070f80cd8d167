"""`latest` of several save directories: an answer each, and one that has none does not keep the others from theirs."""

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


def write_run(place: SaveDir, run: str, *steps: int, complete: bool = True) -> None:
    for step in steps:
        write_checkpoint(lambda path, data=b"": place.write(f"{run}/{path}", data), step, complete=complete)


def documents(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_line_each_in_the_order_given(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "b", 7)
    urls = [f"{save_dir.url}/b", f"{save_dir.url}/a"]
    done = snapctl_inside("latest", *urls)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{urls[0]}/7", f"{urls[1]}/2"]
    done = snapctl_inside("latest", *urls, "--json")
    assert [(d["save_dir"], d["step"], d["error"]) for d in documents(done)] == [(urls[0], 7, None), (urls[1], 2, None)]


def test_all_below_a_root(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "x/a", 1, 2)
    write_run(save_dir, "b", 7)
    done = snapctl_inside("latest", "--recursive", save_dir.url, "--print0")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"{save_dir.url}/b/7\0{save_dir.url}/x/a/2\0"


def test_one_without_any_leaves_the_others_their_answer(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1)
    save_dir.write("b/5/replicated/w", b"x")
    for where in (["-r", save_dir.url], [f"{save_dir.url}/a", f"{save_dir.url}/b"]):
        done = snapctl_inside("latest", *where)
        assert (done.code, done.stdout) == (5, f"{save_dir.url}/a/1\n")
        assert f"{save_dir.url}/b: no complete checkpoint" in done.stderr
        done = snapctl_inside("latest", *where, "--json")
        assert (done.code, done.stderr) == (5, "")
        a, b = documents(done)
        assert (a["step"], b["step"], b["error"]["exit_code"]) == (1, None, 3)
        done = snapctl_inside("latest", *where, "--missing-ok")
        assert (done.code, done.stdout, done.stderr) == (0, f"{save_dir.url}/a/1\n", "")


def test_none_with_an_answer_ends_like_the_single_one(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    save_dir.write("b/5/replicated/w", b"x")
    for where in (["-r", save_dir.url], [f"{save_dir.url}/nowhere", f"{save_dir.url}/b"]):
        done = snapctl_inside("latest", *where)
        assert (done.code, done.stdout) == (3, "")
    assert snapctl_inside("latest", "-r", f"{save_dir.url}/nowhere").code == 3


def test_a_no_of_one_is_a_no(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1)
    write_run(save_dir, "b", 2)
    save_dir.write("b/2/evaled_by/val_DONE")
    done = snapctl_inside("latest", "-r", save_dir.url, "--evaluated-by", "val")
    assert (done.code, done.stdout) == (1, f"{save_dir.url}/b/2\n")


def test_a_checkpoint_among_them_is_a_wrong_command_line(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1)
    write_run(save_dir, "b", 2)
    done = snapctl_inside("latest", f"{save_dir.url}/a", f"{save_dir.url}/b/2")
    assert (done.code, done.stdout) == (2, "")


def test_the_step_alone_would_not_say_whose_it_is(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    assert snapctl_inside("latest", "-r", str(tmp_path), "--print", "step").code == 2


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_what_may_not_be_entered_makes_5(extra: list[str], tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(SaveDir("", root=tmp_path), "a", 1)
    (tmp_path / "secret").mkdir(mode=0)
    done = snapctl_inside("latest", "-r", str(tmp_path), *extra, before=unprivileged())
    assert done.code == 5
    assert f"{tmp_path}/a/1" in done.stdout
    assert "secret" in done.stdout + done.stderr
