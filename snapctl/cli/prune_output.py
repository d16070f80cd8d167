"""How `prune` shows its plans and what became of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from snapctl.cli.output import Output, format_size
from snapctl.cli.tables import Cell
from snapctl.durations import format_duration
from snapctl.markers import format_time
from snapctl.pruning.pruner import Prepared, Pruned
from snapctl.pruning.retention import Row

_STYLES = {"keep": "green", "delete": "red", "leave": "yellow"}
_WORDS = {"keep": "keep", "delete": "delete", "leave": "leave alone"}


class Counter:
    """Adds up what several threads report, for a progress bar."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show = show
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._show(self._done)


def show_plan(out: Output, prepared: Prepared, *, with_name: bool) -> None:
    """The whole plan as a table, and its warnings."""
    plan = prepared.plan
    if with_name:
        out.line(plan.save_dir)
    for warning in (*prepared.survey.warnings, *plan.warnings):
        out.warn(warning)
    if not plan.rows:
        out.note("no checkpoints")
        return
    headers = ["STEP", "PLAN", "CREATED", "FREES", "REASON"]
    out.table(headers, [_cells(row) for row in plan.rows], right=("STEP", "FREES"))


def _cells(row: Row) -> list[str]:
    created = format_time(row.checkpoint.created_at)
    return [
        str(row.step),
        Cell(_WORDS[row.action], _STYLES[row.action]),
        f"{created[:10]} {created[11:19]}Z" if created else "-",
        format_size(row.size_bytes) if row.action == "delete" else "-",
        "; ".join(row.reasons),
    ]


def would_be(rows: Sequence[Row], *, verb: str) -> str:
    """``delete 3 checkpoints (12.0 GiB)``."""
    size = format_size(sum(row.size_bytes or 0 for row in rows))
    return f"{verb} {_counted(len(rows))} ({size})"


def _counted(number: int) -> str:
    return f"{number} checkpoint" + ("" if number == 1 else "s")


def say_result(out: Output, result: Pruned, *, dry_run: bool, with_name: bool) -> None:
    """What was left or failed, on stderr; and the final line."""
    plan = result.prepared.plan
    for row in plan.deletions:
        outcome = result.outcomes.get(row.step)
        if outcome is not None and outcome.message is not None:
            what = "could not be deleted: " if outcome.status == "failed" else ""
            what = "left alone: " if outcome.status == "left" else what
            out.warn(f"{row.checkpoint.path}: {what}{outcome.message}")
    for row in result.prepared.left_by_plan_file:
        out.warn(f"{row.checkpoint.path}: left alone: {'; '.join(row.reasons)}")
    for row in plan.not_looked_at:
        out.warn(f"{row.checkpoint.path}: kept: {'; '.join(row.reasons)}")
    for warning in result.warnings:
        out.warn(warning)
    name = f"{plan.save_dir}: " if with_name else ""
    if dry_run:
        out.line(f"{name}would {would_be(plan.deletions, verb='delete')}; nothing was changed")
    elif not plan.refusals:
        out.line(f"{name}deleted {_counted(result.deleted)}, freed {format_size(result.freed_bytes)}{_billed(result)}")


def _billed(result: Pruned) -> str:
    if not result.soft_delete_seconds or not result.freed_bytes:
        return ""
    return f" (soft delete: restorable, and billed, for another {format_duration(result.soft_delete_seconds)})"


def prune_json(result: Pruned, *, dry_run: bool) -> dict[str, Any]:
    """The document of one save directory."""
    prepared = result.prepared
    plan = prepared.plan
    left = [
        (row, outcome.message or "")
        for row in plan.deletions
        if (outcome := result.outcomes.get(row.step)) is not None and outcome.status == "left"
    ]
    left += [(row, "; ".join(row.reasons)) for row in plan.rows if row.action == "leave"]
    left_steps = {row.step for row, _ in left}
    return {
        "save_dir": plan.save_dir,
        "dry_run": dry_run,
        "keep": [
            {"step": row.step, "path": row.checkpoint.path, "state": row.state, "reasons": list(row.reasons)}
            for row in plan.rows
            if row.action == "keep"
        ],
        "delete": [_deleted_json(row, result) for row in plan.deletions if row.step not in left_steps],
        "left_alone": [
            {"step": row.step, "path": row.checkpoint.path, "state": row.state, "reason": reason}
            for row, reason in sorted(left, key=lambda item: item[0].step)
        ],
        "freed_bytes": plan.freed_bytes if dry_run else result.freed_bytes,
        "refused": list(plan.refusals),
        "soft_delete_seconds": result.soft_delete_seconds,
        "warnings": [*prepared.survey.warnings, *plan.warnings, *result.warnings],
    }


def _deleted_json(row: Row, result: Pruned) -> dict[str, Any]:
    outcome = result.outcomes.get(row.step)
    return {
        "step": row.step,
        "path": row.checkpoint.path,
        "state": row.state,
        "reason": "; ".join(row.reasons),
        "size_bytes": row.size_bytes,
        "deleted": outcome is not None and outcome.status == "deleted",
        "error": outcome.message if outcome is not None and outcome.status == "failed" else None,
    }
