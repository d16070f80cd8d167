"""CRC32C (Castagnoli), which is what Google Cloud Storage keeps of every object."""

from __future__ import annotations

_PIECE_BYTES = 1 << 20


def crc32c(data: bytes | memoryview) -> int:
    """The CRC32C of a contiguous buffer.

    It is taken a megabyte at a time, since nothing else runs in the process while google_crc32c computes.
    """
    import google_crc32c
    import numpy as np

    array = np.frombuffer(data, "u1")  # google_crc32c takes no memoryview
    found = 0
    for start in range(0, len(array), _PIECE_BYTES):
        found = google_crc32c.extend(found, array[start : start + _PIECE_BYTES])
    return int(found)
