"""Directories of this machine, through `os` alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from threading import Event

from snapctl.errors import (
    InvalidPathError,
    NoSpaceError,
    PermissionDeniedError,
    PreconditionError,
    StorageError,
    UnavailableError,
)
from snapctl.storage.base import (
    DeletedFiles,
    FileIdentity,
    FileInfo,
    Listing,
    ScannedDir,
    Storage,
    check_length,
    check_relative_path,
    not_found,
)

TEMPORARY_MARK = ".snapctl-tmp-"
"""Between the name of a file that is being written and a random id."""

_BLOB_ATTEMPTS = 20
LOCK_SECONDS = 10.0
"""Whoever holds the lock of a directory for longer (for two system calls) has been stopped."""

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS}


def translate_os_error(error: OSError, path: str) -> StorageError:
    """An error of the operating system as one of ours, with the path in it."""
    if isinstance(error, StorageError):
        return error
    if error.errno in _NOT_THERE:
        return not_found(path)
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(text, url=path)
    if error.errno in _NO_SPACE:
        return NoSpaceError(text, url=path)
    return StorageError(text, url=path)


def temporary_name(path: str) -> str:
    """A fresh name beside `path` for a file that is being written."""
    directory, base = os.path.split(path)
    mark = TEMPORARY_MARK + uuid.uuid4().hex[:12]
    room = 255 - len(mark)
    short = os.fsdecode(os.fsencode(base)[:room]) if len(os.fsencode(base)) > room else base
    return os.path.join(directory, short + mark)


def absolute_path(path: str) -> str:
    """A local path made absolute: ``.``, ``..`` and repeated slashes gone, symbolic links kept.

    ``..`` behind a symbolic link leads to where the system would go, not where the text seems to say.
    """
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser(path)
    result = "/"
    if not path.startswith("/"):
        path = os.path.join(_current_directory(), path)
    for part in path.split("/"):
        if part == "..":
            result = os.path.dirname(os.path.realpath(result) if os.path.islink(result) else result)
        elif part not in ("", "."):
            result = os.path.join(result, part)
    return result


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise InvalidPathError("the current directory is gone: a relative path leads nowhere") from error


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
                    if _is_dir(entry):
                        dirs.append(entry.name)
                        if entry.is_symlink():
                            linked.add(entry.name)
                    elif (found := _entry_info(entry, f"{path}/{entry.name}" if path else entry.name)) is not None:
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
                        elif (info := _entry_info(entry, name)) is not None:
                            found.append(info)
            except OSError as error:
                if error.errno in _NOT_THERE:
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
                        if not _is_dir(entry) and (info := _entry_info(entry, entry_name)) is not None:
                            found.files.append(info)
                    elif entry_name in wanted_dirs and _is_dir(entry):
                        found.files += _files_inside(entry)
            if totals:
                try:
                    found.file_count, found.size_bytes = _count(base)
                except OSError as error:
                    found.totals_error = translate_os_error(error, error.filename or base)
        except OSError as error:
            found.error = translate_os_error(error, error.filename or base)
        return found

    def find_file(self, path: str) -> FileInfo | None:
        found = _find_quietly(self._file(path), path)
        if isinstance(found, StorageError):
            raise found
        return found

    def find_each(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None]:
        check_relative_path(path)
        base = self.url if self.url.endswith("/") else self.url + "/"
        return {name: _find_quietly(f"{base}{check_relative_path(name)}/{path}", path) for name in names}

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        with self._open_blob(path, start, end, version) as descriptor:
            data = bytearray(end - start)
            _fill(descriptor, start, memoryview(data), self._file(path))
            return bytes(data)

    def read_into(self, path: str, start: int, buffer: memoryview, *, version: str = "") -> None:
        with self._open_blob(path, start, start + len(buffer), version) as descriptor:
            _fill(descriptor, start, buffer, self._file(path))

    def read_blocks(
        self, path: str, start: int, end: int, buffer: memoryview, *, version: str = ""
    ) -> Iterator[memoryview]:
        with self._open_blob(path, start, end, version) as descriptor:
            for first in range(start, end, len(buffer)):
                block = buffer[: min(len(buffer), end - first)]
                _fill(descriptor, first, block, self._file(path))
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
            with _open_regular(full) as descriptor:
                found = os.fstat(descriptor)
                if version and version != _version(found) and version != _version(os.lstat(full)):
                    raise PreconditionError(f"{full}: is no longer the file that was listed", url=full)
                found_bytes = max(0, min(found.st_size, end) - start)
                check_length(found_bytes, end - start, url=full, start=start)
                yield descriptor
        except OSError as error:
            raise translate_os_error(error, full) from error

    def read(self, path: str, *, version: str = "") -> bytes:
        full = self._file(path)
        try:
            with _open_regular(full) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return file.read()
        except OSError as error:
            raise translate_os_error(error, full) from error

    def _check_confined(self, path: str) -> None:
        full = self.url
        for part in path.split("/"):
            full = os.path.join(full, part)
            if os.path.islink(full):
                root = os.path.realpath(self.url)
                if os.path.commonpath([root, os.path.realpath(self._file(path))]) != root:
                    raise InvalidPathError(f"{self._file(path)}: leads out of {self.url} through a symbolic link")
                return

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
        if exclusive and not durable:
            return self._create(path, data)
        temporary = temporary_name(full)
        try:
            self._make_parents(path, durable=durable)
            found = write_new_file(temporary, data, durable=durable)
            try:
                if exclusive:
                    found = self._link_exclusively(temporary, full, data, found)
                elif version:
                    _replace_version(temporary, full, version)
                else:
                    os.replace(temporary, full)
            finally:
                if exclusive:
                    os.unlink(temporary)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, FileExistsError) and not isinstance(error, StorageError):
                raise PreconditionError(f"{full}: exists already", url=full) from error
            if isinstance(error, OSError):
                raise translate_os_error(error, full) from error
            raise
        if durable:
            self.sync_dir(os.path.dirname(path))
        return _info(path, found, found)

    def write_blob(self, path: str, data: bytes | memoryview, *, durable: bool = True) -> FileInfo:
        full = self._file(path)
        try:
            self._make_parents(path, durable=False)
            for attempt in range(_BLOB_ATTEMPTS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(full)  # never written into: it may be linked elsewhere, or be open in a reader
                try:
                    write_new_file(full, data, durable=durable)
                    break
                except FileExistsError:  # another rank holds the same shard, and writes it, too
                    if attempt == _BLOB_ATTEMPTS - 1:
                        raise
            found = os.lstat(full)  # over NFS the times are settled only when it is closed
        except OSError as error:
            raise translate_os_error(error, full) from error
        return _info(path, found, found)

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
        return _info(path, found, found)

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

    def _link_exclusively(
        self, temporary: str, full: str, data: bytes | memoryview, found: os.stat_result
    ) -> os.stat_result:
        try:
            os.link(temporary, full)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return write_new_file(full, data)
        return found

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
        try:
            if version:
                _check_version(full, version)
            os.unlink(full)
        except OSError as error:
            if error.errno in _NOT_THERE:
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
        with _OpenDirs(self.url) as open_dirs:
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

    def _delete_listed(self, file: FileInfo, open_dirs: _OpenDirs, result: DeletedFiles) -> None:
        directory, _, name = file.path.rpartition("/")
        try:
            descriptor = open_dirs.descriptor(directory)
            if _version(os.stat(name, dir_fd=descriptor, follow_symlinks=False)) != file.version:
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
        for directory, _, _ in os.walk(full, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def sync_dir(self, path: str = "") -> None:
        full = self._full(path)
        with contextlib.suppress(OSError):  # not every file system can, and the data itself is durable already
            descriptor = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def list_links(self, path: str = "", *, deep: bool) -> list[str]:
        links: list[str] = []
        todo = [path]
        while todo:
            directory = todo.pop()
            with contextlib.suppress(OSError), os.scandir(self._full(directory)) as entries:
                for entry in entries:
                    name = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_symlink():
                        links.append(name)
                    elif deep and entry.is_dir(follow_symlinks=False):
                        todo.append(name)
        return sorted(links)

    def identify(self, path: str = "") -> FileIdentity | None:
        full = self._full(path)
        try:
            found = os.stat(full)
        except OSError as error:
            if error.errno in _NOT_THERE:
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
            if error.errno in _NOT_THERE:
                return found
            raise translate_os_error(error, full) from error

    def delete_link(self, name: str) -> bool:
        full = self._file(name)
        try:
            if not stat.S_ISLNK(os.lstat(full).st_mode):
                raise PreconditionError(f"{full}: is no symbolic link", url=full)
            os.unlink(full)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise translate_os_error(error, full) from error
        return True

    def server_now(self) -> float:
        try:
            return _time_of_new_file(self.url)
        except OSError as error:
            raise translate_os_error(error, self.url) from error


class _OpenDirs:
    """Descriptors of the directories below one, opened without following links, as few as will do at a time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: list[tuple[str, int]] = []

    def __enter__(self) -> _OpenDirs:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop()[1])

    def descriptor(self, directory: str) -> int:
        """Of a directory by its path; good until the next call."""
        if self._open and self._open[-1][0] == directory:
            return self._open[-1][1]
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if not self._open:
            self._open.append(("", os.open(self._root, flags)))
        while (top := self._open[-1][0]) and top != directory and not directory.startswith(top + "/"):
            os.close(self._open.pop()[1])
        top, descriptor = self._open[-1]
        rest = directory[len(top) :].strip("/")
        for part in rest.split("/") if rest else ():
            descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            top = f"{top}/{part}" if top else part
            self._open.append((top, descriptor))
        return descriptor


