"""The man page and the pages of docs/ say of the command line what it is."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from snapctl.cli.app import COMMANDS
from snapctl.cli.exit_codes import MEANINGS, ExitCode
from snapctl.cli.man_page import make_man_page
from snapctl.cli.outline import Command, outline_all, outline_command
from tests.support.repository import ROOT, require_repository

require_repository()
EVERYWHERE = {"--help", "--storage-option", "--json"}


def test_the_man_page_in_the_repository_is_what_the_program_makes() -> None:
    assert (ROOT / "docs" / "man" / "snapctl.1").read_text() == make_man_page(), "python -m snapctl.cli.man_page"


def test_it_names_every_command_and_option() -> None:
    text = make_man_page().replace("\\-", "-")
    for command in outline_all():
        assert not command.name or f".SS snapctl {command.name} " in text
        for option in command.options:
            assert all(f"\\fB{name}\\fR" in text for name in option.names), option.names


def test_it_is_well_formed() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(ROOT / "docs" / "man" / "snapctl.1")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_exit_code_has_a_meaning_and_the_page_says_the_same() -> None:
    codes = {int(code) for text in MEANINGS for code in text.split(", ")}
    assert codes == {int(code) for code in ExitCode}
    page = (ROOT / "docs" / "exit-codes.md").read_text().replace("`", "")
    for code, meaning in MEANINGS.items():
        assert f"| {code} | {meaning} |" in page


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_names_all_of_its_options(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    missing = [option for option in _options(outline_command(name)) if not re.search(rf"{option}(?![\w-])", page)]
    assert missing == []


def _options(command: Command) -> list[str]:
    """Their long names; of ``--keep-daily`` and its like the page has the ends alone."""
    names = [option.names[0] for option in command.options]
    stems = {"--keep-daily", "--keep-weekly", "--keep-monthly", "--keep-yearly"}
    return [f"`{name.removeprefix('--keep')}" if name in stems else name for name in names if name not in EVERYWHERE]


@pytest.mark.timeout(900)
def test_the_picture_shows_what_the_session_prints() -> None:
    from docs.session import PICTURE, draw, play, text_of
    from tests.support.pages import is_like

    assert is_like(text_of(PICTURE.read_text()), text_of(draw(play()))), "python -m docs.session"
