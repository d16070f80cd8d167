"""Directories of this machine, through `os` alone."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from threading import Event

from snapctl.errors import (
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    RefusedError,
    StorageError,
)
from snapctl.storage.base import Storage, check_length, check_relative_path
from snapctl.storage.local_files import (
    OpenDirs,
    check_version,
    count_files,
    entry_info,
    file_info,
    file_version,
    files_inside,
    fill_buffer,
    find_quietly,
    is_real_dir,
    open_regular,
    replace_version,
    time_of_new_file,
    write_new_file,
)
from snapctl.storage.local_paths import NOT_THERE, absolute_path, translate_os_error
from snapctl.storage.unfinished import UnfinishedFile, remove_litter
from snapctl.storage.values import DeletedFiles, FileIdentity, FileInfo, Listing, ScannedDir

_WRITE_ATTEMPTS = 20
MAX_WHOLE_BYTES = 4 << 30
"""No manifest, marker or record has so many: it would be a file that only looks large, or no such file."""


class LocalStorage(Storage):
    """A directory of the local file system. It need not exist.

    Blobs (`read_range`, `read_into`) are only read from regular files that lie inside the directory: a location in a
    manifest must not lead out of it through a symbolic link, nor block on a FIFO.
    """

    scheme = "file"
    parallel_requests = 1

    def __init__(self, path: str) -> None:
        self.url = absolute_path(path)

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(os.path.join(self.url, check_relative_path(name)))

    def parent(self) -> LocalStorage | None:
        return None if self.url == "/" else LocalStorage(os.path.dirname(self.url))

    def _full(self, path: str) -> str:
        return os.path.join(self.url, check_relative_path(path)) if path else self.url

    def _file(self, path: str) -> str:
        return self._full(check_relative_path(path))

    def list_dir(self, path: str = "") -> Listing:
        full = self._full(path)
        files: list[FileInfo] = []
        dirs: list[str] = []
        linked: set[str] = set()
        try:
            with os.scandir(full) as entries:
                for entry in entries:
                    if is_real_dir(entry):
                        dirs.append(entry.name)
                        if entry.is_symlink():
                            linked.add(entry.name)
                    elif (found := entry_info(entry, f"{path}/{entry.name}" if path else entry.name)) is not None:
                        files.append(found)
        except OSError as error:
            raise translate_os_error(error, full) from error
        files.sort(key=lambda file: file.path)
        return Listing(tuple(files), tuple(sorted(dirs)), frozenset(linked))

    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        found: list[FileInfo] = []
        todo = [path]
        while todo:
            directory = todo.pop()
            full = self._full(directory)
            try:
                with os.scandir(full) as entries:
                    for entry in entries:
                        name = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(name)
                        elif (info := entry_info(entry, name)) is not None:
                            found.append(info)
            except OSError as error:
                if error.errno in NOT_THERE:
                    continue
                raise translate_os_error(error, full) from error
        return sorted(found, key=lambda file: file.path)

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        wanted_files = {name for name in wanted if not name.endswith("/")}
        wanted_dirs = {name[:-1] for name in wanted if name.endswith("/")}
        for name in names:
            yield self._scan_one(check_relative_path(name), wanted_files, wanted_dirs, totals=totals)

    def _scan_one(self, name: str, wanted_files: set[str], wanted_dirs: set[str], *, totals: bool) -> ScannedDir:
        found = ScannedDir(name)
        base = f"{self.url}/{name}" if self.url != "/" else f"/{name}"
        try:
            with os.scandir(base) as entries:
                for entry in entries:
                    entry_name = entry.name
                    if entry_name in wanted_files:
                        if not is_real_dir(entry) and (info := entry_info(entry, entry_name)) is not None:
                            found.files.append(info)
                    elif entry_name in wanted_dirs and is_real_dir(entry):
                        found.files += files_inside(entry)
            if totals:
                try:
                    found.file_count, found.size_bytes = count_files(base)
                except OSError as error:
                    found.totals_error = translate_os_error(error, error.filename or base)
        except OSError as error:
            found.error = translate_os_error(error, error.filename or base)
        return found

    def find_file(self, path: str) -> FileInfo | None:
        found = find_quietly(self._file(path), path)
        if isinstance(found, StorageError):
            raise found
        return found

    def find_each(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None]:
        check_relative_path(path)
        base = self.url if self.url.endswith("/") else self.url + "/"
        return {name: find_quietly(f"{base}{check_relative_path(name)}/{path}", path) for name in names}

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        with self._open_blob(path, start, end, version) as descriptor:
            data = bytearray(end - start)
            fill_buffer(descriptor, start, memoryview(data), self._file(path))
            return bytes(data)

    def read_into(self, path: str, start: int, buffer: memoryview, *, version: str = "") -> None:
        with self._open_blob(path, start, start + len(buffer), version) as descriptor:
            fill_buffer(descriptor, start, buffer, self._file(path))

    def read_blocks(
        self, path: str, start: int, end: int, buffer: memoryview, *, version: str = ""
    ) -> Iterator[memoryview]:
        with self._open_blob(path, start, end, version) as descriptor:
            for first in range(start, end, len(buffer)):
                block = buffer[: min(len(buffer), end - first)]
                fill_buffer(descriptor, first, block, self._file(path))
                yield block

    def copy_range(self, path: str, start: int, end: int, descriptor: int, *, version: str = "") -> int:
        if not hasattr(os, "copy_file_range"):  # not on Linux
            return 0
        done = 0
        with self._open_blob(path, start, end, version) as source:
            while start + done < end:
                try:
                    copied = os.copy_file_range(source, descriptor, end - start - done, start + done)
                except OSError:  # across file systems, a full disk, …: reading and writing will tell which
                    return done
                if copied == 0:
                    return done
                done += copied
        return done

    @contextlib.contextmanager
    def _open_blob(self, path: str, start: int, end: int, version: str) -> Iterator[int]:
        """A descriptor of a file that reaches to `end`: no room is made for what a file does not hold."""
        full = self._file(path)
        self._check_confined(path)
        try:
            with open_regular(full) as descriptor:
                found = os.fstat(descriptor)
                if version and version != file_version(found) and version != file_version(os.lstat(full)):
                    raise PreconditionError(f"{full}: is no longer the file that was listed", url=full)
                found_bytes = max(0, min(found.st_size, end) - start)
                check_length(found_bytes, end - start, url=full, start=start)
                yield descriptor
        except OSError as error:
            raise translate_os_error(error, full) from error

    def read(self, path: str, *, version: str = "") -> bytes:
        full = self._file(path)
        try:
            with open_regular(full) as descriptor, open(descriptor, "rb", closefd=False) as file:
                size_bytes = os.fstat(descriptor).st_size
                if size_bytes > MAX_WHOLE_BYTES:
                    raise StorageError(f"{full}: {size_bytes} bytes, too many to be read at once", url=full)
                return file.read()
        except MemoryError as error:
            raise StorageError(f"{full}: {size_bytes} bytes do not fit into memory", url=full) from error
        except OSError as error:
            raise translate_os_error(error, full) from error

    def _check_confined(self, path: str) -> None:
        if self._leads_out(path):
            raise InvalidPathError(f"{self._file(path)}: leads out of {self.url} through a symbolic link")

    def _check_parents(self, path: str) -> None:
        """Nothing is written or deleted outside, whatever somebody has put in the place of a directory."""
        parent, slash, _ = path.rpartition("/")
        if slash and self._leads_out(parent):
            raise RefusedError(f"{self._file(parent)}: leads out of {self.url} through a symbolic link: left alone")

    def _leads_out(self, path: str) -> bool:
        full = self.url
        for part in path.split("/"):
            full = os.path.join(full, part)
            if os.path.islink(full):
                root = os.path.realpath(self.url)
                return os.path.commonpath([root, os.path.realpath(self._file(path))]) != root
        return False

    def write(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        exclusive: bool = False,
        version: str = "",
        durable: bool = True,
    ) -> FileInfo:
        full = self._file(path)
        self._check_parents(path)
        if exclusive and not durable:
            return self._create(path, data)
        try:
            found = self._write_whole(path, data, exclusive=exclusive, version=version, durable=durable)
        except FileExistsError as error:
            if isinstance(error, StorageError):
                raise
            raise PreconditionError(f"{full}: exists already", url=full) from error
        except OSError as error:
            raise translate_os_error(error, full) from error
        remove_litter(full, found.st_mtime, of_others=True)
        if durable:
            self.sync_dir(os.path.dirname(path))
        return file_info(path, found, found)

    def _write_whole(
        self, path: str, data: bytes | memoryview, *, exclusive: bool, version: str, durable: bool
    ) -> os.stat_result:
        full = self._file(path)
        for _ in range(_WRITE_ATTEMPTS):
            self._make_parents(path, durable=durable)
            try:
                with UnfinishedFile(full) as file:
                    file.write(data)
                    if durable:
                        os.fsync(file.descriptor)
                    if exclusive:
                        file.create()
                    elif version:
                        replace_version(file, full, version)
                    else:
                        file.replace()
                    return file.status()
            except FileNotFoundError:
                if version or "/" not in path or not os.path.isdir(self.url):
                    raise
                # whoever deletes in this directory has removed the one for the file, which was empty
        raise FileNotFoundError(errno.ENOENT, "its directory comes and goes")

    def write_blob(self, path: str, data: bytes | memoryview, *, durable: bool = True) -> FileInfo:
        full = self._file(path)
        self._check_parents(path)
        try:
            for attempt in range(1, _WRITE_ATTEMPTS + 1):
                try:
                    self._make_parents(path, durable=False)
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(full)  # never written into: it may be linked elsewhere, or be open in a reader
                    write_new_file(full, data, durable=durable)
                    break
                except FileExistsError:  # another rank holds the same shard, and writes it, too
                    if attempt == _WRITE_ATTEMPTS:
                        raise
                except FileNotFoundError:  # whoever deletes an earlier save of this step has removed what was empty
                    if attempt == _WRITE_ATTEMPTS:
                        raise
                    self.make_dir(durable=durable)
            found = os.lstat(full)  # over NFS the times are settled only when it is closed
        except OSError as error:
            raise translate_os_error(error, full) from error
        return file_info(path, found, found)

    def _create(self, path: str, data: bytes | memoryview) -> FileInfo:
        """Creates a file in one step, without waiting for the disk."""
        full = self._file(path)
        try:
            self._make_parents(path)
            write_new_file(full, data, durable=False)
            found = os.lstat(full)  # over NFS the times are settled only when it is closed
        except FileExistsError as error:
            raise PreconditionError(f"{full}: exists already", url=full) from error
        except OSError as error:
            raise translate_os_error(error, full) from error
        return file_info(path, found, found)

    def make_dir(self, *, durable: bool = True) -> None:
        missing: list[str] = []
        path = self.url
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        try:
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                    if durable:
                        LocalStorage(os.path.dirname(path)).sync_dir()
            if not os.path.isdir(self.url):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory")
        except NotADirectoryError as error:
            raise StorageError(f"{self.url}: is not a directory", url=self.url) from error
        except OSError as error:
            raise translate_os_error(error, self.url) from error

    def _make_parents(self, path: str, *, durable: bool = True) -> None:
        """Makes the directories between this one and the file; never this one itself."""
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.url, *parts[:depth]))
                if durable:
                    self.sync_dir("/".join(parts[: depth - 1]))

    def delete(self, path: str, *, version: str = "") -> bool:
        full = self._file(path)
        self._check_parents(path)
        try:
            if version:
                check_version(full, version)
            os.unlink(full)
        except OSError as error:
            if error.errno in NOT_THERE:
                return False
            raise translate_os_error(error, full) from error
        return True

    def delete_files(
        self,
        files: Sequence[FileInfo],
        *,
        stop: Event | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> DeletedFiles:
        """As `Storage.delete_files`; symbolic links on the way to a file are not followed."""
        result = DeletedFiles()
        done = 0
        with OpenDirs(self.url) as open_dirs:
            for number, file in enumerate(files):
                if result.changed or (stop is not None and stop.is_set()):
                    result.unfinished = len(files) - number
                    break
                self._delete_listed(file, open_dirs, result)
                if on_done is not None and number % 64 == 63:
                    on_done(number + 1 - done)
                    done = number + 1
        if on_done is not None and len(files) - result.unfinished > done:
            on_done(len(files) - result.unfinished - done)
        return result

    def _delete_listed(self, file: FileInfo, open_dirs: OpenDirs, result: DeletedFiles) -> None:
        directory, _, name = file.path.rpartition("/")
        try:
            descriptor = open_dirs.descriptor(directory)
            if file_version(os.stat(name, dir_fd=descriptor, follow_symlinks=False)) != file.version:
                result.changed.append(file.path)
                return
            os.unlink(name, dir_fd=descriptor)
            result.deleted += 1
            result.deleted_bytes += 0 if file.is_link else file.size_bytes
        except FileNotFoundError:
            result.gone += 1
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EISDIR):  # no longer the directory that was listed
                result.changed.append(file.path)
            else:
                result.failed.append(translate_os_error(error, f"{self.url}/{file.path}"))

    def delete_empty_dirs(self, path: str = "") -> None:
        full = self._full(path)
        if path and self._leads_out(path):
            return
        for directory, _, _ in os.walk(full, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def find_dirs_time(self) -> float | None:
        newest: float | None = None
        for directory, _, _ in os.walk(self.url):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest or 0.0, os.stat(directory).st_mtime)
        return newest

    def delete_stale_dirs(self, path: str, before: float) -> bool:
        full = self._full(path)
        dirs = [full]
        try:
            for directory in dirs:
                if not stat.S_ISDIR((found := os.lstat(directory)).st_mode) or found.st_mtime > before:
                    return False
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if not entry.is_dir(follow_symlinks=False):
                            return False
                        dirs.append(entry.path)
            for directory in reversed(dirs):
                os.rmdir(directory)  # which fails if something has come into it meanwhile
        except OSError:
            return False
        return True

    def sync_dir(self, path: str = "") -> None:
        full = self._full(path)
        with contextlib.suppress(OSError):  # not every file system can, and the data itself is durable already
            descriptor = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def list_links(
        self, path: str = "", *, deep: bool, on_denied: Callable[[StorageError], None] | None = None
    ) -> list[str]:
        links: list[str] = []
        todo = [path]
        while todo:
            directory = todo.pop()
            full = self._full(directory)
            try:
                with os.scandir(full) as entries:
                    for entry in entries:
                        name = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.is_symlink():
                            links.append(name)
                        elif deep and entry.is_dir(follow_symlinks=False):
                            todo.append(name)
            except OSError as error:
                if error.errno in NOT_THERE:
                    continue
                translated = translate_os_error(error, full)
                if on_denied is None or not isinstance(translated, PermissionDeniedError):
                    raise translated from error
                on_denied(translated)
        return sorted(links)

    def identify(self, path: str = "") -> FileIdentity | None:
        full = self._full(path)
        try:
            found = os.stat(full)
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise translate_os_error(error, full) from error
        return found.st_dev, found.st_ino

    def identify_ancestors(self, path: str) -> list[FileIdentity]:
        full = self._full(path)
        found: list[FileIdentity] = []
        try:
            os.stat(full)
            place = os.path.realpath(full)
            while True:
                seen = os.stat(place)
                found.append((seen.st_dev, seen.st_ino))
                if place == "/":
                    return found
                place = os.path.dirname(place)
        except OSError as error:
            if error.errno in NOT_THERE:
                return found
            raise translate_os_error(error, full) from error

    def delete_link(self, name: str) -> bool:
        full = self._file(name)
        try:
            if not stat.S_ISLNK(os.lstat(full).st_mode):
                raise PreconditionError(f"{full}: is no symbolic link", url=full)
            os.unlink(full)
        except OSError as error:
            if error.errno in NOT_THERE:
                return False
            raise translate_os_error(error, full) from error
        return True

    def server_now(self) -> float:
        try:
            return time_of_new_file(self.url)
        except OSError as error:
            raise translate_os_error(error, self.url) from error
