"""Claims: one of many evaluators takes a partition of a checkpoint, and keeps it until its time is up.

A claim is a file ``evaled_by/<P>_CLAIM.<n>`` that is created exclusively and never overwritten; the highest n rules.
Taking over, renewing and releasing are n+1. Of all who see n as dead the storage lets one create n+1. How old a claim
is, is the storage's time now less the storage's time of the claim: no two machines' clocks are compared.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapctl.checkpoints import incomplete, open_checkpoint
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    PreconditionError,
    RefusedError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import (
    DEFAULT_CLAIM_TTL_SECONDS,
    DELETING_NAME,
    MARKER_DIR,
    MAX_CLAIM_TTL_SECONDS,
    Claim,
    check_partition,
    claim_of_path,
    claim_path,
    format_claim,
    format_time,
    is_live,
    parse_claim,
    partition_of_marker,
)
from snapctl.storage import FileInfo, Storage

DELETION_SECONDS = 3600.0
"""An announced deletion that is younger is at work; an older one was interrupted before it began."""
_ATTEMPTS = 5


class ClaimRefusedError(RefusedError):
    """A partition cannot be claimed, or is not held by who says so.

    Attributes:
        partition: which one.
        ruling: the claim that rules instead; None where there is none, or where the partition is marked.
    """

    def __init__(self, message: str, *, partition: str, ruling: Claim | None = None) -> None:
        super().__init__(message)
        self.partition = partition
        self.ruling = ruling

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "partition": self.partition,
            "claimed_by": self.ruling.owner if self.ruling else None,
            "claim_expires_at": format_time(self.ruling.expires_at) if self.ruling else None,
        }


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a partition stands at one look."""

    marked: bool
    ruling: Claim | None
    file: FileInfo | None
    """That of the ruling claim."""


def new_owner() -> str:
    """A fresh random identity of a claimer."""
    return uuid.uuid4().hex[:16]


def require_complete(storage: Storage) -> None:
    """Raises `CheckpointNotFoundError` unless the checkpoint is complete."""
    manifest = storage.find_file(MANIFEST_NAME)
    if manifest is None or manifest.size_bytes == 0:
        raise incomplete(storage)


def take_claim(
    storage: Storage, partition: str, *, owner: str | None = None, ttl_seconds: float = DEFAULT_CLAIM_TTL_SECONDS
) -> Claim:
    """Claims a partition of a checkpoint for evaluation; of many who try, one succeeds.

    Args:
        storage: the checkpoint's directory.
        owner: who claims; None: a fresh random identity.
        ttl_seconds: for how long, at most 7 days.

    Raises:
        ClaimRefusedError: it is claimed (by `owner` too), or marked already, or somebody was faster.
        CheckpointNotFoundError: the checkpoint is not there, or incomplete.
        RefusedError: it is being deleted, or the storage cannot create a file exclusively.
        StorageError: the storage failed. Perhaps the claim stands nevertheless, and lasts until its time is up.
    """
    _check_ttl(ttl_seconds)
    check_partition(partition)
    require_complete(storage)
    seen = _look(storage, partition)
    if seen.marked:
        raise _marked(storage, partition)
    if seen.ruling is not None and is_live(seen.ruling, (), storage.child(MARKER_DIR).server_now()):
        raise _held(storage, seen.ruling)
    return _create_next(storage, partition, seen, _checked_owner(owner), ttl_seconds, was_live=False)


def renew_claim_of(
    storage: Storage, partition: str, owner: str, *, ttl_seconds: float = DEFAULT_CLAIM_TTL_SECONDS
) -> Claim:
    """Prolongs one's own claim, from now on; also one that has run out and that nobody has taken over.

    Raises:
        ClaimRefusedError: `owner` does not hold it: it was taken over, released, or the partition is marked.
        CheckpointNotFoundError, RefusedError, StorageError: as `take_claim`.
    """
    _check_ttl(ttl_seconds)
    seen = _held_by(storage, partition, owner)
    assert seen.ruling is not None
    now = storage.child(MARKER_DIR).server_now()
    was_live = is_live(seen.ruling, (), now)
    return _create_next(storage, partition, seen, owner, ttl_seconds, was_live=was_live)


def release_claim_of(storage: Storage, partition: str, owner: str) -> None:
    """Gives one's own claim back: the partition can be claimed again at once.

    Raises:
        ClaimRefusedError: `owner` does not hold it: it was taken over, released, or the partition is marked.
        CheckpointNotFoundError, StorageError: as `take_claim`.
    """
    seen = _held_by(storage, partition, owner)
    assert seen.ruling is not None
    _create(storage, partition, seen.ruling.number + 1, owner, 0.0)


