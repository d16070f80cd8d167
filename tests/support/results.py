"""What a test measured, kept for docs/reliability.md: see `benchmarks.reliability`.

A test records facts and rows of tables of a section. They go into ``<section>.json`` in the directory that the
environment variable ``SNAPCTL_RESULTS`` names; where it is not set, nowhere. Several processes may record at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

VARIABLE = "SNAPCTL_RESULTS"


def record_facts(section: str, **facts: Any) -> None:
    """Numbers and words that the section's text names as ``{{name}}``; a later one replaces an earlier one."""
    with _document(section) as document:
        document.setdefault("facts", {}).update(facts)


def add_facts(section: str, **numbers: float) -> None:
    """Numbers that add up over the tests of a section: rounds survived, requests, kills."""
    with _document(section) as document:
        facts = document.setdefault("facts", {})
        for name, number in numbers.items():
            facts[name] = round(facts.get(name, 0) + number, 3)


def record_row(section: str, table: str, **cells: Any) -> None:
    """A row of the section's ``{{table NAME}}``, by column; one with the same first cell is replaced, cell by cell."""
    with _document(section) as document:
        rows: list[dict[str, Any]] = document.setdefault("tables", {}).setdefault(table, [])
        key, value = next(iter(cells.items()))
        same = next((row for row in rows if row.get(key) == value), None)
        if same is None:
            rows.append(dict(cells))
        else:
            same.update(cells)


def order_rows(section: str, table: str, first_cells: Sequence[Any]) -> None:
    """Sorts a table by its first column, in the order given, however the tests were run."""
    with _document(section) as document:
        rows = document.get("tables", {}).get(table, [])
        order = {cell: number for number, cell in enumerate(first_cells)}
        rows.sort(key=lambda row: order.get(next(iter(row.values())), len(order)))


@contextlib.contextmanager
def _document(section: str) -> Iterator[dict[str, Any]]:
    directory = os.environ.get(VARIABLE)
    if not directory:
        yield {}
        return
    path = pathlib.Path(directory) / f"{section}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        document = json.loads(text) if text else {}
        yield document
        file.seek(0)
        file.truncate()
        file.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
