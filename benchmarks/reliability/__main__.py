"""Makes docs/reliability.md: what was done to snapctl, and what came of it.

    python -m benchmarks.reliability                 writes the page from the results that are kept
    python -m benchmarks.reliability --run faults    runs the tests of a section anew before that (``all`` for each)
    python -m benchmarks.reliability --check         1 if the page is not what it would write

A section is a file ``sections/<NN>-<name>.md``: Markdown with ``{{fact}}`` and ``{{table NAME}}`` on a line of its own.
Its first line ``<!-- run: ARGUMENTS -->`` says what pytest is called with to measure it; without one it is only text.
The tests record through `tests.support.results`; what they recorded is kept in ``results/<name>.json``. The facts
``run_date``, ``run_seconds`` and ``run_on`` come by themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = HERE / "results"
_RUN = re.compile(r"<!-- run: (.*) -->\n+")
_TABLE = re.compile(r"^\{\{table (\S+)\}\}$", re.MULTILINE)
_FACT = re.compile(r"\{\{(\w+)\}\}")


def sections() -> dict[str, pathlib.Path]:
    """The sections by name, in the order of the page."""
    return {path.stem.partition("-")[2]: path for path in sorted((HERE / "sections").glob("*.md"))}


def render_section(text: str, result: Mapping[str, Any]) -> str:
    """The Markdown of one section.

    Raises:
        KeyError: its result lacks a fact or a table that it names.
    """
    body = _RUN.sub("", text, count=1)
    tables, facts = result.get("tables", {}), {**result.get("facts", {}), **result.get("run", {})}
    body = _TABLE.sub(lambda match: render_table(tables[match[1]]), body)
    return _FACT.sub(lambda match: _cell(facts[match[1]]), body)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; the columns are all that any row has, in the order in which they come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def render_page() -> str:
    """The whole page.

    Raises:
        KeyError, FileNotFoundError: a section has not been run.
    """
    parts = ["<!-- made by python -m benchmarks.reliability: do not edit -->"]
    for name, path in sections().items():
        result_path = RESULTS / f"{name}.json"
        result = json.loads(result_path.read_text("utf-8")) if _RUN.match(path.read_text("utf-8")) else {}
        parts.append(render_section(path.read_text("utf-8"), result).strip())
    return "\n\n".join(parts) + "\n"


def run_section(name: str, path: pathlib.Path) -> None:
    """Runs the tests of a section and keeps what they recorded; an old result stays if one of them fails."""
    match = _RUN.match(path.read_text("utf-8"))
    if match is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "--timeout=1800", *shlex.split(match[1])]
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, env={**os.environ, "SNAPCTL_RESULTS": directory}, check=True)
        result = json.loads((pathlib.Path(directory) / f"{name}.json").read_text("utf-8"))
    result["run"] = {
        "run_date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "run_seconds": round(time.monotonic() - began),
        "run_on": f"Python {platform.python_version()}, gcsfs {version('gcsfs')}, {os.cpu_count()} cores",
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", default=[], metavar="SECTION", help="run its tests anew; or all")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is out of date")
    options = parser.parse_args()
    known = sections()
    for name in known if "all" in options.run else options.run:
        if name not in known:
            parser.error(f"no section {name!r}: there are {', '.join(known)}")
        run_section(name, known[name])
    page = render_page()
    if options.check:
        return 0 if PAGE.exists() and PAGE.read_text("utf-8") == page else 1
    PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
