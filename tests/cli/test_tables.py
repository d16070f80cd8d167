"""Tables as a terminal of 60, 80, 120 or 200 columns shows them: golden files, looked at by people.

With ``SNAPCTL_WRITE_GOLDEN=1`` the files get what is shown.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys

import pytest

from tests.support.repository import DATA, GOLDEN
from tests.support.snapshots import local_writer, write_checkpoint
from tests.support.terminal import on_terminal, without_control

pytestmark = pytest.mark.timeout(900)
COMMANDS = (
    ("list", "run", "--all", "--long"),
    ("show", "torchrec", "--values"),
    ("restore-weight", "torchrec", "model/*", "--stats"),
    ("verify", "damaged"),
    ("prune", "run", "--keep-best", "val/recall:max:1", "--dry-run"),
)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    """Short and long names and numbers; all files of one time."""
    (tmp_path / "torchrec").symlink_to(DATA / "torchrec-2ranks")
    (tmp_path / "damaged").symlink_to(DATA / "truncated-bfloat16")
    write = local_writer(tmp_path / "run")
    for step in (9, 10000):
        write_checkpoint(write, step)
    write("9/PINNED")
    write("9/evaled_by/val_DONE", b'{"metrics": {"recall": 0.25}}')
    metrics = b'{"metrics": {"ndcg@10": 0.123456789, "recall": 0.5, "loss": 1e-9}}'
    write("10000/evaled_by/a-partition-with-quite-a-long-name_DONE", metrics)
    write("10000/evaled_by/val_DONE", b'{"metrics": {"recall": 0.5}}')
    write("20000/0/model")
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (1796000000, 1796000000))
    return tmp_path


def show(directory: pathlib.Path, columns: int, *arguments: str, **env: str) -> str:
    command = [sys.executable, "-m", "snapctl", "--no-progress", *arguments]
    python_path = os.pathsep.join([str(DATA.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": python_path, "LC_ALL": "C.UTF-8", **env}
    with on_terminal(command, columns=columns, cwd=str(directory), env=environment) as terminal:
        return terminal.read_all(seconds=200)


def session(directory: pathlib.Path, columns: int) -> str:
    """What is shown, but for the paths of this machine and the times of the files of the repository."""
    shown = []
    for arguments in COMMANDS:
        text = without_control(show(directory, columns, *arguments))
        assert all(len(line) <= columns for line in text.splitlines() if ";" not in line), text
        text = re.sub(r"^path: .*?(?=^state: )|^created: [^\n]*\n", "", text, flags=re.MULTILINE | re.DOTALL)
        shown += [f"$ snapctl {' '.join(arguments)}", *text.splitlines(), ""]
    return "\n".join(shown)


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_tables_look_as_they_were_looked_at(directory: pathlib.Path, columns: int) -> None:
    golden = GOLDEN / f"tables-{columns}.txt"
    shown = session(directory, columns)
    if os.environ.get("SNAPCTL_WRITE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()


def test_colour_adds_nothing_but_colour(directory: pathlib.Path) -> None:
    for arguments in COMMANDS:
        coloured = show(directory, 80, *arguments)
        assert "\x1b[1m" in coloured, arguments
        assert set(re.findall(r"\x1b\[([\d;]+)m", coloured)) <= {"0", "1", "2", "1;31", "32", "33", "36"}, arguments
        assert "\x1b" not in show(directory, 80, *arguments, NO_COLOR="1")
        assert without_control(coloured) == without_control(show(directory, 80, *arguments, NO_COLOR="1"))


def test_an_error_is_seen_on_a_terminal_of_any_colour(directory: pathlib.Path) -> None:
    coloured = show(directory, 80, "latest", "nowhere")
    assert coloured.startswith("\x1b[1;31merror:\x1b[0m "), "bold: plain red is hard to read on black"
    plain = show(directory, 80, "latest", "nowhere", NO_COLOR="1")
    assert without_control(plain) == without_control(coloured)
    assert plain.startswith("error: ")


def test_folding_loses_nothing(directory: pathlib.Path) -> None:
    wide = without_control(show(directory, 400, "list", "run", "--long")).partition("\n\n")[0]  # charts need room
    narrow = without_control(show(directory, 50, "list", "run", "--long"))
    for word in re.findall(r"[\w@/.=-]+", wide):
        assert word in re.sub(r"\s", "", narrow), word
