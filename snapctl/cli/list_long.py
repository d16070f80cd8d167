"""What ``list --long`` adds: spacing and save times by step, and on a terminal the metrics as small charts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapctl.cadence import SaveTime, Series, Spacing, find_save_time, find_series
from snapctl.checkpoints import Checkpoint
from snapctl.cli.charts import ramp_of, sparkline
from snapctl.cli.output import Output, format_number
from snapctl.cli.terminal import cell_width, terminal_width
from snapctl.durations import format_duration

CHART_COLUMNS = 60
"""The widest chart."""
MIN_CHART_COLUMNS = 8
MIN_TERMINAL_COLUMNS = 70
"""On a narrower terminal there are no charts."""
SHOWN_SERIES = 8


def long_json(checkpoint: Checkpoint, spacings: Mapping[int, Spacing] | None) -> dict[str, Any]:
    """The keys of an item that are null without ``--long``."""
    spacing = spacings.get(checkpoint.step or 0) if spacings is not None else None
    save = find_save_time(checkpoint) if spacings is not None else None
    return {
        "steps_since_previous": None if spacing is None else spacing.steps,
        "seconds_since_previous": None if spacing is None else spacing.seconds,
        "save_blocked_seconds": None if save is None else save.blocked_seconds,
        "save_durable_seconds": None if save is None else save.durable_seconds,
    }


def spacing_cells(checkpoint: Checkpoint, spacings: Mapping[int, Spacing]) -> list[str]:
    """The cells of SPACING and SAVE."""
    spacing = spacings.get(checkpoint.step or 0)
    return [_spacing_text(spacing), _save_text(find_save_time(checkpoint))]


def print_charts(out: Output, checkpoints: Sequence[Checkpoint], spacings: Mapping[int, Spacing]) -> None:
    """Metrics, spacing and save times of the checkpoints, ascending by step, a line each; nothing in a pipe or on a
    narrow terminal."""
    room = terminal_width(sys.stdout)
    if room is None or room < MIN_TERMINAL_COLUMNS:
        return
    metrics = find_series(checkpoints)
    charted: list[tuple[Series, Callable[[float], str]]] = [(item, format_number) for item in metrics[:SHOWN_SERIES]]
    charted += [(series, _seconds) for series in _times(checkpoints, spacings) if len(series.finite) > 1]
    if not charted:
        return
    rows = [_series_row(series, show) for series, show in charted]
    headers = ["BY STEP", "MIN", "MAX", "LAST"]
    used = sum(max(map(cell_width, column)) + 2 for column in zip(headers, *rows, strict=True))
    width = min(CHART_COLUMNS, room - used)
    if width < MIN_CHART_COLUMNS:
        return
    ramp = ramp_of(sys.stdout)
    title = f"{checkpoints[0].step} TO {checkpoints[-1].step}"
    title = title if len(title) <= width else "CHART"
    charts = [sparkline(series.values, width, ramp) for series, _ in charted]
    out.line("")
    out.table(
        [*headers, title],
        [[*row, chart] for row, chart in zip(rows, charts, strict=True)],
        right=("MIN", "MAX", "LAST"),
    )
    if len(metrics) > SHOWN_SERIES:
        out.note(f"{len(metrics) - SHOWN_SERIES} more metrics: see --json")


def _times(checkpoints: Sequence[Checkpoint], spacings: Mapping[int, Spacing]) -> list[Series]:
    found = [spacings.get(checkpoint.step or 0) for checkpoint in checkpoints]
    saves = [find_save_time(checkpoint) for checkpoint in checkpoints]
    return [
        Series("spacing", tuple(None if spacing is None else spacing.seconds for spacing in found)),
        Series("blocked", tuple(None if save is None else save.blocked_seconds for save in saves)),
        Series("durable", tuple(None if save is None else save.durable_seconds for save in saves)),
    ]


def _series_row(series: Series, show: Callable[[float], str]) -> list[str]:
    finite = series.finite
    return [series.name, show(min(finite)), show(max(finite)), show(finite[-1])]


def _spacing_text(spacing: Spacing | None) -> str:
    if spacing is None:
        return "-"
    if spacing.seconds is None:
        return f"+{spacing.steps}"
    return f"+{spacing.steps} {_signed(spacing.seconds)}"


def _save_text(save: SaveTime | None) -> str:
    return "-" if save is None else f"{_seconds(save.blocked_seconds)}/{_seconds(save.durable_seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}s" if 0 <= seconds < 10 else _signed(seconds)


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "") + format_duration(abs(seconds))
