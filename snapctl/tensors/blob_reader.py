"""Bytes out of the blobs of one checkpoint: looked up once, read in ranges, several at once, in the version found."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from snapctl.checksums import BlobSums
from snapctl.errors import (
    DamagedError,
    InvalidPathError,
    PreconditionError,
    ShortReadError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.output_file import NewFile
from snapctl.storage import FileInfo, Storage
from snapctl.tensors.blob_file import SMALL_FILE_BYTES, BlobFile
from snapctl.tensors.layout import Box
from snapctl.tensors.torch_decoding import MAX_EXPANDED_BYTES

LOCAL_READ_BYTES = 8 << 20
REMOTE_READ_BYTES = 4 << 20
"""The longest request: several at once are faster than one, and each is held twice for a moment."""
MAX_PREFETCHED_BYTES = 32 << 20
REMOTE_GAP_BYTES = 64 << 10
"""Reading over so many bytes in an object store is faster than asking twice. A local disk reads what it is asked."""


class BlobReader:
    """Reads blobs of one checkpoint.

    Attributes:
        bytes_read: what has come so far, gaps included.
        on_read: called with `bytes_read` whenever some have come, from any thread.
        read_bytes: the longest request.
        gap_bytes: how many unneeded bytes are read over rather than asked around.
        sums: looks at every piece that has come, where checksums are to be compared.
    """

    def __init__(self, storage: Storage, *, read_bytes: int | None = None) -> None:
        is_local = storage.scheme == "file"
        self.storage = storage
        self.bytes_read = 0
        self.on_read: Callable[[int], None] | None = None
        self.sums: BlobSums | None = None
        self.read_bytes = read_bytes or (LOCAL_READ_BYTES if is_local else REMOTE_READ_BYTES)
        self.gap_bytes = 0 if is_local else REMOTE_GAP_BYTES
        self._jobs = max(2, storage.parallel_requests)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._files: dict[str, FileInfo | None] = {}
        self._all_listed = False
        self._prefetched: dict[tuple[str, int], bytearray] = {}

    def close(self) -> None:
        """Ends its threads; what has not begun is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    # -- looking -----------------------------------------------------------------------------------------------

    def use_listing(self, files: Iterable[FileInfo]) -> None:
        """Takes a listing of the whole checkpoint instead of looking up blobs one by one."""
        self._files = {file.path: file for file in files}
        self._all_listed = True

    def look_up(self, locations: Iterable[str]) -> Mapping[str, FileInfo | None]:
        """What the storage says of blobs, None for one that is not there; asked once for each.

        Raises:
            StorageError: it could not be asked.
        """
        wanted = list(dict.fromkeys(locations))
        unknown = [] if self._all_listed else [location for location in wanted if location not in self._files]
        if unknown:
            found = self.storage.find_files([location for location in unknown if _is_readable(location)])
            self._files.update({location: found.get(location) for location in unknown})
        return {location: self._files.get(location) for location in wanted}

    # -- reading -----------------------------------------------------------------------------------------------

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Calls a function in one of the threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="snapctl-read")
        return self._pool.submit(call, *arguments)

    def fetch(self, location: str, start: int, buffer: memoryview, entry: str) -> None:
        """Fills a buffer with what begins at an offset of a blob that has been looked up.

        Args:
            entry: the manifest path of the entry that needs it.

        Raises:
            DamagedError: the blob is missing, short, or lies outside of the checkpoint.
            PreconditionError: it is not the blob any more that was looked up.
            StorageError: it could not be read.
        """
        with self._errors(location, start, start + len(buffer), entry):
            self.storage.read_into(location, start, buffer, version=self._version(location))
        self._count(len(buffer))
        if self.sums is not None and (differing := self.sums.add(location, start, buffer)) is not None:
            recorded, computed = differing
            raise DamagedError(
                f"{entry}: {location} has the CRC32C {computed:08x}, and {recorded:08x} was recorded when it was saved",
                kind="checksum",
                entry=entry,
                blob=location,
            )

    def copy(self, location: str, start: int, end: int, file: NewFile, entry: str) -> int:
        """Has the operating system append a part of a blob to a file, where it can; raises as `fetch`.

        Returns:
            how many bytes were copied.
        """
        with self._errors(location, start, end, entry):
            copied = file.append(
                lambda descriptor: self.storage.copy_range(
                    location, start, end, descriptor, version=self._version(location)
                )
            )
        self._count(copied)
        return copied

    def _version(self, location: str) -> str:
        found = self._files.get(location)
        return "" if found is None or found.is_link else found.version

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.bytes_read += size_bytes
            if self.on_read is not None:
                self.on_read(self.bytes_read)

    @contextlib.contextmanager
    def _errors(self, location: str, start: int, end: int, entry: str) -> Iterator[None]:
        try:
            yield
        except ShortReadError as error:
            found = self._files.get(location)
            if found is not None and found.size_bytes >= end:  # it is the answer that is wrong
                text = f"{error.message}, and it had {found.size_bytes} when it was looked up"
                raise StorageError(text, url=error.url) from error
            raise DamagedError(
                f"{entry}: {location} ends at byte {start + error.found_bytes}, and it needs {end}",
                kind="short-blob",
                entry=entry,
                blob=location,
            ) from error
        except InvalidPathError as error:
            raise DamagedError(f"{entry}: {error.message}", kind="outside", entry=entry, blob=location) from error
        except StorageNotFoundError as error:
            if self._files.get(location) is None:
                raise missing_blob(entry, location) from error
            url = self.storage.url_of(location)
            raise PreconditionError(f"{url}: was replaced or deleted while it was being read", url=url) from error

    def fill(self, location: str, start: int, buffer: memoryview, entry: str) -> None:
        """As `fetch`, in requests of bounded size, several at once."""
        step = self.read_bytes
        wait_for(
            [
                self.submit(self.fetch, location, start + first, buffer[first : first + step], entry)
                for first in range(0, len(buffer), step)
            ]
        )

    def open(self, box: Box) -> BlobFile:
        """The stretch of a blob that a box takes, as a file.

        Raises:
            DamagedError: the blob is missing or short.
        """
        found = self.look_up([box.location])[box.location]
        problem = blob_problem(box, found)
        if problem is not None:
            raise problem
        assert found is not None
        end = box.byte_range[1] if box.byte_range is not None else found.size_bytes
        held = self._prefetched.pop((box.location, box.start), None)
        if held is not None:
            data = memoryview(held)

            def copy(start: int, buffer: memoryview) -> None:
                buffer[:] = data[start - box.start : start - box.start + len(buffer)]

            return BlobFile(copy, box.start, end)
        return BlobFile(lambda start, buffer: self.fill(box.location, start, buffer, box.entry), box.start, end)

    def prefetch(self, boxes: Sequence[Box]) -> None:
        """Reads small stretches that `open` will be asked for, all at once: one by one each would wait for the network.

        Those that are missing or too much are left to `open`.
        """
        files = self.look_up(box.location for box in boxes)
        wanted: dict[tuple[str, int], tuple[Box, bytearray]] = {}
        room = MAX_PREFETCHED_BYTES
        for box in boxes:
            found = files[box.location]
            if found is None or blob_problem(box, found) is not None:
                continue
            size = (box.byte_range[1] if box.byte_range is not None else found.size_bytes) - box.start
            if size <= SMALL_FILE_BYTES and size <= room and (box.location, box.start) not in self._prefetched:
                room -= size
                wanted[box.location, box.start] = (box, bytearray(size))
        wait_for(
            [
                self.submit(self.fetch, box.location, box.start, memoryview(data), box.entry)
                for box, data in wanted.values()
            ]
        )
        self._prefetched.update({place: data for place, (_, data) in wanted.items()})


