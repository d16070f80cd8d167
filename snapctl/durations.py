"""Durations as people write them: ``90s``, ``1d12h``. Pure."""

from __future__ import annotations

import re

from snapctl.errors import InvalidOptionError

_DURATION = re.compile(r"(?:(\d{1,15})w)?(?:(\d{1,15})d)?(?:(\d{1,15})h)?(?:(\d{1,15})m)?(?:(\d{1,15})s)?", re.ASCII)
_UNIT_SECONDS = (604800, 86400, 3600, 60, 1)


def parse_duration(text: str, *, name: str, zero_ok: bool = False) -> float:
    """Seconds of ``1d12h``: integers with ``s m h d w``; ``0`` without a unit, where it means something.

    Raises:
        InvalidOptionError: it is none, or zero where that makes no sense.
    """
    match = _DURATION.fullmatch(text)
    if text == "0" and zero_ok:
        return 0.0
    if match is None or not any(match.groups()):
        raise InvalidOptionError(f"{name} takes a duration such as 30s, 15m, 2h or 1d12h, not {text[:40]!r}")
    parts = zip(match.groups(), _UNIT_SECONDS, strict=True)
    seconds = float(sum(int(number) * unit for number, unit in parts if number))
    if seconds == 0 and not zero_ok:
        raise InvalidOptionError(f"{name} must be more than zero, not {text!r}")
    if seconds > 100 * 365 * 86400:
        raise InvalidOptionError(f"{name} is more than a hundred years: {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """The other way round, in at most two units, days the largest: ``1d12h``, ``0s``."""
    rest, parts = round(seconds), []
    for unit, size in zip("dhms", _UNIT_SECONDS[1:], strict=True):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"
