"""Pruning all save directories below some roots: only by a plan that was made, and looked at, before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from snapctl.checkpoints import Place, classify, not_a_save_dir
from snapctl.errors import CredentialsError, InvalidOptionError, InvalidPathError, SnapctlError, StorageError
from snapctl.pruning.plan_file import PlanLine
from snapctl.pruning.policy import DeleteLimit, Policy
from snapctl.pruning.pruner import Prepared, Progress, ignore_progress, prepare_lines, prepare_places
from snapctl.save_dirs.opening import open_all_below
from snapctl.storage import Storage, open_storage


def prepare_below(
    roots: Sequence[str],
    policy: Policy,
    options: Mapping[str, Any],
    *,
    now: float | None = None,
    on_look: Progress = ignore_progress,
) -> tuple[list[Prepared], list[SnapctlError]]:
    """Plans, for looking at, for every save directory below some roots; and what could not be looked at.

    Args:
        now: rehearse as if it were that time.

    Raises:
        SaveDirNotFoundError, InvalidPathError, StorageError: as `open_all_below`, or nothing at all could be planned.
    """
    found = open_all_below(roots, options)
    missed: list[StorageError] = []
    prepared = prepare_places(
        found.places, policy, dry_run=True, now=now, on_look=on_look, roots=found.roots, failures=missed
    )
    if not prepared:
        raise missed[0]
    return prepared, [*map(StorageError, found.problems), *missed]


def prepare_planned(
    roots: Sequence[str],
    lines: Sequence[PlanLine],
    options: Mapping[str, Any],
    *,
    max_delete: DeleteLimit | None,
    dry_run: bool,
) -> tuple[list[Prepared], list[SnapctlError]]:
    """`prepare_from_lines` for a plan of all save directories below some roots; and those that cannot be had now.

    Raises:
        InvalidOptionError, InvalidPathError, CredentialsError: as `_open_planned` and `prepare_lines`.
        SnapctlError: nothing at all could be prepared.
    """
    storages, places, known, failures = _open_planned(roots, lines, options)
    missed: list[StorageError] = []
    prepared = prepare_lines(
        places, known, options, max_delete=max_delete, dry_run=dry_run, roots=storages, failures=missed
    )
    failures += missed
    if not prepared and failures:
        raise failures[0]
    return prepared, failures


def _open_planned(
    roots: Sequence[str], lines: Sequence[PlanLine], options: Mapping[str, Any]
) -> tuple[list[Storage], list[Place], list[PlanLine], list[SnapctlError]]:
    """What a plan that was made of roots is carried out on.

    Returns:
        the roots; the save directories that the plan names, each once; the lines that speak of these; and why the other
        save directories of the plan cannot be had now: gone, or not to be listed.

    Raises:
        InvalidOptionError: a save directory of the plan does not lie below a root.
        InvalidPathError: one of them is a checkpoint now.
        CredentialsError: the storage does not know who asks.
    """
    storages = [open_storage(root, options) for root in roots]
    places: dict[str, Place] = {}
    failures: list[SnapctlError] = []
    for url in dict.fromkeys(line.save_dir for line in lines):
        storage = _open_below(storages, url)
        try:
            place = classify(storage)
        except (CredentialsError, InvalidPathError):
            raise
        except SnapctlError as error:
            failures.append(error)
            continue
        if place.kind == "checkpoint":
            raise not_a_save_dir(storage)
        places[url] = place
    return storages, list(places.values()), [line for line in lines if line.save_dir in places], failures


def _open_below(roots: Sequence[Storage], url: str) -> Storage:
    for root in roots:
        base = root.url.rstrip("/") + "/"
        if url == root.url:
            return root
        if url.startswith(base):
            try:
                storage = root.child(url[len(base) :])
            except InvalidPathError:
                break
            if _is_really_below(storage, root):
                return storage
    raise InvalidOptionError(
        f"{url}: is in the plan, and does not lie below {', '.join(root.url for root in roots)}",
        hint="a plan is carried out on the roots that it was made of",
    )


def _is_really_below(storage: Storage, root: Storage) -> bool:
    """No symbolic link leads out of the root: the search for save directories follows none."""
    if storage.scheme != "file":
        return True
    real = os.path.realpath(root.url)
    return os.path.realpath(storage.url) == os.path.join(real, os.path.relpath(storage.url, root.url))
