"""Objects written to GCS, whole or not at all: a simple, a multipart or a resumable upload."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

import msgspec

from snapctl.errors import (
    UnavailableError,
)
from snapctl.storage.gcs.client import MAX_ATTEMPTS, MULTIPART_BYTES
from snapctl.storage.gcs.connection import GcsConnection
from snapctl.storage.gcs.objects import decode_item
from snapctl.storage.values import FileInfo

SINGLE_UPLOAD_BYTES = 160 << 20
"""Up to here it is one request: torchsnapshot's slabs, of 128 MiB, are."""
UPLOAD_CHUNK_BYTES = 64 << 20
UPLOAD_PIECE_BYTES = 1 << 20


class _Pieces:
    """A large body, sent a piece at a time and never copied as a whole; each attempt to send it begins anew."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._data), UPLOAD_PIECE_BYTES):
            yield self._data[start : start + UPLOAD_PIECE_BYTES]


class GcsUploads(GcsConnection):
    """Writing."""

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
            return self._info(decode_item(contents), self._prefix)

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