def wait_for(futures: Sequence[Future[None]]) -> None:
    """Until all are done; the first error cancels what has not begun, and is raised."""
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def blob_problem(box: Box, found: FileInfo | None) -> DamagedError | None:
    """What is wrong with a box's blob as it was looked up: missing, or shorter than the box needs."""
    if found is None:
        return missing_blob(box.entry, box.location)
    end = box.end
    if end is None or found.size_bytes >= end:
        claimed = box.elements * (box.item_bytes or 0)
        if box.serializer != "torch_save" or claimed <= max(found.size_bytes, MAX_EXPANDED_BYTES):
            return None
        return DamagedError(
            f"{box.entry}: takes {claimed} bytes, and {box.location} has {found.size_bytes}",
            kind="size-mismatch",
            entry=box.entry,
            blob=box.location,
        )
    return DamagedError(
        f"{box.entry}: {box.location} has {found.size_bytes} bytes, and it needs {end}",
        kind="short-blob",
        entry=box.entry,
        blob=box.location,
    )


def missing_blob(entry: str, location: str) -> DamagedError:
    """The error for a blob that is not there."""
    return DamagedError(f"{entry}: {location} is not there", kind="missing-blob", entry=entry, blob=location)


def _is_readable(location: str) -> bool:
    """Whether a storage can have a file of that name at all."""
    try:
        location.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return not any(part in ("", ".", "..") for part in location.split("/")) and "\0" not in location
