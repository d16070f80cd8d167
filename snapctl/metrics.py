"""Choosing checkpoints by what evaluators recorded. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from snapctl.checkpoints import Checkpoint
from snapctl.errors import InvalidOptionError


class MetricSpec(msgspec.Struct, frozen=True):
    """``[PARTITION/]METRIC:max|min``: by which metric checkpoints are compared, and which way."""

    text: str
    """``[PARTITION/]METRIC`` as it was given."""
    mode: Literal["max", "min"]

    def __str__(self) -> str:
        return f"{self.text}:{self.mode}"


class AmbiguousMetricError(InvalidOptionError):
    """Several partitions carry the metric, and none was named."""


def parse_metric_spec(text: str) -> MetricSpec:
    """A `MetricSpec` from its text.

    Raises:
        InvalidOptionError: it is none.
    """
    name, colon, mode = text.rpartition(":")
    if not colon or not name.strip("/") or mode not in ("max", "min"):
        raise InvalidOptionError(f"a metric is given as [PARTITION/]METRIC:max or :min, not {text!r}")
    return MetricSpec(name, "max" if mode == "max" else "min")


def metric_value(checkpoint: Checkpoint, spec: MetricSpec) -> float | None:
    """The finite value of the metric on a checkpoint, or None.

    ``P/M`` is metric M of partition P; where there is no such partition, metric ``P/M`` of any.

    Raises:
        AmbiguousMetricError: several partitions carry it and none is named.
    """
    if not checkpoint.markers:
        return None
    partition, slash, name = spec.text.partition("/")
    for marker in checkpoint.markers:
        if slash and marker.partition == partition and name in marker.metrics:
            return _finite(marker.metrics[name])
    carriers = [marker for marker in checkpoint.markers if spec.text in marker.metrics]
    if len(carriers) > 1:
        named = " or ".join(f"{marker.partition}/{spec.text}" for marker in carriers)
        raise AmbiguousMetricError(
            f"{checkpoint.path}: several partitions carry the metric {spec.text!r}: name one: {named}"
        )
    return _finite(carriers[0].metrics[spec.text]) if carriers else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rank_by_metric(checkpoints: Iterable[Checkpoint], spec: MetricSpec) -> list[Checkpoint]:
    """The checkpoints that have a finite value, the best first; of equal values the higher step is the better.

    Raises:
        AmbiguousMetricError: several partitions carry the metric, on one checkpoint or on different ones.
    """
    candidates = list(checkpoints)
    _check_one_partition(candidates, spec)
    scored = [(value, found) for found in candidates if (value := metric_value(found, spec)) is not None]
    sign = -1.0 if spec.mode == "max" else 1.0
    return [found for _, found in sorted(scored, key=lambda item: (sign * item[0], -(item[1].step or 0)))]


def _check_one_partition(candidates: Sequence[Checkpoint], spec: MetricSpec) -> None:
    carriers = {marker.partition for found in candidates for marker in found.markers if spec.text in marker.metrics}
    partition, slash, _ = spec.text.partition("/")
    named = slash and any(marker.partition == partition for found in candidates for marker in found.markers)
    if len(carriers) > 1 and not named:
        options = " or ".join(f"{carrier}/{spec.text}" for carrier in sorted(carriers))
        raise AmbiguousMetricError(f"several partitions carry the metric {spec.text!r}: name one: {options}")


def is_evaluated(checkpoint: Checkpoint, by: Iterable[str] = (), not_by: Iterable[str] = ()) -> bool:
    """Whether all of `by` have marked it, and none of `not_by`."""
    partitions = set(checkpoint.evaluated_by)
    return partitions.issuperset(by) and partitions.isdisjoint(not_by)
