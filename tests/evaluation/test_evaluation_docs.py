"""The worked examples of docs/evaluation.md, as they stand there (with shorter pauses), while training goes on."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.support.command import Finished
from tests.support.command import snapctl as run_snapctl
from tests.support.repository import ROOT, require_repository

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

require_repository()
SHORTER = {"--follow": "--follow --interval 1s --timeout 60s", "sleep 60": "sleep 1", "timeout=3600": "1, timeout=10"}


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory with the scripts of the page, and ``snapctl`` and ``python`` on the path."""
    for block in [*blocks("python"), *blocks("sh")]:
        named = re.match(r"(?:#!/bin/sh\n)?# (\w+\.\w+)", block)
        if named:
            for long, short in SHORTER.items():
                block = block.replace(long, short)
            (tmp_path / named[1]).write_text(block)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("snapctl", f"{sys.executable} -m snapctl"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


def test_evaluators_in_shell_and_python_evaluate_all_that_is_saved_meanwhile(bench: pathlib.Path) -> None:
    run = bench / "run"
    shell = ["sh", "evaluate.sh", str(run), "val"]
    commands = [shell, shell, [sys.executable, "evaluate.py", str(run), "test"]]
    training = subprocess.Popen([sys.executable, "train.py", str(run), "250"], cwd=bench)
    while training.poll() is None and not (run / "50").exists():  # torch is imported for seconds
        time.sleep(0.05)
    evaluators = [subprocess.Popen(command, cwd=bench, stderr=subprocess.PIPE, text=True) for command in commands]
    assert training.wait(timeout=60) == 0
    endings = [(evaluator.communicate(timeout=100), evaluator.returncode) for evaluator in evaluators]
    assert [code for _, code in endings] == [0, 0, 0], endings
    listed = run_snapctl("list", str(run), "--json").json["checkpoints"]
    assert [item["step"] for item in listed] == [50, 100, 150, 200, 250]
    assert all(item["evaluated_by"] == ["test", "val"] for item in listed)
    losses = [item["metrics"]["val"]["loss"] for item in listed]
    assert losses[-1] < losses[0]
    best = run_snapctl("latest", str(run), "--best", "val/loss:min", "--print", "step")
    assert best.stdout.strip() == str(listed[losses.index(min(losses))]["step"])
    claims = [path.name for path in run.glob("*/evaled_by/*_CLAIM.*")]
    assert sorted(set(claims)) == ["test_CLAIM.1", "val_CLAIM.1"]  # none was evaluated twice
    check_the_interval(bench, run)


def check_the_interval(bench: pathlib.Path, run: pathlib.Path) -> Finished:
    """The command that says how often to save."""
    (command,) = [block for block in blocks("sh") if "save_timings" in block]
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "RUN": str(run)}, cwd=bench, capture_output=True, text=True
    )
    assert re.fullmatch(r"save every \d+ s\n", done.stdout), done
    return Finished(done.returncode, done.stdout, done.stderr)


def test_the_evaluators_are_as_short_as_they_are_said_to_be() -> None:
    (shell,) = [block for block in blocks("sh") if "evaluate.sh" in block]
    assert len([line for line in shell.splitlines() if line and not line.startswith("#")]) == 10
