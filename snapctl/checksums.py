"""CRC32C (Castagnoli), which is what Google Cloud Storage keeps of every object."""

from __future__ import annotations

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
