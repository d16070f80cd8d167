"""``.snapctl/save.json``: what a save by snapctl records about itself. Pure: bytes in, values out, and back.

::

    {"format_version": 1, "saved_at": "2026-11-30T12:00:00.000Z", "world_size": 2,
     "ranks": [{"rank": 0, "blocked_seconds": 0.2, "durable_seconds": 3.1, "bytes": 1048576,
                "bytes_per_second": 338250.3}, …],
     "restored": {"restored_at": "2026-11-30T09:00:00.000Z", "step": 900, "world_size": 4,
                  "restored_seconds": 12.5, "bytes": 4194304},
     "blobs": {"0/model/w": {"size_bytes": 16, "crc32c": "yZRlqg=="}, …},
     "manifest": {"size_bytes": 1234, "crc32c": "…"}}

``restored`` is there if the job had restored a checkpoint before: a restore itself writes nothing, and may not have the
permission to. ``crc32c`` is written as GCS writes it: base64 of the four bytes, the most significant first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import msgspec

from snapctl.markers import format_time, parse_time

SAVE_RECORD_PATH = ".snapctl/save.json"
FORMAT_VERSION = 1


class BlobSum(msgspec.Struct, frozen=True):
    """Length and checksum of a file, taken while it was written."""

    size_bytes: int
    crc32c: int


class RankTimings(msgspec.Struct, frozen=True):
    """How a save went on one rank."""

    rank: int
    blocked_seconds: float
    """How long training stood still."""
    durable_seconds: float
    """From the call until the rank's last blob was durable."""
    size_bytes: int
    """Of the blobs that the rank wrote."""

    @property
    def bytes_per_second(self) -> float:
        """From the call until the last blob was durable; 0.0 for a rank that had nothing to write."""
        return self.size_bytes / self.durable_seconds if self.durable_seconds > 0 else 0.0


class RestoreTimings(msgspec.Struct, frozen=True):
    """How a restore went, on all ranks together."""

    restored_at: float
    """When it was over, in seconds since the epoch by the clock of rank 0."""
    step: int | None
    """Of the checkpoint that was restored; None for one that is not named by a step."""
    world_size: int
    restored_seconds: float
    """From the call until all of the state was loaded."""
    size_bytes: int
    """What all ranks together needed of the blobs."""


class SaveRecord(msgspec.Struct, frozen=True):
    """The content of ``.snapctl/save.json``."""

    saved_at: float
    """Seconds since the epoch, by the clock of rank 0."""
    world_size: int
    manifest: BlobSum
    """Of the manifest that this save wrote: where another one stands there, the record is void."""
    ranks: tuple[RankTimings, ...] = ()
    blobs: Mapping[str, BlobSum] | None = None
    """By location; None when it was read without them."""
    restored: RestoreTimings | None = None
    """The last restore of the job before this save."""


class _Sum(msgspec.Struct, gc=False):
    size_bytes: int
    crc32c: str


class _Rank(msgspec.Struct, gc=False):
    rank: int
    blocked_seconds: float
    durable_seconds: float
    bytes: int
    bytes_per_second: float | None = None


class _Restored(msgspec.Struct, gc=False):
    restored_at: str
    step: int | None
    world_size: int
    restored_seconds: float
    bytes: int


class _Head(msgspec.Struct):
    format_version: int
    saved_at: str
    world_size: int
    manifest: _Sum
    ranks: list[_Rank] = []
    restored: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Whole(_Head):
    blobs: dict[str, _Sum] = {}


def parse_save_record(data: bytes, *, with_blobs: bool = False) -> SaveRecord:
    """The record.

    Args:
        with_blobs: also the checksums of the blobs, of which there may be 100,000.

    Raises:
        ValueError: it is not such a record, or of a format to come.
    """
    try:
        found = msgspec.json.decode(data, type=_Whole if with_blobs else _Head)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if found.format_version != FORMAT_VERSION:
        raise ValueError(f"format version {found.format_version}, which this snapctl does not know")
    blobs = {name: _sum(item) for name, item in found.blobs.items()} if isinstance(found, _Whole) else None
    ranks = tuple(RankTimings(r.rank, r.blocked_seconds, r.durable_seconds, r.bytes) for r in found.ranks)
    saved_at = _parse_time(found.saved_at)
    return SaveRecord(saved_at, found.world_size, _sum(found.manifest), ranks, blobs, _parse_restored(found.restored))


def format_save_record(record: SaveRecord) -> bytes:
    """The bytes of ``.snapctl/save.json``."""
    return msgspec.json.encode(
        _Whole(
            FORMAT_VERSION,
            format_time(record.saved_at) or "",
            record.world_size,
            _text(record.manifest),
            [
                _Rank(r.rank, r.blocked_seconds, r.durable_seconds, r.size_bytes, round(r.bytes_per_second, 1))
                for r in record.ranks
            ],
            _format_restored(record.restored),
            {name: _text(item) for name, item in (record.blobs or {}).items()},
        )
    )


def _parse_time(text: str) -> float:
    found = parse_time(text)
    assert found is not None
    return found


def _parse_restored(found: msgspec.Raw | msgspec.UnsetType) -> RestoreTimings | None:
    """None also for what cannot be understood: nothing but a figure depends on it."""
    if isinstance(found, msgspec.UnsetType):
        return None
    try:
        held = msgspec.json.decode(found, type=_Restored)
        restored_at = _parse_time(held.restored_at)
    except (ValueError, RecursionError):
        return None
    return RestoreTimings(restored_at, held.step, held.world_size, held.restored_seconds, held.bytes)


def _format_restored(held: RestoreTimings | None) -> msgspec.Raw | msgspec.UnsetType:
    if held is None:
        return msgspec.UNSET
    restored_at = format_time(held.restored_at) or ""
    found = _Restored(restored_at, held.step, held.world_size, held.restored_seconds, held.size_bytes)
    return msgspec.Raw(msgspec.json.encode(found))


def _sum(found: _Sum) -> BlobSum:
    raw = base64.b64decode(found.crc32c, validate=True)
    if len(raw) != 4:
        raise ValueError(f"not a CRC32C: {found.crc32c!r}")
    return BlobSum(found.size_bytes, int.from_bytes(raw, "big"))


def _text(item: BlobSum) -> _Sum:
    return _Sum(item.size_bytes, base64.b64encode(item.crc32c.to_bytes(4, "big")).decode())
