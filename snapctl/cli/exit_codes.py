"""What the exit codes mean, and which error ends with which: the only table of them."""

from __future__ import annotations

from enum import IntEnum

from snapctl import errors


class ExitCode(IntEnum):
    """Scripts must take any other number as a failure."""

    OK = 0
    NO = 1
    """The answer is no."""
    USAGE = 2
    NOT_FOUND = 3
    STORAGE = 4
    """The storage failed, and nothing could be done."""
    PARTIAL = 5
    REFUSED = 6
    BUG = 70
    TIMED_OUT = 124
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143


PRECEDENCE = (
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
    ExitCode.CLOSED_PIPE,
    ExitCode.BUG,
    ExitCode.STORAGE,
    ExitCode.REFUSED,
    ExitCode.NO,
    ExitCode.PARTIAL,
    ExitCode.OK,
)
"""When several apply, the first of these."""

# The first that fits; a class stands before those that it derives from.
_BY_TYPE: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.InvalidPathError, ExitCode.USAGE),
    (errors.InvalidOptionError, ExitCode.USAGE),
    (errors.NoMatchError, ExitCode.NO),
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.StorageNotFoundError, ExitCode.NOT_FOUND),
    (errors.ManifestError, ExitCode.NO),
    (errors.DamagedError, ExitCode.NO),
    (errors.RefusedError, ExitCode.REFUSED),
    (errors.StorageError, ExitCode.STORAGE),
    (errors.DeadlineError, ExitCode.TIMED_OUT),
    (errors.FailureReportedError, ExitCode.NO),
    (errors.CommandFailedError, ExitCode.PARTIAL),
)


def code_of(error: errors.SnapctlError) -> ExitCode:
    """The exit code of an error that ends a command."""
    return next((code for kind, code in _BY_TYPE if isinstance(error, kind)), ExitCode.BUG)


def worst(*codes: ExitCode) -> ExitCode:
    """The one of several codes that goes out."""
    return min(codes, key=lambda code: PRECEDENCE.index(code) if code in PRECEDENCE else -1, default=ExitCode.OK)
