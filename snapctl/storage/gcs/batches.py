"""How GCS wants to be asked for much at once: batches of deletions, and listings of several ranges. Pure.

Source: the documentation of the GCS JSON API (at most 100 calls in a batch, 1,000 names in a page).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

Part = TypeVar("Part")

BATCH_SIZE = 100

_STATUS = re.compile(rb"^HTTP/[0-9.]+ +([0-9]{3})", re.MULTILINE)
_CONTENT_ID = re.compile(rb"^Content-ID: *<?[^>\r\n]*\+([0-9]+)>?", re.MULTILINE | re.IGNORECASE)
_BOUNDARY = re.compile(r'boundary="?([^";]+)"?', re.IGNORECASE)


class PartAnswer(NamedTuple):
    """The answer to one call of a batch."""

    status: int
    """0 where the server said nothing about it."""
    message: str


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


def format_deletions(
    bucket: str, keys: Sequence[tuple[str, str]], *, parameters: Mapping[str, str], boundary: str
) -> bytes:
    """The body of a batch that deletes objects.

    Args:
        keys: object names, each with the generation that alone may be deleted; ``""`` for whichever there is.
        parameters: for each of the calls (``userProject``).
    """
    base = f"DELETE /storage/v1/b/{quote(bucket, safe='')}/o/"
    parts = []
    for number, (key, generation) in enumerate(keys, start=1):
        query = urlencode({**({"ifGenerationMatch": generation} if generation else {}), **parameters})
        parts.append(
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <snapctl+{number}>\r\n\r\n"
            f"{base}{quote(key, safe='')}{'?' + query if query else ''} HTTP/1.1\r\n\r\n\r\n"
        )
    return ("".join(parts) + f"--{boundary}--\r\n").encode()


def parse_answers(content_type: str, contents: bytes, count: int) -> list[PartAnswer]:
    """The answers of a batch, in the order of its calls.

    Raises:
        ValueError: it is no such answer.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise ValueError(f"not the answer to a batch: {content_type!r:.100}")
    answers = [PartAnswer(0, "the server did not answer this call")] * count
    for position, part in enumerate(contents.split(b"--" + match.group(1).encode())[1:-1]):
        status = _STATUS.search(part)
        if status is None:
            continue
        named = _CONTENT_ID.search(part, 0, status.start())
        index = int(named.group(1)) - 1 if named else position
        if 0 <= index < count:
            code = int(status.group(1))
            answers[index] = PartAnswer(code, _message(part) if code >= 300 else "")
    return answers


def _message(part: bytes) -> str:
    start, end = part.find(b"{"), part.rfind(b"}")
    try:
        text = msgspec.json.decode(part[start : end + 1], type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return " ".join(text.split())[:300]


def join_parts(cuts: Sequence[str], jobs: int) -> Sequence[str]:
    """Fewer cuts: so many parts of a page each are put together that at most `jobs` ranges remain."""
    pages_each = -(-(len(cuts) + 1) // jobs)
    return cuts[pages_each - 1 :: pages_each]


def spread(parts: Sequence[Part], jobs: int) -> list[Part]:
    """The same parts in an order in which those that are under way together lie far apart.

    Source: GCS splits its index by ranges of names, and is slow where all requests go to one of them.
    """
    stride = max(1, -(-len(parts) // jobs))
    return [parts[position] for start in range(stride) for position in range(start, len(parts), stride)]


def is_text(name: str) -> bool:
    """Whether a name can be the name of an object: UTF-8 knows no lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
