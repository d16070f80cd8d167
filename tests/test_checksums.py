"""CRC32C of pieces put together."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.checksums import BlobSums, combine_crc32c, crc32c


def test_known_values() -> None:
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(b"") == 0


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_pieces_make_the_whole(first: bytes, second: bytes) -> None:
    assert combine_crc32c(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("size", [1 << 20, (1 << 22) + 12345])
def test_the_checksum_of_large_parts(size: int) -> None:
    data = random.Random(size).randbytes(size)
    sums = crc32c(b"head"), crc32c(data)
    assert combine_crc32c(*sums, size) == crc32c(b"head" + data)


@given(st.binary(min_size=1, max_size=100), st.lists(st.integers(1, 99), max_size=5), st.randoms())
def test_pieces_in_any_order_are_checked_when_the_last_has_come(
    data: bytes, cuts: list[int], order: random.Random
) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = list(itertools.pairwise(bounds))
    order.shuffle(pieces)
    for recorded, result in ((crc32c(data), None), (crc32c(data) ^ 1, (crc32c(data) ^ 1, crc32c(data)))):
        sums = BlobSums()
        sums.expected = {"blob": (len(data), recorded)}
        found = [sums.add("blob", start, memoryview(data)[start:end]) for start, end in pieces]
        assert found[:-1] == [None] * (len(pieces) - 1) and found[-1] == result
        assert sums.checked == (result is None)


def test_a_blob_that_is_not_read_whole_is_not_judged() -> None:
    sums = BlobSums()
    sums.expected = {"blob": (10, 1)}
    assert sums.add("blob", 0, memoryview(b"12345")) is None
    assert sums.add("blob", 0, memoryview(b"12345")) is None
    assert sums.add("other", 0, memoryview(b"1234567890")) is None
    assert sums.checked == 0
