"""What the tests of restore-weight share: a run to write checkpoints into, and a place for the output."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.repository import ROOT
from tests.support.shards import Builder
from tests.support.snapshots import local_writer


@pytest.fixture
def out(tmp_path: pathlib.Path) -> pathlib.Path:
    """An empty directory for what is written."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def builder(tmp_path: pathlib.Path) -> Builder:
    return Builder(local_writer(tmp_path / "run"))


@pytest.fixture
def run(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def no_torch(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment in which torch cannot be imported."""
    (tmp_path / "hidden/torch").mkdir(parents=True)
    (tmp_path / "hidden/torch/__init__.py").write_text("raise ImportError('hidden')\n")
    return {"PYTHONPATH": f"{tmp_path}/hidden:{ROOT}"}
