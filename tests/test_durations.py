"""Durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.durations import format_duration, parse_duration
from snapctl.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d12h", 129600), ("1w", 604800), ("1w1d", 691200)]
)
def test_units_are_combined(text: str, seconds: float) -> None:
    assert parse_duration(text, name="--x") == seconds


@pytest.mark.parametrize("text", ["", "7", "-1d", "1.5h", "h", "1h2d", "1 d", "٣d", "0s", "0", "99999999w"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="--x"):
        parse_duration(text, name="--x")


def test_zero_needs_no_unit_where_it_means_something() -> None:
    assert parse_duration("0", name="--x", zero_ok=True) == 0


@given(st.integers(1, 100 * 365 * 86400))
def test_a_formatted_duration_can_be_read_again_and_is_as_long_but_for_its_smaller_units(seconds: int) -> None:
    found = parse_duration(format_duration(seconds), name="--x")
    assert found <= seconds < found * 2 + 60


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (0.2, "0.2s"), (7 * 86400, "7d"), (90000, "1d1h"), (3661, "1h1m")]
)
def test_at_most_two_units_are_shown(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
