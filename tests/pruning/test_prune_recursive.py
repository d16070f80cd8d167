"""`prune --recursive`: by the rules of a file, and by a plan that was made before; nothing else deletes."""

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


def steps_of(place: SaveDir, run: str) -> set[str]:
    return {name.split("/")[run.count("/") + 1] for name in place.names(run)}


def documents(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policy") / "prune.toml"
    path.write_text("keep-last = 1\n")
    return str(path)


@pytest.fixture
def plan(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("plan") / "plan.jsonl"


def test_without_a_file_of_rules_or_a_plan_it_is_refused(
    save_dir: SaveDir, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    write_run(save_dir, "a", 1, 2)
    for options in (
        ["--keep-last", "1", "--dry-run"],
        ["--keep-last", "1", "--yes"],
        [],
        ["--policy", policy],
        ["--policy", policy, "--yes"],
        ["--policy", policy, "--plan", str(plan), "--yes"],
    ):
        done = snapctl_inside("prune", "--recursive", save_dir.url, *options)
        assert (done.code, done.stdout) == (6, ""), options
        assert "hint:" in done.stderr
    assert not plan.exists()
    assert steps_of(save_dir, "a") == {"1", "2"}


def test_a_dry_run_shows_every_save_directory_and_changes_nothing(
    save_dir: SaveDir, policy: str, snapctl_inside: Snapctl
) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "x/b", 3, 4, 5)
    before = save_dir.names("")
    done = snapctl_inside("prune", "--recursive", save_dir.url, "--policy", policy, "--dry-run", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert [(d["save_dir"], [row["step"] for row in d["delete"]]) for d in documents(done)] == [
        (f"{save_dir.url}/a", [1]),
        (f"{save_dir.url}/x/b", [3, 4]),
    ]
    assert save_dir.names("") == before


def test_the_plan_is_carried_out(save_dir: SaveDir, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "x/b", 3, 4, 5)
    done = snapctl_inside("prune", "--recursive", save_dir.url, "--policy", policy, "--plan", str(plan))
    assert done.code == 0
    assert steps_of(save_dir, "x/b") == {"3", "4", "5"}
    write_run(save_dir, "x/b", 6)
    write_run(save_dir, "new", 1, 2)
    done = snapctl_inside("prune", "--recursive", save_dir.url, "--apply", str(plan), "--yes")
    assert (done.code, done.stderr) == (0, "")
    assert f"{save_dir.url}/x/b: deleted 2 checkpoints" in done.stdout
    assert steps_of(save_dir, "a") == {"2"}
    assert steps_of(save_dir, "x/b") == {"5", "6"}
    assert steps_of(save_dir, "new") == {"1", "2"}


def test_a_plan_of_elsewhere_is_no_plan_of_these_roots(
    save_dir: SaveDir, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    write_run(save_dir, "a/r", 1, 2)
    write_run(save_dir, "ab/r", 1, 2)
    snapctl_inside("prune", "--recursive", save_dir.url, "--policy", policy, "--plan", str(plan))
    done = snapctl_inside("prune", "--recursive", f"{save_dir.url}/a", "--apply", str(plan), "--yes")
    assert (done.code, done.stdout) == (2, "")
    assert f"{save_dir.url}/ab/r" in done.stderr
    assert steps_of(save_dir, "a/r") == {"1", "2"}


def test_a_plan_that_was_changed_by_hand_leads_nowhere_else(
    tmp_path: pathlib.Path, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    place = SaveDir("", root=tmp_path)
    write_run(place, "root/a", 1, 2)
    write_run(place, "outside", 1, 2)
    (tmp_path / "root" / "link").symlink_to("../outside")
    root = f"{tmp_path}/root"
    snapctl_inside("prune", "--recursive", root, "--policy", policy, "--plan", str(plan))
    text = plan.read_text()
    assert "outside" not in text
    for other in (f"{root}/link", f"{root}/../outside", f"{tmp_path}/outside"):
        plan.write_text(text.replace(f"{root}/a", other))
        done = snapctl_inside("prune", "--recursive", root, "--apply", str(plan), "--yes")
        assert (done.code, done.stdout) == (2, ""), other
    plan.write_text(text.replace(f'"path":"{root}/a/', f'"path":"{tmp_path}/outside/'))
    assert snapctl_inside("prune", "--recursive", root, "--apply", str(plan), "--yes").code == 2
    assert steps_of(place, "outside") == {"1", "2"}
    assert steps_of(place, "root/a") == {"1", "2"}


def test_a_link_anywhere_below_the_root_protects_what_it_leads_to(
    tmp_path: pathlib.Path, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    place = SaveDir("", root=tmp_path)
    write_run(place, "team/a", 1, 2, 3)
    (tmp_path / "prod").mkdir()
    (tmp_path / "prod" / "model").symlink_to("../team/a/1")
    done = snapctl_inside("prune", "-r", str(tmp_path), "--policy", policy, "--plan", str(plan), "--json")
    (document,) = documents(done)
    assert [row["step"] for row in document["delete"]] == [2]
    assert any("prod/model" in reason for row in document["keep"] for reason in row["reasons"])
    (tmp_path / "now").symlink_to("team/a/2")  # after the plan
    done = snapctl_inside("prune", "-r", str(tmp_path), "--apply", str(plan), "--yes")
    assert done.code == 6
    assert steps_of(place, "team/a") == {"1", "2", "3"}


def test_a_save_directory_that_is_gone_or_locked_leaves_the_others_their_plan(
    tmp_path: pathlib.Path, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    place = SaveDir("", root=tmp_path)
    for run in ("a", "b", "c"):
        write_run(place, run, 1, 2)
    snapctl_inside("prune", "-r", str(tmp_path), "--policy", policy, "--plan", str(plan))
    place.delete_dir("a")
    (tmp_path / "b").chmod(0)
    done = snapctl_inside("prune", "-r", str(tmp_path), "--apply", str(plan), "--yes", before=unprivileged())
    (tmp_path / "b").chmod(0o755)
    assert done.code == 5
    assert f"{tmp_path}/a: no such directory" in done.stderr
    assert steps_of(place, "b") == {"1", "2"}
    assert steps_of(place, "c") == {"2"}


def test_what_cannot_be_listed_makes_5_and_the_others_are_planned(
    tmp_path: pathlib.Path, policy: str, snapctl_inside: Snapctl
) -> None:
    write_run(SaveDir("", root=tmp_path), "a", 1, 2)
    (tmp_path / "secret").mkdir(mode=0)
    command = ["prune", "-r", str(tmp_path), "--policy", policy, "-n", "--json"]
    done = snapctl_inside(*command, before=unprivileged())
    assert done.code == 5
    (document,) = documents(done)
    assert [row["step"] for row in document["delete"]] == [1]
    assert any("secret" in warning for warning in document["warnings"])


def test_no_save_directory_is_3(save_dir: SaveDir, policy: str, snapctl_inside: Snapctl) -> None:
    save_dir.write("readme.txt", b"x")
    done = snapctl_inside("prune", "--recursive", save_dir.url, "--policy", policy, "--dry-run")
    assert (done.code, done.stdout) == (3, "")


def test_the_guard_of_one_does_not_keep_the_others(
    save_dir: SaveDir, policy: str, plan: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    write_run(save_dir, "a", 1, 2)
    write_run(save_dir, "b", 1, 2, 3, 4)
    snapctl_inside("prune", "-r", save_dir.url, "--policy", policy, "--plan", str(plan))
    done = snapctl_inside("prune", "-r", save_dir.url, "--apply", str(plan), "--max-delete", "1", "--yes")
    assert done.code == 6
    assert steps_of(save_dir, "a") == {"2"}
    assert steps_of(save_dir, "b") == {"1", "2", "3", "4"}
