"""Local paths, temporary names, and the errors of the operating system."""

from __future__ import annotations

import errno
import os
import uuid

from snapctl.errors import (
    InvalidPathError,
    NoSpaceError,
    PermissionDeniedError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.storage.base import not_found

TEMPORARY_MARK = ".snapctl-tmp-"
"""Between the name of a file that is being written and a random id."""

NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def translate_os_error(error: OSError, path: str) -> StorageError:
    """An error of the operating system as one of ours, with the path in it."""
    if isinstance(error, StorageError):
        return error
    text = f"{path}: {error.strerror or error}"
    if error.errno in NOT_THERE:
        return not_found(path) if error.errno == errno.ENOENT else StorageNotFoundError(text, url=path)
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
