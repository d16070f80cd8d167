"""fsspec file systems for training code that has always worked with them."""

from __future__ import annotations

import os
from typing import Any

from snapctl.storage import split_url


def infer_fs(save_dir: str | os.PathLike[str]) -> Any:
    """An fsspec file system for a path or URL, with no cache of listings.

    For ``gs://`` it is gcsfs's plain-HTTP class, with snapctl's bounded retries and timeouts.

    Raises:
        InvalidPathError: no such scheme.
        MissingExtraError: the package behind the scheme is not installed.
        CredentialsError: the credentials are a missing file or cannot be used.
    """
    scheme, rest = split_url(os.fspath(save_dir))
    if scheme == "file":
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem(auto_mkdir=True, skip_instance_cache=True)
    if scheme == "gs":
        from snapctl.storage.gcs import open_file_system

        return open_file_system({})
    from snapctl.storage.generic import open_generic

    return open_generic(scheme, rest, {}).file_system


def is_gcs_fs(fs: Any) -> bool:
    """Whether an fsspec file system is Google Cloud Storage."""
    return bool({"gs", "gcs"} & _protocols(fs))


def is_local_fs(fs: Any) -> bool:
    """Whether an fsspec file system is this machine's."""
    return bool({"file", "local"} & _protocols(fs))


def _protocols(fs: Any) -> set[str]:
    protocol = getattr(fs, "protocol", ())
    return {protocol} if isinstance(protocol, str) else set(protocol)
