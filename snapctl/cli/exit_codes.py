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


MEANINGS = {
    "0": "done; the answer is yes",
    "1": "the answer is no: damage found, not evaluated, too old, no checkpoint fits the filter, the manifest cannot "
    "be parsed, the file of --fail-if is there, show --diff found differences",
    "2": "the command line is wrong",
    "3": "not there: no such save directory, no complete checkpoint, no such step or entry",
    "4": "the storage failed and nothing could be done: permission, credentials, network, I/O, no space",
    "5": "done in part: some deletions failed, some checkpoints could not be read, a command of wait --exec failed",
    "6": "refused: a guard said no, a claim is held, the output file exists, an object would need unpickling, an "
    "optional part is not installed (also on a worker), the answer at the prompt was no or nobody could be asked",
    "70": "a bug in the tool; with a traceback",
    "124": "timed out waiting",
    "130, 143": "interrupted, terminated",
    "141": "the reader of the output went away",
}
"""For the documentation."""

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
