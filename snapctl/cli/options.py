"""Options and arguments that several commands share, and how their values are read."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import msgspec
import typer

from snapctl.checkpoints import parse_step
from snapctl.durations import parse_duration as parse_duration
from snapctl.errors import InvalidOptionError

SaveDirArgument = Annotated[
    str, typer.Argument(metavar="SAVE_DIR", help="The directory that holds the checkpoints: a local path or a URL.")
]
SaveDirsArgument = Annotated[
    list[str], typer.Argument(metavar="SAVE_DIR...", help="Directories that hold checkpoints: paths or URLs.")
]
RecursiveOption = Annotated[
    bool, typer.Option("--recursive", "-r", help="Every save directory below the directories given.")
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's own path, or a save directory with --step N.")
]
CheckpointOrSaveDirArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint's own path, or a save directory: then its latest is meant."
    ),
]

CheckpointsOrSaveDirsArgument = Annotated[
    list[str],
    typer.Argument(metavar="CHECKPOINT...", help="Checkpoints, or save directories: then the latest of each is meant."),
]


def read_step(text: str) -> int:
    """A step as directories spell it: ``10``, and not ``010`` or ``+10``."""
    step = parse_step(text)
    if step is None:
        raise typer.BadParameter(f"{text[:40]!r} is no step")
    return step


StepOption = Annotated[
    int | None,
    typer.Option("--step", metavar="N", parser=read_step, help="The checkpoint of this step of the save directory."),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="For the storage (fsspec). KEY=@FILE and KEY=$ENV keep secrets out of process lists. Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
EvaluatedByOption = Annotated[
    list[str] | None,
    typer.Option("--evaluated-by", metavar="P", help="Only checkpoints that partition P has marked. Repeatable."),
]
NotEvaluatedByOption = Annotated[
    list[str] | None,
    typer.Option("--not-evaluated-by", metavar="P", help="Only those that P has not marked. Repeatable."),
]
Print0Option = Annotated[
    bool, typer.Option("--print0", "-0", help="Bare paths, each ended by a NUL character: for xargs -0.")
]


def parse_storage_options(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs for fsspec.

    A value that is a JSON boolean, number or object is passed as such; ``@FILE`` is read from a file, ``$ENV`` from
    the environment. Values are never shown, not even in errors.

    Raises:
        InvalidOptionError: not ``KEY=VALUE``, or the file or variable is not there.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidOptionError("--storage-option takes KEY=VALUE")
        options[key] = _storage_value(key, value)
    return options


def _storage_value(key: str, value: str) -> Any:
    if value.startswith("@"):
        try:
            with open(os.path.expanduser(value[1:]), encoding="utf-8") as file:
                value = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise InvalidOptionError(f"--storage-option {key}=@…: the file cannot be read: {reason}") from error
    elif value.startswith("$"):
        found = os.environ.get(value[1:])
        if found is None:
            raise InvalidOptionError(f"--storage-option {key}=${value[1:]}: there is no such environment variable")
        value = found
    if key == "requester_pays":
        return True if value.lower() == "true" else value
    if re.match(r"true$|false$|-?\d|\{", value):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value
