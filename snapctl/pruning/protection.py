"""What is never deleted, whatever the rules say, and what is left of dead saves and deletions. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from snapctl.checkpoints import EARLIEST_SAVE_TIME, FUTURE_TOLERANCE_SECONDS, Checkpoint, State
from snapctl.durations import format_duration
from snapctl.markers import Claim, format_time, is_live
from snapctl.pruning.contents import Contents

ManifestState = Literal["unknown", "parsed", "cut-off", "unusable", "not-looked-at"]

SAVE_AGAIN_SECONDS = 86400.0
"""A file younger than the manifest means that the checkpoint is being saved again, for so long."""
ANNOUNCEMENT_SECONDS = 3600.0
"""An announced deletion that has not begun is taken for dead after so long."""


class Clock(msgspec.Struct, frozen=True):
    """The time to judge by."""

    now: float
    """Seconds since the epoch, by the storage's clock where that can be had."""
    slack_seconds: float = 0.0
    """How far `now` may be ahead of the storage's clock: so much longer claims live and files count as changed."""

    @property
    def earliest(self) -> float:
        """The earliest that it can be by the storage's clock."""
        return self.now - self.slack_seconds


class Subject(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint, and what is known about it so far."""

    step: int
    checkpoint: Checkpoint
    manifest_state: ManifestState = "unknown"
    """Of a complete one: ``cut-off``: read whole, and neither JSON nor YAML; ``unusable``: of an unknown version, or a
    document of another kind; ``not-looked-at``: the storage did not let us look at the manifest or at what lies there.
    """
    problem: str | None = None
    """What was wrong, for the last three."""
    passes: bool | None = None
    """Whether its blobs are all there in full length; None: not looked at."""
    contents: Contents | None = None
    """None: not listed."""
    links: tuple[str, ...] = ()
    """Paths of symbolic links that lead to it or into it."""
    announced_newest: float | None = None
    """Of a half deleted one: the time of the latest file that its deleter had listed, if the announcement says."""

    @property
    def state(self) -> State:
        """As it is shown: what cannot be parsed or looked at is unreadable."""
        if self.checkpoint.state == "complete" and self.manifest_state not in ("unknown", "parsed"):
            return "unreadable"
        return self.checkpoint.state

    @property
    def counts(self) -> bool:
        """Whether it may take a slot of a rule: complete, and parsable as far as anybody knows."""
        return self.checkpoint.state == "complete" and self.manifest_state in ("unknown", "parsed")

    @property
    def was_not_looked_at(self) -> bool:
        found = self.checkpoint
        return found.state == "unreadable" or bool(found.unread) or self.manifest_state == "not-looked-at"

    @property
    def is_half_deleted(self) -> bool:
        """A deletion has begun, and was interrupted or is under way: announced, and without a manifest."""
        return self.checkpoint.deleting is not None and self.checkpoint.manifest is None


def live_claims(checkpoint: Checkpoint, clock: Clock) -> list[Claim]:
    """The claims that hold."""
    return [
        claim
        for claim in checkpoint.claims
        if is_live(claim, checkpoint.markers, clock.now, extra_seconds=clock.slack_seconds)
    ]


def always_kept(subject: Subject, clock: Clock) -> list[str]:
    """Why a checkpoint is kept whatever the rules say; empty if nothing speaks for it."""
    checkpoint = subject.checkpoint
    reasons = []
    if checkpoint.state == "unreadable":
        reasons.append(f"could not be looked at: {checkpoint.problem}")
    reasons += [f"could not be looked at: {problem}" for problem in checkpoint.unread]
    if subject.manifest_state == "not-looked-at":
        reasons.append(f"could not be looked at: {subject.problem}")
    elif subject.manifest_state in ("cut-off", "unusable"):
        reasons.append(f"cannot be parsed: {subject.problem}")
    reasons += claims_and_pins(checkpoint, clock)
    reasons += [f"{link} leads to it" for link in subject.links]
    if subject.contents is not None and not checkpoint.is_link:
        reasons += _work_in_progress(checkpoint, subject.contents, clock)
    return reasons


def claims_and_pins(checkpoint: Checkpoint, clock: Clock) -> list[str]:
    """What people and evaluators have put on a checkpoint so that it stays."""
    reasons: list[str] = []
    if checkpoint.pin is None and not checkpoint.claims:
        return reasons
    if checkpoint.pin is not None:
        reasons.append("pinned" + (f": {checkpoint.pin.note}" if checkpoint.pin.note else ""))
    for claim in live_claims(checkpoint, clock):
        until = format_time(claim.expires_at)
        reasons.append(f"claimed for {claim.partition} by {claim.owner or 'unknown'} until {until}")
    return reasons


def _work_in_progress(checkpoint: Checkpoint, contents: Contents, clock: Clock) -> list[str]:
    reasons = []
    saved_at, manifest = contents.newest_saved_at, checkpoint.manifest
    if (
        saved_at is not None
        and manifest is not None
        and saved_at > manifest.modified_at
        and saved_at > clock.earliest - SAVE_AGAIN_SECONDS
    ):
        reasons.append(f"being saved again: {contents.newest_saved} is younger than the manifest")
    if contents.inner_checkpoint is not None:
        reasons.append(f"another checkpoint lies in it: {contents.inner_checkpoint}")
    return reasons


def other_prune(subject: Subject, clock: Clock) -> str | None:
    """Why a whole checkpoint whose deletion is announced is left alone: somebody else is at it."""
    announced = subject.checkpoint.deleting
    if announced is None or subject.checkpoint.is_link:
        return None
    age = clock.earliest - announced.modified_at
    if age >= ANNOUNCEMENT_SECONDS:
        return None
    return f"another prune announced its deletion {format_duration(max(0.0, age))} ago"


def is_leftover(subject: Subject, clock: Clock) -> bool:
    """Whether an announcement stands beside a manifest from a deletion that never began."""
    announced, manifest = subject.checkpoint.deleting, subject.checkpoint.manifest
    return (
        announced is not None
        and manifest is not None
        and manifest.size_bytes > 0
        and not subject.checkpoint.is_link
        and clock.earliest - announced.modified_at >= ANNOUNCEMENT_SECONDS
    )


def judge_interrupted(subject: Subject, clock: Clock) -> tuple[Literal["delete", "leave"], str]:
    """Whether somebody's deletion is gone on with, and why or why not."""
    announced, contents = subject.checkpoint.deleting, subject.contents
    if subject.checkpoint.is_link:
        return "leave", "half deleted, behind a link"
    if subject.checkpoint.pin is not None:
        return "leave", "half deleted, and pinned"
    if subject.links:
        return "leave", f"half deleted, and {subject.links[0]} leads to it"
    if contents is None or announced is None:
        return "delete", "half deleted: its deletion goes on"
    since = announced.modified_at
    if subject.announced_newest is not None:
        since = min(since, subject.announced_newest)
    if contents.newest_saved_at is not None and contents.newest_saved_at > since:
        return "leave", f"half deleted, and being saved again: {contents.newest_saved} is younger than the deletion"
    if contents.inner_checkpoint is not None:
        return "leave", f"half deleted, and another checkpoint lies in it: {contents.inner_checkpoint}"
    if contents.files == 1 and announced.held_until is not None and announced.held_until > clock.now:
        return "leave", f"deleted; its announcement may not go before {format_time(announced.held_until) or 'released'}"
    return "delete", "half deleted: its deletion goes on"


def judge_remains(
    subject: Subject, older_than_seconds: float | None, clock: Clock
) -> tuple[Literal["delete", "leave"], str]:
    """Whether what a dead save left may go, but for the later checkpoint that there must be; and why or why not."""
    checkpoint, contents = subject.checkpoint, subject.contents
    if checkpoint.state == "complete":
        what, why = "cannot be parsed (cut off)", f"cannot be parsed: {subject.problem}"
    else:
        what = why = "incomplete"
    if older_than_seconds is None:
        return "leave", why
    if checkpoint.is_link:
        return "leave", f"{why}, behind a link"
    kept = [f"could not be looked at: {problem}" for problem in checkpoint.unread]
    kept += [*claims_and_pins(checkpoint, clock), *(f"{link} leads to it" for link in subject.links)]
    if kept:
        return "leave", f"{why}, {', '.join(kept)}"
    if contents is None:
        return "delete", what
    if (objection := _objection(contents, older_than_seconds, clock)) is not None:
        return "leave", f"{why}, {objection}"
    age = format_duration(clock.now - (contents.newest_at or 0.0))
    return "delete", f"{what}, unchanged for {age}"


def _objection(contents: Contents, older_than_seconds: float, clock: Clock) -> str | None:
    """Why these are not the remains of a dead save."""
    if contents.newest_at is None or contents.oldest_at is None:
        return "empty"
    newest_at, oldest_at = max(contents.newest_at, contents.dirs_changed_at or 0.0), contents.oldest_at
    if contents.pinned:
        return "pinned"
    if contents.foreign is not None:
        return f"holds something else than a save: {contents.foreign}"
    if contents.inner_checkpoint is not None:
        return f"another checkpoint lies in it: {contents.inner_checkpoint}"
    if oldest_at < EARLIEST_SAVE_TIME or newest_at > clock.now + FUTURE_TOLERANCE_SECONDS:
        return "its files have times that cannot be"
    if newest_at > clock.earliest - older_than_seconds:
        return f"changed {format_duration(max(0.0, clock.now - newest_at))} ago"
    return None
