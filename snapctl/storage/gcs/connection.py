"""One prefix of one bucket, and how it is asked."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from snapctl.errors import (
    InvalidPathError,
    UnavailableError,
)
from snapctl.storage.base import Storage, check_relative_path
from snapctl.storage.gcs.client import FileSystem
from snapctl.storage.gcs.errors import translate_gcs_error
from snapctl.storage.gcs.objects import PAGE_FIELDS, Item, Page, decode_item, seconds_of
from snapctl.storage.running import seconds_left
from snapctl.storage.values import FileInfo

Result = TypeVar("Result")


class GcsConnection(Storage):
    """What the parts of `GcsStorage` share: its place, and single requests for it."""

    scheme = "gs"
    parallel_requests = 32

    def __init__(self, bucket: str, prefix: str, file_system: FileSystem) -> None:
        """
        Args:
            bucket: its name.
            prefix: without slashes at either end; empty for the bucket itself.
        """
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._fs = file_system
        self.url = f"gs://{bucket}/{prefix}" if prefix else f"gs://{bucket}"

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
        """One request.

        Raises:
            ValueError: the answer is a web page, of a proxy that wants somebody to log in: nothing has been done.
        """
        headers, contents = await self._fs._call(method, template, *args, **kwargs)
        is_page = headers.get("Content-Type", "").startswith("text/html")
        is_page = is_page or (method == "DELETE" and contents.lstrip().startswith(b"<"))
        if is_page and "x-goog-generation" not in headers and "x-goog-hash" not in headers:
            raise ValueError("a web page")
        return headers, contents

    async def _page(self, prefix: str, *, fields: str = PAGE_FIELDS, **params: Any) -> Page:
        _, contents = await self._call("GET", "b/{}/o", self._bucket, prefix=prefix, fields=fields, **params)
        try:
            return msgspec.json.decode(contents, type=Page)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a listing: {error}") from error

    async def _pages(self, prefix: str, **params: Any) -> AsyncIterator[Page]:
        token: str | None = None
        while True:
            page = await self._page(prefix, pageToken=token, **params)
            yield page
            token = page.nextPageToken
            if not token:
                return

    def _info(self, item: Item, base: str) -> FileInfo:
        held = seconds_of(item.retentionExpirationTime) if item.retentionExpirationTime else None
        if item.temporaryHold or item.eventBasedHold:
            held = float("inf")
        return FileInfo(
            item.name[len(base) :],
            int(item.size),
            seconds_of(item.timeCreated),
            item.generation,
            int.from_bytes(base64.b64decode(item.crc32c), "big") if item.crc32c else None,
            held_until=held,
        )

    async def _look(self, key: str) -> Item | None:
        fields = PAGE_FIELDS.partition("items(")[2][:-1]
        try:
            _, contents = await self._call("GET", "b/{}/o/{}", self._bucket, key, fields=fields)
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise
            return None
        return decode_item(contents)

    def _key(self, path: str) -> str:
        return self._prefix + check_relative_path(path)
