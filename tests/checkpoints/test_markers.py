"""Markers, claims and pins: names and bytes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.errors import InvalidOptionError
from snapctl.markers import (
    CLAIM_SLACK_SECONDS,
    DEFAULT_CLAIM_TTL_SECONDS,
    Claim,
    Marker,
    check_partition,
    claim_of_path,
    claim_path,
    format_claim,
    is_live,
    marker_path,
    parse_claim,
    partition_of_marker,
)

NOW = 1_800_000_000.0


def claim(*, ttl: float = 60.0, created_at: float = NOW, partition: str = "val") -> Claim:
    return Claim(partition, 1, "owner", "nonce", ttl, created_at)


def test_a_claim_is_live_for_its_ttl_and_ten_seconds_more() -> None:
    assert CLAIM_SLACK_SECONDS == 10
    assert is_live(claim(), [], NOW)
    assert is_live(claim(), [], NOW + 69.999)
    assert not is_live(claim(), [], NOW + 70)


def test_a_claim_is_live_though_the_clock_went_back() -> None:
    assert is_live(claim(), [], NOW - 3600)


def test_a_mark_on_its_partition_voids_a_claim_and_others_do_not() -> None:
    assert not is_live(claim(), [Marker("val")], NOW)
    assert is_live(claim(), [Marker("test")], NOW)


def test_a_release_is_not_live_for_a_moment() -> None:
    assert not is_live(claim(ttl=0.0), [], NOW)


def test_a_caller_without_the_storages_clock_takes_claims_as_live_for_longer() -> None:
    assert is_live(claim(), [], NOW + 369, extra_seconds=300)
    assert not is_live(claim(), [], NOW + 370, extra_seconds=300)


def test_a_claim_of_unknown_time_is_live() -> None:
    assert is_live(claim(created_at=0.0), [], NOW)


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.integers(0, 604800))
def test_a_claim_comes_back_from_its_body(owner: str, nonce: str, ttl: int) -> None:
    found = parse_claim("val", 3, format_claim(owner, nonce, float(ttl)), NOW)
    assert found == Claim("val", 3, owner, nonce, float(ttl), NOW)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"owner": "a", "nonce": "b", "ttl": -1}', b"\xff" * 10])
def test_a_body_that_says_nothing_counts_as_a_claim_with_the_default_ttl(body: bytes) -> None:
    found = parse_claim("val", 3, body, NOW)
    assert (found.owner, found.ttl_seconds) == (None, DEFAULT_CLAIM_TTL_SECONDS)


def test_a_ttl_beyond_seven_days_does_not_rule() -> None:
    assert parse_claim("val", 1, format_claim("a", "b", 604801.0), NOW).ttl_seconds == DEFAULT_CLAIM_TTL_SECONDS
    assert math.isclose(parse_claim("val", 1, format_claim("a", "b", 604800.0), NOW).ttl_seconds, 604800)


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b", "a\nb", "a\0", "\x85", "x" * 201, "é" * 101, ".val"])
def test_a_partition_that_cannot_be_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidOptionError):
        check_partition(name)


@pytest.mark.parametrize("name", ["val", "val_DONE", "p 1", "ü", "-x", "x" * 200, "x_CLAIM.1", "[a]*?", "ｖａｌ"])
def test_a_partition_comes_back_from_the_paths_of_its_marker_and_claims(name: str) -> None:
    assert partition_of_marker(marker_path(name)) == name
    assert claim_of_path(marker_path(name)) is None
    assert claim_of_path(claim_path(name, 12)) == (name, 12)
    assert partition_of_marker(claim_path(name, 12)) is None
