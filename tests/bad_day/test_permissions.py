"""Who may read but not write, not list, or not look at one of the checkpoints: every command says what it could not do,
does the rest, and changes nothing by halves. Locally as a user for whom permissions hold, on GCS by single refusals."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping

import pytest

from tests.faults.conftest import hasty, proxy, scene
from tests.faults.scene import COMMANDS, FAULTS, Fault, Scene, arguments_of
from tests.support.command import Finished, snapctl_here, unprivileged
from tests.support.results import record_row
from tests.support.several import run_several
from tests.support.snapshots import local_writer, write_checkpoint

__all__ = ["hasty", "proxy", "scene"]

LOCAL = {
    **{command.name: command.arguments for command in COMMANDS},
    "list": ["list", "{run}"],
    "mark-eval --claim": ["mark-eval", "{run}/20", "claimed", "--claim"],
    "latest --evaluated-by": ["latest", "{run}", "--evaluated-by", "val"],
    "show 30": ["show", "{run}/30"],
    "verify 30 --level data": ["verify", "{run}/30", "--level", "data"],
    "restore-weight 30": ["restore-weight", "{run}/30", "weight", "-o", "{tmp}/w30.npy", "--force"],
    "mark-eval 30": ["mark-eval", "{run}/30", "test"],
    "mark-eval 30 --claim": ["mark-eval", "{run}/30", "claimed", "--claim"],
    "pin 30": ["pin", "{run}/30"],
    "prune --dry-run": ["prune", "{run}", "--keep-last", "1", "--dry-run"],
    "prune": ["prune", "{run}", "--keep-last", "1", "--yes"],
}
WRITING = {name for name in LOCAL if name.startswith(("mark-eval", "pin", "prune"))} - {
    "mark-eval --check",
    "prune --dry-run",
}
READING = LOCAL.keys() - WRITING
OF_30 = {"show 30", "verify 30 --level data", "restore-weight 30", "mark-eval 30", "mark-eval 30 --claim", "pin 30"}


def codes(default: int, **special: int) -> dict[str, int]:
    return {**dict.fromkeys(LOCAL, default), **special}


def read_only(run: pathlib.Path) -> None:
    for path in [*run.rglob("*"), run]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def closed(*names: str) -> Callable[[pathlib.Path], None]:
    def close(run: pathlib.Path) -> None:
        for name in names:
            (run / name).chmod(0)

    return close


SCENARIOS: dict[str, tuple[Callable[[pathlib.Path], None], Mapping[str, int]]] = {
    "read-only": (read_only, {name: 4 if name in WRITING else 0 for name in LOCAL}),
    "may be entered, not listed": (
        lambda run: run.chmod(0o311),
        {name: 4 if "{run}" in LOCAL[name] else 0 for name in LOCAL},
    ),
    "may not be entered": (closed("."), codes(4)),
    "its newest step may not be entered": (
        closed("30"),
        {
            **{name: 4 if name in OF_30 else 5 for name in LOCAL},
            **dict.fromkeys(["wait", "mark-eval", "mark-eval, two", "mark-eval --claim", "pin", "pin --remove"], 0),
            "mark-eval --check": 4,
            "mark-eval --remove": 4,
            "latest --evaluated-by": 5,
        },
    ),
    "the manifest of its newest step may not be read": (
        closed("30/.snapshot_metadata"),
        {
            **dict.fromkeys(LOCAL, 0),
            **dict.fromkeys(["latest", "latest --best", "latest --verified", "latest --evaluated-by", "show"], 5),
            **dict.fromkeys(["restore-weight", "verify", "verify --level data", "prune", "prune --dry-run"], 5),
            **dict.fromkeys(["show 30", "verify 30 --level data", "restore-weight 30", "wait"], 4),
        },
    ),
    "a blob of its newest step may not be read": (
        closed("30/0/model/weight"),
        {
            **dict.fromkeys(LOCAL, 0),
            "verify --level data": 5,
            "verify 30 --level data": 4,
            "restore-weight": 4,
            "restore-weight 30": 4,
        },
    ),
    "the markers of its newest step may not be listed": (
        closed("30/evaled_by"),
        {
            **dict.fromkeys(LOCAL, 0),
            **dict.fromkeys(["list", "latest", "latest --best", "latest --evaluated-by", "show", "show 30"], 5),
            **dict.fromkeys(["latest --verified", "verify", "verify --level data", "prune", "prune --dry-run"], 5),
            **dict.fromkeys(["wait", "mark-eval --check", "mark-eval --remove", "mark-eval 30"], 4),
            **dict.fromkeys(["mark-eval 30 --claim", "verify 30 --level data"], 4),
        },
    ),
}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "run"
    write = local_writer(root)
    for step in (10, 20, 30):
        write_checkpoint(write, step, {"weight": step * _ones(), "bias": _ones()})
    for step, auc in ((20, 0.7), (30, 0.9)):
        write(f"{step}/evaled_by/val_DONE", json.dumps({"metrics": {"auc": auc}}).encode())
    write("10/PINNED", b"{}")
    return root


def _ones() -> object:
    import numpy as np

    return np.ones((2, 3), "f4")


def contents(root: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.skipif(os.getuid() != 0, reason="takes root's power away from a process, and so needs root")
@pytest.mark.parametrize("name", SCENARIOS)
def test_local_permissions(name: str, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    prepare, expected = SCENARIOS[name]
    out = tmp_path / "out"
    out.mkdir()
    before = contents(run)
    order = sorted(LOCAL, key=lambda command: (command in WRITING, command.startswith("prune"), command))
    lines = [[word.format(run=run, tmp=out) for word in LOCAL[command]] for command in order]
    prepare(run)
    try:
        finished = dict(zip(order, run_several(lines, before=unprivileged()), strict=True))
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    wrong = {c: (finished[c], expected[c]) for c in order if finished[c].code != expected[c]}
    assert not wrong, "\n".join(f"{c}: wanted {want}: {done}" for c, (done, want) in wrong.items())
    for command, done in finished.items():
        check_said(done, (name, command))
        record_row("permissions", "local", command=command, **{name: done.code})
    after = contents(run)
    may_go = ("10/", "20/", "30/evaled_by/val")  # its pin is removed before it is pruned
    assert not {path for path in before.keys() - after.keys() if not path.startswith(may_go)}
    for step in (10, 20, 30):
        if f"{step}/.snapshot_metadata" in after:
            assert {f"{step}/0/model/bias", f"{step}/0/model/weight"} <= after.keys(), "it looks complete"
    if name in ("read-only", "may not be entered"):
        assert after == before
    assert not any(".snapctl-tmp" in path for path in after), "nothing unfinished is left"
    assert {path.name for path in out.iterdir()} <= {"w.npy", "w30.npy"}


def check_said(done: Finished, what: object) -> None:
    """One error at most, in a line; what could not be looked at is named."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr and len(errors) <= 1, (what, done)
    if done.code in (4, 5):
        assert "ermission denied" in done.stderr + done.stdout, (what, done)
    if done.code == 4:
        assert len(errors) == 1, (what, done)