def write_new_file(full: str, data: bytes | memoryview, *, durable: bool = True) -> os.stat_result:
    """Creates a file that must not exist, writes it, makes its content durable; removes it again on failure."""
    descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(descriptor, view[: 1 << 30]) :]
        if durable:
            os.fsync(descriptor)
        return os.fstat(descriptor)
    except BaseException:
        os.unlink(full)
        raise
    finally:
        os.close(descriptor)


def _check_version(full: str, version: str) -> None:
    if _version(os.lstat(full)) != version:
        raise PreconditionError(f"{full}: is no longer the file that was listed", url=full)


def _replace_version(temporary: str, full: str, version: str) -> None:
    """Renames a file over the one that has this version; the directory is locked between the look and the act."""
    with _locked(os.path.dirname(full)):
        try:
            _check_version(full, version)
        except FileNotFoundError as error:
            raise PreconditionError(f"{full}: is no longer there", url=full) from error
        os.replace(temporary, full)


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """An advisory lock on a directory, where the file system has such locks (NFS does not lend them to readers)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        give_up_at = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > give_up_at:
                    raise UnavailableError(f"{directory}: somebody holds its lock", url=directory) from error
                time.sleep(0.005)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _time_of_new_file(directory: str) -> float:
    """The mtime of a file that is new in a directory; it has no name, where the file system can do that, so that not
    even a kill leaves it behind."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(directory, flags | os.O_TMPFILE, 0o600)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
    temporary = temporary_name(os.path.join(directory, "clock"))
    os.close(os.open(temporary, flags | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        return os.stat(temporary).st_mtime
    finally:
        os.unlink(temporary)


@contextlib.contextmanager
def _open_regular(full: str) -> Iterator[int]:
    """A descriptor of a regular file; anything else (a FIFO would block for ever) is refused."""
    descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{full}: not a regular file", url=full)
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(descriptor: int, start: int, buffer: memoryview, full: str) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], start + done)
        if got == 0:  # it was cut while we read
            check_length(done, len(buffer), url=full, start=start)
        done += got


