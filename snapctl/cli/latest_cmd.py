"""The path of the newest complete checkpoint whose manifest can be parsed; of several save directories, one of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from snapctl.checkpoints import (
    Checkpoint,
    Chooser,
    Judge,
    LatestSearch,
    Place,
    find_latest,
    open_save_dir,
)
from snapctl.cli.checkpoint_json import brief_json
from snapctl.cli.exit_codes import ExitCode, code_of, worst
from snapctl.cli.options import (
    EvaluatedByOption,
    JsonOption,
    NotEvaluatedByOption,
    Print0Option,
    RecursiveOption,
    SaveDirsArgument,
    StorageOptions,
    parse_duration,
    parse_storage_options,
)
from snapctl.cli.output import Output, error_json
from snapctl.cli.several import code_of_several, collect_all_errors, open_several
from snapctl.durations import format_duration
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    NoMatchError,
    SaveDirNotFoundError,
    SnapctlError,
)
from snapctl.metrics import is_evaluated, parse_metric_spec, rank_by_metric
from snapctl.storage import run_parallel

_JOBS = 8
"""Save directories that are looked at at a time."""


class Printed(str, Enum):
    """What to print of it."""

    PATH = "path"
    STEP = "step"


def command(
    context: typer.Context,
    save_dirs: SaveDirsArgument,
    recursive: RecursiveOption = False,
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
    options = parse_storage_options(storage_option)

    def find(place: Place) -> LatestSearch:
        judge = _judge_blobs() if verified else None
        return find_latest(place, choose=choose, compares_all=best is not None, judge=judge)

    if recursive or len(save_dirs) > 1:
        if printed is Printed.STEP:
            raise InvalidOptionError("--print step is for one save directory; --json tells the steps of several")
        many = _Many(out, print0=print0, missing_ok=missing_ok, age_limit=age_limit)
        return many.run(save_dirs, options, find, recursive=recursive)
    try:
        place = open_save_dir(save_dirs[0], options)
        found = find(place)
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


class _Many:
    """The latest of several save directories: a line each; one that has none does not keep the others from theirs."""

    def __init__(self, out: Output, *, print0: bool, missing_ok: bool, age_limit: float | None) -> None:
        self._out = out
        self._end = "\0" if print0 else "\n"
        self._missing_ok = missing_ok
        self._age_limit = age_limit

    def run(
        self, paths: list[str], options: dict[str, Any], find: Callable[[Place], LatestSearch], *, recursive: bool
    ) -> ExitCode:
        places, problems = open_several(paths, options, recursive=recursive)
        for problem in problems:
            self._out.warn(f"could not be looked at: {problem}")
        opened = [place for _, place in places if isinstance(place, Place)]
        jobs = max((min(_JOBS, place.storage.parallel_requests) for place in opened), default=1)
        answers = iter(run_parallel(collect_all_errors(find), opened, jobs=jobs))
        codes: list[ExitCode] = []
        failures: list[ExitCode] = []
        for path, place in places:
            answer = next(answers) if isinstance(place, Place) else place
            if isinstance(answer, LatestSearch) and isinstance(place, Place):
                codes.append(self._show(path, place, answer))
            elif isinstance(answer, SnapctlError):
                code = self._show_failure(path, answer)
                (codes if code is ExitCode.OK else failures).append(code)
        return code_of_several(codes, failures, is_partial=bool(problems))

    def _show(self, path: str, place: Place, found: LatestSearch) -> ExitCode:
        code = _say_what_was_passed_over(self._out, found)
        if self._age_limit is not None:
            now = place.storage.now(may_write=False)
            code = worst(code, _judge_age(self._out, found.checkpoint, self._age_limit, now=now))
        if self._out.as_json:
            self._out.document({"save_dir": path, **brief_json(found.checkpoint), "error": None})
        else:
            self._out.path(found.checkpoint.path, end=self._end)
        return code

    def _show_failure(self, path: str, error: SnapctlError) -> ExitCode:
        is_missing = isinstance(error, SaveDirNotFoundError | CheckpointNotFoundError)
        code = code_of(error)
        if is_missing and self._missing_ok and not isinstance(error, NoMatchError):
            code = ExitCode.OK
        elif not self._out.as_json:
            self._out.warn(error.message)
        if self._out.as_json:
            nothing = dict.fromkeys(("step", "path", "created_at", "evaluated_by", "metrics"))
            told = None if code is ExitCode.OK else error_json(error, code)
            self._out.document({"save_dir": path, **nothing, "error": told})
        return code


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