def check_not_taken_over(storage: Storage, partition: str, owner: str) -> None:
    """Refuses unless the last claim on the partition, if there is one, is this owner's.

    Raises:
        ClaimRefusedError: somebody else has claimed it since.
    """
    ruling = _look(storage, partition).ruling
    if ruling is not None and ruling.owner != owner:
        message = f"{storage.url}: {partition!r} is no longer {owner!r}'s: {ruling.owner!r} has claimed it since"
        raise ClaimRefusedError(message, partition=partition, ruling=ruling)


def void_claims(storage: Storage, partition: str) -> None:
    """Makes lasting that a mark has voided all claims, before the mark is removed: the last one counts as released."""
    ruling = _look(storage, partition).ruling
    if ruling is not None and ruling.ttl_seconds > 0:
        try:
            _create(storage, partition, ruling.number + 1, ruling.owner or "", 0.0)
        except ClaimRefusedError:
            return  # somebody else was faster with it; none but a release can come after a mark


def find_live_claim(storage: Storage, partition: str, *, now: float) -> Claim | None:
    """The claim that keeps others from a partition, or None; reads, and writes nothing.

    Args:
        now: by the storage's clock, as near as a reader knows it.
    """
    seen = _look(storage, partition)
    return None if seen.marked or seen.ruling is None or not is_live(seen.ruling, (), now) else seen.ruling


def check_not_being_deleted(storage: Storage) -> None:
    """Refuses while a deletion is announced or under way.

    To be called after writing, as the deleter announces before it looks: one of the two sees the other.

    Raises:
        RefusedError: it is.
    """
    announced = storage.find_file(DELETING_NAME)
    if announced is not None and storage.server_now() - announced.modified_at < DELETION_SECONDS:
        raise RefusedError(f"{storage.url}: is being deleted")


# -- the protocol ----------------------------------------------------------------------------------------------------


def _look(storage: Storage, partition: str) -> _Standing:
    """Marker and claims of a partition, from one listing."""
    check_partition(partition)
    for _ in range(_ATTEMPTS):
        try:
            files = storage.list_dir(MARKER_DIR).files
        except StorageNotFoundError:
            files = ()
        claims = {named[1]: file for file in files if (named := claim_of_path(file.path)) and named[0] == partition}
        marked = any(partition_of_marker(file.path) == partition for file in files)
        if not claims:
            return _Standing(marked, None, None)
        number = max(claims)
        file = claims[number]
        try:
            body = storage.read(file.path, version=file.version)
        except StorageNotFoundError:
            continue  # its owner took it back between the two requests
        ruling = parse_claim(partition, number, body, file.modified_at)
        return _Standing(marked, ruling, file)
    raise UnavailableError(f"{storage.url}: the claims on {partition!r} come and go", url=storage.url)


def _held_by(storage: Storage, partition: str, owner: str) -> _Standing:
    """How a partition stands that this owner holds, whether its time is up or not."""
    require_complete(storage)
    seen = _look(storage, partition)
    if seen.marked:
        raise _marked(storage, partition)
    if seen.ruling is None or seen.ruling.ttl_seconds == 0:
        raise ClaimRefusedError(f"{storage.url}: nobody holds {partition!r}", partition=partition)
    if seen.ruling.owner != owner:
        raise _held(storage, seen.ruling)
    return seen


def _create_next(
    storage: Storage, partition: str, seen: _Standing, owner: str, ttl_seconds: float, *, was_live: bool
) -> Claim:
    """Creates the claim after the one that was seen, and looks whether it holds; otherwise it is taken back."""
    number = 1 if seen.ruling is None else seen.ruling.number + 1
    claim, file = _create(storage, partition, number, owner, ttl_seconds)
    try:
        _confirm(storage, claim, seen, was_live=was_live)
    except (RefusedError, CheckpointNotFoundError):
        take_back(storage, file)
        raise
    return claim


def _create(storage: Storage, partition: str, number: int, owner: str, ttl_seconds: float) -> tuple[Claim, FileInfo]:
    nonce = uuid.uuid4().hex
    path = claim_path(partition, number)
    body = format_claim(owner, nonce, ttl_seconds)
    for _ in range(_ATTEMPTS):
        try:
            file = storage.write(path, body, exclusive=True)
        except StorageNotFoundError:
            require_complete(storage)  # it is gone; or only `evaled_by/`, which somebody emptied and removed just now
            continue
        except (PreconditionError, UnavailableError) as error:
            # Somebody was faster; or one's own request was carried out, and the answer to it got lost.
            found = _find_with_body(storage, path, body)
            if found is None:
                message = f"{storage.url}: somebody was faster in claiming {partition!r}"
                raise ClaimRefusedError(message, partition=partition) from error
            file = found
        if file.modified_at == 0.0:
            storage.delete(path, version=file.version)
            raise RefusedError(f"{storage.url}: {storage.scheme}:// tells no times, and claims live by them")
        return Claim(partition, number, owner, nonce, ttl_seconds, file.modified_at), file
    raise UnavailableError(f"{storage.url_of(path)}: its directory comes and goes", url=storage.url_of(path))


