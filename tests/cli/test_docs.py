"""Every command line and every program of README.md and docs/, run as it stands; what is shown is what is printed.

With ``SNAPCTL_WRITE_DOCS=1`` the pages get the output that was printed, where it differs.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.support.pages import PROGRAMS, ROOT, Block, Stage, commands_of, find_pages, is_like, parse_blocks
from tests.support.repository import require_repository
from tests.support.servers import fake_gcs_server
from tests.support.worlds import PRELUDES, WORLDS, prepare

require_repository()
pytestmark = pytest.mark.timeout(900)
PAGES = [str(path.relative_to(ROOT)) for path in find_pages()]
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def server() -> Iterator[str]:
    """Of the page's own: its buckets have names of their own."""
    with fake_gcs_server() as endpoint:
        yield endpoint


def programs_of(page: str) -> list[Block]:
    return [block for block in parse_blocks((ROOT / page).read_text()) if block.language in PROGRAMS]


@pytest.mark.parametrize("page", [page for page in PAGES if programs_of(page)])
def test_the_examples_run_and_print_what_the_page_says(page: str, tmp_path: pathlib.Path, server: str) -> None:
    stage = Stage(tmp_path)
    prepare(stage)
    worlds: set[str] = set()
    complaints: list[str] = []
    printed: list[tuple[str, str]] = []
    for block in programs_of(page):
        if "skip" in block.markers or "elsewhere" in block.markers or ("torch" in block.markers and not HAS_TORCH):
            continue
        if block.world and block.world not in worlds:
            WORLDS[block.world](stage, server)
            worlds.add(block.world)
        complaints += [f"{page}:{block.line}: {complaint}" for complaint in _run(stage, block, printed)]
    if printed and os.environ.get("SNAPCTL_WRITE_DOCS"):
        text = (ROOT / page).read_text()
        for old, new in printed:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (ROOT / page).write_text(text)
    assert not complaints, "\n\n".join(complaints)


def _run(stage: Stage, block: Block, printed: list[tuple[str, str]]) -> Iterator[str]:
    allowed = {0, *map(int, block.markers.get("exits", "").split())}
    if block.language == "console":
        for command, said in commands_of(block):
            code, output = stage.run(command)
            if code not in allowed:
                yield f"{command}ended with {code}:\n{output}"
            elif not is_like(said, output):
                printed.append((f"$ {command}{said}", f"$ {command}{output}"))
                yield f"{command}is said to print\n{said}and prints\n{output}"
        return
    prelude, smaller = PRELUDES[block.markers["with"]] if "with" in block.markers else ("", {})
    text = block.text
    for word, other in smaller.items():
        text = text.replace(word, other)
    code, output = stage.run_python(prelude + text) if block.language == "python" else stage.run(text)
    if code not in allowed:
        yield f"ended with {code}:\n{output}"


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_here_has_a_reason(page: str) -> None:
    for block in programs_of(page):
        assert "skip" not in block.markers or len(block.markers["skip"]) > 10, (page, block.line)
        elsewhere = block.markers.get("elsewhere")
        assert elsewhere is None or pathlib.Path(page).name in (ROOT / elsewhere).read_text(), (page, block.line)
        assert block.markers.get("with", "training") in PRELUDES
        assert not block.world or block.world in WORLDS, (page, block.line)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert "://" in target or ((ROOT / page).parent / target).exists(), target


def test_an_output_is_compared_line_by_line() -> None:
    assert is_like("at 2026-11-30 13:01:06Z\n", "at 2025-01-02 03:04:05Z\n")
    assert is_like("a\n…\nd\n", "a\nb\nc\nd\n")
    assert not is_like("a\n", "a\nb\n")
    assert not is_like("12.0 KiB\n", "12.1 KiB\n")
