"""`list --recursive`: a line for each save directory below a root."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.command import Finished, unprivileged
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import write_checkpoint

Snapctl = Callable[..., Finished]


def write_fleet(place: SaveDir) -> None:
    """Two runs, one of them with an incomplete checkpoint and evaluations, and junk."""
    for step in (10, 20, 30):
        write_checkpoint(lambda path, data=b"": place.write(f"team/a/{path}", data), step)
    write_checkpoint(lambda path, data=b"": place.write(f"b/{path}", data), 7)
    place.write("b/8/replicated/w", b"123")
    place.write("team/a/20/evaled_by/val_DONE")
    place.write("team/a/10/evaled_by/test_DONE", b'{"metrics": {"auc": 1}}')
    place.write("notes/readme.txt", b"hello")


def documents(done: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_line_each(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_fleet(save_dir)
    done = snapctl_inside("list", "--recursive", save_dir.url)
    assert (done.code, done.stderr) == (0, "")
    header, b, a = done.stdout.splitlines()
    assert header.split() == ["NEWEST", "AGE", "CHECKPOINTS", "INCOMPLETE", "SIZE", "EVALUATED", "SAVE_DIR"]
    assert b.split()[0] == "7"
    assert b.split()[2:4] == ["1", "1"]
    assert b.split()[-2:] == ["-", f"{save_dir.url}/b"]
    assert a.split()[0] == "30"
    assert a.split()[2:4] == ["3", "0"]
    assert a.split()[-2:] == ["20", f"{save_dir.url}/team/a"]


def test_a_document_each(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_fleet(save_dir)
    done = snapctl_inside("list", "--recursive", save_dir.url, "--json")
    assert (done.code, done.stderr) == (0, "")
    b, a = documents(done)
    assert b["save_dir"] == f"{save_dir.url}/b"
    assert (b["newest_step"], b["checkpoints"], b["incomplete"], b["unreadable"]) == (7, 1, 1, 0)
    assert (b["evaluated_by"], b["newest_evaluated_step"], b["problem"]) == ({}, None, None)
    assert a["evaluated_by"] == {
        "test": {"checkpoints": 1, "newest_step": 10},
        "val": {"checkpoints": 1, "newest_step": 20},
    }
    assert a["newest_path"] == f"{save_dir.url}/team/a/30"
    assert a["newest_evaluated_step"] == 20
    assert 0 <= a["newest_age_seconds"] < 600
    assert a["newest_created_at"].endswith("Z")
    sizes = snapctl_inside("list", f"{save_dir.url}/team/a", "--long", "--json").json["checkpoints"]
    assert a["size_bytes"] == sum(item["size_bytes"] for item in sizes)
    assert a["files"] == sum(item["files"] for item in sizes)


def test_bare_paths(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_fleet(save_dir)
    expected = [f"{save_dir.url}/b", f"{save_dir.url}/team/a"]
    assert snapctl_inside("list", "-r", save_dir.url, "-q").stdout.splitlines() == expected
    assert snapctl_inside("list", "-r", save_dir.url, "--print0").stdout.split("\0") == [*expected, ""]


def test_nothing_is_an_answer(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    for extra in ([], ["--json"], ["-q"]):
        done = snapctl_inside("list", "--recursive", str(tmp_path), *extra)
        assert (done.code, done.stdout) == (0, "")
        assert done.stderr == ("no save directories\n" if not extra else "")


@pytest.mark.parametrize("option", [["--long"], ["--all"], ["--limit", "3"], ["--reverse"], ["--evaluated-by", "val"]])
def test_options_about_single_checkpoints_are_refused(
    option: list[str], tmp_path: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    done = snapctl_inside("list", "--recursive", str(tmp_path), *option)
    assert (done.code, done.stdout) == (2, "")


def test_what_is_not_there_and_what_is_a_checkpoint(save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_fleet(save_dir)
    for extra in ([], ["-q"], ["--json"], ["--format", "openmetrics"]):
        done = snapctl_inside("list", "-r", f"{save_dir.url}/nowhere", *extra)
        assert (done.code, done.stdout) == (3, "")
        done = snapctl_inside("list", "-r", f"{save_dir.url}/b/7", *extra)
        assert (done.code, done.stdout) == (2, "")
        assert f"{save_dir.url}/b" in done.stderr


@pytest.fixture
def locked(tmp_path: pathlib.Path) -> Iterator[Callable[[str], None]]:
    """Takes all permissions from directories until the test is over."""
    done: list[pathlib.Path] = []

    def lock(path: str) -> None:
        done.append(tmp_path / path)
        done[-1].chmod(0)

    yield lock
    for path in done:
        path.chmod(0o755)


def test_what_may_not_be_entered_is_a_line_and_the_rest_goes_on(
    tmp_path: pathlib.Path, locked: Callable[[str], None], snapctl_inside: Snapctl
) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    write_fleet(place)
    place.write("secret/run/1/.snapshot_metadata", b"{}")
    place.write("zz/1/.snapshot_metadata", b"{}")
    for path in ("secret", "team/a/20", "b/8/replicated", "zz/1"):
        locked(path)
    done = snapctl_inside("list", "-r", str(tmp_path), before=unprivileged())
    assert done.code == 5
    assert [line.split()[-1].removeprefix(str(tmp_path)) for line in done.stdout.splitlines()[1:]] == [
        "/b", "/secret", "/team/a", "/zz/1",
    ]  # fmt: skip
    assert done.stderr.count("could not be looked at") == 4
    assert "Traceback" not in done.stderr
    by_path = {d["save_dir"].removeprefix(str(tmp_path)): d for d in documents(
        snapctl_inside("list", "-r", str(tmp_path), "--json", before=unprivileged())
    )}  # fmt: skip
    assert by_path["/secret"]["checkpoints"] is None
    assert "Permission denied" in by_path["/secret"]["problem"]
    assert (by_path["/team/a"]["checkpoints"], by_path["/team/a"]["unreadable"]) == (2, 1)
    assert by_path["/b"]["problem"].count("Permission denied") == 1
    bare = snapctl_inside("list", "-r", str(tmp_path), "-q", before=unprivileged())
    assert bare.code == 5
    assert bare.stdout.splitlines() == [f"{tmp_path}/b", f"{tmp_path}/team/a"]


def test_a_root_that_may_not_be_entered_is_4(
    tmp_path: pathlib.Path, locked: Callable[[str], None], snapctl_inside: Snapctl
) -> None:
    (tmp_path / "root").mkdir()
    locked("root")
    done = snapctl_inside("list", "-r", str(tmp_path / "root"), before=unprivileged())
    assert (done.code, done.stdout) == (4, "")


def test_a_part_of_a_bucket_that_is_forbidden_is_said(minigcs: Controlled, snapctl_inside: Snapctl) -> None:
    Bucket(minigcs.endpoint, "bk")
    blobs = [".snapshot_metadata", *(f"0/w{number}" for number in range(52))]
    minigcs.seed("bk", [(f"r{run}/{step}/{name}", 1) for run in range(10, 30) for step in range(20) for name in blobs])
    minigcs.configure(faults=[{"match": "startOffset=r15", "status": 403, "body": "{}"}])
    done = snapctl_inside("list", "-r", "gs://bk", "--json")
    assert done.code == 5
    found = documents(done)
    whole = [d["save_dir"] for d in found if d["problem"] is None]
    assert whole == [f"gs://bk/r{run}" for run in range(10, 30) if run != 15]
    assert [d["save_dir"] for d in found if d["problem"]] == ["gs://bk/r15"]


def test_the_network_gone_at_once_is_4_and_soon(minigcs: Controlled, snapctl_inside: Snapctl) -> None:
    Bucket(minigcs.endpoint, "bk")
    minigcs.configure(faults=[{"match": "/o\\?", "status": 401, "body": "{}"}])
    done = snapctl_inside("list", "-r", "gs://bk")
    assert (done.code, done.stdout) == (4, "")


def test_names_that_a_terminal_would_act_on_are_shown_and_given_whole(
    tmp_path: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    name = os.fsdecode(b"r\xff\n\x1b[31m")
    place = SaveDir("", root=tmp_path / name)
    place.write("1/.snapshot_metadata", b"{}")
    done = snapctl_inside("list", "-r", str(tmp_path))
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    bare = snapctl_inside("list", "-r", str(tmp_path), "--print0")
    assert bare.stdout == f"{tmp_path}/{name}\0"
    (document,) = documents(snapctl_inside("list", "-r", str(tmp_path), "--json"))
    assert document["save_dir"] == f"{tmp_path}/{name}"


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_signal_ends_it_within_a_second(minigcs: Controlled, extra: list[str]) -> None:
    Bucket(minigcs.endpoint, "bk")
    blobs = [".snapshot_metadata", *(f"0/w{number}" for number in range(99))]
    minigcs.seed("bk", [(f"r{run}/{step}/{name}", 1) for run in range(50) for step in range(20) for name in blobs])
    minigcs.configure(latency=0.3, faults=[])
    command = [sys.executable, "-m", "snapctl", "list", "-r", "gs://bk", *extra]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (143, b"")
    assert time.monotonic() - began < 5  # a second on a machine with nothing else to do


def test_a_reader_who_goes_away_ends_it_with_141(minigcs: Controlled) -> None:
    Bucket(minigcs.endpoint, "bk")
    minigcs.seed("bk", [(f"r{run:03}/1/{n}", 1) for run in range(300) for n in [".snapshot_metadata", *"abcdefgh"]])
    minigcs.configure(latency=0.05, faults=[])
    command = [sys.executable, "-m", "snapctl", "list", "-r", "gs://bk"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