def _find_with_body(storage: Storage, path: str, body: bytes) -> FileInfo | None:
    found = storage.find_file(path)
    try:
        return found if found is not None and storage.read(path, version=found.version) == body else None
    except StorageNotFoundError:
        return None


def _confirm(storage: Storage, claim: Claim, before: _Standing, *, was_live: bool) -> None:
    """Looks once more, now that all can see the claim.

    It holds if it is the highest, still runs, and the claim that was judged is still there: had that one been taken
    back meanwhile, somebody else could have got its number anew, and be at work.
    """
    if not was_live:  # otherwise the claim before it has kept deleters away
        check_not_being_deleted(storage)
    require_complete(storage)
    seen = _look(storage, claim.partition)
    if seen.marked:
        raise _marked(storage, claim.partition)
    is_highest = seen.ruling is not None and seen.ruling.nonce == claim.nonce
    if not is_highest or not _is_unchanged(storage, before.file):
        message = f"{storage.url}: {claim.partition!r} was claimed by somebody else meanwhile"
        raise ClaimRefusedError(message, partition=claim.partition, ruling=None if is_highest else seen.ruling)
    if claim.expires_at <= storage.child(MARKER_DIR).server_now():
        message = f"{storage.url}: the claim on {claim.partition!r} ran out before it was confirmed"
        raise ClaimRefusedError(message, partition=claim.partition)


def _is_unchanged(storage: Storage, file: FileInfo | None) -> bool:
    if file is None:
        return True
    now = storage.find_file(file.path)
    return now is not None and now.version == file.version


def _marked(storage: Storage, partition: str) -> ClaimRefusedError:
    return ClaimRefusedError(f"{storage.url}: {partition!r} is evaluated already", partition=partition)


def _held(storage: Storage, ruling: Claim) -> ClaimRefusedError:
    holder = f"{ruling.owner!r}" if ruling.owner is not None else "a claim that does not say by whom"
    message = f"{storage.url}: {ruling.partition!r} is claimed by {holder} until {format_time(ruling.expires_at)}"
    return ClaimRefusedError(message, partition=ruling.partition, ruling=ruling)


def _checked_owner(owner: str | None) -> str:
    if owner is None:
        return new_owner()
    if not owner or len(owner) > 200 or not owner.isprintable():
        raise InvalidOptionError(f"an owner is 1 to 200 printable characters, not {owner!r}")
    return owner


def _check_ttl(ttl_seconds: float) -> None:
    if not 0 < ttl_seconds <= MAX_CLAIM_TTL_SECONDS:
        raise InvalidOptionError(f"the ttl of a claim is more than 0 s and at most 7 days, not {ttl_seconds:g} s")


def take_back(storage: Storage, file: FileInfo) -> None:
    """Removes what one has just written, and the directories if nothing is left in them."""
    try:
        storage.delete(file.path, version=file.version)
    except PreconditionError:
        return
    storage.delete_empty_dirs(MARKER_DIR)
    try:
        left = storage.list_dir()
    except StorageNotFoundError:
        return
    if not left.files and not left.dirs:  # the deleter could not remove the directory for what lay in it
        storage.delete_empty_dirs()


# -- the names for training code -------------------------------------------------------------------------------------


def claim_eval(
    checkpoint_path: str,
    eval_partition: str,
    *,
    owner: str | None = None,
    ttl: float = DEFAULT_CLAIM_TTL_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> Claim:
    """`take_claim` by the checkpoint's path; `ttl` in seconds. The claim's `owner` is what the other calls ask for."""
    storage = open_checkpoint(checkpoint_path, None, storage_options)
    return take_claim(storage, eval_partition, owner=owner, ttl_seconds=ttl)


def renew_claim(
    checkpoint_path: str,
    eval_partition: str,
    owner: str,
    *,
    ttl: float = DEFAULT_CLAIM_TTL_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> Claim:
    """`renew_claim_of` by the checkpoint's path; `ttl` in seconds, from now on."""
    storage = open_checkpoint(checkpoint_path, None, storage_options)
    return renew_claim_of(storage, eval_partition, owner, ttl_seconds=ttl)


def release_claim(
    checkpoint_path: str, eval_partition: str, owner: str, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """`release_claim_of` by the checkpoint's path."""
    release_claim_of(open_checkpoint(checkpoint_path, None, storage_options), eval_partition, owner)
