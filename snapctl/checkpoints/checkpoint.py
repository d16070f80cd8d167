"""A checkpoint: what is known of it, and what its name and its times mean."""

from __future__ import annotations

from typing import Literal

import msgspec

from snapctl.errors import (
    StorageError,
)
from snapctl.markers import (
    Claim,
    Marker,
    Pin,
)
from snapctl.save_record import SaveRecord
from snapctl.storage import FileInfo

State = Literal["complete", "incomplete", "unreadable"]

FUTURE_TOLERANCE_SECONDS = 300.0
EARLIEST_SAVE_TIME = 1640995200.0
"""2022-01-01: torchsnapshot is younger. Earlier times come from copies, images and broken clocks."""


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint as it was found at one moment."""

    step: int | None
    """None for a checkpoint whose directory's name is no number."""
    path: str
    """As it is printed."""
    state: State
    created_at: float | None = None
    """Seconds since the epoch: the recorded save time, else the manifest's by the storage; None if unknown or not
    plausible (see `plausible_time`)."""
    manifest: FileInfo | None = None
    """The manifest's file; its path is relative to the checkpoint."""
    deleting: FileInfo | None = None
    """The announcement of a deletion."""
    pin: Pin | None = None
    markers: tuple[Marker, ...] = ()
    """Sorted by partition."""
    claims: tuple[Claim, ...] = ()
    """The ruling claim of each partition that has one, live or not, sorted by partition."""
    record: SaveRecord | None = None
    """What the save recorded about itself, without the blobs' checksums; None if there is none or it is void."""
    size_bytes: int | None = None
    files: int | None = None
    """All that lies in the directory; None unless it was asked for."""
    side_files: tuple[FileInfo, ...] = ()
    """The files behind `markers`, `claims` and `pin`, and older claims, sorted by path."""
    is_link: bool = False
    """The directory is reached through a symbolic link."""
    error: StorageError | None = None
    """Why it is unreadable."""
    unread: tuple[str, ...] = ()
    """What could not be read of its markers, claims, pin and save record, or not be counted, one message each. Its
    state, and which markers there are, is known all the same."""
    warnings: tuple[str, ...] = ()

    @property
    def evaluated_by(self) -> tuple[str, ...]:
        """The partitions that have marked it, sorted."""
        return tuple(marker.partition for marker in self.markers)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Metrics by partition, of the partitions that recorded any."""
        return {marker.partition: dict(marker.metrics) for marker in self.markers if marker.metrics}

    @property
    def problem(self) -> str | None:
        """Why it is unreadable, in a line."""
        return self.error.message if self.error is not None else None

    @property
    def pinned(self) -> bool:
        return self.pin is not None


def parse_step(name: str) -> int | None:
    """The step that a directory's name stands for: a canonical decimal number, or None.

    ``0`` and ``100`` are steps; ``0100``, ``+7``, ``1_000``, ``9²`` are not.
    """
    canonical = name.isdecimal() and name.isascii() and (name[0] != "0" or name == "0")
    return int(name) if canonical and len(name) <= 4000 else None


def plausible_time(seconds: float | None, now: float) -> float | None:
    """A time that can be relied on, or None: not before 2022, and not more than 5 minutes ahead of `now`."""
    if seconds is None or not EARLIEST_SAVE_TIME <= seconds <= now + FUTURE_TOLERANCE_SECONDS:
        return None
    return seconds
