"""What stands in the way of a restore, put together from all ranks, and the one error that says it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from snapctl.errors import (
    DamagedError,
    RefusedError,
    RestoreDamagedError,
    RestoreError,
    RestoreRefusedError,
    SnapctlError,
    StorageError,
    UnpicklingError,
)
from snapctl.ranks import describe as in_words
from snapctl.restoring.plan import Problem

MAX_LISTED = 1000
"""Problems in one message; `RestoreError.problems` has them all."""

Found: TypeAlias = "tuple[Problem, tuple[int, ...]]"
"""A problem, and the ranks that have it."""

_HINTS = {
    "own": "name it in replicated= if it is the same on all ranks, or leave it out of the state",
    "pickle": "restore(…, allow_pickle=True) unpickles them, which runs whatever code the checkpoint says: "
    "only if you trust everybody who could write to it",
}


def as_problem(error: BaseException, path: str) -> Problem:
    """An error as something that can be told to other ranks."""
    if isinstance(error, DamagedError):
        return Problem("damaged", path, error.message, error.kind, error.entry, error.blob)
    if isinstance(error, RefusedError):
        return Problem("pickle" if isinstance(error, UnpicklingError) else "unsupported", path, error.message)
    if isinstance(error, StorageError):
        return Problem("storage", path, error.message)
    prefix = f"{path}: " if path else ""
    return Problem("failed", path, error.message if isinstance(error, SnapctlError) else prefix + in_words(error))


def blob_damage(kind: str, entry: str, location: str, text: str) -> Problem:
    """Something that is wrong with a blob, whoever reads it."""
    return Problem("damaged", "", f"{entry}: {location} {text}", kind, entry, location)


def merge_problems(by_rank: Sequence[Sequence[Problem]]) -> list[Found]:
    """The problems of all ranks, each once, in the order of the ranks."""
    merged: dict[Problem, list[int]] = {}
    for rank, found in enumerate(by_rank):
        for problem in found:
            merged.setdefault(problem, []).append(rank)
    return [(problem, tuple(ranks)) for problem, ranks in merged.items()]


def make_error(
    path: str, found: Sequence[Found], *, world_size: int, loaded: tuple[str, ...], incomplete: tuple[str, ...]
) -> RestoreError:
    """The error that says all of it: a `RestoreDamagedError` or `RestoreRefusedError` where it is nothing else.

    Args:
        path: of the checkpoint.
        loaded: names in the state that were loaded in full.
        incomplete: names of which some tensors may have been.
    """
    lines = []
    for problem, ranks in found:
        who = f" (rank {', '.join(map(str, ranks))})" if ranks and len(ranks) != world_size else ""
        lines.append(problem.text + who)
    shown = "; ".join(lines[:MAX_LISTED]) + (f"; … ({len(lines)} in all)" if len(lines) > MAX_LISTED else "")
    state = "the state is as it was"
    if loaded or incomplete:
        state = f"loaded: {', '.join(loaded) or 'nothing'}"
        state += f"; with old and new values in it: {', '.join(incomplete)}" if incomplete else ""
    kinds = {problem.kind for problem, _ in found}
    types: dict[frozenset[str], type[RestoreError]] = {
        frozenset({"damaged"}): RestoreDamagedError,
        frozenset({"pickle"}): RestoreRefusedError,
    }
    error = types.get(frozenset(kinds), RestoreError)(
        f"{path} was not restored ({state}): {shown}",
        problems=tuple(lines),
        ranks=tuple(sorted({rank for _, ranks in found for rank in ranks})),
        loaded=loaded,
        incomplete=incomplete,
        hint="; ".join(hint for kind, hint in _HINTS.items() if kind in kinds) or None,
    )
    if isinstance(error, RestoreDamagedError):
        first = found[0][0]
        error.kind, error.entry, error.blob = first.damage, first.entry, first.blob
    return error
