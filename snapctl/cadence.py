"""How a run has been going: the spacing of its checkpoints, how long saves took, how metrics moved. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapctl.checkpoints import Checkpoint


class Spacing(NamedTuple):
    """How far a checkpoint is from the complete one before it, by step."""

    steps: int
    seconds: float | None
    """By their save times, negative where a run was started again at a lower step; None if one of them is unknown."""


def find_spacings(checkpoints: Iterable[Checkpoint]) -> dict[int, Spacing]:
    """The spacing of each complete checkpoint but the first, by step.

    Args:
        checkpoints: of one save directory, ascending by step.
    """
    found: dict[int, Spacing] = {}
    before: Checkpoint | None = None
    for checkpoint in checkpoints:
        if checkpoint.state != "complete" or checkpoint.step is None:
            continue
        if before is not None and before.step is not None:
            times = checkpoint.created_at, before.created_at
            seconds = None if times[0] is None or times[1] is None else times[0] - times[1]
            found[checkpoint.step] = Spacing(checkpoint.step - before.step, seconds)
        before = checkpoint
    return found


class SaveTime(NamedTuple):
    """How long a save took, on its slowest rank."""

    blocked_seconds: float
    """Training stood still."""
    durable_seconds: float
    """Until the last blob was durable."""


def find_save_time(checkpoint: Checkpoint) -> SaveTime | None:
    """What the save recorded; None if it recorded nothing."""
    record = checkpoint.record
    if record is None or not record.ranks:
        return None
    return SaveTime(
        max(rank.blocked_seconds for rank in record.ranks), max(rank.durable_seconds for rank in record.ranks)
    )


class Series(NamedTuple):
    """A number by checkpoint."""

    name: str
    values: tuple[float | None, ...]
    """One for each checkpoint; None where there is none, or none that is finite."""

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]


def find_series(checkpoints: Sequence[Checkpoint]) -> list[Series]:
    """Each metric as ``partition/name`` over checkpoints in their order, sorted by name; only those with two values or
    more."""
    names = {
        (partition, name)
        for checkpoint in checkpoints
        for partition, held in checkpoint.metrics.items()
        for name in held
    }
    found = []
    for partition, name in sorted(names):
        values = (checkpoint.metrics.get(partition, {}).get(name) for checkpoint in checkpoints)
        finite = tuple(value if value is not None and math.isfinite(value) else None for value in values)
        found.append(Series(f"{partition}/{name}", finite))
    return [series for series in found if len(series.finite) > 1]
