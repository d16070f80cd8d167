"""A stretch of a blob as a file, for decoders that seek: it is read in parts, and never held as a whole."""

from __future__ import annotations

import io
from collections.abc import Callable

SMALL_FILE_BYTES = 1 << 20
WINDOW_BYTES = 256 << 10


class BlobFile(io.RawIOBase):
    """Reads ahead a little for the many small reads of a zip archive's directory; long reads go through as they are."""

    def __init__(self, fill: Callable[[int, memoryview], None], start: int, end: int) -> None:
        """
        Args:
            fill: fills a buffer with what begins at an offset of the blob, or raises.
            start: of the stretch in the blob.
            end: of the stretch in the blob.
        """
        super().__init__()
        self._fill = fill
        self._start = start
        self._size = end - start
        self._position = 0
        self._window = b""
        self._window_start = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self._size - self._position))
        if count:
            self._read(view[:count])
        self._position += count
        return count

    def readall(self) -> bytes:
        data = bytearray(max(0, self._size - self._position))
        self.readinto(data)
        return bytes(data)

    def _read(self, view: memoryview) -> None:
        if len(view) >= WINDOW_BYTES and self._size > SMALL_FILE_BYTES:
            self._fill(self._start + self._position, view)
            return
        offset = self._position - self._window_start
        if not 0 <= offset <= len(self._window) - len(view):
            self._move_window(len(view))
            offset = self._position - self._window_start
        view[:] = self._window[offset : offset + len(view)]

    def _move_window(self, length: int) -> None:
        """A window around the position: archives are read from their end towards the beginning."""
        first, last = 0, self._size
        if self._size > SMALL_FILE_BYTES:
            first = max(0, min(self._position - WINDOW_BYTES // 2, self._size - WINDOW_BYTES))
            last = max(self._position + length, min(self._size, first + WINDOW_BYTES))
        data = bytearray(last - first)
        self._fill(self._start + first, memoryview(data))
        self._window, self._window_start = bytes(data), first
