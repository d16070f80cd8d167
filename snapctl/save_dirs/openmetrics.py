"""How save directories stand, as text for a monitoring system. Pure.

The text is OpenMetrics, and at the same time what Prometheus' older text format allows, which is all that the textfile
collector of the node exporter reads: gauges only, and no sample has a timestamp.

Source: the OpenMetrics 1.0 specification; the conventions for names and base units of the Prometheus documentation.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from snapctl.cadence import SaveTime, find_save_time
from snapctl.save_dirs.summaries import SaveDirSummary, Summary, Unreadable
from snapctl.save_record import RankTimings, RestoreTimings

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = Iterator[tuple[Labels, float]]


class Metric(NamedTuple):
    """A family of samples."""

    name: str
    unit: str
    """The end of its name; empty for a number of things."""
    help: str


SAVE_DIRS = Metric("snapctl_save_dirs", "", "Save directories that were found.")
UNREADABLE_DIRS = Metric(
    "snapctl_unreadable_dirs", "", "Directories that could not be listed, so that nobody knows what lies below."
)
RUN_TIMESTAMP = Metric(
    "snapctl_run_timestamp_seconds", "seconds", "When snapctl looked, by the clock of the storage, since the epoch."
)
RUN_DURATION = Metric("snapctl_run_duration_seconds", "seconds", "How long snapctl took to look.")
CHECKPOINTS = Metric("snapctl_checkpoints", "", "Checkpoints by state: complete, incomplete, unreadable.")
SIZE = Metric("snapctl_checkpoints_size_bytes", "bytes", "What lies in the checkpoints of a state.")
PINNED = Metric("snapctl_pinned_checkpoints", "", "Checkpoints that are protected from pruning.")
PROBLEMS = Metric("snapctl_problems", "", "What of the save directory could not be looked at.")
NEWEST_STEP = Metric("snapctl_newest_checkpoint_step", "", "The highest step of a complete checkpoint.")
NEWEST_TIMESTAMP = Metric(
    "snapctl_newest_checkpoint_timestamp_seconds", "seconds", "When that checkpoint was saved, since the epoch."
)
NEWEST_AGE = Metric(
    "snapctl_newest_checkpoint_age_seconds", "seconds", "How old that checkpoint was when snapctl looked."
)
NEWEST_SIZE = Metric("snapctl_newest_checkpoint_size_bytes", "bytes", "What lies in that checkpoint.")
EVALUATED = Metric("snapctl_evaluated_checkpoints", "", "Complete checkpoints that a partition has evaluated.")
EVALUATED_STEP = Metric(
    "snapctl_newest_evaluated_step", "", "The highest step of a complete checkpoint that a partition has evaluated."
)
BLOCKED = Metric(
    "snapctl_last_save_blocked_seconds", "seconds", "How long training stood still for the newest checkpoint."
)
DURABLE = Metric("snapctl_last_save_durable_seconds", "seconds", "From that call of save until all was durable.")
SAVED_BYTES = Metric("snapctl_last_save_size_bytes", "bytes", "What all ranks together wrote for it.")
THROUGHPUT = Metric(
    "snapctl_last_save_bytes_per_second", "bytes_per_second", "What all ranks together wrote for it in a second."
)
RANKS = Metric("snapctl_last_save_ranks", "", "Ranks that recorded how that save went.")
RESTORED = Metric(
    "snapctl_last_restore_duration_seconds",
    "seconds",
    "How long the restore took that the job which saved the newest checkpoint had begun with.",
)
RESTORED_TIMESTAMP = Metric("snapctl_last_restore_timestamp_seconds", "seconds", "When it was over, since the epoch.")
RESTORED_STEP = Metric("snapctl_last_restore_step", "", "The step of the checkpoint that it restored.")
RESTORED_BYTES = Metric("snapctl_last_restore_size_bytes", "bytes", "What all ranks together needed of that.")
RESTORED_RANKS = Metric("snapctl_last_restore_ranks", "", "Ranks that restored it.")


def format_openmetrics(summaries: Sequence[Summary], *, root: str, now: float, took_seconds: float) -> str:
    """The whole text, ``# EOF`` at its end.

    Args:
        root: the directory that was looked at, as it is printed.
        now: when.
        took_seconds: how long it took.
    """
    found = [summary for summary in summaries if isinstance(summary, SaveDirSummary)]
    unreadable = sum(isinstance(summary, Unreadable) for summary in summaries)
    of_run = {"root": root}
    lines: list[str] = []
    for metric, value in (
        (SAVE_DIRS, len(found)),
        (UNREADABLE_DIRS, unreadable),
        (RUN_TIMESTAMP, now),
        (RUN_DURATION, round(took_seconds, 3)),
    ):
        lines += _family(metric, iter([(of_run, float(value))]))
    by_metric: dict[Metric, list[tuple[Labels, float]]] = {}
    for summary in found:
        for metric, labels, value in _samples(summary):
            by_metric.setdefault(metric, []).append(({"save_dir": summary.path, **labels}, value))
    for metric in _OF_SAVE_DIRS:
        if metric in by_metric:
            lines += _family(metric, iter(by_metric[metric]))
    return "".join(f"{line}\n" for line in [*lines, "# EOF"])


_OF_SAVE_DIRS = (
    CHECKPOINTS, SIZE, PINNED, PROBLEMS, NEWEST_STEP, NEWEST_TIMESTAMP, NEWEST_AGE, NEWEST_SIZE, EVALUATED,
    EVALUATED_STEP, BLOCKED, DURABLE, SAVED_BYTES, THROUGHPUT, RANKS, RESTORED, RESTORED_TIMESTAMP, RESTORED_STEP,
    RESTORED_BYTES, RESTORED_RANKS,
)  # fmt: skip


def _samples(summary: SaveDirSummary) -> Iterator[tuple[Metric, Labels, float]]:
    """What there is to say of a save directory; what nobody knows is left out."""
    for state, count in summary.counts.items():
        yield CHECKPOINTS, {"state": state}, count
        yield SIZE, {"state": state}, summary.size_bytes[state]
    yield PINNED, {}, summary.pinned
    yield PROBLEMS, {}, len(summary.problems)
    for found in summary.evaluations:
        yield EVALUATED, {"partition": found.partition}, found.checkpoints
        yield EVALUATED_STEP, {"partition": found.partition}, found.newest_step
    newest = summary.newest
    if newest is None:
        return
    yield NEWEST_STEP, {}, newest.step or 0
    if newest.created_at is not None:
        yield NEWEST_TIMESTAMP, {}, newest.created_at
    if summary.newest_age_seconds is not None:
        yield NEWEST_AGE, {}, round(summary.newest_age_seconds, 3)
    if newest.size_bytes is not None:
        yield NEWEST_SIZE, {}, newest.size_bytes
    save = find_save_time(newest)
    if save is not None and newest.record is not None:
        yield from _save_samples(save, newest.record.ranks)
    if newest.record is not None and newest.record.restored is not None:
        yield from _restore_samples(newest.record.restored)


def _save_samples(save: SaveTime, ranks: Sequence[RankTimings]) -> Iterator[tuple[Metric, Labels, float]]:
    written = sum(rank.size_bytes for rank in ranks)
    yield BLOCKED, {}, save.blocked_seconds
    yield DURABLE, {}, save.durable_seconds
    yield SAVED_BYTES, {}, written
    if save.durable_seconds > 0:
        yield THROUGHPUT, {}, round(written / save.durable_seconds, 1)
    yield RANKS, {}, len(ranks)


def _restore_samples(restored: RestoreTimings) -> Iterator[tuple[Metric, Labels, float]]:
    yield RESTORED, {}, restored.restored_seconds
    yield RESTORED_TIMESTAMP, {}, restored.restored_at
    if restored.step is not None:
        yield RESTORED_STEP, {}, restored.step
    yield RESTORED_BYTES, {}, restored.size_bytes
    yield RESTORED_RANKS, {}, restored.world_size


def _family(metric: Metric, samples: Samples) -> Iterator[str]:
    yield f"# TYPE {metric.name} gauge"
    if metric.unit:
        yield f"# UNIT {metric.name} {metric.unit}"
    yield f"# HELP {metric.name} {metric.help}"
    for labels, value in samples:
        inner = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
        yield f"{metric.name}{{{inner}}} {_number(value)}"


def _escape(text: str) -> str:
    """The value of a label: any text of UTF-8; bytes of names that are none are shown like ``\\xff``."""
    shown = os.fsencode(text).decode("utf-8", "backslashreplace")
    return shown.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """Whole numbers without a point; what is too large for a double, as a step may be, is infinite."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**300 else "+Inf"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(float(value))
