"""The path of the newest complete checkpoint whose manifest can be parsed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer

from snapctl.checkpoints import (
    Checkpoint,
    Chooser,
    Judge,
    LatestSearch,
    find_latest,
    open_save_dir,
)
from snapctl.cli.checkpoint_json import brief_json
from snapctl.cli.exit_codes import ExitCode, worst
from snapctl.cli.options import (
    EvaluatedByOption,
    JsonOption,
    NotEvaluatedByOption,
    Print0Option,
    SaveDirArgument,
    StorageOptions,
    parse_duration,
    parse_storage_options,
)
from snapctl.cli.output import Output
from snapctl.durations import format_duration
from snapctl.errors import CheckpointNotFoundError, NoMatchError, SaveDirNotFoundError
from snapctl.metrics import is_evaluated, parse_metric_spec, rank_by_metric


class Printed(str, Enum):
    """What to print of it."""

    PATH = "path"
    STEP = "step"


def command(
    context: typer.Context,
    save_dir: SaveDirArgument,
    printed: Annotated[Printed, typer.Option("--print", help="Its path, or the number of its step.")] = Printed.PATH,
    print0: Print0Option = False,
    evaluated_by: EvaluatedByOption = None,
    not_evaluated_by: NotEvaluatedByOption = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="[P/]METRIC:max|min", help="The best by a metric of partition P, not the newest."),
    ] = None,
    verified: Annotated[
        bool, typer.Option("--verified", help="Only one whose blobs are all there in full length, by their listing.")
    ] = False,
    max_age: Annotated[
        str | None, typer.Option(metavar="DURATION", help="End with 1 when it is older, or of unknown age.")
    ] = None,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="Print nothing and end with 0 when there is none.")
    ] = False,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    age_limit = None if max_age is None else parse_duration(max_age, name="--max-age")
    choose = _chooser(evaluated_by or [], not_evaluated_by or [], best)
    try:
        place = open_save_dir(save_dir, parse_storage_options(storage_option))
        judge = _judge_blobs() if verified else None
        found = find_latest(place, choose=choose, compares_all=best is not None, judge=judge)
    except (SaveDirNotFoundError, CheckpointNotFoundError) as error:
        if not missing_ok or isinstance(error, NoMatchError):
            raise
        _print_nothing(out)
        return ExitCode.OK
    codes = [_say_what_was_passed_over(out, found)]
    if age_limit is not None:
        codes.append(_judge_age(out, found.checkpoint, age_limit, now=place.storage.now(may_write=False)))
    if as_json:
        out.document(brief_json(found.checkpoint))
    elif printed is Printed.STEP:
        out.path(str(found.checkpoint.step), end="\0" if print0 else "\n")
    else:
        out.path(found.checkpoint.path, end="\0" if print0 else "\n")
    return worst(*codes)


def _chooser(evaluated_by: list[str], not_evaluated_by: list[str], best: str | None) -> Chooser | None:
    if not evaluated_by and not not_evaluated_by and best is None:
        return None
    spec = None if best is None else parse_metric_spec(best)

    def choose(newest_first: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        fitting = [found for found in newest_first if is_evaluated(found, evaluated_by, not_evaluated_by)]
        return fitting if spec is None else rank_by_metric(fitting, spec)

    return choose


def _judge_blobs() -> Judge:
    from snapctl.verification.wholeness import find_flaw

    return find_flaw


def _print_nothing(out: Output) -> None:
    if out.as_json:
        out.null()


def _say_what_was_passed_over(out: Output, found: LatestSearch) -> ExitCode:
    for message in found.unparsable:
        out.warn(f"passed over: {message}")
    for message in (*found.not_looked_at, *found.checkpoint.unread):
        out.warn(f"could not be looked at: {message}")
    for message in found.checkpoint.warnings:
        out.warn(message)
    missed = (*found.not_looked_at, *found.checkpoint.unread)
    return ExitCode.PARTIAL if missed else ExitCode.OK


def _judge_age(out: Output, checkpoint: Checkpoint, limit_seconds: float, *, now: float) -> ExitCode:
    if checkpoint.created_at is None:
        out.warn(f"{checkpoint.path}: nobody knows when it was written")
        return ExitCode.NO
    age = now - checkpoint.created_at
    if age > limit_seconds:
        out.warn(f"{checkpoint.path}: is {format_duration(age)} old, more than {format_duration(limit_seconds)}")
        return ExitCode.NO
    return ExitCode.OK
