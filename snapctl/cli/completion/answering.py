"""``snapctl __complete``: what the scripts of the shells call at each press of the tab key.

The answer is a line that says what else the shell should do (``words``, ``nospace``, ``files`` or ``dirs``), and then a
line for each candidate, with its help behind a tab. It never takes long, and has nothing to say about what goes wrong.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence

from snapctl.cli.app import COMMANDS
from snapctl.cli.completion.candidates import Answer, find_answer
from snapctl.cli.completion.situation import find_situation
from snapctl.cli.completion.words import put_back, split_line
from snapctl.cli.outline import outline_command, outline_program

LIMIT_SECONDS = 0.9
"""A storage that has not answered by then is given up, in silence; `SNAPCTL_COMPLETION_SECONDS` changes it."""


def answer(arguments: Sequence[str]) -> int:
    """Answers ``bash LINE WORDBREAKS`` or ``zsh|fish WORD... CURRENT``; always 0."""
    watchdog = threading.Timer(_limit_seconds(), os._exit, (0,))  # also out of a call that nothing interrupts
    watchdog.daemon = True
    watchdog.start()
    with contextlib.suppress(BaseException):
        text = _answer_bash(*arguments[1:3]) if arguments[0] == "bash" else _answer_words(arguments[1:])
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    watchdog.cancel()
    return 0


def _limit_seconds() -> float:
    try:
        return float(os.environ.get("SNAPCTL_COMPLETION_SECONDS", LIMIT_SECONDS))
    except ValueError:
        return LIMIT_SECONDS


def _answer_bash(line: str, breaks: str) -> str:
    typed = split_line(line, breaks)
    found = _find(typed.words[1:], typed.last)
    return _text(found, [put_back(candidate.word, typed) for candidate in found.candidates], with_help=False)


def _answer_words(words: Sequence[str]) -> str:
    found = _find(words[:-1], words[-1])
    return _text(found, [candidate.word for candidate in found.candidates], with_help=True)


def _find(words: Sequence[str], typed: str) -> Answer:
    situation = find_situation(
        words,
        typed,
        program=outline_program(),
        find_command=lambda name: outline_command(name) if name in COMMANDS else None,
    )
    return Answer() if situation is None else find_answer(situation)


def _text(found: Answer, words: Sequence[str], *, with_help: bool) -> str:
    lines: list[str] = [found.paths or ("nospace" if found.is_open else "words")]
    for word, candidate in zip(words, found.candidates, strict=True):
        if word.isprintable():
            lines.append(f"{word}\t{candidate.help}" if with_help and candidate.help else word)
    return "".join(f"{line}\n" for line in lines)
