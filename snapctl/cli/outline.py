"""The command line as values: what its commands, options and arguments are called. For completion and the man page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from snapctl.cli.app import COMMANDS, build_app


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option, or an argument."""

    key: str
    """Its name in Python; arguments and options of one command have different ones."""
    names: tuple[str, ...]
    """``("--limit",)``, the short one last; empty for an argument."""
    metavar: str
    """What its value is called: ``N``; empty for a flag."""
    help: str
    choices: tuple[str, ...] = ()
    """All values that there are, where they can be listed."""
    takes_value: bool = True
    repeatable: bool = False
    """An option that may be given again; an argument that takes all that is left."""
    required: bool = False
    panel: str = ""
    """The heading of --help that it stands under; empty for the general one."""
    default: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or the program itself."""

    name: str
    """Empty for the program."""
    summary: str
    help: str
    options: tuple[Parameter, ...]
    arguments: tuple[Parameter, ...]

    def find_option(self, name: str) -> Parameter | None:
        """The option of that name, long or short."""
        return next((option for option in self.options if name in option.names), None)


def outline_program() -> Command:
    """The global options."""
    group: Any = typer.main.get_command(build_app([]))
    return _outline("", group, group.help or "")


def outline_command(name: str) -> Command:
    """One command; only that one is imported."""
    group: Any = typer.main.get_command(build_app([name]))
    return _outline(name, group.commands[name], COMMANDS[name])


def _outline(name: str, command: Any, summary: str) -> Command:
    parameters = [_parameter(found) for found in command.params]
    return Command(
        name,
        summary,
        (command.help or "").strip(),
        (*(found for found in parameters if found.names), _HELP),
        tuple(found for found in parameters if not found.names),
    )


def _parameter(found: Any) -> Parameter:
    is_option = found.param_type_name == "option"
    takes_value = not (is_option and found.is_flag)
    choices = tuple(str(getattr(choice, "value", choice)) for choice in getattr(found.type, "choices", ()))
    names = sorted(found.opts, key=len, reverse=True) if is_option else []
    default = found.default if isinstance(found.default, str | int | float) and takes_value else ""
    return Parameter(
        key=found.name,
        names=tuple(names),
        metavar=(found.metavar or "|".join(choices) or found.name.upper()) if takes_value else "",
        help=found.help or "",
        choices=choices,
        takes_value=takes_value,
        repeatable=found.multiple if is_option else found.nargs == -1,
        required=found.required,
        panel=getattr(found, "rich_help_panel", None) or "",
        default=str(getattr(default, "value", default)),
    )


_HELP = Parameter("help", ("--help", "-h"), "", "Show the help and end.", takes_value=False)


def outline_all() -> Sequence[Command]:
    """The program, and then its commands in the order of ``--help``."""
    return [outline_program(), *(outline_command(name) for name in COMMANDS)]
