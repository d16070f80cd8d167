"""What evaluators and operators leave in a checkpoint: markers, claims, pins. Pure: names and bytes in, values out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

import msgspec

from snapctl.errors import InvalidOptionError

MARKER_DIR = "evaled_by"
PIN_NAME = "PINNED"
DELETING_NAME = ".snapshot_metadata.deleting"
"""A deletion was announced (beside the manifest) or has begun (without one)."""
DEFAULT_CLAIM_TTL_SECONDS = 7200.0
MAX_CLAIM_TTL_SECONDS = 7 * 86400.0
CLAIM_SLACK_SECONDS = 10.0
"""So much longer than its ttl a claim keeps others out: its holder stops at the ttl, and times are told in seconds."""

_MARKER = re.compile(r"(.+)_DONE", re.DOTALL)
_CLAIM = re.compile(r"(.+)_CLAIM\.(0|[1-9][0-9]*)", re.DOTALL)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Marker(msgspec.Struct, frozen=True):
    """A partition has been evaluated on a checkpoint."""

    partition: str
    finished_at: float | None = None
    """Seconds since the epoch; None for the empty markers of older jobs."""
    metrics: Mapping[str, float] = {}
    host: str | None = None
    problem: str | None = None
    """Why the content says nothing; the marker counts all the same."""


class Claim(msgspec.Struct, frozen=True):
    """The n-th claim on a partition; the highest n rules."""

    partition: str
    number: int
    owner: str | None
    """None where the body does not say."""
    nonce: str | None
    ttl_seconds: float
    created_at: float
    """By the storage's clock; 0.0 where the storage tells no time."""

    @property
    def expires_at(self) -> float:
        """Until when its holder may rely on it, by the storage's clock."""
        return self.created_at + self.ttl_seconds


class Pin(msgspec.Struct, frozen=True):
    """A checkpoint is protected from pruning."""

    note: str | None = None
    owner: str | None = None
    pinned_at: float | None = None


class _ClaimBody(msgspec.Struct):
    owner: str
    nonce: str
    ttl: float


class _PinBody(msgspec.Struct):
    note: str | None = None
    owner: str | None = None
    pinned_at: str | None = None


def is_partition(name: str) -> bool:
    """Whether it can be the name of a partition: 1 to 200 bytes of UTF-8 without ``/``, control characters or a
    leading dot."""
    if name.startswith(".") or "/" in name or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return False
    try:
        return 1 <= len(name.encode()) <= 200
    except UnicodeEncodeError:
        return False


def check_partition(partition: str) -> str:
    """Returns the name of a partition.

    Raises:
        InvalidOptionError: it cannot be one (see `is_partition`).
    """
    if not is_partition(partition):
        raise InvalidOptionError(
            "a partition's name has 1 to 200 bytes of UTF-8, no '/', no control characters and no leading dot: "
            f"{partition[:60]!r}"
        )
    return partition


def marker_path(partition: str) -> str:
    """Where the marker of a partition lies in a checkpoint."""
    return f"{MARKER_DIR}/{check_partition(partition)}_DONE"


def claim_path(partition: str, number: int) -> str:
    """Where the n-th claim on a partition lies in a checkpoint."""
    return f"{MARKER_DIR}/{check_partition(partition)}_CLAIM.{number}"


def partition_of_marker(path: str) -> str | None:
    """The partition of ``evaled_by/<P>_DONE``; None for any other path."""
    directory, _, name = path.partition("/")
    if directory != MARKER_DIR or "/" in name:
        return None
    match = _MARKER.fullmatch(name)
    return match.group(1) if match and is_partition(match.group(1)) else None


def claim_of_path(path: str) -> tuple[str, int] | None:
    """``(partition, n)`` of ``evaled_by/<P>_CLAIM.<n>``; None for any other path."""
    directory, _, name = path.partition("/")
    if directory != MARKER_DIR or "/" in name:
        return None
    match = _CLAIM.fullmatch(name)
    return (match.group(1), int(match.group(2))) if match else None


