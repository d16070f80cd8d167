"""docs/reliability.md is what `benchmarks.reliability` makes of the results that are kept."""

from __future__ import annotations

import json
import multiprocessing
import pathlib

import pytest

from tests.support.repository import require_repository
from tests.support.results import add_facts, order_rows, record_facts, record_row

require_repository()
from benchmarks.reliability.__main__ import PAGE, render_page, render_section  # noqa: E402


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == render_page(), "run: python -m benchmarks.reliability"


def test_a_section_names_its_facts_and_tables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPCTL_RESULTS", str(tmp_path))
    record_row("kills", "rounds", command="prune", killed=3)
    record_row("kills", "rounds", command="pin", killed=4, lost=0)
    record_row("kills", "rounds", command="prune", lost=0)
    order_rows("kills", "rounds", ["pin", "prune"])
    record_facts("kills", seconds=1.25, where="here")
    add_facts("kills", total=3000)
    add_facts("kills", total=4)
    result = json.loads((tmp_path / "kills.json").read_text())
    text = (
        "<!-- run: -m soak tests/test_x.py -->\n# Kills\n\n{{total}} {{where}} in {{seconds}} s\n\n{{table rounds}}\n"
    )
    assert render_section(text, result) == (
        "# Kills\n\n3,004 here in 1.2 s\n\n| command | killed | lost |\n| --- | --- | --- |\n| pin | 4 | 0 |\n"
        "| prune | 3 | 0 |\n"
    )
    with pytest.raises(KeyError):
        render_section("{{nobody_measured_it}}", result)


def _count(number: int) -> None:
    add_facts("many", counted=1)
    record_row("many", "rows", number=number)


def test_several_processes_record_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPCTL_RESULTS", str(tmp_path))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_count, range(40))
    result = json.loads((tmp_path / "many.json").read_text())
    assert result["facts"]["counted"] == 40 and len(result["tables"]["rows"]) == 40


def test_without_a_directory_nothing_is_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPCTL_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    record_facts("nothing", here=1)
    assert list(tmp_path.iterdir()) == []
