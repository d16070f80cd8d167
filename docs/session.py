"""The picture of a session, ``docs/session.svg``: real commands on the snapshots that ship with the repository.

Run it from the root of the repository: ``python -m docs.session``. It shows what a terminal of 100 columns shows.
"""

from __future__ import annotations

import html
import io
import os
import pathlib
import re
import shutil
import sys
import tempfile

from rich.console import Console
from rich.text import Text

from tests.support.terminal import on_terminal

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "session.svg"
COLUMNS = 100
FIRST_DAY = 1796000000
SESSION = (
    ("mark-eval", "run/100", "val", "--metric", "auc=0.834"),
    ("list", "run", "--all", "--long"),
    ("show", "run", "--entries", "model/*"),
    ("restore-weight", "run", "t_rw.weight", "-o", "users.safetensors"),
    ("verify", "damaged"),
    ("prune", "run", "--keep-best", "val/auc:max:1", "--dry-run"),
)


def play() -> str:
    """The session with its colours, as a terminal is sent it."""
    shown = []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        shutil.copytree(ROOT / "tests" / "data" / "torchrec-2ranks" / "100", directory / "run" / "100")
        shutil.copytree(directory / "run" / "100" / "batched", directory / "run" / "200" / "batched")
        shutil.copytree(directory / "run" / "100", directory / "run" / "50")
        shutil.copytree(ROOT / "tests" / "data" / "truncated-bfloat16", directory / "damaged")
        for step, day in ((50, 0), (100, 1)):
            files = [path for path in (directory / "run" / str(step)).rglob("*") if path.is_file()]
            for path in files:  # all at once, as a copy with its times has it
                os.utime(path, (FIRST_DAY + day * 86400, FIRST_DAY + day * 86400))
        for arguments in SESSION:
            words = " ".join(f"'{word}'" if "*" in word else word for word in arguments)
            shown.append(f"\x1b[32m$\x1b[0m \x1b[1msnapctl {words}\x1b[0m\n")
            command = [sys.executable, "-m", "snapctl", "--no-progress", *arguments]
            with on_terminal(command, columns=COLUMNS, cwd=name, env={"PYTHONPATH": str(ROOT)}) as terminal:
                shown.append(
                    terminal.read_all(seconds=200).replace("\r\n", "\n").replace(f"{directory.resolve()}/", "")
                )
            shown.append("\n")
    return "".join(shown).rstrip("\n") + "\n"


def draw(session: str) -> str:
    """The picture, as SVG, without fonts that would have to be fetched."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(session), soft_wrap=True)
    svg = console.export_svg(title="snapctl", unique_id="session")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def text_of(svg: str) -> str:
    """What stands in a picture, without the spaces at the ends of lines."""
    lines: dict[float, str] = {}
    for y, content in re.findall(r'<text class="session-[^"]*" x="[^"]*" y="([^"]*)"[^>]*>([^<]*)</text>', svg):
        lines[float(y)] = lines.get(float(y), "") + html.unescape(content).replace("\xa0", " ").rstrip("\n")
    return "".join(f"{lines[y].rstrip()}\n" for y in sorted(lines))


if __name__ == "__main__":
    PICTURE.write_text(draw(play()), encoding="utf-8")
