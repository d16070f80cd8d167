"""Google Cloud Storage, over plain HTTP through gcsfs's core class.

gcsfs brings credentials, sessions and its endpoint settings (``STORAGE_EMULATOR_HOST``); what is asked of GCS is said
here in single JSON-API requests, since the calls of gcsfs send several, expand patterns, cache listings and know no
conditions.

Source: the measured behaviour of gcsfs 2026.10 and the documentation of the GCS JSON API.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import concurrent.futures
import contextlib
import contextvars
import email.utils
import logging
import math
import os
import random
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from snapctl.errors import (
    BucketNotFoundError,
    CredentialsError,
    InvalidOptionError,
    InvalidPathError,
    MissingExtraError,
    PermissionDeniedError,
    PreconditionError,
    StorageError,
    UnavailableError,
)
from snapctl.storage.base import (
    DeletedFiles,
    FileInfo,
    ListedTree,
    Listing,
    ScannedDir,
    Storage,
    StorageTime,
    check_length,
    check_options,
    check_relative_path,
    hide_values,
    not_found,
    run_parallel,
    seconds_left,
)
from snapctl.storage.gcs_requests import BATCH_SIZE, format_deletions, is_text, join_parts, parse_answers, spread


@contextlib.contextmanager
def _patient_only_for_a_moment() -> Iterator[None]:
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

    with _patient_only_for_a_moment():  # google.auth reads its settings when it is imported
        import gcsfs.core
        import gcsfs.retry
        import google.auth.exceptions
        import google.oauth2.credentials
    import requests.exceptions
    from fsspec.config import conf as fsspec_conf
except ImportError as import_error:  # pragma: no cover - gcsfs is a dependency, but its own may be broken
    raise MissingExtraError(f"gcsfs ({import_error})", extra="gcs") from import_error

Result = TypeVar("Result")

CONNECT_SECONDS = 4.0
READ_SECONDS = 12.0
"""A server that is silent for so long in the middle of an answer is taken for dead."""
UPLOAD_SECONDS = 120.0
"""The same while a large body is under way: the server answers only after the last byte."""
RETRY_SECONDS = 8.0
"""No new attempt begins later than this after the first; for large bodies: than `UPLOAD_SECONDS`."""
MAX_ATTEMPTS = 4
LIST_JOBS = 16
MIN_LISTED_FILES = 4
"""From so many files of a directory on, a listing is tried, and goes on while each page holds as many of them."""
PAGE_ITEMS = 1000
TREE_PAGES = 4
"""The pages of a part of `GcsStorage.list_trees`, by estimate: more are held longer, fewer are less often full."""
MAX_SINGLE_LOOKS = 100
"""More files than that are not asked for one by one, if a listing can tell."""
DELETE_JOBS = 16
"""Batches of deletions under way at a time, over all directories."""
SINGLE_JOBS = 4
"""The same for single deletions, in place of each batch."""
MULTIPART_BYTES = 128 << 10
"""Up to here an upload is copied into one body with its name and may have a condition."""
SINGLE_UPLOAD_BYTES = 160 << 20
"""Up to here it is one request: torchsnapshot's slabs, of 128 MiB, are."""
UPLOAD_CHUNK_BYTES = 64 << 20
UPLOAD_PIECE_BYTES = 1 << 20
PAGE_FIELDS = (
    "nextPageToken,prefixes,items(name,size,timeCreated,generation,crc32c,"
    "temporaryHold,eventBasedHold,retentionExpirationTime)"
)
_NAMED_TOKENS = {"google_default", "cache", "cloud", "token", "anon", "browser"}


_IS_UPLOAD: contextvars.ContextVar[bool] = contextvars.ContextVar("_IS_UPLOAD", default=False)
_FAILED_TRIES: contextvars.ContextVar[int] = contextvars.ContextVar("_FAILED_TRIES", default=0)
"""How often the last request was tried in vain: what a lost answer stood for may have been done all the same."""


class _Item(msgspec.Struct, gc=False):
    """An object resource, as far as it is asked for."""

    name: str
    size: str = "0"
    timeCreated: str = ""
    generation: str = ""
    crc32c: str = ""
    temporaryHold: bool = False
    eventBasedHold: bool = False
    retentionExpirationTime: str = ""


