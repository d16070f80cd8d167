"""What a terminal shows: its width, its colours, and text without what it would act on."""

from __future__ import annotations

import os
import shutil
import unicodedata
from typing import TextIO

FIRST_COMBINING = "\u0300"
"""Before it every character takes one column."""
_SGR = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}
_ACTED_ON = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def wants_color(stream: TextIO | None) -> bool:
    """Whether escape sequences may go there. ``NO_COLOR`` wins over ``FORCE_COLOR``."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def terminal_width(stream: TextIO | None) -> int | None:
    """Columns of a terminal; None for a pipe or a file, which have no edge."""
    if not is_terminal(stream):
        return None
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def printable(text: str) -> str:
    """The text with every character escaped that a terminal would act on, or that cannot be shown."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _ACTED_ON else c for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    if known:
        return known
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str) -> str:
    """A message as one line that is safe to show."""
    return printable(" ".join(text.split("\n")))


def cell_width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii() or max(text) < FIRST_COMBINING:
        return len(text)
    from rich.cells import cell_len

    return cell_len(str(text))


def painted(text: str, style: str, *, color: bool) -> str:
    return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if color and style and text else str(text)
