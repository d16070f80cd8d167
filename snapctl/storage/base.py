"""What every storage can do, in snapctl's own words.

A `Storage` is one directory: everything is named by a path relative to it, with ``/`` between the parts and taken
literally (no pattern characters). All methods are synchronous and may be called from several threads at once; to do
many at a time, use `run_parallel`.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any

import msgspec

from snapctl.errors import (
    InvalidOptionError,
    InvalidPathError,
    PreconditionError,
    ShortReadError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.redaction import remember_secrets
from snapctl.storage.running import collect_errors, run_parallel
from snapctl.storage.values import (
    DeletedFiles,
    FileIdentity,
    FileInfo,
    ListedTree,
    Listing,
    ScannedDir,
    StorageTime,
    WalkFailure,
)

PART_FILES = 995
"""What fits into a page of a listing, but for a few names that nobody expected."""
FIND_TOGETHER = 100
"""So many files are asked for one by one before anybody asks whether the storage answers at all."""


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
        _, remote, rest = self.url.rpartition("://")
        _, slash, name = rest.rstrip("/").rpartition("/")
        return name if slash or not remote else ""

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

    def walk(self) -> Iterator[list[FileInfo] | WalkFailure]:
        """All that lies below this directory, in parts, so that nobody has to hold it all: paths and sizes.

        What lies below one directory comes together, whatever its depth. A directory in which nothing may lie comes
        as a folder object would, with a slash at the end of its path; so does a symbolic link to a directory
        (`FileInfo.is_link`), which is never entered: there are no cycles. Times, versions and checksums may be missing.
        """
        todo = [""]
        while todo:
            path = todo.pop()
            try:
                listing = self.list_dir(path)
            except StorageNotFoundError:
                continue  # it vanished meanwhile
            except StorageError as error:
                yield WalkFailure(path, error)
                continue
            base = f"{path}/" if path else ""
            links = sorted(listing.linked_dirs)
            yield [
                *([FileInfo(base, 0, 0.0)] if base else ()),
                *listing.files,
                *(FileInfo(f"{base}{name}/", 0, 0.0, is_link=True) for name in links),
            ]
            todo += [base + name for name in reversed(listing.dirs) if name not in listing.linked_dirs]

    @abc.abstractmethod
    def find_file(self, path: str) -> FileInfo | None:
        """One file, or None. A directory is no file."""

    def find_files(self, paths: Sequence[str]) -> dict[str, FileInfo]:
        """Those of many files that are there, by path, as `find_file` would find them."""
        found = run_parallel(self.find_file, paths, jobs=self.parallel_requests)
        return {path: file for path, file in zip(paths, found, strict=True) if file is not None}

    def find_each(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None]:
        """The same file in each of many child directories, as `find_file` finds it; errors are returned.

        Paths are relative to the child directory. For many names it asks for all of them at once where the storage
        can.
        """
        look = collect_errors(lambda name: self.find_file(f"{name}/{path}"))
        found: dict[str, FileInfo | StorageError | None] = {}
        away: StorageError | None = None
        for start in range(0, len(names), FIND_TOGETHER):
            part = names[start : start + FIND_TOGETHER]
            if away is not None:  # it has not answered one of the last; the rest would take long
                found.update(dict.fromkeys(part, away))
                continue
            items = run_parallel(look, part, jobs=self.parallel_requests)
            if all(isinstance(item, UnavailableError) for item in items):
                away = next(item for item in items if isinstance(item, UnavailableError))
            for name, item in zip(part, items, strict=True):
                found[name] = msgspec.structs.replace(item, path=path) if isinstance(item, FileInfo) else item
        return found

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

    def copy_range(self, path: str, start: int, end: int, descriptor: int, *, version: str = "") -> int:
        """Has the operating system append the bytes ``[start, end)`` of a file to an open file of this machine.

        Returns:
            how many bytes it copied; fewer, or none, where it cannot: then they are to be read and written.

        Raises:
            ShortReadError, PreconditionError, StorageError: as `read_range`, for the file that is read.
        """
        return 0

    @abc.abstractmethod
    def write(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        exclusive: bool = False,
        version: str = "",
        durable: bool = True,
    ) -> FileInfo:
        """Writes a whole file: readers see the old one, or none, until the new one is there in full and durable.

        Args:
            exclusive: create it, and never touch one that exists.
            version: replace only this very object (see `FileInfo.version`), so that of two who read, change and write
                it none undoes what the other wrote.
            durable: False leaves it to the system when it reaches the disk (local only); an exclusive file is then
                created in one step, and `sync_dir` can make it durable with others.

        Raises:
            PreconditionError: `exclusive`, and it exists; or `version`, and another object is in its place, or none.
                Where an answer was lost, it may be one's own writing that stands there.
            RefusedError: the storage has no way to create a file exclusively.
        """

    def write_blob(self, path: str, data: bytes | memoryview, *, durable: bool = True) -> FileInfo:
        """Writes a whole file that nobody looks at until another one says that it is there.

        An old file of that name is gone first. The content is durable when this returns, its name in the directory
        (and directories made on the way) only after `sync_dir`.

        Args:
            durable: as in `write`.
        """
        return self.write(path, data, durable=durable)

    def make_dir(self, *, durable: bool = True) -> None:  # noqa: B027
        """Makes this directory and those above it, as far as they are missing. Nothing to do on an object store."""

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

    def delete_files(
        self,
        files: Sequence[FileInfo],
        *,
        stop: Event | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> DeletedFiles:
        """Deletes many files, each only while it is still the very object that was listed (of a link: the link).

        One failure does not stop the rest. As soon as another object is seen in the place of one, no more are begun.

        Args:
            files: as `list_tree` lists them.
            stop: set by somebody else to end it early.
            on_done: called with how many more files are done, possibly from another thread.
        """
        result = DeletedFiles()
        for number, file in enumerate(files):
            if result.changed or (stop is not None and stop.is_set()):
                result.unfinished = len(files) - number
                break
            try:
                result.count(file.size_bytes, self.delete(file.path, version=file.version))
            except PreconditionError:
                result.changed.append(file.path)
            except StorageError as error:
                result.failed.append(error)
            if on_done is not None:
                on_done(1)
        return result

    def delete_empty_dirs(self, path: str = "") -> None:  # noqa: B027
        """Removes a directory and those in it, as far as they are empty. Nothing to do on an object store."""

    def delete_stale_dirs(self, path: str, before: float) -> bool:
        """Removes a directory in which there are no files, and which nobody has changed since a time, with those in it.

        Failures are nobody's business. Nothing to do on an object store.

        Args:
            before: by the storage's clock.

        Returns:
            whether it is gone.
        """
        return False

    def find_dirs_time(self) -> float | None:
        """When a name was last added to, or removed from, this directory or one below it; None where there are no
        directories.

        Who copies with the old times of the files (``rsync -a``, ``cp -a``) sets those of a directory when it is full.
        """
        return None

    def sync_dir(self, path: str = "") -> None:  # noqa: B027
        """Makes the names in a directory durable. Nothing to do on an object store."""

    def now(self, *, may_write: bool) -> float:
        """The time by the storage's clock, in seconds since the epoch.

        Args:
            may_write: a temporary file may be written to learn it; otherwise the machine's clock answers where the
                storage does not tell the time by itself.
        """
        return self.read_clock(may_write=may_write).seconds

    def read_clock(self, *, may_write: bool) -> StorageTime:
        """`now`, and whether it is the storage's own time or, for want of it, this machine's."""
        if may_write:
            with contextlib.suppress(StorageError):
                return StorageTime(self.server_now(), True)
        return StorageTime(time.time(), False)

    @abc.abstractmethod
    def server_now(self) -> float:
        """The time by the storage's own clock, never by this machine's; locally a temporary file is written for it.

        It is not ahead of that clock, and may be a second behind.

        Raises:
            StorageError: it cannot be learnt.
        """

    # -- what only some storages have --------------------------------------------------------------------------

    def soft_delete_seconds(self) -> float | None:
        """For how long the storage keeps, and bills, what was deleted; None for not at all, or if it does not say."""
        return None

    def list_links(
        self, path: str = "", *, deep: bool, on_denied: Callable[[StorageError], None] | None = None
    ) -> list[str]:
        """Paths of the symbolic links in a directory, or at any depth below it; none are followed.

        Args:
            on_denied: is told of each directory that may not be entered, and that is passed over.

        Raises:
            StorageError: a directory could not be read to its end, or may not be entered and nobody is told.
        """
        return []

    def identify(self, path: str = "") -> FileIdentity | None:
        """What a path leads to, links followed; None where there is nothing, or no such thing as an identity."""
        return None

    def identify_ancestors(self, path: str) -> list[FileIdentity]:
        """What a symbolic link leads to in the end, and all directories above that, from the inside out.

        Raises:
            PermissionDeniedError: nobody can tell, because something on the way may not be entered.
        """
        return []

    def delete_link(self, name: str) -> bool:
        """Removes a symbolic link, never what it leads to.

        Returns:
            False if it was gone already.

        Raises:
            PreconditionError: it is no symbolic link.
        """
        raise PreconditionError(f"{self.url_of(name)}: is no symbolic link", url=self.url_of(name))


def check_relative_path(path: str) -> str:
    """Returns a path that stays inside its directory.

    Raises:
        InvalidPathError: it is absolute, has an empty part, ``.`` or ``..`` in it, or characters that no name can have.
    """
    parts = path.split("/")
    if "" in parts or ".." in parts or "." in parts or "\0" in path or not _is_encodable(path):
        raise InvalidPathError(f"not a path inside a directory: {path!r}")
    return path


def parent_paths(path: str) -> Iterator[str]:
    """The directories that a file lies in, from the inside out, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _is_encodable(path: str) -> bool:
    """Whether it stands for bytes: lone surrogates do, as far as they stand for a byte that is not UTF-8."""
    if path.isascii():
        return True
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def cuts_of(paths: Sequence[str]) -> Sequence[str]:
    """Those of about all the paths of a directory (sorted) that `Storage.list_tree` takes as its `cuts`."""
    return paths[PART_FILES::PART_FILES]


_OURS = ("asynchronous", "loop", "self", "skip_instance_cache", "use_listings_cache")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses options for fsspec that would take the file system out of our hands, and notes which are secret.

    Raises:
        InvalidOptionError: one of them is there.
    """
    remember_secrets(options)
    for name in _OURS:
        if name in options:
            raise InvalidOptionError(f"the storage option {name!r} is not for users to set")


def hide_values(text: str, options: Mapping[str, Any]) -> str:
    """A message without the values of options, whatever they are."""
    for value in options.values():
        if isinstance(value, Mapping):
            text = hide_values(text, value)
        elif isinstance(value, str) and len(value) > 3:
            text = text.replace(value, "…")
    return text


def check_length(found_bytes: int, expected_bytes: int, *, url: str, start: int = 0) -> None:
    """Raises `ShortReadError` unless so many bytes came."""
    if found_bytes != expected_bytes:
        raise ShortReadError(
            f"{url}: {found_bytes} bytes of {expected_bytes} from offset {start}",
            expected_bytes=expected_bytes,
            found_bytes=found_bytes,
            url=url,
        )


def not_found(url: str) -> StorageNotFoundError:
    """The error for what is not there."""
    return StorageNotFoundError(f"{url}: not found", url=url)
