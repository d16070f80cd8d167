"""What verifying a checkpoint finds, as values."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from snapctl.errors import DamagedError, SnapctlError

Level: TypeAlias = Literal["structure", "size", "data"]
Verdict: TypeAlias = Literal["sound", "damaged", "unreadable", "unverifiable"]
Kind: TypeAlias = Literal[
    "missing-blob",
    "short-blob",
    "bad-range",
    "hole",
    "overlap",
    "size-mismatch",
    "outside",
    "undecodable",
    "checksum",
    "not-finite",
    "missing-entry",
    "unreadable-manifest",
]


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with a checkpoint."""

    kind: str
    """One of `Kind`."""
    entry: str | None
    """The manifest path of the entry that suffers from it, the first of several."""
    blob: str | None
    """The location of the blob."""
    detail: str
    """What was expected and what was found."""


class Unchecked(msgspec.Struct, frozen=True):
    """An entry that could not be judged; that is no damage."""

    entry: str
    reason: str


class NonFinite(NamedTuple):
    """Elements that are no finite numbers."""

    nan: int = 0
    infinite: int = 0
    elements: int = 0
    """Of how many."""

    def plus(self, other: NonFinite) -> NonFinite:
        return NonFinite(self.nan + other.nan, self.infinite + other.infinite, self.elements + other.elements)


class CheckpointReport(msgspec.Struct, frozen=True):
    """What was found of one checkpoint."""

    step: int | None
    path: str
    """As it is printed."""
    level: Level
    verdict: Verdict | None
    """None: it could not be checked, `error` says why."""
    blobs: int = 0
    """Blobs of which the manifest needs at least a byte."""
    bytes_read: int = 0
    """Of blobs."""
    problems: tuple[Problem, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    warnings: tuple[str, ...] = ()
    error: SnapctlError | None = None
    """Why it, or a part of it, could not be checked: a `CheckpointNotFoundError` if it is gone, else a
    `StorageError`."""

    @property
    def is_bad(self) -> bool:
        """Damaged, or its manifest cannot be read."""
        return self.verdict in ("damaged", "unreadable")


def problem_of(error: DamagedError) -> Problem:
    """An error of the tensor reader as a problem; its text without the name of the entry, which stands beside it."""
    prefix = f"{error.entry}: "
    return Problem(error.kind, error.entry, error.blob, error.message.removeprefix(prefix))