def parse_marker(partition: str, data: bytes) -> Marker:
    """A marker from its content. An empty one, and one that does not parse, mean that the partition is done.

    Each field is taken as far as it makes sense; `Marker.problem` says what was not.
    """
    if not data.strip():
        return Marker(partition)
    problems: list[str] = []
    try:
        body = json.loads(data)  # the standard library's: other writers leave NaN literals
    except (ValueError, RecursionError) as error:
        body, problems = {}, [str(error)]
    if not isinstance(body, dict):
        body, problems = {}, ["no mapping"]
    metrics: dict[str, float] = {}
    found = body.get("metrics") or {}
    for name, value in found.items() if isinstance(found, dict) else ():
        try:
            metrics[name] = _metric(name, value)
        except (ValueError, OverflowError) as error:
            problems.append(str(error))
    finished_at = body.get("finished_at")
    try:
        seconds = parse_time(finished_at)
    except ValueError:
        seconds, problems = None, [*problems, f"not a time: {str(finished_at)[:40]!r}"]
    host = body.get("host")
    problem = f"the marker of {partition!r} is not what snapctl writes: {'; '.join(problems)}" if problems else None
    return Marker(partition, seconds, metrics, host if isinstance(host, str) else None, problem)


def _metric(name: str, value: object) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if value is None:  # what JSON libraries make of NaN
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the metric {name!r} is no number: {str(value)[:40]!r}")
    return float(value)


def format_marker(marker: Marker) -> bytes:
    """The content of a marker file; NaN and infinities as strings, since JSON has none."""
    body = {
        "partition": marker.partition,
        "finished_at": format_time(marker.finished_at),
        "metrics": {name: json_number(value) for name, value in marker.metrics.items()},
        "host": marker.host,
    }
    return json.dumps(body, ensure_ascii=True, allow_nan=False).encode()


def json_number(value: float) -> float | str:
    """A number for JSON, which knows neither NaN nor infinities."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parse_claim(partition: str, number: int, data: bytes, created_at: float) -> Claim:
    """A claim from its content; one that is empty or does not parse has the default ttl and no owner."""
    try:
        body = msgspec.json.decode(data, type=_ClaimBody)
        if not 0 <= body.ttl <= MAX_CLAIM_TTL_SECONDS:
            raise ValueError("ttl out of range")
        return Claim(partition, number, body.owner, body.nonce, body.ttl, created_at)
    except (ValueError, RecursionError):
        return Claim(partition, number, None, None, DEFAULT_CLAIM_TTL_SECONDS, created_at)


def format_claim(owner: str, nonce: str, ttl_seconds: float) -> bytes:
    """The content of a claim; a ttl of 0 releases."""
    return json.dumps({"owner": owner, "nonce": nonce, "ttl": ttl_seconds}, allow_nan=False).encode()


def is_live(claim: Claim, markers: Iterable[Marker], now: float, *, extra_seconds: float = 0.0) -> bool:
    """Whether the ruling claim of a partition keeps others from taking it, and its checkpoint from being deleted.

    A mark on the partition voids it, and so does its release (a ttl of 0). One whose time the storage does not tell
    is live.

    Args:
        markers: those of the same checkpoint.
        now: by the storage's clock.
        extra_seconds: how much longer it counts as live; for a caller that knows the machine's clock alone.
    """
    if claim.ttl_seconds == 0 or any(marker.partition == claim.partition for marker in markers):
        return False
    return claim.created_at == 0.0 or claim.expires_at + CLAIM_SLACK_SECONDS + extra_seconds > now


def parse_pin(data: bytes) -> Pin:
    """A pin from its content; one that is empty or does not parse protects all the same."""
    try:
        body = msgspec.json.decode(data, type=_PinBody)
        return Pin(body.note, body.owner, parse_time(body.pinned_at))
    except (ValueError, RecursionError):
        return Pin()


def format_pin(pin: Pin) -> bytes:
    """The content of a ``PINNED`` file."""
    return json.dumps({"note": pin.note, "owner": pin.owner, "pinned_at": format_time(pin.pinned_at)}).encode()


def format_time(seconds: float | None) -> str | None:
    """RFC 3339 in UTC, with milliseconds."""
    if seconds is None:
        return None
    try:
        text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return None
    return text.replace("+00:00", "Z")


def parse_time(text: str | None) -> float | None:
    """Seconds since the epoch of an RFC 3339 time.

    Raises:
        ValueError: it is none.
    """
    if text is None:
        return None
    try:
        found = msgspec.convert(text, type=datetime)
    except OverflowError as error:
        raise ValueError(f"not a time: {text!r}") from error
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
