"""The only room that knows where bytes live.

`open_storage` turns a path or URL into a `Storage`. Local paths go through `os`, everything else through fsspec,
which is imported only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from snapctl.errors import InvalidPathError
from snapctl.storage.base import Storage, check_length, check_relative_path, cuts_of, parent_paths
from snapctl.storage.local import LocalStorage
from snapctl.storage.running import collect_errors, run_parallel, time_limit
from snapctl.storage.values import (
    DeletedFiles,
    FileIdentity,
    FileInfo,
    ListedTree,
    Listing,
    ScannedDir,
    StorageTime,
    WalkFailure,
)

__all__ = [
    "DeletedFiles",
    "FileIdentity",
    "FileInfo",
    "ListedTree",
    "Listing",
    "LocalStorage",
    "ScannedDir",
    "Storage",
    "StorageTime",
    "WalkFailure",
    "check_length",
    "check_relative_path",
    "collect_errors",
    "cuts_of",
    "open_storage",
    "parent_paths",
    "run_parallel",
    "split_url",
    "time_limit",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*(?:::[^/]*)?)://")
_PASSWORD = re.compile(r"[^/@]*:[^/@]*@")
_LOCAL_SCHEMES = ("file", "local")


def split_url(path: str) -> tuple[str, str]:
    """``(scheme, rest)`` of a path or URL, taken literally.

    The scheme comes back in lower case, ``gs`` for ``gcs``, and ``file`` for a local path; slashes of the rest of a
    remote one are never doubled and never stand at the end.

    Raises:
        InvalidPathError: it is empty, has a NUL in it, or chains several file systems.
    """
    if not path or "\0" in path:
        raise InvalidPathError(f"not a path: {path!r}")
    match = _SCHEME.match(path)
    if match is None:
        return "file", path
    scheme, rest = match.group(1).lower(), path[match.end() :]
    if "::" in scheme:
        raise InvalidPathError(f"{path}: unknown scheme {scheme!r} (chained file systems are not supported)")
    if scheme in _LOCAL_SCHEMES:
        return "file", rest or "/"
    if _PASSWORD.match(rest):
        raise InvalidPathError(f"{scheme}://…: a URL with a password in it would be shown: use --storage-option")
    if rest.startswith("/") and scheme in ("gs", "gcs"):
        raise InvalidPathError(f"{path}: names no bucket")  # an empty variable, perhaps: never somebody's bucket
    return {"gcs": "gs"}.get(scheme, scheme), "/".join(part for part in rest.split("/") if part)


def open_storage(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """The directory that a path or URL names; it need not exist, and nothing is asked of it yet.

    Args:
        path: a local path (``~/`` is the home directory) or a URL that fsspec knows. Never a pattern.
        options: for fsspec, as ``--storage-option`` gives them. Ignored for local paths.

    Raises:
        InvalidPathError: no such scheme, or not a path at all.
        MissingExtraError: the package behind the scheme is not installed.
        CredentialsError: the credentials named in `options` are a file that is not there.
    """
    scheme, rest = split_url(os.fspath(path))
    if scheme == "file":
        return LocalStorage(rest)
    if scheme == "gs":
        from snapctl.storage.gcs import open_gcs

        return open_gcs(rest, options or {})
    from snapctl.storage.generic import open_generic

    return open_generic(scheme, rest, options or {})
