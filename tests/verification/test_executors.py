"""`verify` with the executors that clusters have: the same reports as without."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.random_snapshots import full_snapshot
from tests.support.repository import ROOT
from tests.support.snapshots import local_writer

PROGRAM = """
import json, sys
from snapctl.verification.targets import find_targets
from snapctl.verification.verifier import Thoroughness, verify

def judge(path, executor):
    how = Thoroughness("data", finite=True)
    return [repr(report) for report in verify(find_targets(path, every=True, level="data"), how, executor=executor)]

if __name__ == "__main__":
    {import_it}
    with {executor} as executor:
        print(json.dumps([judge(sys.argv[1], None), judge(sys.argv[1], executor)]))
"""


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    damaged = full_snapshot(recorded=True)
    damaged.blobs["0/model/dense"] = bytes(48)
    full_snapshot(recorded=True).write(local_writer(tmp_path / "run"), "10")
    damaged.write(local_writer(tmp_path / "run"), "20")
    return tmp_path / "run"


def compare(run_dir: pathlib.Path, start: list[str], **program: str) -> None:
    path = run_dir.parent / "judge.py"
    path.write_text(PROGRAM.format(**program))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*start, str(path), str(run_dir)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, theirs = json.loads(done.stdout)
    assert len(alone) == 2 and "damaged" in alone[1]
    assert theirs == alone


def test_loky(run_dir: pathlib.Path) -> None:
    pytest.importorskip("loky")
    executor = "get_reusable_executor(max_workers=2)"
    compare(run_dir, [sys.executable], import_it="from loky import get_reusable_executor", executor=executor)


def test_mpi4py(run_dir: pathlib.Path) -> None:
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which(
        "mpiexec", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    )
    if mpiexec is None:
        pytest.skip("needs mpiexec")
    start = [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    compare(run_dir, start, import_it="from mpi4py.futures import MPIPoolExecutor", executor="MPIPoolExecutor(2)")
