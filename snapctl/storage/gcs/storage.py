"""Google Cloud Storage, over plain HTTP through gcsfs's core class.

gcsfs brings credentials, sessions and its endpoint settings (``STORAGE_EMULATOR_HOST``); what is asked of GCS is said
here in single JSON-API requests, since the calls of gcsfs send several, expand patterns, cache listings and know no
conditions.

Source: the measured behaviour of gcsfs 2026.10 and the documentation of the GCS JSON API.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from snapctl.errors import (
    InvalidPathError,
    StorageError,
    UnavailableError,
)
from snapctl.storage.base import check_length, check_relative_path
from snapctl.storage.gcs.client import answer_date, open_file_system
from snapctl.storage.gcs.deletions import GcsDeletions
from snapctl.storage.gcs.listings import GcsListings
from snapctl.storage.gcs.objects import BucketInfo
from snapctl.storage.gcs.uploads import GcsUploads
from snapctl.storage.gcs.walking import GcsWalking
from snapctl.storage.values import StorageTime


class GcsStorage(GcsListings, GcsWalking, GcsUploads, GcsDeletions):
    """A prefix of a bucket, or the bucket itself."""

    def child(self, name: str) -> GcsStorage:
        return GcsStorage(self._bucket, self._prefix + check_relative_path(name), self._fs)

    def parent(self) -> GcsStorage | None:
        if not self._prefix:
            return None
        return GcsStorage(self._bucket, self._prefix[:-1].rpartition("/")[0], self._fs)

    # -- reading -----------------------------------------------------------------------------------------------

    async def _get(
        self, path: str, version: str, headers: Mapping[str, str] | None = None
    ) -> tuple[Mapping[str, str], bytes]:
        return await self._call(
            "GET",
            f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}",
            self._bucket,
            self._key(path),
            alt="media",
            generation=version or None,
            headers=headers,
        )

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        if end <= start:
            return b""
        try:
            _, data = self._run(self._get(path, version, {"Range": f"bytes={start}-{end - 1}"}), path)
        except StorageError as error:
            if getattr(error.__cause__, "code", None) != 416:
                raise
            data = b""  # it begins past the end
        if len(data) > end - start:  # a server that ignores ranges
            data = data[start:end]
        check_length(len(data), end - start, url=self.url_of(path), start=start)
        return data

    def read(self, path: str, *, version: str = "") -> bytes:
        headers, data = self._run(self._get(path, version), path)
        if not _is_whole(headers, data):
            raise UnavailableError(f"{self.url_of(path)}: was cut off or changed on its way", url=self.url_of(path))
        return data

    # -- the server itself -------------------------------------------------------------------------------------

    def read_clock(self, *, may_write: bool) -> StorageTime:
        if self._fs.server_time_ahead is None:
            self._run(self._page(self._prefix, maxResults=1), "", listing=True)
        ahead = self._fs.server_time_ahead
        return StorageTime(time.time() + (ahead or 0.0), ahead is not None)

    def server_now(self) -> float:
        request = self._call("GET", "b/{}/o", self._bucket, prefix=self._prefix, maxResults=1, fields="nextPageToken")
        headers, _ = self._run(request, "", listing=True)
        told = answer_date(headers)
        if told is None:
            raise StorageError(f"{self.url}: the answer tells no time", url=self.url)
        return told

    def soft_delete_seconds(self) -> float | None:
        async def work() -> float:
            _, contents = await self._call(
                "GET", "b/{}", self._bucket, fields="softDeletePolicy(retentionDurationSeconds)"
            )
            return float(msgspec.json.decode(contents, type=BucketInfo).softDeletePolicy.retentionDurationSeconds)

        try:
            return self._run(work(), "") or None
        except StorageError:  # who may delete objects need not be allowed to look at the bucket
            return None


def _is_whole(headers: Mapping[str, str], data: bytes) -> bool:
    """Whether an object arrived as it is stored, as far as the answer tells. Half a manifest, or half a marker, could
    otherwise be taken for what a dead writer has left."""
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return True  # its checksum is that of what is stored
    hashes = ",".join(headers.getall("x-goog-hash", []) if hasattr(headers, "getall") else [])
    found = re.search(r"crc32c=([A-Za-z0-9+/]{6}==)", hashes)
    if found is None:
        return True
    import google_crc32c

    return int(google_crc32c.value(data)) == int.from_bytes(base64.b64decode(found[1]), "big")


def open_gcs(rest: str, options: Mapping[str, Any]) -> GcsStorage:
    """A `GcsStorage` for what follows ``gs://``."""
    bucket, _, prefix = rest.partition("/")
    if not bucket or rest.startswith("/"):
        raise InvalidPathError("gs://: names no bucket")
    return GcsStorage(bucket, prefix, open_file_system(options))
