"""CRC32C (Castagnoli), which is what Google Cloud Storage keeps of every object."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

_PIECE_BYTES = 1 << 20


def crc32c(data: bytes | memoryview) -> int:
    """The CRC32C of a contiguous buffer."""
    return extend_crc32c(0, data)


def extend_crc32c(found: int, data: bytes | memoryview) -> int:
    """A CRC32C continued over a contiguous buffer.

    It is taken a megabyte at a time, since nothing else runs in the process while google_crc32c computes.
    """
    import google_crc32c
    import numpy as np

    array = np.frombuffer(data, "u1")  # google_crc32c takes no memoryview
    for start in range(0, len(array), _PIECE_BYTES):
        found = google_crc32c.extend(found, array[start : start + _PIECE_BYTES])
    return int(found)


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two pieces one after the other, from theirs.

    Source: appending n zero bytes multiplies a CRC, as a polynomial over GF(2), by x^(8n) modulo that of the CRC.
    """
    return _multiply(first, _shift(second_bytes)) ^ second


_POLYNOMIAL = 0x82F63B78
"""Of Castagnoli, bits reversed; so are all polynomials here: the highest bit is x^0."""


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _shift(count: int) -> int:
    """x^(8 count) modulo the polynomial."""
    power, result = 1 << 23, 1 << 31
    while count:
        if count & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        count >>= 1
    return result


class BlobSums:
    """Compares blobs with recorded checksums while they are read, in pieces that come in any order, from any thread."""

    def __init__(self) -> None:
        self.expected: Mapping[str, tuple[int, int]] = {}
        """``(length, CRC32C)`` by location, of the blobs that will be read whole."""
        self._pieces: dict[str, dict[int, tuple[int, int]]] = {}
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self.checked = 0
        """Blobs that were found right so far."""

    def add(self, location: str, start: int, data: memoryview) -> tuple[int, int] | None:
        """Takes note of a piece.

        Returns:
            ``(recorded, found)``, where this piece completes a blob, and the two differ; else None.
        """
        expected = self.expected.get(location)
        if expected is None or not len(data):
            return None
        found = crc32c(data)
        with self._lock:
            pieces = self._pieces.setdefault(location, {})
            pieces[start] = (start + len(data), found)
            seen = self._seen[location] = self._seen.get(location, 0) + len(data)
            if seen < expected[0]:
                return None
            whole = _chain(pieces, expected[0])
            if whole is None:
                return None
            del self._pieces[location]
            self.checked += whole == expected[1]
        return None if whole == expected[1] else (expected[1], whole)


def _chain(pieces: Mapping[int, tuple[int, int]], size: int) -> int | None:
    """The CRC32C of pieces that follow each other from the first byte to the last; None while one is missing."""
    position, whole = 0, 0
    while position < size:
        piece = pieces.get(position)
        if piece is None:
            return None
        whole = combine_crc32c(whole, piece[1], piece[0] - position) if position else piece[1]
        position = piece[0]
    return whole if position == size else None