def _find_quietly(full: str, path: str) -> FileInfo | StorageError | None:
    try:
        found = os.lstat(full)
        target = os.stat(full) if stat.S_ISLNK(found.st_mode) else found
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        return translate_os_error(error, full)
    return None if stat.S_ISDIR(target.st_mode) else _info(path, found, target)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a loop of links leads nowhere; a target that may not be looked at can be one
        return error.errno not in _NOT_THERE


def _files_inside(directory: os.DirEntry[str]) -> list[FileInfo]:
    """The files of a directory; none if it has vanished since it was listed."""
    found = []
    try:
        with os.scandir(directory.path) as entries:
            for entry in entries:
                path = f"{directory.name}/{entry.name}"
                if not _is_dir(entry) and (info := _entry_info(entry, path)) is not None:
                    found.append(info)
    except FileNotFoundError:
        return []
    return found


def _entry_info(entry: os.DirEntry[str], path: str) -> FileInfo | None:
    """None for what vanished between the listing and the look."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(found.st_mode):
        return _info(path, found, found)
    try:
        target = entry.stat()
    except OSError:  # it leads nowhere
        target = found
    return _info(path, found, target)


def _info(path: str, found: os.stat_result, target: os.stat_result) -> FileInfo:
    regular = stat.S_ISREG(target.st_mode)
    linked = found is not target or stat.S_ISLNK(found.st_mode)
    size = target.st_size if regular else 0
    return FileInfo(path, size, target.st_mtime, _version(found), None, linked, regular)


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def _count(base: str) -> tuple[int, int]:
    """Files below a directory and their bytes; links count as files of no bytes and are not followed."""
    files = size_bytes = 0
    todo = [base]
    while todo:
        with contextlib.suppress(FileNotFoundError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    continue
                files += 1
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    size_bytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return files, size_bytes
