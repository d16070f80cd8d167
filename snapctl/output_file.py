"""A local file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

from snapctl.errors import InvalidPathError, OutputExistsError, PermissionDeniedError, StorageError
from snapctl.storage import split_url
from snapctl.storage.local_paths import NOT_THERE, absolute_path, translate_os_error
from snapctl.storage.unfinished import UnfinishedFile, remove_litter

FLUSH_BYTES = 64 << 20
"""From so many unflushed bytes on the disk is set to work while we go on: the end, and an interrupt, wait for less."""
MAX_UNFLUSHED_BYTES = 512 << 20
SMALL_WRITE_BYTES = 256 << 10
_MAX_WRITE_BYTES = 1 << 30


class Sink(Protocol):
    """What an exporter writes to: a `NewFile`, or standard output."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def check_output_path(path: str, *, force: bool) -> str:
    """Where an output file goes, links followed, looked at before anything is read.

    Returns:
        Its absolute path.

    Raises:
        OutputExistsError: it is there, and not to be replaced.
        InvalidPathError: it is a directory, something else that is no file, or a URL.
        PermissionDeniedError, StorageError: its directory is not there, or may not be written to.
    """
    if split_url(path)[0] != "file":
        raise InvalidPathError(f"{path}: the output must be a local file")
    shown = absolute_path(split_url(path)[1])
    if path.endswith(("/", "/.")):
        raise InvalidPathError(f"{path}: names a directory, not a file")
    full = os.path.realpath(shown)
    try:
        found = os.stat(full)
    except FileNotFoundError:
        found = None
    except OSError as error:
        if error.errno in NOT_THERE:  # a name that is too long, a file on the way: no answer to a question is missing
            raise StorageError(f"{shown}: {error.strerror}", url=shown) from error
        raise translate_os_error(error, shown) from error
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise InvalidPathError(f"{shown}: is {kind}")
    parent = os.path.dirname(full)
    if not os.path.isdir(parent):
        raise StorageError(f"{parent}: no such directory", url=parent, hint=f"mkdir -p {parent}")
    if found is not None and not force:
        raise OutputExistsError(f"{shown}: exists already", hint="--force replaces it")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionDeniedError(f"{parent}: permission denied", url=parent)
    return full


class NewFile:
    """Written beside its place, without a name where the file system can do that; `commit` gives it its name.

    ``with NewFile(path) as file: file.write(…); file.commit()``. The permissions of a file that it replaces are kept.
    Errors of the disk are raised as `StorageError`, with the name that the user knows.
    """

    def __init__(self, path: str) -> None:
        """
        Args:
            path: absolute, as `check_output_path` returns it.
        """
        self.path = path
        self.size_bytes = 0
        self._file: UnfinishedFile | None = None
        self._descriptor = -1
        self._flusher: _Flusher | None = None
        self._small = bytearray()

    def __enter__(self) -> NewFile:
        with self._errors():
            self._file = UnfinishedFile(self.path)
            self._descriptor = self._file.descriptor
            with contextlib.suppress(OSError):  # a file system without permissions, or a file of somebody else's
                os.fchmod(self._descriptor, stat.S_IMODE(os.stat(self.path).st_mode))
        return self

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes all of it; little pieces are put together first."""
        view = memoryview(data).cast("B")
        if len(view) < SMALL_WRITE_BYTES:
            self._small += view
            if len(self._small) >= SMALL_WRITE_BYTES:
                self._write_small()
        else:
            self._write_small()
            self._write(view)
        return len(view)

    def _write_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._write(memoryview(small))

    def _write(self, view: memoryview) -> None:
        with self._errors():
            while view:
                written = os.write(self._descriptor, view[:_MAX_WRITE_BYTES])
                view = view[written:]
                self._advance(written)

    def append(self, copy: Callable[[int], int]) -> int:
        """Lets a function append to the descriptor that it is given.

        Args:
            copy: returns how many bytes it appended; its errors are its own.
        """
        self._write_small()
        copied = copy(self._descriptor)
        with self._errors():
            self._advance(copied)
        return copied

    def _advance(self, written: int) -> None:
        self.size_bytes += written
        if self.size_bytes >= FLUSH_BYTES:
            if self._flusher is None:
                self._flusher = _Flusher(self._descriptor)
            self._flusher.advance(self.size_bytes)

    def flush(self) -> None:
        """Nothing has to be flushed before `commit`."""

    def commit(self) -> None:
        """Makes the content durable and gives the file its name."""
        self._write_small()
        with self._errors():
            if self._flusher is not None:
                self._flusher.stop()
                self._flusher = None
            os.fsync(self._descriptor)
            assert self._file is not None
            self._file.replace()
            remove_litter(self.path, self._file.status().st_mtime)
        with contextlib.suppress(OSError):  # not every file system can, and the data itself is durable already
            directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.discard()
        if self._flusher is not None:
            self._flusher.abandon()
        elif self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate_os_error(error, self.path) from error


class _Flusher:
    """A thread that flushes what has been written, so that reading, writing and the disk work at the same time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._flushed = 0
        self._state = "running"
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="snapctl-flush", daemon=True)
        self._thread.start()

    def advance(self, written: int) -> None:
        """So many bytes have been written. Waits while far too many of them are not flushed."""
        with self._changed:
            self._written = written
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or written - self._flushed <= MAX_UNFLUSHED_BYTES)
            if self._error is not None:
                raise self._error

    def stop(self) -> None:
        """Ends the thread, and raises what went wrong in it."""
        self._end("stopped")
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the thread without waiting for the disk; the descriptor is closed by it."""
        self._end("abandoned")

    def _end(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _run(self) -> None:
        while (upto := self._next()) is not None:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._state != "running")
                break
            with self._changed:
                self._flushed = upto
                self._changed.notify_all()
        if self._state == "abandoned":
            os.close(self._descriptor)

    def _next(self) -> int | None:
        """How far the file is written once there is enough to flush; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "running" or self._written - self._flushed >= FLUSH_BYTES)
            return self._written if self._state == "running" else None