class _SoftDeletePolicy(msgspec.Struct):
    retentionDurationSeconds: str = "0"


class _BucketInfo(msgspec.Struct):
    softDeletePolicy: _SoftDeletePolicy = msgspec.field(default_factory=_SoftDeletePolicy)


class _Page(msgspec.Struct):
    items: list[_Item] = []
    prefixes: list[str] = []
    nextPageToken: str = ""


class _FileSystem(gcsfs.core.GCSFileSystem):  # type: ignore[misc]
    """gcsfs with retries that end while somebody still waits for the answer."""

    server_time_ahead: float | None = None
    """What to add to this machine's clock to get the server's, by the last answer (to a second)."""
    batches_are_safe: bool | None = None
    """Whether the server knows batches and honours the condition of each part; None until it was tried."""
    delete_slots: asyncio.Semaphore | None = None

    @property
    def requests_timeout(self) -> aiohttp.ClientTimeout:
        read = UPLOAD_SECONDS if _IS_UPLOAD.get() else READ_SECONDS
        return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read)

    @requests_timeout.setter
    def requests_timeout(self, value: object) -> None:
        """gcsfs sets it to None; ours depends on the request."""

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        once = gcsfs.core.GCSFileSystem._request.__wrapped__
        _IS_UPLOAD.set(kwargs.get("data") is not None)
        patience = UPLOAD_SECONDS if len(kwargs.get("data") or ()) > MULTIPART_BYTES else RETRY_SECONDS
        started = time.monotonic()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            _FAILED_TRIES.set(attempt - 1)
            try:
                answer = await once(self, *args, **kwargs)
            except Exception as error:
                pause = min(2.0 ** (attempt - 2), 4.0) * (1 + random.random() / 4)
                too_late = time.monotonic() - started + pause > patience
                if attempt == MAX_ATTEMPTS or too_late or not _is_worth_a_retry(error):
                    raise
                await asyncio.sleep(pause)
            else:
                self._learn_time(answer[1])
                return answer
        raise AssertionError("unreachable")

    def _learn_time(self, headers: Mapping[str, str]) -> None:
        told = _date(headers)
        if told is not None:
            self.server_time_ahead = told - time.time()


def _date(headers: Mapping[str, str]) -> float | None:
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


