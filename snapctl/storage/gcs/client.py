"""gcsfs as snapctl uses it: credentials that are looked for once, times that are bounded, no listings cache."""

from __future__ import annotations

import asyncio
import contextvars
import email.utils
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from snapctl.errors import (
    CredentialsError,
    InvalidOptionError,
    StorageError,
)
from snapctl.storage.base import check_options, hide_values
from snapctl.storage.gcs.dependencies import aiohttp, fsspec_conf, gcsfs, google, patient_only_for_a_moment, requests
from snapctl.storage.gcs.errors import one_line

CONNECT_SECONDS = 4.0
READ_SECONDS = 12.0
"""A server that is silent for so long in the middle of an answer is taken for dead."""
BATCH_SECONDS = 30.0
"""The same for the answer to a batch, which may take a while."""
UPLOAD_SECONDS = 120.0
"""The same while a large body is under way: the server answers only after the last byte."""
RETRY_SECONDS = 8.0
"""No new attempt begins later than this after the first; for large bodies: than `UPLOAD_SECONDS`."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; it doubles with each further one."""
MAX_ATTEMPTS = 4
MULTIPART_BYTES = 128 << 10
"""Up to here an upload is copied into one body with its name and may have a condition."""
_NAMED_TOKENS = {"google_default", "cache", "cloud", "token", "anon", "browser"}

SILENCE_SECONDS: contextvars.ContextVar[float] = contextvars.ContextVar("SILENCE_SECONDS", default=READ_SECONDS)
"""For how long the server may be silent over the request that is under way."""
FAILED_TRIES: contextvars.ContextVar[int] = contextvars.ContextVar("FAILED_TRIES", default=0)
"""How often the last request was tried in vain: what a lost answer stood for may have been done all the same."""


class _Sent:
    """How often one request was sent. aiohttp by itself sends one a second time whose connection broke."""

    times = 0


_SENT: contextvars.ContextVar[_Sent | None] = contextvars.ContextVar("_SENT", default=None)


async def _count_sent(*_: object) -> None:
    sent = _SENT.get()
    if sent is not None:
        sent.times += 1


def _counting() -> aiohttp.TraceConfig:
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_count_sent)
    return trace


class FileSystem(gcsfs.core.GCSFileSystem):  # type: ignore[misc]
    """gcsfs with retries that end while somebody still waits for the answer."""

    server_time_ahead: float | None = None
    """What to add to this machine's clock to get the server's, by the last answer (to a second)."""
    batches_are_safe: bool | None = None
    """Whether the server knows batches and honours the condition of each part; None until it was tried."""
    delete_slots: asyncio.Semaphore | None = None

    @property
    def requests_timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS.get())

    @requests_timeout.setter
    def requests_timeout(self, value: object) -> None:
        """gcsfs sets it to None; ours depends on the request."""

    async def _request(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        once = gcsfs.core.GCSFileSystem._request.__wrapped__
        patience, silence = RETRY_SECONDS, READ_SECONDS
        if len(kwargs.get("data") or ()) > MULTIPART_BYTES:
            patience = silence = UPLOAD_SECONDS
        elif path == self.batch_url_base:
            silence = BATCH_SECONDS
        SILENCE_SECONDS.set(silence)
        started = time.monotonic()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            sent = _Sent()
            _SENT.set(sent)
            try:
                try:
                    answer = await once(self, method, path, *args, **kwargs)
                finally:
                    FAILED_TRIES.set(attempt - 1 + max(0, sent.times - 1))
            except Exception as error:
                pause = pause_seconds(attempt)
                too_late = time.monotonic() - started + pause > patience
                if attempt == MAX_ATTEMPTS or too_late or not _is_worth_a_retry(error):
                    raise
                await asyncio.sleep(pause)
            else:
                self._learn_time(answer[1])
                return answer
        raise AssertionError("unreachable")

    def _learn_time(self, headers: Mapping[str, str]) -> None:
        told = answer_date(headers)
        if told is not None:
            self.server_time_ahead = told - time.time()


def pause_seconds(attempt: int) -> float:
    """How long to wait after so many attempts in vain; not the same for all who wait."""
    return FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1) * (1 + random.random() / 4)


def answer_date(headers: Mapping[str, str]) -> float | None:
    """The server's time when it answered, to the second below."""
    try:
        return email.utils.parsedate_to_datetime(headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _is_worth_a_retry(error: Exception) -> bool:
    if isinstance(error, gcsfs.retry.HttpError) and error.code == 401:
        return False  # gcsfs would go on for half a minute
    return isinstance(error, asyncio.TimeoutError | requests.exceptions.ProxyError) or bool(
        gcsfs.retry.is_retriable(error)
    )


def open_file_system(options: Mapping[str, Any]) -> FileSystem:
    """A gcsfs instance of our own: no shared one, no listings cache, bounded times.

    Raises:
        CredentialsError: the credentials named are a missing file, or unusable. Nothing has been sent.
    """
    check_options(options)
    chosen = dict(options)
    if "token" not in chosen:
        chosen["token"] = fsspec_conf.get("gs", {}).get("token", fsspec_conf.get("gcs", {}).get("token"))
    if chosen["token"] is None and _is_emulator(chosen.get("endpoint_url")):
        chosen["token"] = "anon"  # an emulator knows no accounts; asking for some takes many seconds
    chosen["token"] = _checked_token(chosen["token"])
    session = chosen.get("session_kwargs") or {}
    if not isinstance(session, Mapping):
        raise InvalidOptionError("gs://: the storage option session_kwargs takes a JSON object")
    session = dict(session)
    session["trace_configs"] = [*(session.get("trace_configs") or ()), _counting()]
    chosen.update(use_listings_cache=False, skip_instance_cache=True, session_kwargs=session)
    with patient_only_for_a_moment():
        try:
            return FileSystem(**chosen)
        except StorageError:
            raise
        except (TypeError, AttributeError) as error:
            reason = hide_values(one_line(error), options)
            raise InvalidOptionError(f"gs://: the storage options cannot be used: {reason}") from error
        except Exception as error:  # google.auth, json, ValueError: whatever a bad credential sets off
            raise CredentialsError(
                f"gs://: the credentials cannot be used: {hide_values(one_line(error), options)}",
                url="gs://",
                hint="gcloud auth application-default login, or --storage-option token=FILE.json",
            ) from error


def _is_emulator(endpoint_url: object) -> bool:
    """Whether requests go to a server that is not Google's and asks nobody who they are: plain HTTP, no credentials
    named. A private endpoint is https, and wants them."""
    endpoint = endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or ""
    if not isinstance(endpoint, str):
        raise InvalidOptionError("gs://: the storage option endpoint_url takes a URL")
    is_plain = bool(endpoint) and not endpoint.startswith("https://")
    return is_plain and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")


def _checked_token(token: Any) -> Any:
    """Refuses a file that is not there (gcsfs would send its name out as a token) and wraps a raw token."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if token in (None, "google_default") and named and not os.path.isfile(named):
        raise CredentialsError(
            f"gs://: GOOGLE_APPLICATION_CREDENTIALS names a file that is not there: {named}", url="gs://"
        )
    if not isinstance(token, str) or token in _NAMED_TOKENS:
        return token
    expanded = os.path.expanduser(token)
    if os.path.exists(expanded):
        return expanded
    if "/" in token or token.endswith(".json") or len(token) < 40:
        raise CredentialsError("gs://: the token option names a credentials file that is not there", url="gs://")
    return google.oauth2.credentials.Credentials(token)  # type: ignore[no-untyped-call]
