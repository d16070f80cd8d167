"""The examples of the documentation: fenced blocks of README.md and docs/, run as they stand.

A comment ``<!-- test: … -->`` on a line of its own above a block says what it needs; without one it is run as it is:

- ``world NAME``: what is there when it runs, from here to the end of the page (`tests.support.worlds`);
- ``with NAME``: what a piece of a program takes for granted (`tests.support.worlds.PRELUDES`);
- ``exits 1 3``: codes that its commands may end with besides 0;
- ``torch``: it needs torch;
- ``elsewhere tests/test_x.py``: that file runs it;
- ``skip REASON``: it cannot be run here.

``console`` blocks are commands behind ``$`` and what they print (a line ``…`` stands for any lines), compared but for
times, random IDs and measured seconds. ``sh`` and ``python`` blocks have to end with 0. Other languages are no
programs.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.repository import ROOT

PROGRAMS = ("console", "sh", "bash", "python")
_MARKER = re.compile(r"<!-- test: (\w+)\s*(.*?) -->")
_VARYING = (
    (re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?Z"), "TIME"),
    (re.compile(r"(?<![.\w])[0-9a-f]{16}\b"), "ID"),
    (re.compile(r"(?<=seconds['\"]: )[\d.]+"), "SECONDS"),
    (re.compile(r"(?<=blocked )[\d.]+ s|(?<=durable after )[\d.]+ s"), "SECONDS"),
    (re.compile(r"(?<=\"owner\": \")[^\"]+"), "OWNER"),
    (re.compile(r"(?<=changed )[\d.]+m?s(?= ago)"), "SECONDS"),
    (re.compile(r"(?<=safetensors: )[\d.]+ (?:KiB|B)"), "SIZE"),  # the path of the checkpoint is in the file
    (re.compile(r" +(?:\d+[wdhms]){1,2}(?= )"), " AGE"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


@dataclass
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Where its first line stands in the page, counted from 1."""
    world: str = ""
    markers: dict[str, str] = field(default_factory=dict)


def find_pages() -> list[pathlib.Path]:
    """README.md and all pages of docs/, in this order."""
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_merge" not in path.parts]
    return [ROOT / "README.md", *found]


def parse_blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    markers: dict[str, str] = {}
    world = ""
    lines = iter(enumerate(text.splitlines(), start=1))
    for _, line in lines:
        marker = _MARKER.fullmatch(line.strip())
        if marker:
            markers[marker[1]] = marker[2]
            world = markers.pop("world", world)
        elif line.startswith("```"):
            language, body, begin = line[3:].strip(), [], 0
            for number, inner in lines:
                if inner == "```":
                    break
                begin = begin or number
                body.append(inner)
            yield Block(language, "".join(f"{inner}\n" for inner in body), begin, world, markers)
            markers = {}
        elif line.strip():
            markers = {}


def commands_of(block: Block) -> list[tuple[str, str]]:
    """The commands of a ``console`` block, each with what it is said to print."""
    found: list[tuple[str, str]] = []
    continued = False
    for line in block.text.splitlines(keepends=True):
        if continued:
            found[-1] = (found[-1][0] + line, "")
        elif line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            command, output = found[-1]
            found[-1] = (command, output + line)
            continue
        continued = line.endswith("\\\n")
    return found


def is_like(said: str, printed: str) -> bool:
    """Whether the output in a page is what was printed, times and the like aside."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…\n" else re.escape(line) for line in _steady(said).splitlines(keepends=True)
    )
    return re.fullmatch(pattern, _steady(printed)) is not None


def _steady(text: str) -> str:
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


class Stage:
    """A directory in which the blocks of one page run, with ``snapctl`` and ``python`` on the path."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.roots: dict[str, str] = {"/path/to": str(directory)}
        """What a page calls a directory, and where it really is."""
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HOME": str(directory),
        }
        programs = directory / ".bin"
        programs.mkdir()
        for name, command in (("snapctl", f'"{sys.executable}" -m snapctl'), ("python", f'"{sys.executable}"')):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.env["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def run(self, command: str) -> tuple[int, str]:
        """Runs a command as a page has it; its exit code, and both of its streams as a page would show them."""
        try:
            done = subprocess.run(
                ["bash", "-c", self._here(command)],
                cwd=self.directory,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=300,
            )
        except subprocess.TimeoutExpired as error:
            return -1, f"{error}"
        return done.returncode, self._as_in_a_page(done.stdout.decode("utf-8", "surrogateescape"))

    def run_python(self, program: str) -> tuple[int, str]:
        """Runs a program as a page has it."""
        (self.directory / ".program.py").write_text(self._here(program))
        return self.run("python .program.py")

    def _here(self, text: str) -> str:
        for name, real in self.roots.items():
            if name != "/path/to":
                text = re.sub(rf"(?<![\w/.]){re.escape(name)}\b", real, text)
        return text

    def _as_in_a_page(self, text: str) -> str:
        for name, real in sorted(self.roots.items(), key=lambda item: -len(item[1])):
            text = text.replace(real, name)
        return text
