"""A file of this machine that gets its name when it is whole, and what is left of those that never got theirs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable

from snapctl.storage.local_paths import TEMPORARY_MARK, temporary_name

LITTER_SECONDS = 86_400.0
"""An unfinished file to which nothing was written for so long belongs to nobody any more."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS}
_TEMPORARY = re.compile(re.escape(TEMPORARY_MARK) + r"[0-9a-f]{12}\Z")
_COPY_BYTES = 8 << 20


class UnfinishedFile:
    """A new file for a place where it does not stand yet; to be left (``with``) once it has its name, or has not.

    Where the file system can do that it has no name at all until then, so that not even ``kill -9`` leaves anything
    behind; elsewhere a temporary one beside its own.
    """

    def __init__(self, full: str) -> None:
        """
        Args:
            full: where it is to stand.
        """
        self._full = full
        self._temporary = ""
        self._copied: os.stat_result | None = None
        self.descriptor = _open_without_name(os.path.dirname(full))
        if self.descriptor < 0:
            self._temporary = temporary_name(full)
            self.descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> UnfinishedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of it."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.descriptor, view[: 1 << 30]) :]

    def status(self) -> os.stat_result:
        """Of the file that has the name, or will have it."""
        return self._copied or os.fstat(self.descriptor)

    def create(self) -> None:
        """Gives it its name, which nothing may have yet.

        Raises:
            FileExistsError: something has.
        """
        self._link(self._full)
        self.discard()

    def replace(self, check: Callable[[], None] | None = None) -> None:
        """Gives it its name, in the place of what may stand there.

        Args:
            check: called directly before; what it raises keeps the file that stands there.
        """
        if not self._temporary:
            if check is None:
                with contextlib.suppress(FileExistsError):
                    self._link(self._full)
                    return
            temporary = temporary_name(self._full)
            self._link(temporary)
            self._temporary = temporary
        if check is not None:
            check()
        os.replace(self._temporary, self._full)
        self._temporary = ""

    def discard(self) -> None:
        """Takes the temporary name away, if it has one; the descriptor stays open."""
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def _link(self, target: str) -> None:
        try:
            if self._temporary:
                os.link(self._temporary, target)
            else:  # links are followed only where a directory is given, though an absolute path does not need it
                source = f"/proc/self/fd/{self.descriptor}"
                os.link(source, target, src_dir_fd=self.descriptor, follow_symlinks=True)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._copy(target)

    def _copy(self, target: str) -> None:
        """For a file system without links."""
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            done = 0
            while block := os.pread(self.descriptor, _COPY_BYTES, done):
                done += os.write(copy, block)
            os.fchmod(copy, stat.S_IMODE(os.fstat(self.descriptor).st_mode))
            os.fsync(copy)
            self._copied = os.fstat(copy)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(copy)


def _open_without_name(directory: str) -> int:
    """A descriptor of a file without a name, or -1 where there is no such thing, or no way to name it later."""
    try:
        descriptor = os.open(directory or ".", os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o666)
    except (OSError, AttributeError):  # an error that is not about this comes again with the name
        return -1
    if os.path.lexists(f"/proc/self/fd/{descriptor}"):
        return descriptor
    os.close(descriptor)
    return -1


def remove_litter(full: str, now: float, *, of_others: bool = False) -> None:
    """Removes what was to become a file, and was left unfinished by writers that died; failures are nobody's business.

    Args:
        now: by the clock of that file system.
        of_others: also what was to become another file of the same directory.
    """
    directory, base = os.path.split(temporary_name(full))
    beginning = base[: base.rindex(TEMPORARY_MARK) + len(TEMPORARY_MARK)]
    with contextlib.suppress(OSError), os.scandir(directory or ".") as entries:
        for entry in entries:
            if not _TEMPORARY.search(entry.name) or not (of_others or entry.name.startswith(beginning)):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and now - found.st_mtime > LITTER_SECONDS:
                    os.unlink(entry.path)
