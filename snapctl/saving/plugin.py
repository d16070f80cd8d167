"""Our storage as a storage plugin of torchsnapshot.

It is registered as the entry point ``snapctl`` of the group ``storage_plugins``, so that torchsnapshot reads (and
writes) whatever snapctl can under ``snapctl://<path or URL>``; a save uses the same class to take over its blobs.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from torchsnapshot.io_types import ReadIO, StoragePlugin, WriteIO

from snapctl.checksums import crc32c
from snapctl.errors import DamagedError
from snapctl.manifest import MANIFEST_NAME
from snapctl.save_record import BlobSum
from snapctl.storage import FileInfo, Storage, open_storage, parent_paths

Result = TypeVar("Result")

SCHEME = "snapctl"
JOBS = 16
"""As many as torchsnapshot has under way at once."""


@dataclass(frozen=True, slots=True)
class Written:
    """A blob that is in the storage."""

    file: FileInfo
    sum: BlobSum
    """The checksum is 0 where none was taken."""


class SnapctlPlugin(StoragePlugin):  # type: ignore[misc]
    """One checkpoint's directory. Blobs go under their final names, a manifest is written as a whole."""

    def __init__(
        self,
        storage: Storage,
        *,
        durable: bool = True,
        checksums: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            durable: make each blob durable as it is written (local only).
            checksums: take a CRC32C of each, and compare it with the storage's where that keeps one.
            check: called before each write; what it raises ends the writing.
        """
        self.storage = storage
        self.written: dict[str, Written] = {}
        self._durable = durable
        self._checksums = checksums
        self._check = check
        self._dirs: set[str] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(JOBS, thread_name_prefix="snapctl-blobs")

    async def _run(self, func: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, func, *args)

    # -- what torchsnapshot calls --------------------------------------------------------------------------------

    async def write(self, write_io: WriteIO) -> None:
        await self._run(self._write, write_io.path, write_io.buf)

    async def read(self, read_io: ReadIO) -> None:
        read_io.buf = io.BytesIO(await self._run(self._read, read_io.path, read_io.byte_range))

    async def delete(self, path: str) -> None:
        await self._run(self.storage.delete, path)

    async def delete_dir(self, path: str) -> None:
        def work() -> None:
            for file in self.storage.list_tree(path):
                self.storage.delete(file.path)
            self.storage.delete_empty_dirs(path)

        await self._run(work)

    async def close(self) -> None:
        self.shut_down()

    # -- what happens in the threads -----------------------------------------------------------------------------

    def _read(self, path: str, byte_range: tuple[int, int] | None) -> bytes:
        if byte_range is None:
            return self.storage.read(path)
        return self.storage.read_range(path, byte_range[0], byte_range[1])

    def _write(self, path: str, data: bytes | memoryview) -> None:
        self._check()
        if path == MANIFEST_NAME:  # torchsnapshot's own commit
            self.seal()
            self.storage.write(path, data, durable=self._durable)
            return
        with self._lock:
            if not self._dirs:
                self.storage.make_dir(durable=self._durable)
            self._dirs.update(("", *parent_paths(path)))
        total = BlobSum(len(data), crc32c(data) if self._checksums else 0)
        found = self.storage.write_blob(path, data, durable=self._durable)
        with self._lock:
            self.written[path] = Written(found, total)
        url = self.storage.url_of(path)
        if found.size_bytes != total.size_bytes:
            raise DamagedError(
                f"{url}: {found.size_bytes} bytes arrived of {total.size_bytes}", kind="short-blob", blob=path
            )
        if self._checksums and found.crc32c is not None and found.crc32c != total.crc32c:
            raise DamagedError(
                f"{url}: the storage's CRC32C is {found.crc32c:08x}, that of what was sent {total.crc32c:08x}",
                kind="checksum",
                blob=path,
            )

    # -- what a save does ----------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Makes the names of all blobs durable."""
        if self._durable:
            for directory in sorted(self._dirs):
                self.storage.sync_dir(directory)

    def shut_down(self) -> None:
        """Waits for what is being written, and begins nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def open_plugin(path: str, storage_options: Mapping[str, Any] | None = None) -> SnapctlPlugin:
    """The entry point: what follows ``snapctl://`` is a path or URL in its own right."""
    return SnapctlPlugin(open_storage(path, storage_options or {}))


def plugin_url(path: str | os.PathLike[str]) -> str:
    """Under which URL torchsnapshot reads a path or URL through this plugin."""
    return f"{SCHEME}://{os.fspath(path)}"
