"""Hours, days, ISO weeks, months and years of UTC. Pure."""

from __future__ import annotations

from datetime import date
from typing import Literal, NamedTuple, TypeAlias

Period: TypeAlias = Literal["hourly", "daily", "weekly", "monthly", "yearly"]
PERIODS: tuple[Period, ...] = ("hourly", "daily", "weekly", "monthly", "yearly")

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_MONDAY = -3
"""A day number that was a Monday: 1970-01-01, day 0, was a Thursday."""


class Span(NamedTuple):
    """One period."""

    start: float
    """Seconds since the epoch."""
    end: float
    """Exclusive."""
    name: str
    """``2026-11-30 14h``, ``2026-11-30``, ``2026-W49``, ``2026-11`` or ``2026``."""


def span_of(time: float, period: Period) -> Span:
    """The period that a time falls into.

    Args:
        time: seconds since the epoch, between the years 1 and 9998.
    """
    day = int(time // 86400)
    found = date.fromordinal(day + _EPOCH_ORDINAL)
    match period:
        case "hourly":
            hour = int(time // 3600)
            return Span(hour * 3600.0, hour * 3600.0 + 3600, f"{found.isoformat()} {hour % 24:02d}h")
        case "daily":
            return Span(day * 86400.0, day * 86400.0 + 86400, found.isoformat())
        case "weekly":
            monday = day - (day - _MONDAY) % 7
            year, week, _ = found.isocalendar()
            return Span(monday * 86400.0, (monday + 7) * 86400.0, f"{year}-W{week:02d}")
        case "monthly":
            after = date(found.year + found.month // 12, found.month % 12 + 1, 1)
            return Span(_start(found.replace(day=1)), _start(after), f"{found.year}-{found.month:02d}")
        case "yearly":
            return Span(_start(date(found.year, 1, 1)), _start(date(found.year + 1, 1, 1)), str(found.year))


def _start(day: date) -> float:
    return (day.toordinal() - _EPOCH_ORDINAL) * 86400.0
