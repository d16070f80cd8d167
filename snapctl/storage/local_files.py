"""Files and directories of this machine, one at a time: opened, written, locked, looked at."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator

from snapctl.errors import (
    PreconditionError,
    StorageError,
    UnavailableError,
)
from snapctl.storage.base import check_length
from snapctl.storage.local_paths import NOT_THERE, temporary_name, translate_os_error
from snapctl.storage.unfinished import UnfinishedFile
from snapctl.storage.values import FileInfo

LOCK_SECONDS = 10.0
"""Whoever holds the lock of a directory for longer (for two system calls) has been stopped."""


class OpenDirs:
    """Descriptors of the directories below one, opened without following links, as few as will do at a time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: list[tuple[str, int]] = []

    def __enter__(self) -> OpenDirs:
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


def check_version(full: str, version: str) -> None:
    if file_version(os.lstat(full)) != version:
        raise PreconditionError(f"{full}: is no longer the file that was listed", url=full)


def replace_version(file: UnfinishedFile, full: str, version: str) -> None:
    """Puts a file in the place of one that has this version; the directory is locked between the look and the act."""

    def check() -> None:
        try:
            check_version(full, version)
        except FileNotFoundError as error:
            raise PreconditionError(f"{full}: is no longer there", url=full) from error

    with directory_lock(os.path.dirname(full)):
        file.replace(check)


@contextlib.contextmanager
def directory_lock(directory: str) -> Iterator[None]:
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


def time_of_new_file(directory: str) -> float:
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
def open_regular(full: str) -> Iterator[int]:
    """A descriptor of a regular file; anything else (a FIFO would block for ever) is refused."""
    descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{full}: not a regular file", url=full)
        yield descriptor
    finally:
        os.close(descriptor)


def fill_buffer(descriptor: int, start: int, buffer: memoryview, full: str) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], start + done)
        if got == 0:  # it was cut while we read
            check_length(done, len(buffer), url=full, start=start)
        done += got


def find_quietly(full: str, path: str) -> FileInfo | StorageError | None:
    try:
        found = os.lstat(full)
        target = os.stat(full) if stat.S_ISLNK(found.st_mode) else found
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        return translate_os_error(error, full)
    return None if stat.S_ISDIR(target.st_mode) else file_info(path, found, target)


def is_real_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a loop of links leads nowhere; a target that may not be looked at can be one
        return error.errno not in NOT_THERE


def files_inside(directory: os.DirEntry[str]) -> list[FileInfo]:
    """The files of a directory; none if it has vanished since it was listed."""
    found = []
    try:
        with os.scandir(directory.path) as entries:
            for entry in entries:
                path = f"{directory.name}/{entry.name}"
                if not is_real_dir(entry) and (info := entry_info(entry, path)) is not None:
                    found.append(info)
    except FileNotFoundError:
        return []
    return found


def entry_info(entry: os.DirEntry[str], path: str) -> FileInfo | None:
    """None for what vanished between the listing and the look."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(found.st_mode):
        return file_info(path, found, found)
    try:
        target = entry.stat()
    except OSError:  # it leads nowhere
        target = found
    return file_info(path, found, target)


def file_info(path: str, found: os.stat_result, target: os.stat_result) -> FileInfo:
    regular = stat.S_ISREG(target.st_mode)
    linked = found is not target or stat.S_ISLNK(found.st_mode)
    size = target.st_size if regular else 0
    return FileInfo(path, size, target.st_mtime, file_version(found), None, linked, regular)


def file_version(found: os.stat_result) -> str:
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def count_files(base: str) -> tuple[int, int]:
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
