"""The words of a line that is being typed, as bash hands it over, and how a word is put back into it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_SPECIAL = frozenset(" \t\"'\\$`&|;<>()[]{}*?!#~=%^")
_BREAKS = ":=@"
"""Those of bash's word breaks that words of ours contain."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A line up to the cursor."""

    words: tuple[str, ...]
    """The whole words, without their quotes."""
    last: str
    """The word under the cursor, without its quotes."""
    quote: str
    """The quote that it stands in; empty if none is open."""
    kept: str
    """What of it bash leaves alone when it puts a candidate in: what ends with the last word break."""


def split_line(line: str, breaks: str) -> Typed:
    """The words of a line up to the cursor, which may stand within quotes.

    Args:
        breaks: ``COMP_WORDBREAKS``.
    """
    words: list[str] = []
    last, kept, quote, begun, escaped = "", "", "", False, False
    for character in line:
        if escaped:
            last += character
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = begun = True
        elif quote:
            if character == quote:
                quote = ""
            else:
                last += character
        elif character in "\"'":
            quote, begun = character, True
            kept = last  # what stands before an opening quote is a word of its own
        elif character in " \t\n":
            if begun:
                words.append(last)
            last, kept, begun = "", "", False
        else:
            last, begun = last + character, True
            if character in breaks and character in _BREAKS:
                kept = last
    return Typed(tuple(words), last, quote, kept)


def put_back(word: str, typed: Typed) -> str:
    """A candidate as bash must insert it: without what it leaves alone, and quoted like what is there."""
    rest = word[len(typed.kept) :]
    if typed.quote == "'":
        return rest.replace("'", "'\\''")
    if typed.quote == '"':
        return "".join(f"\\{c}" if c in '"\\$`' else c for c in rest)
    return "".join(f"\\{c}" if c in _SPECIAL and not (c in "=~" and number) else c for number, c in enumerate(rest))
