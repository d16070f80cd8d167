"""Every error that snapctl raises on purpose.

::

    SnapctlError
    ├── InvalidPathError            (ValueError)         not a path or URL that can be used, or of the wrong kind
    ├── InvalidOptionError          (ValueError)         an argument that makes no sense
    ├── NotFoundError               (FileNotFoundError)
    │   ├── SaveDirNotFoundError                         no such directory, prefix or bucket
    │   ├── CheckpointNotFoundError                      no complete checkpoint answers the request
    │   │   └── NoMatchError                             there are some, and none fits the filter
    │   └── EntryNotFoundError                           no such entry in the manifest
    ├── ManifestError               (ValueError)         a manifest that cannot be used; `kind` says how
    ├── DamagedError                (ValueError)         what is stored contradicts the manifest
    ├── RefusedError                                     a guard said no; nothing was changed
    │   ├── UnsavableError                               the state holds what cannot be saved exactly
    │   ├── OutputExistsError       (FileExistsError)
    │   ├── UnsupportedEntryError                        an entry that cannot be decoded or written
    │   ├── UnpicklingError                              an object that is not on PyTorch's weights-only list
    │   ├── MissingExtraError       (ImportError)        an optional part is not installed
    │   └── WorkerSetupError                             a worker has another snapctl, or none
    ├── StorageError                (OSError)
    │   ├── StorageNotFoundError    (FileNotFoundError)  this object or directory is not there
    │   │   └── BucketNotFoundError
    │   ├── PermissionDeniedError   (PermissionError)    the storage knows who asks, and says no
    │   ├── CredentialsError        (PermissionError)    no credentials, or unusable ones
    │   ├── UnavailableError        (ConnectionError)    network, server or time
    │   ├── PreconditionError       (FileExistsError)    it exists already, or is not the object that was meant
    │   ├── ShortReadError                               fewer bytes than asked for
    │   ├── NoSpaceError
    │   └── WorkerError             (RuntimeError)       those that were to read died, or cannot be reached
    ├── SaveError                   (RuntimeError)       a save came to nothing: no manifest was written
    ├── RestoreError                (RuntimeError)       a checkpoint does not fit the state, or a restore broke off
    │   ├── RestoreDamagedError     (DamagedError)       … since the checkpoint is damaged
    │   └── RestoreRefusedError     (RefusedError)       … since objects would have to be unpickled
    ├── DeadlineError               (TimeoutError)       waited in vain
    │   └── EvaluationTimeoutError                       some evaluators have not marked the checkpoint
    ├── FailureReportedError                             the file that reports a failure has appeared
    └── CommandFailedError                               a command that was to be run for a checkpoint failed

This module knows no exit codes: the command line maps these types to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

ManifestProblem = Literal["unparsable", "invalid", "unsupported-version"]


class SnapctlError(Exception):
    """The root of all errors that snapctl raises on purpose.

    Attributes:
        message: one line: the fact first, with its values.
        hint: what to type or to do next, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    @property
    def facts(self) -> Mapping[str, Any]:
        """What else a program may want to know, by name; values that JSON can hold."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes send their errors, and `__init__` wants more than the `args` that an exception would keep.
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(kind: type[SnapctlError], args: tuple[Any, ...], attributes: dict[str, Any]) -> SnapctlError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidPathError(SnapctlError, ValueError):
    """A path or URL that cannot be used here, or that is of the wrong kind."""


class InvalidOptionError(SnapctlError, ValueError):
    """An argument that makes no sense."""


class NotFoundError(SnapctlError, FileNotFoundError):
    """What was asked for is not there."""


class SaveDirNotFoundError(NotFoundError):
    """No such directory, prefix or bucket."""


class CheckpointNotFoundError(NotFoundError):
    """No complete checkpoint answers the request."""


class NoMatchError(CheckpointNotFoundError):
    """There are complete checkpoints, and none fits the filter."""


class EntryNotFoundError(NotFoundError):
    """No entry of the manifest answers to the name.

    Attributes:
        candidates: paths that were meant, perhaps: several hits, or the nearest names.
    """

    def __init__(self, message: str, *, candidates: tuple[str, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.candidates = candidates

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"candidates": list(self.candidates)}


class ManifestError(SnapctlError, ValueError):
    """A manifest that cannot be used.

    Attributes:
        kind: ``unparsable`` (neither JSON nor YAML: cut off, or something else altogether), ``invalid``
            (a document, but not a manifest) or ``unsupported-version``.
    """

    def __init__(self, message: str, *, kind: ManifestProblem, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind: ManifestProblem = kind

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"kind": self.kind}


class DamagedError(SnapctlError, ValueError):
    """What is stored contradicts the manifest: a hole, an overlap, a short blob, a wrong checksum.

    Attributes:
        kind: one of the problem kinds of ``snapctl verify`` (``short-blob``, ``hole``, …).
        entry: the manifest path of the entry, or None.
        blob: the blob's location in the checkpoint, or None.
    """

    def __init__(
        self, message: str, *, kind: str, entry: str | None = None, blob: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.entry = entry
        self.blob = blob

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "entry": self.entry, "blob": self.blob}


class RefusedError(SnapctlError):
    """A guard said no; nothing was changed."""


class UnsavableError(RefusedError):
    """A training state holds something that cannot be saved exactly; nothing was written or deleted, on any rank."""


class OutputExistsError(RefusedError, FileExistsError):
    """The output file exists and was not to be replaced."""


class UnsupportedEntryError(RefusedError):
    """An entry of a type, dtype or serializer that this version cannot decode, or that the output cannot hold."""


class UnpicklingError(RefusedError):
    """An object that would have to be unpickled, which can run code."""


class MissingExtraError(RefusedError, ImportError):
    """An optional part of snapctl is not installed."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(f"{what} is not installed", hint=f"pip install 'snapctl[{extra}]'")
        self.extra = extra


