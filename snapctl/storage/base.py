"""What every storage can do, in snapctl's own words.

A `Storage` is one directory: everything is named by a path relative to it, with ``/`` between the parts and taken
literally (no pattern characters). All methods are synchronous and may be called from several threads at once; to do
many at a time, use `run_parallel`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from snapctl.errors import InvalidPathError, ShortReadError, StorageError, StorageNotFoundError

PART_FILES = 995
"""What fits into a page of a listing, but for a few names that nobody expected."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class FileInfo(msgspec.Struct, frozen=True, gc=False):
    """One file or object, as the storage saw it at one moment."""

    path: str
    """Relative to the storage that listed it."""
    size_bytes: int
    modified_at: float
    """Seconds since the epoch by the storage's clock: the mtime locally, ``timeCreated`` of the live generation on
    GCS (any change of metadata moves ``updated``). 0.0 where the storage keeps no time."""
    version: str = ""
    """Identifies this very object: the generation on GCS, ``inode:size:mtime_ns`` locally; empty where unknown."""
    crc32c: int | None = None
    """CRC32C (Castagnoli) of the content, where the storage keeps one."""
    is_link: bool = False
    """A symbolic link (local only); the other fields are then those of what it leads to, where that exists."""
    held_until: float | None = None
    """It cannot be deleted before this time (retention); infinity while an object is under a hold."""


class Listing(msgspec.Struct, frozen=True):
    """The direct children of a directory, each sorted by name."""

    files: tuple[FileInfo, ...]
    dirs: tuple[str, ...]
    """Names of sub-directories; a symbolic link to a directory counts as one."""
    linked_dirs: frozenset[str] = frozenset()
    """Those of `dirs` that are symbolic links."""


class ScannedDir(msgspec.Struct, gc=False):
    """What `Storage.scan` found in one child directory."""

    name: str
    files: list[FileInfo] = []
    """The wanted files; paths are relative to the child directory."""
    file_count: int | None = None
    """All files at any depth, folder objects of no bytes excluded. None unless totals were asked for."""
    size_bytes: int | None = None
    error: StorageError | None = None
    """It could not be looked at; a `StorageNotFoundError` if it vanished meanwhile."""


class ListedTree(msgspec.Struct, gc=False):
    """What `Storage.list_trees` found below one child directory."""

    name: str
    files: list[FileInfo] = []
    """Sorted by path; paths are relative to the child directory. Empty where there is nothing."""
    error: StorageError | None = None
    """It could not be listed."""


