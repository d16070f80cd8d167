"""The newest checkpoint that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from snapctl.checkpoints.checkpoint import Checkpoint
from snapctl.checkpoints.looking import find_checkpoints, look_at_checkpoint, read_manifest
from snapctl.checkpoints.places import Patience, Place, probe
from snapctl.errors import (
    CheckpointNotFoundError,
    ManifestError,
    NoMatchError,
    StorageError,
)
from snapctl.manifest import Manifest
from snapctl.storage import Storage

Chooser = Callable[[Sequence["Checkpoint"]], Sequence["Checkpoint"]]
Judge = Callable[[Storage, Manifest], str | None]
"""Why a checkpoint does not answer, or None if it does; raises `StorageError` where that cannot be told."""


class LatestSearch(msgspec.Struct, frozen=True):
    """The newest checkpoint that answers, and what had to be passed over for it."""

    checkpoint: Checkpoint
    manifest: Manifest
    unparsable: tuple[str, ...] = ()
    """One message for each newer one whose content cannot be parsed, or that the judge turned down."""
    not_looked_at: tuple[str, ...] = ()
    """One message for each newer one (with `compares_all`, for each) that the storage did not let us look at."""


def find_latest(
    place: Place, *, choose: Chooser | None = None, compares_all: bool = False, judge: Judge | None = None
) -> LatestSearch:
    """The newest complete checkpoint (by step) whose manifest can be parsed.

    Args:
        choose: which of the complete checkpoints (handed over with all details, the newest first) answer, in the order
            of preference, instead of all of them from the newest down.
        compares_all: `choose` compares the checkpoints with each other, so that any that cannot be looked at counts,
            and not only newer ones.
        judge: asked about each in turn, until it turns one not down.

    Raises:
        NoMatchError: there are complete checkpoints, and none is chosen, or the judge turned all of these down.
        CheckpointNotFoundError: there is no complete checkpoint.
        ManifestError: there are complete ones, and none can be parsed.
        StorageError: none could be looked at.
    """
    unparsable: list[str] = []
    failures: dict[int, StorageError] = {}
    bad_manifest: ManifestError | None = None
    turned_down = 0
    patience = Patience()
    candidates = (
        _chosen(place, choose, failures, compares_all=compares_all) if choose else _newest_first(place, failures)
    )
    for name, known in candidates:
        if patience.is_over:
            break
        storage = place.storage.child(name)
        try:
            manifest = read_manifest(storage)
            reason = judge(storage, manifest) if judge is not None else None
            if reason is not None:
                turned_down += 1
                unparsable.append(f"{storage.url}: {reason}")
                continue
            found = known or look_at_checkpoint(storage)
        except ManifestError as error:
            bad_manifest = error
            unparsable.append(error.message)
            continue
        except CheckpointNotFoundError:
            continue  # it was deleted meanwhile, or is being saved again
        except StorageError as error:
            failures[int(name)] = error
            patience.note(error)
            continue
        found = msgspec.structs.replace(found, is_link=name in place.linked_names)
        missed = tuple(
            error.message
            for step, error in sorted(failures.items())
            if step > (found.step or 0) or (compares_all and step != found.step)
        )
        return LatestSearch(found, manifest, tuple(unparsable), missed)
    if failures:
        raise failures[max(failures)]
    if turned_down:
        raise NoMatchError(f"{place.storage.url}: none of the complete checkpoints passes: {unparsable[0]}")
    if bad_manifest is not None:
        raise bad_manifest
    raise no_complete_checkpoint(place)


def find_newest_complete(place: Place) -> tuple[str, tuple[StorageError, ...]]:
    """The name of the newest complete checkpoint (by step), whatever its manifest is like; and what could not be
    looked at on the way to it.

    Raises:
        CheckpointNotFoundError: there is no complete checkpoint.
        StorageError: none could be looked at.
    """
    failures: dict[int, StorageError] = {}
    for name, _ in _newest_first(place, failures):
        return name, tuple(failures[step] for step in sorted(failures))
    if failures:
        raise failures[max(failures)]
    raise no_complete_checkpoint(place)


def no_complete_checkpoint(place: Place) -> CheckpointNotFoundError:
    """The error for a save directory without any."""
    hint = f"{len(place.step_names)} incomplete: see snapctl list --all" if place.step_names else None
    return CheckpointNotFoundError(f"{place.storage.url}: no complete checkpoint", hint=hint)


def _newest_first(place: Place, failures: dict[int, StorageError]) -> Iterator[tuple[str, Checkpoint | None]]:
    """The names of complete checkpoints from the newest down, one look at each at the most."""
    for name, manifest in probe(place, place.step_names[::-1]):
        if isinstance(manifest, StorageError):
            failures[int(name)] = manifest
        elif manifest is not None and manifest.size_bytes > 0:
            yield name, None


def _chosen(
    place: Place, choose: Chooser, failures: dict[int, StorageError], *, compares_all: bool
) -> Iterator[tuple[str, Checkpoint | None]]:
    """The chosen ones with all details. What could not be read of one counts where all are compared."""
    found = sorted(find_checkpoints(place), key=lambda checkpoint: -(checkpoint.step or 0))
    complete = [checkpoint for checkpoint in found if checkpoint.state == "complete"]
    failures.update({c.step or 0: c.error for c in found if c.error is not None})
    if compares_all:
        failures.update({c.step or 0: StorageError(c.unread[0], url=c.path) for c in complete if c.unread})
    chosen = choose(complete)
    if complete and not chosen and not failures:
        raise NoMatchError(f"{place.storage.url}: none of {len(complete)} complete checkpoints fits the filter")
    for checkpoint in chosen:
        yield str(checkpoint.step), checkpoint
