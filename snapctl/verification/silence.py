"""When to stop asking a storage that does not answer."""

from __future__ import annotations

from snapctl.errors import UnavailableError
from snapctl.storage import Storage

GIVE_UP_AFTER = 24
"""After so many reads in a row that the storage did not answer, nothing more is asked of it."""


class Silence:
    """How many reads in a row the storage has not answered."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, error: Exception | None) -> None:
        """How a read ended: None for an answer."""
        self._count = self._count + 1 if isinstance(error, UnavailableError) else 0

    @property
    def is_over(self) -> bool:
        """Nothing more should be asked."""
        return self._count >= GIVE_UP_AFTER

    def error(self, storage: Storage) -> UnavailableError:
        """What then stands for the answer."""
        return UnavailableError(f"{storage.url}: the storage has stopped answering")
