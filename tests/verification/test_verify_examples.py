"""The worked examples of docs/verify.md, run as they stand, but on a local save directory."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.random_snapshots import full_snapshot
from tests.support.repository import ROOT, require_repository
from tests.support.snapshots import local_writer

require_repository()
TEXT = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")


def example(language: str, number: int = 0) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    text: str = found[number]
    return text


class Machine:
    """A directory with a save directory and a `snapctl` on the path."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.run_dir = root / "run1"
        (root / "bin").mkdir()
        for name, module in (("snapctl", "-m snapctl"), ("python", "")):
            path = root / "bin" / name
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            path.chmod(0o755)

    def run(self, command: str, *, shell: tuple[str, ...] = ("sh", "-c")) -> subprocess.CompletedProcess[str]:
        text = command.replace("gs://my-bucket/run1", str(self.run_dir))
        path = os.pathsep.join([str(self.root / "bin"), os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run([*shell, text], capture_output=True, text=True, env=env, cwd=self.root, timeout=60)


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_the_table_of_the_first_example_is_what_is_printed(machine: Machine) -> None:
    prompt, _, answer = example("console").partition("\n")
    done = subprocess.run(
        ["sh", "-c", f'"{machine.root}/bin/{prompt.removeprefix("$ ").replace("snapctl", "snapctl" + chr(34), 1)}'],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (1, answer)


def test_the_nights_of_a_week_cover_everything(machine: Machine) -> None:
    line = example("crontab").strip().replace("\\%", "%").split(maxsplit=5)[5]
    for step in (10, 20):
        damaged = full_snapshot(recorded=True)
        damaged.blobs["0/model/dense"] = bytes(48)
        damaged.write(local_writer(machine.run_dir), str(step))
    assert machine.run(line).returncode in (0, 1)
    codes, found = [], []
    for day in range(1, 8):
        done = machine.run(line.replace("$(date +%u)", str(day)) + " --json")
        codes.append(done.returncode)
        found += [c["step"] for c in json.loads(done.stdout)["checkpoints"] if c["verdict"] == "damaged"]
    assert sorted(found) == [10, 20]
    assert set(codes) == {0, 1}


def test_the_ci_job_fails_when_the_newest_checkpoint_is_damaged(machine: Machine) -> None:
    step = example("yaml").split("- run: ")[2].splitlines()[0]
    full_snapshot(recorded=True).write(local_writer(machine.run_dir), "10")
    shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
    assert machine.run(step, shell=shell).returncode == 0
    (machine.run_dir / "10" / "0" / "model" / "dense").write_bytes(bytes(48))
    assert machine.run(step, shell=shell).returncode == 1
    assert "checksum" in (machine.root / "verify.json").read_text()


@pytest.mark.torch
def test_the_monthly_job_restores_into_the_model(machine: Machine) -> None:
    torch = pytest.importorskip("torch")
    torchsnapshot = pytest.importorskip("torchsnapshot")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    for step in (10, 20):
        torchsnapshot.Snapshot.take(str(machine.run_dir / str(step)), {"model": model})
    batched = next((machine.run_dir / "20" / "batched").iterdir())
    batched.write_bytes(batched.read_bytes()[:-1])
    (machine.root / "restore_check.py").write_text(example("python", 0))
    done = machine.run(example("sh"))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["restored: 26 parameters"]), done.stderr


def test_the_python_example_runs(machine: Machine) -> None:
    full_snapshot(recorded=True).write(local_writer(machine.run_dir), "10")
    (machine.root / "example.py").write_text(example("python", 1).replace("gs://my-bucket/run1", str(machine.run_dir)))
    done = machine.run("python example.py")
    assert (done.returncode, done.stdout) == (0, "10 sound ()\n"), done.stderr
