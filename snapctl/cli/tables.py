"""How a table is laid out: as wide as it needs to be; on a narrow terminal folded, or each row as a block of lines."""

from __future__ import annotations

from collections.abc import Sequence

from snapctl.cli.terminal import cell_width, painted, printable

MIN_COLUMN = 8
SHORT_WORD = 12
LONG_WORD = 20
"""On a narrow terminal words of a table are not divided up to this length if that can be, and never up to the other."""
_BREAKS = "/.,_-="
"""A long word is divided after one of these, if there is one in the second half of a line."""


class Cell(str):
    """A table's cell with a style; the text alone says all that it means."""

    style: str

    def __new__(cls, text: str, style: str = "") -> Cell:
        self = super().__new__(cls, text)
        self.style = style
        return self


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str], room: int | None, color: bool
) -> list[str]:
    """A table, row by row.

    Args:
        right: headers of the columns that are flush right.
        room: columns of the terminal; None for a pipe, in which each row is one line.
    """
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(cell_width, column)) for column in zip(headers, *cells, strict=True)]
    flush = [header in right for header in headers]
    if room is not None and sum(widths) + 2 * (len(widths) - 1) > room:
        words = [max(map(_longest_word, column)) for column in zip(headers, *cells, strict=True)]
        narrow = _shrink(widths, words, flush, room)
        if narrow is None:
            return _records(headers, cells, room, color=color)
        widths = narrow
    lines = [row_line([Cell(header, "bold") for header in headers], widths, flush, color=color).rstrip()]
    for row in cells:
        lines += _fold_row(row, widths, flush, color=color, fold=room is not None)
    return lines


def _records(headers: Sequence[str], rows: Sequence[Sequence[str]], room: int, *, color: bool) -> list[str]:
    """A table for a terminal that is too narrow for it: a block of lines for each row."""
    lines: list[str] = []
    for row in rows:
        lines += ["", *field_lines(list(zip(headers, row, strict=True)), room, color=color)]
    return lines[1:]


def row_line(cells: Sequence[str], widths: Sequence[int], flush: Sequence[bool], *, color: bool) -> str:
    """One line of a table. A cell that is too wide moves the others.

    Args:
        flush: whether a column is flush right.
    """
    return "  ".join(_row(cells, widths, flush, color=color))


def field_lines(pairs: Sequence[tuple[str, str]], room: int | None, *, color: bool) -> list[str]:
    """Names and values below each other; in colour the names are bold, and values have their styles."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    lines = []
    for name, value in pairs:
        parts = [value] if room is None else chop(value, max(MIN_COLUMN, room - width))
        for number, part in enumerate(parts):
            label = Cell(f"{name}:" if number == 0 else "", "bold")
            lines.append("".join(_row([label, part], [width, cell_width(part)], [False, False], color=color)))
    return lines


def _fold_row(
    row: Sequence[str], widths: Sequence[int], flush: Sequence[bool], *, color: bool, fold: bool
) -> list[str]:
    if not fold:
        return [row_line(row, widths, flush, color=color).rstrip()]
    pieces = [chop(cell, width) for cell, width in zip(row, widths, strict=True)]
    height = max(map(len, pieces))
    lines = []
    for number in range(height):
        part = [piece[number] if number < len(piece) else "" for piece in pieces]
        lines.append(row_line(part, widths, flush, color=color).rstrip())
    return lines


def _row(cells: Sequence[str], widths: Sequence[int], flush: Sequence[bool], *, color: bool) -> list[str]:
    parts = []
    for cell, width, to_right in zip(cells, widths, flush, strict=True):
        padding = " " * (width - cell_width(cell))
        style = cell.style if isinstance(cell, Cell) else ""
        shown = painted(cell, style, color=color)
        parts.append(padding + shown if to_right else shown + padding)
    return parts


def plain(cell: str) -> str:
    """A cell whose text is safe to show."""
    shown = printable(cell)
    return Cell(shown, cell.style) if isinstance(cell, Cell) else shown


def _shrink(widths: Sequence[int], words: Sequence[int], fixed: Sequence[bool], room: int) -> list[int] | None:
    """Widths that fit, taken from the widest columns; None if that leaves too little of them.

    Args:
        words: the longest word of each column, which is divided only if it is long.
        fixed: columns that keep their width: numbers.
    """
    result = list(widths)
    excess = sum(result) + 2 * (len(result) - 1) - room
    steps = (
        [min(width, LONG_WORD) for width in widths],
        [min(word, LONG_WORD) for word in words],
        [min(word, SHORT_WORD) for word in words],
    )
    for step in steps:
        floors = [width if keeps else floor for width, floor, keeps in zip(widths, step, fixed, strict=True)]
        while excess > 0:
            spare = [width - floor for width, floor in zip(result, floors, strict=True)]
            most = max(range(len(result)), key=spare.__getitem__)
            if spare[most] <= 0:
                break
            result[most] -= 1
            excess -= 1
    return result if excess <= 0 else None


def chop(text: str, width: int) -> list[str]:
    """A text in pieces that are at most so wide, at spaces where there are some; at least one piece."""
    if cell_width(text) <= width:
        return [text]
    pieces: list[str] = []
    for word in str(text).split(" "):
        if pieces and cell_width(pieces[-1]) + 1 + cell_width(word) <= width:
            pieces[-1] += f" {word}"
        else:
            pieces += _chop_word(word, width)
    return [Cell(piece, text.style) for piece in pieces] if isinstance(text, Cell) else pieces


def _chop_word(word: str, width: int) -> list[str]:
    if cell_width(word) <= width:
        return [word]
    from rich.cells import chop_cells

    pieces = []
    while cell_width(word) > width:
        piece = chop_cells(word, width)[0]
        ends = [end for end in range(len(piece) // 2 + 1, len(piece) + 1) if _may_end(word, end)]
        cut = ends[-1] if ends else len(piece)
        pieces.append(word[:cut])
        word = word[cut:]
    return [*pieces, word]


def _may_end(word: str, end: int) -> bool:
    """Whether a word is well divided here: behind punctuation, but not within a number."""
    return word[end - 1] in _BREAKS and not (word[end - 1] in ".-" and word[end].isdigit())


def _longest_word(text: str) -> int:
    return max(map(cell_width, str(text).split(" ")))
