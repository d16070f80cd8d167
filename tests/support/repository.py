"""Where things lie. An installed wheel is tested without what stands beside the package: pages, completions."""

from __future__ import annotations

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = ROOT / "tests" / "data"
GOLDEN = ROOT / "tests" / "golden"
SUPPORT = ROOT / "tests" / "support"


def require_repository() -> None:
    """Skips the test, or the module that calls it, where only the tests were copied."""
    if not DOCS.is_dir():
        pytest.skip("needs docs/ and completions/ beside tests/", allow_module_level=True)
