"""Work for another process, and how it travels.

A load is sealed: what an executor carries is a plain `io.BytesIO` and the function `pickle.load`, which exist
everywhere. So a scheduler needs no snapctl to pass it on, a worker without it (or with another version) fails in words
instead of dying of something that it cannot decode, and no dashboard, key or log shows what is inside, which are also
the options of the storage.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
from typing import Any

import msgspec

from snapctl.errors import MissingExtraError, SnapctlError, StorageNotFoundError, WorkerError, WorkerSetupError
from snapctl.release import __version__
from snapctl.verification.data_checks import BlobSource, PartResult, check_load
from snapctl.verification.data_plan import Load


class _Call:
    """Becomes, where it is unpickled, the result of the work."""

    def __init__(self, source: BlobSource, load: Load) -> None:
        self._work = pickle.dumps((source, load))

    def __reduce__(self) -> tuple[Any, ...]:
        return perform, (__version__, self._work)


def seal(source: BlobSource, load: Load) -> io.BytesIO:
    """A load on its way; `pickle.load` of it, in any process, is what `check_load` returns."""
    return io.BytesIO(pickle.dumps(_Call(source, load)))


def perform(version: str, work: bytes) -> tuple[PartResult, ...]:
    """Does what was sealed, in the process that unpickles it.

    Args:
        version: of the snapctl that sealed it: nothing of it is decoded by another one.

    Raises:
        WorkerSetupError: this process has another snapctl, or lacks a part that the storage needs.
    """
    if version != __version__:
        raise WorkerSetupError(
            f"the worker {_this_process()} has snapctl {__version__}, and this is {version}",
            hint=install_hint(version),
        )
    source, load = pickle.loads(work)  # noqa: S301 - sealed by ourselves
    try:
        results = check_load(source, load)
    except MissingExtraError as error:
        raise WorkerSetupError(f"the worker {_this_process()}: {error.message}", hint=error.hint) from error
    return tuple(_with_place(result) for result in results)


def explain(error: Exception) -> WorkerSetupError | None:
    """What an error of an executor means that shows a worker without snapctl, or with quite another one; else None."""
    text = str(error)
    if isinstance(error, SnapctlError):
        return None
    if isinstance(error, ImportError) or (isinstance(error, AttributeError) and "get attribute" in text):
        return WorkerSetupError(
            f"a worker has another snapctl than this one ({__version__}), or none: {text}",
            hint=install_hint(__version__),
        )
    return None


def install_hint(version: str) -> str:
    """What to do on the workers."""
    return f"pip install 'snapctl=={version}' on every worker"


def _with_place(result: PartResult) -> PartResult:
    """A blob that was listed elsewhere and is not there for this process: perhaps they do not see the same storage."""
    error = result.error
    if not isinstance(error, StorageNotFoundError):
        return result
    told = WorkerError(
        f"{error.message} on the worker {_this_process()}, and it is listed: do all see the same storage?"
    )
    return msgspec.structs.replace(result, error=told)


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
