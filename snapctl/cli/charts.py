"""Small charts in characters, for terminals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_RAMP = "_.-~=+*#"
"""The same heights where the encoding has no blocks."""


def ramp_of(stream: TextIO | None) -> str:
    """The characters from low to high that a stream can carry."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    if os.environ.get("LC_ALL") in ("C", "POSIX"):  # Python writes UTF-8 then; the terminal has not been told
        return ASCII_RAMP
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII_RAMP
    return BLOCKS


def sparkline(values: Sequence[float | None], width: int, ramp: str = BLOCKS) -> str:
    """Values as a row of characters, the lowest and the highest at the ends of the ramp; a space where there is none.

    Args:
        width: the most characters; of more values, neighbours are put together to their mean.
    """
    points = _condense(values, width)
    finite = [value for value in points if value is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    top = len(ramp) - 1
    scale = high / 2 - low / 2  # halves: the difference itself may be too large for a float
    return "".join(
        " " if value is None else ramp[round((value / 2 - low / 2) / scale * top) if scale else top // 2]
        for value in points
    )


def _condense(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    points: list[float | None] = []
    for number in range(width):
        part = values[number * len(values) // width : (number + 1) * len(values) // width]
        held = [value for value in part if value is not None]
        points.append(sum(value / len(held) for value in held) if held else None)
    return points
