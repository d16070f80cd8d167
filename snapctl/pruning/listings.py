"""Listings of checkpoints that are remembered between looking at them and deleting them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from snapctl.storage import FileInfo, cuts_of

FRESH_SECONDS = 60.0
"""A listing is used for the deletion itself as long as it is younger."""
REMEMBERED_FILES = 200_000
"""So many files are remembered at a time: a run can delete many more than fit into memory."""


class Listings:
    """The listings of the checkpoints of a save directory, as far as they fit, by step."""

    def __init__(self) -> None:
        self._listings: dict[int, tuple[float, list[FileInfo]]] = {}
        self._cuts: dict[int, Sequence[str]] = {}
        self._files = 0
        self._lock = threading.Lock()

    def add(self, step: int, files: list[FileInfo]) -> None:
        """Remembers a listing (sorted by path)."""
        self.take(step)
        self._cuts[step] = cuts_of([file.path for file in files])
        with self._lock:
            if self._files + len(files) <= REMEMBERED_FILES:
                self._listings[step] = (time.monotonic(), files)
                self._files += len(files)

    def take(self, step: int) -> list[FileInfo] | None:
        """A listing, if it is still fresh; it is forgotten here."""
        with self._lock:
            taken_at, files = self._listings.pop(step, (0.0, None))
            if files is None:
                return None
            self._files -= len(files)
        return files if time.monotonic() - taken_at <= FRESH_SECONDS else None

    def cuts(self, step: int) -> Sequence[str]:
        """Where a listing made now can be cut, to be had faster."""
        return self._cuts.get(step, ())
