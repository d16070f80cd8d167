"""What is being typed: which parameter of which command, and what stands before it on the line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from snapctl.cli.outline import Command, Parameter


@dataclass(frozen=True, slots=True)
class Situation:
    """The word under the cursor."""

    command: Command
    typed: str
    """What there is of it, without `before`."""
    before: str = ""
    """``--step=`` of ``--step=10``: goes back in front of every candidate."""
    parameter: Parameter | None = None
    """Whose value it is; None for the name of an option, or of a command."""
    given: dict[str, list[str]] = field(default_factory=dict)
    """Values by the key of their parameter; empty strings for flags."""
    may_be_option: bool = True
    """No ``--`` stands before it."""


def find_situation(
    words: Sequence[str], typed: str, *, program: Command, find_command: Callable[[str], Command | None]
) -> Situation | None:
    """Where the cursor stands; None after something that is no command.

    Args:
        words: the whole words before the cursor, without the program's name.
        typed: the word under the cursor, as far as it goes.
    """
    for number, word in enumerate(words):
        if not word.startswith("-"):
            command = find_command(word)
            return None if command is None else _in_command(command, words[number + 1 :], typed)
    return Situation(program, typed)


def _in_command(command: Command, words: Sequence[str], typed: str) -> Situation:
    given: dict[str, list[str]] = {}
    places = list(command.arguments)
    waiting: Parameter | None = None
    options_end = False
    for word in words:
        if waiting is not None:
            given.setdefault(waiting.key, []).append(word)
            waiting = None
        elif word == "--" and not options_end:
            options_end = True
        elif word.startswith("-") and len(word) > 1 and not options_end:
            waiting = _take_option(command, word, given)
        elif places:
            given.setdefault(places[0].key, []).append(word)
            if not places[0].repeatable:
                places.pop(0)
    if waiting is not None:
        return Situation(command, typed, "", waiting, given)
    if typed.startswith("--") and "=" in typed and not options_end:
        name, _, value = typed.partition("=")
        option = command.find_option(name)
        return Situation(command, value, f"{name}=", option, given, may_be_option=False)
    argument = places[0] if places and not (typed.startswith("-") and not options_end) else None
    return Situation(command, typed, "", argument, given, may_be_option=not options_end)


def _take_option(command: Command, word: str, given: dict[str, list[str]]) -> Parameter | None:
    """Takes note of ``--name``, ``--name=value``, ``-abc`` or ``-nvalue``; the option whose value must follow."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        option = command.find_option(name)
        if option is None:
            return None
        if option.takes_value and not equals:
            return option
        given.setdefault(option.key, []).append(value)
        return None
    for position, letter in enumerate(word[1:], start=2):
        option = command.find_option(f"-{letter}")
        if option is None:
            return None
        if option.takes_value:
            if position == len(word):
                return option
            given.setdefault(option.key, []).append(word[position:])
            return None
        given.setdefault(option.key, []).append("")
    return None
