"""Any error of gcsfs or of what lies under it as one of ours."""

from __future__ import annotations

import asyncio
import concurrent.futures

from snapctl.errors import (
    BucketNotFoundError,
    CredentialsError,
    PermissionDeniedError,
    PreconditionError,
    StorageError,
    UnavailableError,
)
from snapctl.storage.base import not_found
from snapctl.storage.gcs.dependencies import aiohttp, google, requests


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def translate_gcs_error(
    error: BaseException, url: str, *, bucket: str, listing: bool = False, pays: bool = False
) -> StorageError:
    """Any error of gcsfs or of what lies under it as one of ours.

    Args:
        listing: a 404 for a listing means that the bucket is not there.
        pays: a project that pays was named: then the server's own words tell what is wrong with it.
    """
    if isinstance(error, StorageError):
        return error
    text = one_line(error)
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if "requester pays" in text.lower() and not pays:
        return CredentialsError(
            f"{url}: the bucket wants a project that pays for the request",
            url=url,
            hint="--storage-option requester_pays=PROJECT",
        )
    if isinstance(error, FileNotFoundError) or code == 404:
        if listing or "bucket does not exist" in text:
            return BucketNotFoundError(f"gs://{bucket}: no such bucket", url=url)
        return not_found(url)
    if isinstance(error, FileExistsError):
        return PreconditionError(f"{url}: exists already, or has changed meanwhile", url=url)
    if isinstance(error, OSError) and str(error).startswith("Forbidden"):
        reason = str(error).partition("\n")[2].strip() or "the storage says no"
        return PermissionDeniedError(f"{url}: permission denied: {' '.join(reason.split())[:300]}", url=url)
    if code in (401, "401") or isinstance(error, google.auth.exceptions.GoogleAuthError):
        reason = " ".join(str(getattr(error, "message", error)).split())[:300].removesuffix(", 401")
        return CredentialsError(
            f"{url}: not logged in, or the credentials were refused: {reason}",
            url=url,
            hint="gcloud auth application-default login, or --storage-option token=FILE.json",
        )
    if isinstance(error, TimeoutError | asyncio.TimeoutError | concurrent.futures.TimeoutError):
        return UnavailableError(f"{url}: no answer in time", url=url)
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
        return StorageError(f"{url}: the answer is not what GCS would say: {text}", url=url)
    return UnavailableError(f"{url}: {_reason(error, code)}", url=url)


def _reason(error: BaseException, code: object) -> str:
    """Why there is no answer, in words that do not need the source of aiohttp."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the connection was dropped"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer was cut off"
    if isinstance(error, requests.exceptions.ProxyError):  # what gcsfs makes of a 502
        return "the server answers 502"
    if code is not None:
        message = " ".join(str(getattr(error, "message", "")).split()).removesuffix(f", {code}")[:200]
        return f"the server answers {code}: {message}" if message else f"the server answers {code}"
    return one_line(error)


def means_no_batches(error: Exception) -> bool:
    """Whether an emulator's error says that it does not know batches, and not that it is busy or says no."""
    return isinstance(error, ValueError | FileNotFoundError) or getattr(error, "code", None) in (400, 405, 501)


def part_error(status: int, message: str, url: str) -> StorageError:
    if status == 403:
        return PermissionDeniedError(f"{url}: permission denied: {message or 'the storage says no'}", url=url)
    if status == 401:
        return CredentialsError(f"{url}: the credentials were refused: {message}", url=url)
    return UnavailableError(f"{url}: HTTP {status}: {message}" if status else f"{url}: {message}", url=url)