class WorkerSetupError(RefusedError):
    """A worker that was to read has another snapctl than this one, or none, or lacks an optional part of it."""


class StorageError(SnapctlError, OSError):
    """The storage did not do what was asked.

    Attributes:
        url: what it was about, as it is printed.
    """

    def __init__(self, message: str, *, url: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.url = url


class StorageNotFoundError(StorageError, FileNotFoundError):
    """This object or directory is not there."""


class BucketNotFoundError(StorageNotFoundError):
    """The bucket itself is not there."""


class PermissionDeniedError(StorageError, PermissionError):
    """The storage knows who asks, and says no."""


class CredentialsError(StorageError, PermissionError):
    """There are no credentials, or unusable ones."""


class UnavailableError(StorageError, ConnectionError):
    """The network, the server or its patience gave out; the same request may succeed later."""


class PreconditionError(StorageError, FileExistsError):
    """It exists already, or is no longer the object that was meant."""


class ShortReadError(StorageError):
    """Fewer bytes came than were asked for.

    Attributes:
        expected_bytes, found_bytes: the two lengths.
    """

    def __init__(self, message: str, *, expected_bytes: int, found_bytes: int, url: str = "") -> None:
        super().__init__(message, url=url)
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes


class NoSpaceError(StorageError):
    """The disk is full, or a quota or file size limit is reached."""


class WorkerError(StorageError, RuntimeError):
    """The workers that were to read something died over it, or cannot be reached any more.

    Attributes:
        is_final: nothing more will be done by any of them.
    """

    def __init__(self, message: str, *, is_final: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.is_final = is_final


class SaveError(SnapctlError, RuntimeError):
    """A save came to nothing, on all ranks alike.

    Attributes:
        ranks: the ranks that failed or fell silent, as far as this rank knows.
        unknown: contact was lost at the very end: the checkpoint may be complete all the same.
    """

    def __init__(
        self, message: str, *, ranks: tuple[int, ...] = (), unknown: bool = False, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks
        self.unknown = unknown

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"ranks": list(self.ranks), "unknown": self.unknown}


class RestoreError(SnapctlError, RuntimeError):
    """A restore came to nothing, or broke off, on all ranks alike.

    Attributes:
        problems: everything that was found, a line each; the message holds them too.
        ranks: the ranks that found something.
        loaded: names in the state that were loaded in full before it broke off.
        incomplete: names whose tensors may hold old and new values, side by side. With both empty, nothing of the
            state was touched.
    """

    def __init__(
        self,
        message: str,
        *,
        problems: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        loaded: tuple[str, ...] = (),
        incomplete: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> None:
        SnapctlError.__init__(self, message, hint=hint)  # not those of a DamagedError
        self.problems = problems
        self.ranks = ranks
        self.loaded = loaded
        self.incomplete = incomplete

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "problems": list(self.problems),
            "ranks": list(self.ranks),
            "loaded": list(self.loaded),
            "incomplete": list(self.incomplete),
        }


class RestoreDamagedError(RestoreError, DamagedError):
    """A restore found the checkpoint damaged; `kind`, `entry` and `blob` are those of the first problem."""

    kind: str = ""
    entry: str | None = None
    blob: str | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**RestoreError.facts.fget(self), **DamagedError.facts.fget(self)}  # type: ignore[attr-defined]


class RestoreRefusedError(RestoreError, RefusedError):
    """A restore would have had to unpickle objects; nothing was touched."""


class DeadlineError(SnapctlError, TimeoutError):
    """What was waited for did not come in time.

    Attributes:
        step: the step that was waited for, or found; None where none was.
        done: partitions that have marked it.
        missing: partitions that have not.
    """

    def __init__(
        self, message: str, *, step: int | None = None, done: tuple[str, ...] = (), missing: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.step = step
        self.done = done
        self.missing = missing

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"step": self.step, "done": list(self.done), "missing": list(self.missing)}


class EvaluationTimeoutError(DeadlineError):
    """Some evaluators have not marked the checkpoint in time; `missing` names their partitions."""


class FailureReportedError(SnapctlError):
    """The file has appeared by which somebody reports that no checkpoint will come."""


class CommandFailedError(SnapctlError):
    """A command that was run for a checkpoint failed.

    Attributes:
        returncode: as `subprocess` has it: negative for a signal.
    """

    def __init__(self, message: str, *, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"returncode": self.returncode}
