"""The complete checkpoints of a save directory, in ascending order of step.

With --recursive: every save directory below a root, a line each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from snapctl.cadence import Spacing, find_spacings
from snapctl.checkpoints import Checkpoint, find_checkpoints, open_save_dir
from snapctl.cli.checkpoint_json import listed_json
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.list_long import long_json, print_charts, spacing_cells
from snapctl.cli.options import (
    EvaluatedByOption,
    JsonOption,
    NotEvaluatedByOption,
    Print0Option,
    SaveDirArgument,
    StorageOptions,
    parse_storage_options,
)
from snapctl.cli.output import Output, format_number, format_size
from snapctl.cli.tables import Cell
from snapctl.errors import InvalidOptionError
from snapctl.markers import format_time
from snapctl.metrics import is_evaluated

_STYLES = {"complete": "green", "incomplete": "yellow", "unreadable": "red"}


class FormatName(str, Enum):
    """Other forms of the answer."""

    OPENMETRICS = "openmetrics"


def command(
    context: typer.Context,
    save_dir: SaveDirArgument,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Incomplete checkpoints, too.")] = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Add sizes, spacing, save times, and metrics.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the newest N.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The newest first.")] = False,
    evaluated_by: EvaluatedByOption = None,
    not_evaluated_by: NotEvaluatedByOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Bare paths, one a line.")] = False,
    print0: Print0Option = False,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Every save directory below this one, a line each.")
    ] = False,
    output_format: Annotated[
        FormatName | None,
        typer.Option("--format", help="Figures for a monitoring system instead of a table."),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    options = parse_storage_options(storage_option)
    if recursive or output_format is not None:
        is_about_one = show_all or long or reverse or limit is not None or bool(evaluated_by or not_evaluated_by)
        what = "--recursive lists save directories" if recursive else "--format gives figures"
        if is_about_one:
            raise InvalidOptionError(f"{what}: options about single checkpoints do not go with it")
        if output_format is not None and (quiet or print0 or as_json):
            raise InvalidOptionError("--format, --json, --quiet and --print0 exclude each other")
        return _list_save_dirs(
            out,
            save_dir,
            options,
            recursive=recursive,
            bare=quiet or print0,
            print0=print0,
            figures=bool(output_format),
        )
    place = open_save_dir(save_dir, options)
    with out.progress(
        f"looking at {len(place.step_names)} checkpoints", None, unit="", only_if=place.storage.scheme != "file"
    ):
        found = list(find_checkpoints(place, totals=long, details=not (quiet or print0)))
    chosen = [c for c in found if c.state == "unreadable" or _is_wanted(c, show_all, evaluated_by, not_evaluated_by)]
    if limit is not None:
        chosen = chosen[-limit:]
    for checkpoint in chosen:
        for warning in (*checkpoint.warnings, *checkpoint.unread):
            out.warn(warning)
    spacings = find_spacings(found) if long else None
    if reverse:
        chosen.reverse()
    if as_json:
        items = [{**listed_json(c), **long_json(c, spacings)} for c in chosen]
        out.document({"save_dir": place.storage.url, "checkpoints": items})
    elif quiet or print0:
        _print_paths(out, chosen, end="\0" if print0 else "\n")
    else:
        _print_table(out, chosen, spacings)
        if spacings is not None:
            print_charts(out, sorted(chosen, key=lambda checkpoint: checkpoint.step or 0), spacings)
    return ExitCode.PARTIAL if any(c.state == "unreadable" or c.unread for c in chosen) else ExitCode.OK


def _list_save_dirs(
    out: Output, root: str, options: dict[str, Any], *, recursive: bool, bare: bool, print0: bool, figures: bool
) -> int:
    from snapctl.cli.save_dirs_output import list_save_dirs, print_openmetrics, print_save_dirs

    if figures:
        return print_openmetrics(out, root, options, recursive=recursive)
    if bare and not out.as_json:
        return print_save_dirs(out, root, options, end="\0" if print0 else "\n")
    return list_save_dirs(out, root, options)


def _is_wanted(
    checkpoint: Checkpoint, show_all: bool, evaluated_by: list[str] | None, not_evaluated_by: list[str] | None
) -> bool:
    return (show_all or checkpoint.state == "complete") and is_evaluated(
        checkpoint, evaluated_by or (), not_evaluated_by or ()
    )


def _print_paths(out: Output, checkpoints: Sequence[Checkpoint], *, end: str) -> None:
    for checkpoint in checkpoints:
        if checkpoint.state == "unreadable":
            out.warn(f"left out: {checkpoint.problem}")
        else:
            out.path(checkpoint.path, end=end)


def _print_table(out: Output, checkpoints: Sequence[Checkpoint], spacings: Mapping[int, Spacing] | None) -> None:
    if not checkpoints:
        out.note("no checkpoints")
        return
    headers = ["STEP", "STATE", "CREATED", "EVALUATED"]
    rows = [_row(checkpoint) for checkpoint in checkpoints]
    if spacings is not None:
        headers += ["SIZE", "FILES", "SPACING", "SAVE", "METRICS"]
        rows = [
            [*row, *_size_cells(c), *spacing_cells(c, spacings), _metrics_text(c) or "-"]
            for row, c in zip(rows, checkpoints, strict=True)
        ]
    out.table(headers, rows, right=("STEP", "SIZE", "FILES"))
    for checkpoint in checkpoints:
        if checkpoint.problem:
            out.warn(checkpoint.problem)


def _row(checkpoint: Checkpoint) -> list[str]:
    state = checkpoint.state + (", pinned" if checkpoint.pinned else "") + (", deleting" if checkpoint.deleting else "")
    created = format_time(checkpoint.created_at)
    return [
        str(checkpoint.step),
        Cell(state, _STYLES[checkpoint.state]),
        f"{created[:10]} {created[11:19]}Z" if created else "-",
        ", ".join(checkpoint.evaluated_by) or "-",
    ]


def _size_cells(checkpoint: Checkpoint) -> list[str]:
    return [format_size(checkpoint.size_bytes), "-" if checkpoint.files is None else str(checkpoint.files)]


def _metrics_text(checkpoint: Checkpoint) -> str:
    return ", ".join(
        f"{partition}/{name}={format_number(value)}"
        for partition, values in checkpoint.metrics.items()
        for name, value in values.items()
    )
