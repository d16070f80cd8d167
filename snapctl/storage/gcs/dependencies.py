"""gcsfs and what it stands on, imported without their log lines and without a long look for credentials."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

from snapctl.errors import MissingExtraError

__all__ = ["aiohttp", "fsspec_conf", "gcsfs", "google", "patient_only_for_a_moment", "requests"]


@contextlib.contextmanager
def patient_only_for_a_moment() -> Iterator[None]:
    """Settings of google.auth that are its own only while it looks for credentials: one look for a metadata server,
    no second one by gcsfs, and nothing in the log. What the process and its children find afterwards is untouched."""
    settings = {"GCE_METADATA_DETECT_RETRIES": "1", "NO_GCE_CHECK": "true"}
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    loggers = [logging.getLogger(name) for name in ("gcsfs", "google.auth")]
    levels = [logger.level for logger in loggers]
    os.environ.update(missing)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


try:
    import aiohttp

    with patient_only_for_a_moment():  # google.auth reads its settings when it is imported
        import gcsfs.core
        import gcsfs.retry
        import google.auth.exceptions
        import google.oauth2.credentials
    import requests.exceptions
    from fsspec.config import conf as fsspec_conf
except ImportError as import_error:  # pragma: no cover - gcsfs is a dependency, but its own may be broken
    raise MissingExtraError(f"gcsfs ({import_error})", extra="gcs") from import_error
