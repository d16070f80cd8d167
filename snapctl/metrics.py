"""Choosing checkpoints by what evaluators recorded. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def metric_value(checkpoint: Checkpoint, spec: MetricSpec, *, named: bool | None = None) -> float | None:
    """The finite value of the metric on a checkpoint, or None.

    Args:
        named: whether the part before the first slash is a partition; None: if this checkpoint has such a one.

    Raises:
        AmbiguousMetricError: several partitions carry it and none is named.
    """
    if not checkpoint.markers:
        return None
    if named is None:
        named = names_partition([checkpoint], spec)
    if named:
        partition, _, name = spec.text.partition("/")
        values = [m.metrics[name] for m in checkpoint.markers if m.partition == partition and name in m.metrics]
    else:
        carriers = [marker for marker in checkpoint.markers if spec.text in marker.metrics]
        if len(carriers) > 1:
            _check_one_partition([marker.partition for marker in carriers], spec)
        values = [marker.metrics[spec.text] for marker in carriers]
    return values[0] if values and math.isfinite(values[0]) else None


def names_partition(checkpoints: Iterable[Checkpoint], spec: MetricSpec) -> bool:
    """Whether ``P/M`` means metric M of partition P: some checkpoint has a marker of P. Otherwise the metric is
    called ``P/M``."""
    partition, slash, _ = spec.text.partition("/")
    return bool(slash) and any(marker.partition == partition for found in checkpoints for marker in found.markers)


def rank_by_metric(checkpoints: Iterable[Checkpoint], spec: MetricSpec) -> list[Checkpoint]:
    """The checkpoints that have a finite value, the best first; of equal values the higher step is the better.

    Raises:
        AmbiguousMetricError: several partitions carry the metric, on one checkpoint or on different ones.
    """
    candidates = list(checkpoints)
    named = names_partition(candidates, spec)
    if not named:
        markers = [marker for found in candidates for marker in found.markers]
        _check_one_partition([marker.partition for marker in markers if spec.text in marker.metrics], spec)
    values = [(metric_value(found, spec, named=named), found) for found in candidates]
    scored = [(value, found) for value, found in values if value is not None]
    sign = -1.0 if spec.mode == "max" else 1.0
    return [found for _, found in sorted(scored, key=lambda item: (sign * item[0], -(item[1].step or 0)))]


def _check_one_partition(carriers: Iterable[str], spec: MetricSpec) -> None:
    different = sorted(set(carriers))
    if len(different) > 1:
        options = " or ".join(f"{carrier}/{spec.text}" for carrier in different)
        raise AmbiguousMetricError(f"several partitions carry the metric {spec.text!r}: name one: {options}")


def is_evaluated(checkpoint: Checkpoint, by: Iterable[str] = (), not_by: Iterable[str] = ()) -> bool:
    """Whether all of `by` have marked it, and none of `not_by`."""
    partitions = set(checkpoint.evaluated_by)
    return partitions.issuperset(by) and partitions.isdisjoint(not_by)
