"""A checkpoint as the JSON of several commands shows it."""

from __future__ import annotations

from typing import Any

from snapctl.checkpoints import Checkpoint
from snapctl.markers import format_time, json_number


def metrics_json(checkpoint: Checkpoint) -> dict[str, dict[str, float | str]]:
    """``{partition: {name: value}}``; numbers that are not finite as strings."""
    return {
        partition: {name: json_number(value) for name, value in values.items()}
        for partition, values in checkpoint.metrics.items()
    }


def brief_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys of ``latest`` and ``wait``."""
    return {
        "step": checkpoint.step,
        "path": checkpoint.path,
        "created_at": format_time(checkpoint.created_at),
        "evaluated_by": list(checkpoint.evaluated_by),
        "metrics": metrics_json(checkpoint),
    }


def listed_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys of an item of ``list``."""
    return {
        **brief_json(checkpoint),
        "state": checkpoint.state,
        "pinned": checkpoint.pinned,
        "size_bytes": checkpoint.size_bytes,
        "files": checkpoint.files,
        "problem": checkpoint.problem,
    }
