"""What the JSON API says of buckets and objects, as far as it is asked for."""

from __future__ import annotations

from datetime import datetime

import msgspec

PAGE_FIELDS = (
    "nextPageToken,prefixes,items(name,size,timeCreated,generation,crc32c,"
    "temporaryHold,eventBasedHold,retentionExpirationTime)"
)


class Item(msgspec.Struct, gc=False):
    """An object resource, as far as it is asked for."""

    name: str
    size: str = "0"
    timeCreated: str = ""
    generation: str = ""
    crc32c: str = ""
    temporaryHold: bool = False
    eventBasedHold: bool = False
    retentionExpirationTime: str = ""


class SoftDeletePolicy(msgspec.Struct):
    retentionDurationSeconds: str = "0"


class BucketInfo(msgspec.Struct):
    softDeletePolicy: SoftDeletePolicy = msgspec.field(default_factory=SoftDeletePolicy)


class Page(msgspec.Struct):
    items: list[Item] = []
    prefixes: list[str] = []
    nextPageToken: str = ""


def decode_item(contents: bytes) -> Item:
    try:
        return msgspec.json.decode(contents, type=Item)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an object's description: {error}") from error


def seconds_of(text: str) -> float:
    """Seconds since the epoch of a time of the JSON API (RFC 3339)."""
    try:
        return msgspec.convert(text, type=datetime).timestamp()
    except (msgspec.ValidationError, OverflowError, OSError):
        return 0.0
