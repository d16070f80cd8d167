"""The man page, from the app itself: ``python -m snapctl.cli.man_page > docs/man/snapctl.1``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from snapctl import __version__
from snapctl.cli.exit_codes import MEANINGS
from snapctl.cli.outline import Command, Parameter, outline_all

_ENVIRONMENT = (
    ("NO_COLOR, FORCE_COLOR", "No colour, or colour even in a pipe."),
    ("STORAGE_EMULATOR_HOST", "Where gs:// leads instead of Google Cloud Storage."),
    ("GOOGLE_APPLICATION_CREDENTIALS, FSSPEC_*", "Credentials and options, as gcsfs and fsspec take them."),
    ("SNAPCTL_COMPLETION_SECONDS", "For how long completion in the shell waits for a storage (0.9)."),
)


def make_man_page() -> str:
    """The text of ``snapctl.1``."""
    program, *commands = outline_all()
    lines = [
        f'.TH SNAPCTL 1 "" "snapctl {__version__}" "User Commands"',
        ".SH NAME",
        "snapctl \\- find, inspect, verify, prune and restore torchsnapshot checkpoints",
        ".SH SYNOPSIS",
        ".B snapctl",
        "[\\fIOPTION\\fR]... \\fICOMMAND\\fR [\\fIARGUMENT\\fR]...",
        ".SH DESCRIPTION",
        *_text(program.summary),
        ".PP",
        *_text(
            "A save directory holds checkpoints: its direct child directories whose names are decimal numbers, their "
            "steps. Both are local paths or URLs (gs://, s3://, ...), and taken literally. The answer goes to standard "
            "output, everything else to standard error."
        ),
        ".SH OPTIONS",
        *_options(program.options),
        ".SH COMMANDS",
    ]
    for command in commands:
        lines += _command(command)
    lines.append(".SH EXIT STATUS")
    for code, meaning in MEANINGS.items():
        lines += [".TP", f".B {code}", *_text(meaning)]
    lines.append(".SH ENVIRONMENT")
    for name, meaning in _ENVIRONMENT:
        lines += [".TP", f".B {_escape(name)}", *_text(meaning)]
    return "\n".join([*lines, ""])


def _command(command: Command) -> Iterator[str]:
    usage = " ".join(_argument(argument) for argument in command.arguments)
    yield f".SS snapctl {_escape(command.name)} [\\fIOPTION\\fR]... {usage}"
    for number, paragraph in enumerate(command.help.split("\n\n")):
        if number:
            yield ".PP"
        yield from _text(" ".join(paragraph.split()))
    for argument in command.arguments:
        yield from (".TP", _argument(argument), *_text(argument.help))
    by_panel: dict[str, list[Parameter]] = {}
    for option in command.options:
        by_panel.setdefault(option.panel, []).append(option)
    for panel, options in by_panel.items():
        if panel:
            yield from (".PP", f"{_escape(panel)}:")
        yield from _options(options)


def _argument(argument: Parameter) -> str:
    name = argument.metavar.removesuffix("...")
    return f"\\fI{_escape(name)}\\fR" + ("..." if argument.repeatable else "")


def _options(options: Iterable[Parameter]) -> Iterator[str]:
    for option in options:
        value = f" \\fI{_escape(option.metavar)}\\fR" if option.metavar else ""
        default = f" Default: {option.default}." if option.default else ""
        yield ".TP"
        yield ", ".join(f"\\fB{_escape(name)}\\fR" for name in reversed(option.names)) + value
        yield from _text(option.help + default)


def _text(text: str) -> list[str]:
    """A paragraph; a line that begins like a request is none."""
    escaped = _escape(text)
    return [f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped]


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in escaped)


if __name__ == "__main__":
    sys.stdout.write(make_man_page())
