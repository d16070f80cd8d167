"""Tests of what stands beside the package: pages, completions. An installed wheel is tested without."""

from __future__ import annotations

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def require_repository() -> None:
    """Skips the test, or the module that calls it, where only the tests were copied."""
    if not (ROOT / "docs").is_dir():
        pytest.skip("needs docs/ and completions/ beside tests/", allow_module_level=True)
