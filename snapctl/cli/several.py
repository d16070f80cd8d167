"""What commands share that take several save directories: how one that fails leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from snapctl.checkpoints import Place, open_save_dir
from snapctl.cli.exit_codes import ExitCode, worst
from snapctl.errors import InvalidPathError, SnapctlError
from snapctl.save_dirs.opening import open_all_below

Item = TypeVar("Item")
Result = TypeVar("Result")


def open_several(
    paths: Sequence[str],
    options: Mapping[str, Any],
    *,
    recursive: bool,
    find: Callable[[str, Mapping[str, Any]], Place] = open_save_dir,
) -> tuple[list[tuple[str, Place | SnapctlError]], tuple[str, ...]]:
    """Save directories with their paths, or why one of them cannot be had; and what else could not be looked at.

    Args:
        find: how one that is named is opened.

    Raises:
        InvalidPathError: one of the paths is none, or a checkpoint: the command line is wrong.
        SaveDirNotFoundError, StorageError: with `recursive`, as `open_all_below`.
    """
    if recursive:
        found = open_all_below(paths, options)
        return [(place.storage.url, place) for place in found.places], found.problems
    opened = [(path, _open(path, options, find)) for path in paths]
    return [(path if isinstance(place, SnapctlError) else place.storage.url, place) for path, place in opened], ()


def _open(
    path: str, options: Mapping[str, Any], find: Callable[[str, Mapping[str, Any]], Place]
) -> Place | SnapctlError:
    try:
        return find(path, options)
    except InvalidPathError:
        raise
    except SnapctlError as error:
        return error


def collect_all_errors(func: Callable[[Item], Result]) -> Callable[[Item], Result | SnapctlError]:
    """`func`, but an error is returned instead of raised."""

    def call(item: Item) -> Result | SnapctlError:
        try:
            return func(item)
        except SnapctlError as error:
            return error

    return call


_WORST_FIRST = (ExitCode.STORAGE, ExitCode.REFUSED, ExitCode.NO, ExitCode.NOT_FOUND)


def code_of_several(answers: Sequence[ExitCode], failures: Sequence[ExitCode], *, is_partial: bool = False) -> ExitCode:
    """The exit code of a command over several save directories.

    Args:
        answers: of those that got an answer, whatever it is.
        failures: of those that got none. If none got one, the worst of these; otherwise a no stays one, and anything
            else means that the command was done in part.
        is_partial: something could not even be listed.
    """
    if failures and not answers:
        return next((code for code in _WORST_FIRST if code in failures), failures[0])
    codes = [*answers, *(code if code is ExitCode.NO else ExitCode.PARTIAL for code in failures)]
    return worst(*codes, *([ExitCode.PARTIAL] if is_partial else []))
