"""How `list` shows save directories: a line each, or figures for a monitoring system."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from snapctl.checkpoints import open_save_dir
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.output import Output, format_size
from snapctl.cli.tables import Cell
from snapctl.durations import format_duration
from snapctl.markers import format_time
from snapctl.save_dirs.openmetrics import format_openmetrics
from snapctl.save_dirs.summaries import (
    SaveDirSummary,
    Summary,
    Unreadable,
    find_below,
    iter_summaries,
    path_of,
    summarize_save_dir,
)
from snapctl.storage import Storage, open_storage

_HEADERS = ("NEWEST", "AGE", "CHECKPOINTS", "INCOMPLETE", "SIZE", "EVALUATED")
_WIDTHS = (10, 7, 11, 10, 10, 10)
_SWITCH_SECONDS = 20e-6


def list_save_dirs(out: Output, root: str, options: Mapping[str, Any]) -> ExitCode:
    """A line, or a JSON document, for each save directory below a root, as soon as it is found."""
    code, is_first = ExitCode.OK, True
    for summary in _summaries(open_storage(root, options)):
        if _says_problems(out, summary):
            code = ExitCode.PARTIAL
        if out.as_json:
            out.document(_json(summary))
        else:
            if is_first:
                out.columns([Cell(name, "bold") for name in _HEADERS], Cell("SAVE_DIR", "bold"), _WIDTHS)
            out.columns(_cells(summary), summary.path, _WIDTHS)
        is_first = False
        out.flush()
    if is_first:
        out.note("no save directories")
    return code


def print_save_dirs(out: Output, root: str, options: Mapping[str, Any], *, end: str) -> ExitCode:
    """Their bare paths."""
    code = ExitCode.OK
    storage = open_storage(root, options)
    for found in find_below(storage):
        path, problem = path_of(storage, found)
        if problem is not None:
            out.warn(problem if path is not None else f"left out: {problem}")
            code = ExitCode.PARTIAL
        if path is not None:
            out.path(path, end=end)
            out.flush()
    return code


def print_openmetrics(out: Output, path: str, options: Mapping[str, Any], *, recursive: bool) -> ExitCode:
    """Figures for the textfile collector of a node exporter: all at once, at the end, or nothing."""
    began = time.monotonic()
    if recursive:
        storage = open_storage(path, options)
        summaries: list[Summary] = list(_summaries(storage))
    else:
        place = open_save_dir(path, options)
        storage, summaries = place.storage, [summarize_save_dir(place)]
    code = ExitCode.OK
    for summary in summaries:
        if _says_problems(out, summary):
            code = ExitCode.PARTIAL
    now = storage.now(may_write=False)
    out.text(format_openmetrics(summaries, root=storage.url, now=now, took_seconds=time.monotonic() - began))
    return code


def _summaries(storage: Storage) -> Iterator[Summary]:
    """`iter_summaries`, with threads that give way at once: one of them reads from the network, and would wait five
    milliseconds for every look whether something has come, as long as another is computing."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield from iter_summaries(storage)
    finally:
        sys.setswitchinterval(before)


def _says_problems(out: Output, summary: Summary) -> bool:
    """Whether something could not be looked at; says what, and what else is to be said."""
    if isinstance(summary, Unreadable):
        out.warn(f"could not be looked at: {summary.problem}")
        return True
    for problem in summary.problems:
        out.warn(f"could not be looked at: {problem}")
    for warning in summary.warnings:
        out.warn(warning)
    return bool(summary.problems)


def _cells(summary: Summary) -> list[str]:
    if isinstance(summary, Unreadable):
        return [Cell("unreadable", "red"), "-", "-", "-", "-", "-"]
    age = summary.newest_age_seconds
    incomplete = str(summary.counts["incomplete"])
    return [
        "-" if summary.newest is None else str(summary.newest.step),
        "-" if age is None else format_duration(age),
        str(summary.counts["complete"]),
        incomplete if incomplete == "0" else Cell(incomplete, "yellow"),
        format_size(sum(summary.size_bytes.values())),
        "-" if summary.newest_evaluated_step is None else str(summary.newest_evaluated_step),
    ]


def _json(summary: Summary) -> dict[str, Any]:
    """The document of one save directory; of one that could not be looked at all but the first key and the last is
    null."""
    known = summary if isinstance(summary, SaveDirSummary) else None
    newest = known.newest if known is not None else None
    problems = [summary.problem] if isinstance(summary, Unreadable) else list(summary.problems)
    return {
        "save_dir": summary.path,
        "newest_step": newest.step if newest is not None else None,
        "newest_path": newest.path if newest is not None else None,
        "newest_created_at": format_time(newest.created_at) if newest is not None else None,
        "newest_age_seconds": known.newest_age_seconds if known is not None else None,
        "newest_evaluated_step": known.newest_evaluated_step if known is not None else None,
        "checkpoints": known.counts["complete"] if known is not None else None,
        "incomplete": known.counts["incomplete"] if known is not None else None,
        "unreadable": known.counts["unreadable"] if known is not None else None,
        "pinned": known.pinned if known is not None else None,
        "size_bytes": sum(known.size_bytes.values()) if known is not None else None,
        "files": known.files if known is not None else None,
        "evaluated_by": None
        if known is None
        else {p.partition: {"checkpoints": p.checkpoints, "newest_step": p.newest_step} for p in known.evaluations},
        "problem": "; ".join(problems) or None,
    }
