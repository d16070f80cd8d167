"""What must never be shown: the values of options that are secrets, and what looks like a secret.

Every error of snapctl passes its message through `redact`, and so does whatever the command line writes to stderr,
tracebacks of other libraries' exceptions included. A server may echo what it was sent.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

MIN_SECRET_LENGTH = 6
HIDDEN = "…"
_NAMES = re.compile(
    r"token|secret|passw|passphrase|credential|authoriz|cookie|connection_?string|(^|[^a-z])p?key(_?id)?$",
    re.IGNORECASE,
)
_NO_SECRETS = re.compile(r"google_default|browser|[\d.eE+-]*|true|false|null", re.IGNORECASE)

_known: tuple[str, ...] = ()
"""The longest first."""


def remember_secrets(options: Mapping[str, Any]) -> None:
    """Notes the values of options that are secrets by their names, at any depth: from now on none of them is shown."""
    global _known
    found = {form for text in _secrets_in(options) for form in _forms(text)}
    if not found.issubset(_known):
        _known = tuple(sorted(found.union(_known), key=len, reverse=True))


def remember_arguments(arguments: Iterable[str]) -> None:
    """The same for a command line that nobody has parsed yet: its mistakes are shown to the user."""
    for word in arguments:
        name, equals, value = word.removeprefix("--storage-option=").removeprefix("--").partition("=")
        if equals and value[:1] not in ("@", "$"):
            remember_secrets({name: value})


def redact(text: str) -> str:
    """A text without secrets."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return _patterns().sub(_hide_match, text)


def _secrets_in(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets_in(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets_in(inner, name)
    elif isinstance(value, str):
        content = _json(value)
        if content is not None:
            yield from _secrets_in(content, name)
        elif _NAMES.search(name):
            yield value


def _json(text: str) -> object:
    """The object or list that a text holds, or None."""
    if text[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _forms(secret: str) -> Iterator[str]:
    """As which a secret may turn up: as it is, line by line, in JSON, in a URL."""
    if len(secret) >= MIN_SECRET_LENGTH and not _NO_SECRETS.fullmatch(secret):
        yield secret
        yield quote(secret, safe="")
        yield json.dumps(secret)[1:-1]
        yield from (line for line in secret.splitlines() if len(line) >= 16)


@functools.cache
def _patterns() -> re.Pattern[str]:
    query = "X-Goog-Signature|X-Amz-Signature|X-Amz-Security-Token|Signature|sig|access_token|token|upload_id"
    field = "access_token|refresh_token|client_secret|private_key|password"
    return re.compile(
        r"(?P<bearer>\bBearer\s+)[A-Za-z0-9._~+/=-]+"
        r"|\bya29\.[A-Za-z0-9._-]+"
        r"|(?P<password>://[^/\s:@'\"]*:)[^/\s'\"]+(?=@)"
        rf"|(?P<query>[?&](?:{query})=)[^&\s'\"]+"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
        rf"|(?P<field>\"(?:{field})\\?\"\s*:\s*\\?\")[^\"]*",
        re.IGNORECASE,
    )


def _hide_match(match: re.Match[str]) -> str:
    return (match[match.lastgroup] if match.lastgroup else "") + HIDDEN