class Storage(abc.ABC):
    """One directory of a file system or an object store."""

    scheme: str
    """``file``, ``gs``, ``memory``, …"""
    parallel_requests: int = 8
    """How many small requests at a time pay off."""
    url: str
    """As it is printed: with its scheme, local paths without one; no slash at the end."""

    def url_of(self, path: str = "") -> str:
        """How a path in this directory is printed."""
        if not path:
            return self.url
        return self.url + path if self.url.endswith("/") else f"{self.url}/{path}"

    @property
    def name(self) -> str:
        """The last part of the URL; empty for a bucket or the root."""
        return self.url.split("://", 1)[-1].rstrip("/").rpartition("/")[2]

    @abc.abstractmethod
    def child(self, name: str) -> Storage:
        """The directory `name` below this one, over the same connection."""

    @abc.abstractmethod
    def parent(self) -> Storage | None:
        """The directory above; None for a bucket or the root."""

    @abc.abstractmethod
    def list_dir(self, path: str = "") -> Listing:
        """The direct children of a directory.

        Raises:
            StorageNotFoundError: there is no such directory (on an object store: nothing lies under it).
        """

    @abc.abstractmethod
    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        """All files below a directory at any depth, sorted by path; paths are relative to this storage.

        Symbolic links are listed and never followed. Empty where there is nothing.

        Args:
            cuts: paths (relative to `path`, sorted) at which the listing can be cut into parts of a page each, see
                `cuts_of`. They need not be right: an object store only uses them to have several parts at a time.
        """

    @abc.abstractmethod
    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        """Looks into many child directories at once, in the order of `names`.

        Args:
            names: child directories (the caller has seen them in a listing).
            wanted: files directly in a child by their full name, and directories by their name with a slash at the
                end, of which the files directly inside are wanted: ``("PINNED", "evaled_by/")``.
            totals: count and add up all files, too.
        """

    def list_trees(self, names: Sequence[str]) -> Iterator[ListedTree]:
        """`list_tree` of many child directories, as far as the caller goes on asking; in whatever order is quickest.

        Args:
            names: child directories (the caller has seen them in a listing).
        """
        for name in names:
            try:
                files = self.list_tree(name)
            except StorageError as error:
                yield ListedTree(name, error=error)
                continue
            skip = len(name) + 1
            yield ListedTree(name, [msgspec.structs.replace(file, path=file.path[skip:]) for file in files])

    @abc.abstractmethod
    def find_file(self, path: str) -> FileInfo | None:
        """One file, or None. A directory is no file."""

    def find_files(self, paths: Sequence[str]) -> dict[str, FileInfo]:
        """Those of many files that are there, by path, as `find_file` would find them."""
        found = run_parallel(self.find_file, paths, jobs=self.parallel_requests)
        return {path: file for path, file in zip(paths, found, strict=True) if file is not None}

    @abc.abstractmethod
    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        """The bytes ``[start, end)`` of a file.

        Args:
            version: read this very version (see `FileInfo.version`), where the storage can.

        Raises:
            ShortReadError: the file ends before `end`.
        """

    @abc.abstractmethod
    def read(self, path: str, *, version: str = "") -> bytes:
        """A whole file."""

    def read_into(self, path: str, start: int, buffer: memoryview, *, version: str = "") -> None:
        """Fills a writable, contiguous buffer of bytes with what begins at `start`; raises like `read_range`."""
        data = self.read_range(path, start, start + len(buffer), version=version)
        buffer[:] = data

    def read_blocks(
        self, path: str, start: int, end: int, buffer: memoryview, *, version: str = ""
    ) -> Iterator[memoryview]:
        """The bytes ``[start, end)`` of a file in blocks of the buffer's length, each in the buffer until the next one
        is asked for; raises like `read_range`."""
        for first in range(start, end, len(buffer)):
            block = buffer[: min(len(buffer), end - first)]
            self.read_into(path, first, block, version=version)
            yield block

    @abc.abstractmethod
    def write(self, path: str, data: bytes | memoryview, *, exclusive: bool = False) -> FileInfo:
        """Writes a whole file: readers see the old one, or none, until the new one is there in full and durable.

        Args:
            exclusive: create it, and never touch one that exists.

        Raises:
            PreconditionError: `exclusive`, and it exists.
        """

    @abc.abstractmethod
    def delete(self, path: str, *, version: str = "") -> bool:
        """Deletes one file (of a link: the link).

        Args:
            version: only while it is still this very object.

        Returns:
            False if it was gone already.

        Raises:
            PreconditionError: another object is in its place.
        """

    def delete_empty_dirs(self, path: str = "") -> None:  # noqa: B027
        """Removes a directory and those in it, as far as they are empty. Nothing to do on an object store."""

    def sync_dir(self, path: str = "") -> None:  # noqa: B027
        """Makes the names in a directory durable. Nothing to do on an object store."""

    @abc.abstractmethod
    def now(self, *, may_write: bool) -> float:
        """The time by the storage's clock, in seconds since the epoch.

        Args:
            may_write: a temporary file may be written to learn it; otherwise the machine's clock answers where the
                storage does not tell the time by itself.
        """


def check_relative_path(path: str) -> str:
    """Returns a path that stays inside its directory.

    Raises:
        InvalidPathError: it is absolute, or has an empty part, ``.`` or ``..`` in it.
    """
    parts = path.split("/")
    if "" in parts or ".." in parts or "." in parts or "\0" in path:
        raise InvalidPathError(f"not a path inside a directory: {path!r}")
    return path


def cuts_of(paths: Sequence[str]) -> Sequence[str]:
    """Those of about all the paths of a directory (sorted) that `Storage.list_tree` takes as its `cuts`."""
    return paths[PART_FILES::PART_FILES]


def check_length(found_bytes: int, expected_bytes: int, *, url: str, start: int = 0) -> None:
    """Raises `ShortReadError` unless so many bytes came."""
    if found_bytes != expected_bytes:
        raise ShortReadError(
            f"{url}: {found_bytes} bytes of {expected_bytes} from offset {start}",
            expected_bytes=expected_bytes,
            found_bytes=found_bytes,
            url=url,
        )


def run_parallel(func: Callable[[Item], Result], items: Iterable[Item], *, jobs: int) -> list[Result]:
    """Calls `func` for each item, several at once; results in the order of the items.

    The first exception cancels what has not begun and is raised; so does an interrupt.
    """
    todo = list(items)
    if len(todo) <= 1 or jobs <= 1:
        return [func(item) for item in todo]
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # 4 ms that a local `latest` does not need

    pool = ThreadPoolExecutor(min(jobs, len(todo)), thread_name_prefix="snapctl-io")
    try:
        futures = [pool.submit(func, item) for item in todo]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def collect_errors(func: Callable[[Item], Result]) -> Callable[[Item], Result | StorageError]:
    """`func`, but a `StorageError` is returned instead of raised: one failure must not end the others."""

    def call(item: Item) -> Result | StorageError:
        try:
            return func(item)
        except StorageError as error:
            return error

    return call


def not_found(url: str) -> StorageNotFoundError:
    """The error for what is not there."""
    return StorageNotFoundError(f"{url}: not found", url=url)