# -- single permissions of GCS ---------------------------------------------------------------------------------------

FORBIDDEN = next(fault for fault in FAULTS if fault.name == "403")
REFUSED = {
    "list": {"match": r"/o\?", "method": "GET"},
    "get": {"match": r"/o/", "method": "GET"},
    "create": {"match": r"/upload/", "method": "POST"},
    "delete": {"match": r"/o/", "method": "DELETE"},
}
CHANGING = {command.name for command in COMMANDS if command.changes}
REMOVING = {"mark-eval --remove", "pin --remove", "prune"}
WITHOUT = {
    "list": dict.fromkeys((command.name for command in COMMANDS), 4),
    "get": {**dict.fromkeys((command.name for command in COMMANDS), 4), "list": 5, "prune": 5, "pin --remove": 0},
    "create": {c.name: 4 if c.name in CHANGING - {"mark-eval --remove", "pin --remove"} else 0 for c in COMMANDS},
    "delete": {c.name: 4 if c.name in REMOVING else 0 for c in COMMANDS},
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("missing", WITHOUT)
def test_a_single_permission_that_is_missing_on_gcs(missing: str, scene: Scene, tmp_path: pathlib.Path) -> None:
    before = scene.listed()
    wrong = []
    for command in COMMANDS:
        fault = Fault("403", {**FORBIDDEN.proxy, **REFUSED[missing]}, 4, False)
        scene.proxy.configure(faults=[fault.proxy])
        done = snapctl_here(*arguments_of(command, scene, tmp_path))
        check_said(done, (missing, command.name))
        if done.code != WITHOUT[missing][command.name]:
            wrong.append(f"{command.name}: wanted {WITHOUT[missing][command.name]}: {done}")
        now = scene.listed()
        if done.code == 4:
            added = {name for name in now.keys() - before.keys() if not name.endswith(".deleting")}
            assert not added and before.items() <= now.items(), (missing, command.name, added)
        record_row("permissions", "gcs", command=command.name, **{f"no {missing}": done.code})
        scene.reset(before=before)
        before = scene.listed()
    assert not wrong, "\n".join(wrong)
