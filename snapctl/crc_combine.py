"""The CRC32C of a whole from those of its parts, so that the parts can be read anywhere and in any order. Pure.

Source: the arithmetic of zlib's ``crc32_combine``, with the polynomial of CRC32C: feeding zeros to a CRC is a linear
map over GF(2), and that of 2n zeros is the square of that of n.
"""

from __future__ import annotations

import functools

_POLYNOMIAL = 0x82F63B78
"""CRC32C, its bits reversed."""

_Matrix = tuple[int, ...]
"""32 columns."""


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two parts one after the other.

    Args:
        first: the CRC32C of the first part.
        second: the CRC32C of the second part.
        second_bytes: the length of the second part.
    """
    if second_bytes == 0:
        return first
    return _times(_zeros(second_bytes), first) ^ second


@functools.lru_cache(maxsize=64)  # nearly all parts are of one length
def _zeros(count: int) -> _Matrix:
    """The map of feeding `count` bytes of zeros."""
    result: _Matrix | None = None
    power = 0
    while count:
        if count & 1:
            step = _zeros_of_power(power)
            result = step if result is None else _product(step, result)
        count >>= 1
        power += 1
    assert result is not None
    return result


@functools.cache
def _zeros_of_power(power: int) -> _Matrix:
    """The map of feeding ``2**power`` bytes of zeros."""
    if power > 0:
        half = _zeros_of_power(power - 1)
        return _product(half, half)
    matrix: _Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one bit
    for _ in range(3):
        matrix = _product(matrix, matrix)
    return matrix


def _times(matrix: _Matrix, vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _product(one: _Matrix, other: _Matrix) -> _Matrix:
    return tuple(_times(one, column) for column in other)