class _Pieces:
    """A large body, sent a piece at a time and never copied as a whole; each attempt to send it begins anew."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._data), UPLOAD_PIECE_BYTES):
            yield self._data[start : start + UPLOAD_PIECE_BYTES]


def open_file_system(options: Mapping[str, Any]) -> _FileSystem:
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
    chosen.update(use_listings_cache=False, skip_instance_cache=True)
    with _patient_only_for_a_moment():
        try:
            return _FileSystem(**chosen)
        except StorageError:
            raise
        except (TypeError, AttributeError) as error:
            reason = hide_values(_one_line(error), options)
            raise InvalidOptionError(f"gs://: the storage options cannot be used: {reason}") from error
        except Exception as error:  # google.auth, json, ValueError: whatever a bad credential sets off
            raise CredentialsError(
                f"gs://: the credentials cannot be used: {hide_values(_one_line(error), options)}",
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


def _one_line(error: BaseException) -> str:
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
    text = _one_line(error)
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
    return _one_line(error)


class GcsStorage(Storage):
    """A prefix of a bucket, or the bucket itself."""

    scheme = "gs"
    parallel_requests = 32

    def __init__(self, bucket: str, prefix: str, file_system: _FileSystem) -> None:
        """
        Args:
            bucket: its name.
            prefix: without slashes at either end; empty for the bucket itself.
        """
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._fs = file_system
        self.url = f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"

    def child(self, name: str) -> GcsStorage:
        return GcsStorage(self._bucket, self._prefix + check_relative_path(name), self._fs)

    def parent(self) -> GcsStorage | None:
        if not self._prefix:
            return None
        return GcsStorage(self._bucket, self._prefix[:-1].rpartition("/")[0], self._fs)

    # -- requests ----------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Result], path: str, *, listing: bool = False) -> Result:
        """Runs a coroutine on gcsfs's loop; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._fs.loop)
        try:
            return future.result(seconds_left())
        except concurrent.futures.CancelledError as error:
            raise UnavailableError(f"{self.url_of(path)}: cancelled", url=self.url_of(path)) from error
        except Exception as error:
            if isinstance(error, InvalidPathError):
                raise
            future.cancel()  # time was up; anything else is over already
            pays = bool(self._fs.requester_pays)
            raise translate_gcs_error(
                error, self.url_of(path), bucket=self._bucket, listing=listing, pays=pays
            ) from error
        except BaseException:  # an interrupt, whatever its type
            future.cancel()
            raise

    async def _call(self, method: str, template: str, *args: str, **kwargs: Any) -> tuple[Mapping[str, str], bytes]:
        headers, contents = await self._fs._call(method, template, *args, **kwargs)
        return headers, contents

    async def _page(self, prefix: str, **params: Any) -> _Page:
        _, contents = await self._call("GET", "b/{}/o", self._bucket, prefix=prefix, fields=PAGE_FIELDS, **params)
        try:
            return msgspec.json.decode(contents, type=_Page)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a listing: {error}") from error

    async def _pages(self, prefix: str, **params: Any) -> AsyncIterator[_Page]:
        token: str | None = None
        while True:
            page = await self._page(prefix, pageToken=token, **params)
            yield page
            token = page.nextPageToken
            if not token:
                return

    def _info(self, item: _Item, base: str) -> FileInfo:
        held = _seconds(item.retentionExpirationTime) if item.retentionExpirationTime else None
        if item.temporaryHold or item.eventBasedHold:
            held = float("inf")
        return FileInfo(
            item.name[len(base) :],
            int(item.size),
            _seconds(item.timeCreated),
            item.generation,
            int.from_bytes(base64.b64decode(item.crc32c), "big") if item.crc32c else None,
            held_until=held,
        )

    # -- looking -----------------------------------------------------------------------------------------------

    def list_dir(self, path: str = "") -> Listing:
        base = self._prefix + (check_relative_path(path) + "/" if path else "")

        async def work() -> Listing:
            files: list[FileInfo] = []
            dirs: set[str] = set()
            any_object = False
            async for page in self._pages(base, delimiter="/"):
                any_object = any_object or bool(page.items or page.prefixes)
                files += [self._info(item, self._prefix) for item in page.items if item.name != base]
                dirs.update(prefix[len(base) : -1] for prefix in page.prefixes)
            if not any_object and base:
                raise not_found(self.url_of(path))
            dirs.discard("")  # a doubled slash in an object's name
            return Listing(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(dirs)))

        return self._run(work(), path, listing=True)

    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        base = self._prefix + (check_relative_path(path) + "/" if path else "")

        async def part(start: str, end: str) -> list[FileInfo]:
            pages = self._pages(base, startOffset=start or None, endOffset=end or None)
            return [self._info(item, self._prefix) async for page in pages for item in page.items]

        async def work() -> list[FileInfo]:
            marks = sorted({base + name for name in join_parts(cuts, LIST_JOBS) if is_text(name)})
            found: list[FileInfo] = []
            start = ""
            if not marks:
                first = await self._page(base)
                found = [self._info(item, self._prefix) for item in first.items]
                if not first.nextPageToken:
                    return sorted(found, key=lambda file: file.path)
                start = first.items[-1].name + "\0" if first.items else ""
                marks = [mark for mark in await self._cut_points(base) if mark > start]
            for infos in await asyncio.gather(*(part(*cut) for cut in zip([start, *marks], [*marks, ""], strict=True))):
                found += infos
            return sorted(found, key=lambda file: file.path)

        return self._run(work(), path, listing=True)

    async def _cut_points(self, base: str) -> list[str]:
        """Where a listing can be cut so that its parts can be had at the same time: at the sub-directories, if there
        are enough, and otherwise inside the largest name space, the hexadecimal one of ``batched/``."""
        first = await self._page(base, delimiter="/")
        if first.nextPageToken or len(first.prefixes) < 2:
            return [base + "batched/" + digit for digit in "02468ace"] + [base + "c"]
        marks = sorted({*first.prefixes, *(base + "batched/" + digit for digit in "48c")})
        return marks[:: -(-len(marks) // LIST_JOBS)]

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        ordered = sorted(names, key=lambda name: name + "/")
        size = max(1, -(-len(ordered) // LIST_JOBS))
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]

        async def work() -> list[dict[str, ScannedDir]]:
            return await asyncio.gather(*(self._scan_part(part, wanted, totals=totals) for part in parts))

        found: dict[str, ScannedDir] = {}
        if ordered:
            for part in self._run(work(), "", listing=True):
                found.update(part)
        yield from (found[name] for name in names)

    async def _scan_part(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool) -> dict[str, ScannedDir]:
        """Flat listings from the first to the last of the names (sorted).

        Without totals, a page that ends among blobs is not simply continued: the next one begins at the next wanted
        name, so that a checkpoint of a million blobs costs a few requests and not a thousand.
        """
        found = {name: ScannedDir(name) for name in names}
        if totals:
            for entry in found.values():
                entry.file_count = entry.size_bytes = 0
        end = self._prefix + names[-1] + "0"  # "0" is the character after "/"
        start: str | None = self._prefix + names[0] + "/"
        token: str | None = None
        position = 0  # of the first name that may still get something
        while start is not None:
            page = await self._page(self._prefix, startOffset=start, endOffset=end, pageToken=token)
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner and name in found:
                    self._take(found[name], item, inner, wanted)
            token = page.nextPageToken or None
            if token is None:
                return found
            if not totals and page.items:
                jump, position = self._jump(page.items[-1].name, names, position, wanted)
                if jump is None:
                    return found
                if jump > page.items[-1].name + "\0":
                    start, token = jump, None
        return found

    def _take(self, entry: ScannedDir, item: _Item, inner: str, wanted: Sequence[str]) -> None:
        if entry.file_count is not None and entry.size_bytes is not None and not inner.endswith("/"):
            entry.file_count += 1
            entry.size_bytes += int(item.size)
        directory, slash, base = inner.rpartition("/")
        if (directory + slash if slash else inner) in wanted and base:
            entry.files.append(self._info(item, f"{self._prefix}{entry.name}/"))

    def _jump(self, last: str, names: Sequence[str], position: int, wanted: Sequence[str]) -> tuple[str | None, int]:
        """Where the next wanted object name after `last` may be; None if there is none."""
        for index in range(position, len(names)):
            base = f"{self._prefix}{names[index]}/"
            for mark in sorted(wanted):
                target = base + mark
                if last < target:
                    return target, index
                if mark.endswith("/") and last.startswith(target):
                    return last + "\0", index
        return None, len(names)

    def list_trees(self, names: Sequence[str]) -> Iterator[ListedTree]:
        """In flat listings of several children each, cut so that their pages are full, several at once.

        The first page tells how many files a child has. So much is held at a time: what is listed by `LIST_JOBS`
        requests of `TREE_PAGES` pages each.
        """
        ordered = sorted(names, key=lambda name: name + "/")
        if not ordered:
            return
        try:
            first = self._run(self._list_children(ordered, pages=1), "", listing=True)
        except StorageError as error:
            yield from (ListedTree(name, error=error) for name in ordered)
            return
        yield from first
        rest = ordered[len(first) :]
        each = sum(len(tree.files) for tree in first) / max(1, len(first))
        pages = min(TREE_PAGES, max(1, math.ceil(len(rest) * each / PAGE_ITEMS / LIST_JOBS)))
        size = max(1, int(pages * PAGE_ITEMS / max(each, 1)))
        parts = [rest[start : start + size] for start in range(0, len(rest), size)]
        running: deque[tuple[list[str], concurrent.futures.Future[list[ListedTree]]]] = deque()
        try:
            for part in [*parts, *([None] * LIST_JOBS)]:
                if part is not None:
                    work = self._list_children(part)
                    running.append((part, asyncio.run_coroutine_threadsafe(work, self._fs.loop)))
                if running and (part is None or len(running) == LIST_JOBS):
                    yield from self._finished_part(*running.popleft())
        finally:
            for _, future in running:
                future.cancel()

    def _finished_part(
        self, names: Sequence[str], future: concurrent.futures.Future[list[ListedTree]]
    ) -> Iterator[ListedTree]:
        try:
            yield from future.result()
        except Exception as error:  # what gcsfs raises, and whatever lies under it
            translated = translate_gcs_error(error, self.url, bucket=self._bucket, listing=True)
            yield from (ListedTree(name, error=translated) for name in names)

    async def _list_children(self, names: Sequence[str], *, pages: int | None = None) -> list[ListedTree]:
        """Flat listings from the first to the last of the names (sorted); what lies between them is passed over.

        Args:
            pages: end after so many, with the children that are whole by then (at least one).
        """
        found = {name: ListedTree(name) for name in names}
        marks = [name + "/" for name in names]
        end = self._prefix + names[-1] + "0"  # "0" is the character after "/"
        start: str | None = self._prefix + marks[0]
        token: str | None = None
        number = 0
        while start is not None:
            page = await self._page(self._prefix, startOffset=start, endOffset=end, pageToken=token)
            number += 1
            inner = ""
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner and name in found:
                    found[name].files.append(self._info(item, f"{self._prefix}{name}/"))
            token = page.nextPageToken or None
            if token is None:
                break
            if not page.items:
                continue
            last = page.items[-1].name[len(self._prefix) :]
            following = bisect.bisect_right(marks, last)
            is_inside = following > 0 and last.startswith(marks[following - 1])
            if pages is not None and number >= pages and following - is_inside > 0:
                return [found[name] for name in names[: following - is_inside]]
            if not is_inside:
                start, token = (self._prefix + marks[following], None) if following < len(marks) else (None, None)
        return list(found.values())

    def find_file(self, path: str) -> FileInfo | None:
        item = self._run(self._look(self._key(path)), path)
        return None if item is None else self._info(item, self._prefix)

    async def _look(self, key: str) -> _Item | None:
        fields = PAGE_FIELDS.partition("items(")[2][:-1]
        try:
            _, contents = await self._call("GET", "b/{}/o/{}", self._bucket, key, fields=fields)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return None
        return _decode_item(contents)

    def find_files(self, paths: Sequence[str]) -> dict[str, FileInfo]:
        """In one listing for each directory that many of them share, unless it is too full of others."""
        by_directory: dict[str, list[str]] = {}
        for path in dict.fromkeys(paths):
            by_directory.setdefault(check_relative_path(path).rpartition("/")[0], []).append(path)
        listed = [sorted(group) for group in by_directory.values() if len(group) >= MIN_LISTED_FILES]
        found: dict[str, FileInfo] = {}
        single = [path for group in by_directory.values() if len(group) < MIN_LISTED_FILES for path in group]
        for files, left in run_parallel(self._list_some, listed, jobs=LIST_JOBS):
            found.update(files)
            single += left
        found.update(super().find_files(single))
        return found

    def _list_some(self, paths: Sequence[str]) -> tuple[dict[str, FileInfo], Sequence[str]]:
        """What a listing from the first to the last of some files (sorted) finds, and those that it gave up on."""
        wanted = set(paths)
        last = self._prefix + paths[-1] + "\0"

        async def work() -> tuple[dict[str, FileInfo], Sequence[str]]:
            found: dict[str, FileInfo] = {}
            position, pages = 0, 0
            while position < len(paths):
                page = await self._page(self._prefix, startOffset=self._prefix + paths[position], endOffset=last)
                infos = [self._info(item, self._prefix) for item in page.items]
                found.update({info.path: info for info in infos if info.path in wanted})
                pages += 1
                if not page.nextPageToken:
                    return found, ()
                position = bisect.bisect_right(paths, infos[-1].path) if infos else position
                if not infos or position < pages * MIN_LISTED_FILES:
                    break
            return found, paths[position:]

        return self._run(work(), "", listing=True)

    def find_each(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None]:
        if len(names) <= MAX_SINGLE_LOOKS:
            return super().find_each(names, path)
        try:
            listed = self._run(self._find_by_glob(names, check_relative_path(path)), "", listing=True)
        except StorageError as error:
            return dict.fromkeys(names, error)
        return super().find_each(names, path) if listed is None else listed

    async def _find_by_glob(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None] | None:
        """All of them from one listing with a glob; None if that takes so many pages that single looks are better.

        A page may come with few names, or with none, and a server that knows no globs lists everything.
        """
        found: dict[str, FileInfo | StorageError | None] = dict.fromkeys(names)
        glob = "**/" + "".join("?" if character in "*?[]{}\\" else character for character in path)
        pages = 0
        async for page in self._pages(self._prefix, matchGlob=glob):
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner == path and name in found:
                    found[name] = self._info(item, f"{self._prefix}{name}/")
            pages += 1
            if page.nextPageToken and pages > 1 + len(names) // MAX_SINGLE_LOOKS:
                return None
        return found

    # -- reading -----------------------------------------------------------------------------------------------

    def _key(self, path: str) -> str:
        return self._prefix + check_relative_path(path)

    async def _get(self, path: str, version: str, headers: Mapping[str, str] | None = None) -> bytes:
        answer, contents = await self._call(
            "GET",
            f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}",
            self._bucket,
            self._key(path),
            alt="media",
            generation=version or None,
            headers=headers,
        )
        is_page = answer.get("Content-Type", "").startswith("text/html")
        if is_page and "x-goog-generation" not in answer and "x-goog-hash" not in answer:
            raise ValueError("a web page instead of the object")  # of a proxy that wants somebody to log in
        return contents

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        if end <= start:
            return b""
        try:
            data = self._run(self._get(path, version, {"Range": f"bytes={start}-{end - 1}"}), path)
        except StorageError as error:
            if getattr(error.__cause__, "code", None) != 416:
                raise
            data = b""  # it begins past the end
        if len(data) > end - start:  # a server that ignores ranges
            data = data[start:end]
        check_length(len(data), end - start, url=self.url_of(path), start=start)
        return data

    def read(self, path: str, *, version: str = "") -> bytes:
        return self._run(self._get(path, version), path)

    # -- changing ----------------------------------------------------------------------------------------------

    def write(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        exclusive: bool = False,
        version: str = "",
        durable: bool = True,
    ) -> FileInfo:
        key = self._key(path)

        async def work() -> FileInfo:
            generation = "0" if exclusive else version
            condition = {"ifGenerationMatch": generation} if generation else {}
            view = memoryview(data).cast("B")
            if len(view) <= MULTIPART_BYTES:
                contents = await self._upload_with_name(key, view, condition)
            elif len(view) <= SINGLE_UPLOAD_BYTES and not condition:
                contents = await self._upload_at_once(key, view)
            else:
                contents = await self._upload_in_chunks(key, view, condition)
            return self._info(_decode_item(contents), self._prefix)

        return self._run(work(), path)

    async def _upload_at_once(self, key: str, data: memoryview) -> bytes:
        _, contents = await self._call(
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
            uploadType="media",
            name=key,
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(len(data))},
            data=_Pieces(data),
        )
        return contents

    async def _upload_with_name(self, key: str, data: memoryview, condition: Mapping[str, str]) -> bytes:
        boundary = f"snapctl-{random.getrandbits(128):032x}"
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{msgspec.json.encode({'name': key}).decode()}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        _, contents = await self._call(
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
            uploadType="multipart",
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode())),
            **condition,
        )
        return contents

    async def _upload_in_chunks(self, key: str, data: memoryview, condition: Mapping[str, str]) -> bytes:
        """A resumable upload: chunk after chunk, each from where the server says that it stands."""
        headers, _ = await self._call(
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
            uploadType="resumable",
            name=key,
            json={"name": key},
            headers={"X-Upload-Content-Type": "application/octet-stream"},
            **condition,
        )
        location = headers["Location"].replace("{", "%7B").replace("}", "%7D")
        done, tries = 0, 0
        while True:
            chunk = data[done : done + UPLOAD_CHUNK_BYTES]
            content_range = f"bytes {done}-{done + len(chunk) - 1}/{len(data)}"
            # As one buffer: the answer to all but the last is 308, for which aiohttp wants a body that it could repeat.
            headers, contents = await self._call("POST", location, headers={"Content-Range": content_range}, data=chunk)
            received = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
            if done + len(chunk) == len(data) and (contents or received == len(data)):
                return contents
            tries = 0 if received > done else tries + 1
            if tries == MAX_ATTEMPTS:
                raise UnavailableError(f"gs://{self._bucket}/{key}: the upload stands at {done} of {len(data)} bytes")
            done = received

    def delete(self, path: str, *, version: str = "") -> bool:
        return self._run(self._delete_object(self._key(path), version), path)

    async def _delete_object(self, key: str, version: str) -> bool:
        """One object; False if it was gone. A deletion whose answer was lost and that finds nothing when it is tried
        again has done its work."""
        if version and not self._fs.on_google and not self._fs.batches_are_safe:  # emulators ignore the condition
            found = await self._look(key)
            if found is None:
                return False
            if found.generation != version:
                raise FileExistsError(key)
        try:
            await self._call("DELETE", "b/{}/o/{}", self._bucket, key, ifGenerationMatch=version or None)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return _FAILED_TRIES.get() > 0
        return True

    def delete_files(
        self,
        files: Sequence[FileInfo],
        *,
        stop: Event | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> DeletedFiles:
        """As `Storage.delete_files`: batches of 100 with a condition in each part, 16 at once; an interrupt cancels
        them. Single deletions on emulators, which know no batches."""
        result = DeletedFiles()

        async def work() -> None:
            if self._fs.delete_slots is None:
                self._fs.delete_slots = asyncio.Semaphore(DELETE_JOBS)
            slots, rest = self._fs.delete_slots, await self._try_batches(files, result)
            todo = iter(
                spread([rest[start : start + BATCH_SIZE] for start in range(0, len(rest), BATCH_SIZE)], DELETE_JOBS)
            )

            async def delete_some() -> None:
                for part in todo:
                    async with slots:
                        if result.changed or (stop is not None and stop.is_set()):
                            result.unfinished += len(part)
                            continue
                        await self._delete_part(part, result)
                    if on_done is not None:
                        on_done(len(part))

            await _run_together(delete_some, min(DELETE_JOBS, -(-len(rest) // BATCH_SIZE)))

        if files:
            self._run(work(), "")
        return result

    async def _delete_part(self, files: Sequence[FileInfo], result: DeletedFiles) -> None:
        """One batch, and again those of its deletions that the server was too busy for."""
        if not self._fs.batches_are_safe:
            await self._delete_singly(files, result)
            return
        remaining = list(files)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                remaining = await self._delete_batch(remaining, result, is_last=attempt == MAX_ATTEMPTS)
            except Exception as error:
                result.failed += [
                    translate_gcs_error(error, self.url_of(file.path), bucket=self._bucket) for file in remaining
                ]
                return
            if not remaining:
                return
            await asyncio.sleep(min(2.0 ** (attempt - 2), 4.0) * (1 + random.random() / 4))

    async def _try_batches(self, files: Sequence[FileInfo], result: DeletedFiles) -> Sequence[FileInfo]:
        """Finds out, once, whether an emulator can be trusted with batches: asks it to delete an object (which was
        looked at, and is to go anyway) under a condition that does not hold. Returns the files that are still to do."""
        if self._fs.on_google:
            self._fs.batches_are_safe = True
        for number, file in enumerate(files):
            if self._fs.batches_are_safe is not None:
                break
            key = self._prefix + file.path
            try:
                found = await self._look(key)
                if found is None or found.generation != file.version:
                    continue
                headers, contents = await self._send_batch([(key, "1")])
                (answer,) = parse_answers(headers["Content-Type"], contents, 1)
            except Exception as error:
                if not _means_no_batches(error):
                    break  # busy, or no permission: the deletions themselves will tell
                self._fs.batches_are_safe = False
                break
            if answer.status == 412:
                self._fs.batches_are_safe = True
            elif answer.status in (200, 204):
                self._fs.batches_are_safe = False
                result.count(file.size_bytes, True)
                return [*files[:number], *files[number + 1 :]]
        return files

    async def _delete_batch(self, files: Sequence[FileInfo], result: DeletedFiles, *, is_last: bool) -> list[FileInfo]:
        """Sends one batch, counts what became of it; returns what is worth another try."""
        headers, contents = await self._send_batch([(self._prefix + file.path, file.version) for file in files])
        was_repeated = _FAILED_TRIES.get() > 0
        again: list[FileInfo] = []
        for file, answer in zip(files, parse_answers(headers["Content-Type"], contents, len(files)), strict=True):
            match answer.status:
                case 200 | 204:
                    result.count(file.size_bytes, True)
                case 404:
                    result.count(file.size_bytes, was_repeated)
                case 412:
                    result.changed.append(file.path)
                case 0 | 408 | 429 | 500 | 502 | 503 | 504 if not is_last:
                    again.append(file)
                case status:
                    result.failed.append(_part_error(status, answer.message, self.url_of(file.path)))
        return again

    async def _send_batch(self, keys: Sequence[tuple[str, str]]) -> tuple[Mapping[str, str], bytes]:
        boundary = f"snapctl-{random.getrandbits(64):016x}"
        return await self._call(
            "POST",
            self._fs.batch_url_base,
            headers={"Content-Type": f'multipart/mixed; boundary="{boundary}"'},
            data=format_deletions(self._bucket, keys, parameters=self._fs._get_params({}), boundary=boundary),
        )

    async def _delete_singly(self, files: Sequence[FileInfo], result: DeletedFiles) -> None:
        todo = iter(files)

        async def delete_some() -> None:
            for file in todo:
                try:
                    result.count(file.size_bytes, await self._delete_object(self._prefix + file.path, file.version))
                except FileExistsError:
                    result.changed.append(file.path)
                except Exception as error:
                    result.failed.append(translate_gcs_error(error, self.url_of(file.path), bucket=self._bucket))

        await _run_together(delete_some, SINGLE_JOBS)

    def read_clock(self, *, may_write: bool) -> StorageTime:
        if self._fs.server_time_ahead is None:
            self._run(self._page(self._prefix, maxResults=1), "", listing=True)
        ahead = self._fs.server_time_ahead
        return StorageTime(time.time() + (ahead or 0.0), ahead is not None)

    def server_now(self) -> float:
        request = self._call("GET", "b/{}/o", self._bucket, prefix=self._prefix, maxResults=1, fields="nextPageToken")
        headers, _ = self._run(request, "", listing=True)
        told = _date(headers)
        if told is None:
            raise StorageError(f"{self.url}: the answer tells no time", url=self.url)
        return told

    def soft_delete_seconds(self) -> float | None:
        async def work() -> float:
            _, contents = await self._call(
                "GET", "b/{}", self._bucket, fields="softDeletePolicy(retentionDurationSeconds)"
            )
            return float(msgspec.json.decode(contents, type=_BucketInfo).softDeletePolicy.retentionDurationSeconds)

        try:
            return self._run(work(), "") or None
        except StorageError:  # who may delete objects need not be allowed to look at the bucket
            return None


async def _run_together(work: Callable[[], Coroutine[Any, Any, None]], jobs: int) -> None:
    """Runs the same work several times at once; if one fails or all are cancelled, none is left running."""
    tasks = [asyncio.ensure_future(work()) for _ in range(jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _means_no_batches(error: Exception) -> bool:
    """Whether an emulator's error says that it does not know batches, and not that it is busy or says no."""
    return isinstance(error, ValueError | FileNotFoundError) or getattr(error, "code", None) in (400, 405, 501)


def _part_error(status: int, message: str, url: str) -> StorageError:
    if status == 403:
        return PermissionDeniedError(f"{url}: permission denied: {message or 'the storage says no'}", url=url)
    if status == 401:
        return CredentialsError(f"{url}: the credentials were refused: {message}", url=url)
    return UnavailableError(f"{url}: HTTP {status}: {message}" if status else f"{url}: {message}", url=url)


def _decode_item(contents: bytes) -> _Item:
    try:
        return msgspec.json.decode(contents, type=_Item)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an object's description: {error}") from error


def _seconds(text: str) -> float:
    """Seconds since the epoch of a time of the JSON API (RFC 3339)."""
    try:
        return msgspec.convert(text, type=datetime).timestamp()
    except (msgspec.ValidationError, OverflowError, OSError):
        return 0.0


def open_gcs(rest: str, options: Mapping[str, Any]) -> GcsStorage:
    """A `GcsStorage` for what follows ``gs://``."""
    bucket, _, prefix = rest.partition("/")
    if not bucket or rest.startswith("/"):
        raise InvalidPathError("gs://: names no bucket")
    return GcsStorage(bucket, prefix, open_file_system(options))
