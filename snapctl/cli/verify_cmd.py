"""Whether a checkpoint is whole: its manifest, its blobs, and with --level data every byte of them.

Ends with 0 if everything is sound, 1 if anything is damaged or unreadable, 5 if some could not be checked, 4 if none
could. Nothing is ever executed: what would need unpickling is said to be unchecked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any

import typer

from snapctl.checkpoints import find_place
from snapctl.cli.exit_codes import ExitCode, code_of
from snapctl.cli.options import (
    CheckpointsOrSaveDirsArgument,
    JsonOption,
    RecursiveOption,
    StorageOptions,
    parse_storage_options,
)
from snapctl.cli.output import Output, error_json, format_size
from snapctl.cli.several import code_of_several, open_several
from snapctl.cli.tables import Cell
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    SnapctlError,
    StorageError,
    WorkerSetupError,
)
from snapctl.verification.data_plan import parse_sample
from snapctl.verification.targets import Targets, find_targets, find_targets_in
from snapctl.verification.verdicts import CheckpointReport, Unchecked
from snapctl.verification.verifier import Progress, Thoroughness, verify

_STYLES = {"sound": "green", "unverifiable": "yellow", "damaged": "red", "unreadable": "red"}
_SHOWN_UNCHECKED = 3


class LevelName(str, Enum):
    """How closely to look."""

    STRUCTURE = "structure"
    SIZE = "size"
    DATA = "data"


def command(
    context: typer.Context,
    checkpoints: CheckpointsOrSaveDirsArgument,
    recursive: RecursiveOption = False,
    every: Annotated[bool, typer.Option("--all", help="All complete checkpoints of the save directory.")] = False,
    step: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="This step of the save directory. Repeatable.")
    ] = None,
    level: Annotated[
        LevelName,
        typer.Option(
            help="structure: the manifest alone. size: and all blobs are there in full length, by their listing. "
            "data: and every byte is read, decoded, and compared with the recorded checksums."
        ),
    ] = LevelName.SIZE,
    finite: Annotated[bool, typer.Option("--finite", help="With --level data: NaN and Inf are damage, too.")] = False,
    sample: Annotated[
        str | None,
        typer.Option(metavar="N/T", help="With --level data: read only the Nth of T parts of each checkpoint."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="So many reads at a time.")] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="With --level data: read on the workers of this Dask scheduler."),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    if level is not LevelName.DATA and (finite or sample is not None or dask is not None):
        name = "--finite" if finite else "--sample" if sample is not None else "--dask"
        raise InvalidOptionError(f"{name} has no meaning without reading the data", hint="add --level data")
    if every and step:
        raise InvalidOptionError("--all and --step exclude each other")
    how = Thoroughness(level.value, finite, None if sample is None else parse_sample(sample), jobs)
    options = parse_storage_options(storage_option)
    is_several = recursive or len(checkpoints) > 1
    if is_several and step:
        raise InvalidOptionError("--step is for one save directory")
    with _cluster(out, dask, jobs) as cluster:
        if is_several:
            return _verify_several(out, checkpoints, how, options, cluster, every=every, recursive=recursive)
        targets = find_targets(checkpoints[0], steps=step or (), every=every, level=how.level, options=options)
        reports = _verify(out, targets, how, options, cluster)
    _show(out, reports)
    code = _code(reports, targets)
    if code is ExitCode.STORAGE:
        raise next(report.error for report in reports if isinstance(report.error, StorageError))
    return code


def _verify_several(
    out: Output,
    paths: list[str],
    how: Thoroughness,
    options: dict[str, Any],
    cluster: Mapping[str, Any],
    *,
    every: bool,
    recursive: bool,
) -> ExitCode:
    """Each of several paths; one that cannot be looked at does not keep the others from it."""
    places, problems = open_several(paths, options, recursive=recursive, find=find_place)
    for problem in problems:
        out.warn(f"could not be looked at: {problem}")
    codes: list[ExitCode] = []
    failures: list[ExitCode] = []
    for path, place in places:
        try:
            if isinstance(place, SnapctlError):
                raise place
            targets = find_targets_in(place, every=every and place.kind == "save_dir", level=how.level)
            reports = _verify(out, targets, how, options, cluster)
            _show(out, reports, of=path)
        except WorkerSetupError:  # so it would be for all
            raise
        except SnapctlError as error:
            failures.append(code_of(error))
            if out.as_json:
                out.document({"save_dir": path, "checkpoints": [], "error": error_json(error, failures[-1])})
            else:
                out.warn(f"could not be checked: {error.message}")
            continue
        code = _code(reports, targets)
        (failures if code is ExitCode.STORAGE else codes).append(code)
        out.flush()
    return code_of_several(codes, failures, is_partial=bool(problems))


def _verify(
    out: Output, targets: Targets, how: Thoroughness, options: dict[str, Any], cluster: Mapping[str, Any]
) -> list[CheckpointReport]:
    """The reports in the order of steps, without those of checkpoints that have vanished meanwhile."""
    for error in targets.not_looked_at:
        out.warn(f"could not be looked at: {error.message}")
    with _progress(out, targets, how) as on_progress:
        reports = list(verify(targets, how, options=options, on_progress=on_progress, **cluster))
    reports.sort(key=lambda report: (report.step is None, report.step or 0, report.path))
    gone = [report for report in reports if isinstance(report.error, CheckpointNotFoundError)]
    if targets.all_of is None and len(gone) == len(reports) and gone[0].error is not None:
        raise gone[0].error
    if targets.all_of is not None:  # then it is none of them any more; one that was named could not be checked
        for report in gone:
            out.warn(str(report.error))
        reports = [report for report in reports if report not in gone]
    if not reports:
        raise CheckpointNotFoundError(f"{targets.storage.url}: no complete checkpoint")
    return reports


@contextmanager
def _cluster(out: Output, address: str | None, jobs: int | None) -> Iterator[Mapping[str, Any]]:
    """What `verify` is to read with, by the names of its parameters; nothing without a cluster."""
    if address is None:
        yield {}
        return
    from snapctl.verification.dask_cluster import dask_cluster

    with dask_cluster(address) as executor:
        if executor.capacity() == 0:
            out.note(f"{address}: waiting for a worker")
        yield {"executor": executor, "capacity": lambda: min(executor.capacity(), jobs or sys.maxsize)}


@contextmanager
def _progress(out: Output, targets: Targets, how: Thoroughness) -> Iterator[Any]:
    is_data = how.level == "data"
    description = "reading" if is_data else f"looking at {targets.count} checkpoints"
    is_quick = targets.storage.scheme == "file" and targets.count < 50
    with out.progress(
        description,
        0 if is_data else targets.count,
        unit="bytes" if is_data else "checkpoints",
        only_if=is_data or not is_quick,
    ) as bar:

        def tell(progress: Progress) -> None:
            if is_data:
                bar(progress.read_bytes, progress.estimated_bytes)
            else:
                bar(progress.done, progress.checkpoints)

        yield tell


def _show(out: Output, reports: list[CheckpointReport], *, of: str | None = None) -> None:
    """The reports; `of` is the save directory to name, where there are several."""
    if out.as_json:
        named = {} if of is None else {"save_dir": of}
        out.document({**named, "checkpoints": [_report_json(report) for report in reports]})
        return
    if of is not None:
        out.line(of)
    _print_tables(out, reports)


def _code(reports: list[CheckpointReport], targets: Targets) -> ExitCode:
    failed = [report for report in reports if report.verdict is None]
    if len(failed) == len(reports):
        return ExitCode.STORAGE
    if any(report.is_bad for report in reports):
        return ExitCode.NO
    return ExitCode.PARTIAL if failed or targets.not_looked_at else ExitCode.OK


def _report_json(report: CheckpointReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "path": report.path,
        "verdict": report.verdict,
        "level": report.level,
        "blobs": report.blobs,
        "bytes_read": report.bytes_read,
        "problems": [
            {"kind": problem.kind, "entry": problem.entry, "blob": problem.blob, "detail": problem.detail}
            for problem in report.problems
        ],
        "unchecked": [{"entry": item.entry, "reason": item.reason} for item in report.unchecked],
        "warnings": list(report.warnings),
        "error": None if report.error is None else report.error.message,
    }


def _print_tables(out: Output, reports: list[CheckpointReport]) -> None:
    has_data = any(report.level == "data" for report in reports)
    headers = ["STEP", "VERDICT", "LEVEL", "BLOBS", *(["READ"] if has_data else []), "PROBLEMS"]
    rows = []
    for report in reports:
        verdict = report.verdict or "not checked"
        rows.append(
            [
                _name(report),
                Cell(verdict, _STYLES.get(verdict, "yellow")),
                report.level,
                str(report.blobs),
                *([format_size(report.bytes_read)] if has_data else []),
                str(len(report.problems)),
            ]
        )
    out.table(headers, rows, right=("STEP", "BLOBS", "READ", "PROBLEMS"))
    problems = [
        [_name(report), Cell(p.kind, "red"), p.entry or "-", p.blob or "-", p.detail]
        for report in reports
        for p in report.problems
    ]
    if problems:
        out.line("")
        out.table(["STEP", "PROBLEM", "ENTRY", "BLOB", "DETAIL"], problems, right=("STEP",))
    for report in reports:
        for warning in report.warnings:
            out.warn(f"{report.path}: {warning}")
        for line in _unchecked_lines(report.unchecked):
            out.warn(f"{report.path}: {line}")
        if report.error is not None:
            out.warn(f"{report.path}: could not be checked: {report.error.message}")
    unverifiable = sum(report.verdict == "unverifiable" for report in reports)
    if unverifiable:
        out.note(f"unverifiable: {unverifiable} passed, and had no recorded checksums to compare with")


def _name(report: CheckpointReport) -> str:
    return report.path if report.step is None else str(report.step)


def _unchecked_lines(items: tuple[Unchecked, ...]) -> list[str]:
    """Entries that could not be judged, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for item in items:
        by_reason.setdefault(item.reason, []).append(item.entry)
    return [
        f"unchecked: {', '.join(entries[:_SHOWN_UNCHECKED])}"
        + (f", … ({len(entries)} in all)" if len(entries) > _SHOWN_UNCHECKED else "")
        + f": {reason}"
        for reason, entries in by_reason.items()
    ]
