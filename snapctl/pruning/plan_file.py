"""Plans as files: one JSON document a line, a line for each checkpoint. Pure, but for reading and writing the file.

A line says what is to become of a checkpoint, and how that was recognised when the plan was made::

    {"version": 1, "save_dir": "/runs/a", "path": "/runs/a/100", "step": 100, "action": "delete", "how": "complete",
     "state": "complete", "reasons": ["no rule keeps it"], "size_bytes": 4096, "verified": false,
     "incomplete_older_than_seconds": null, "manifest": {"version": "…", "size_bytes": 512}, "side_files": {},
     "refused": []}
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from snapctl.checkpoints import Checkpoint, parse_step
from snapctl.errors import InvalidOptionError, NoSpaceError, SnapctlError, StorageError
from snapctl.pruning.policy import SHORTEST_INCOMPLETE_AGE_SECONDS, DeleteLimit, Policy
from snapctl.pruning.protection import Clock, Subject, always_kept, other_prune
from snapctl.pruning.retention import How, Plan, Row, finish_plan, judge_incomplete, rank
from snapctl.storage import Storage, open_storage
from snapctl.storage.unfinished import UnfinishedFile

FORMAT_VERSION = 1


class PlannedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the manifest was recognised."""

    version: str
    size_bytes: int


class PlanLine(msgspec.Struct, frozen=True):
    """A line of a plan file."""

    version: int
    save_dir: str
    path: str
    step: int
    action: Literal["keep", "delete", "leave"]
    how: How | None
    state: str
    reasons: list[str]
    size_bytes: int | None
    verified: bool
    incomplete_older_than_seconds: float | None
    manifest: PlannedManifest | None
    side_files: dict[str, str]
    """Markers, claims and pin, with their versions."""
    refused: list[str] = []
    """What guards said to the plan: such a one is for looking at, and is not carried out."""


def format_plan(plan: Plan, policy: Policy) -> bytes:
    """The lines of a plan."""
    return b"".join(msgspec.json.encode(_line(row, plan, policy)) + b"\n" for row in plan.rows)


def _line(row: Row, plan: Plan, policy: Policy) -> PlanLine:
    checkpoint = row.checkpoint
    return PlanLine(
        version=FORMAT_VERSION,
        save_dir=_text(plan.save_dir),
        path=_text(checkpoint.path),
        step=row.step,
        action=row.action,
        how=row.how,
        state=row.state,
        reasons=[_text(reason) for reason in row.reasons],
        size_bytes=row.size_bytes,
        verified=policy.verified,
        incomplete_older_than_seconds=policy.incomplete_older_than_seconds,
        manifest=_manifest(checkpoint),
        side_files={_text(path): version for path, version in _side_files(checkpoint).items()},
        refused=[_text(message) for message in plan.refusals],
    )


def _text(text: str) -> str:
    """JSON knows no lone surrogates, which stand for the bytes of names that are not UTF-8."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _manifest(checkpoint: Checkpoint) -> PlannedManifest | None:
    file = checkpoint.manifest
    return None if file is None else PlannedManifest(file.version, file.size_bytes)


def _side_files(checkpoint: Checkpoint) -> dict[str, str]:
    return {file.path: file.version for file in checkpoint.side_files}


def write_plan(path: str, plans: Iterable[tuple[Plan, Policy]]) -> None:
    """Writes plans to a file, whole or not at all; a device or a pipe is written to.

    Raises:
        StorageError: it cannot be written.
    """
    data = b"".join(format_plan(plan, policy) for plan, policy in plans)
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "wb") as file:
                file.write(data)
            return
        target = os.path.realpath(path)
        with UnfinishedFile(target) as file:
            file.write(data)
            os.fsync(file.descriptor)
            file.replace()
    except OSError as error:
        kind = NoSpaceError if error.errno in (27, 28, 122) else StorageError
        raise kind(f"{path}: the plan cannot be written: {error.strerror or error}", url=path) from error


def read_plan(path: str) -> list[PlanLine]:
    """The lines of a plan file.

    Raises:
        InvalidOptionError: it cannot be read, or is not such a file.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise InvalidOptionError(f"{path}: the plan cannot be read: {error.strerror or error}") from error
    return [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_line(data: bytes, where: str) -> PlanLine:
    try:
        line = msgspec.json.decode(data, type=PlanLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidOptionError(f"{where}: is no line of a plan: {error}") from error
    if line.version != FORMAT_VERSION:
        raise InvalidOptionError(f"{where}: a plan of version {line.version}, which this snapctl does not know")
    age = line.incomplete_older_than_seconds
    if age is not None and not age >= SHORTEST_INCOMPLETE_AGE_SECONDS:
        raise InvalidOptionError(f"{where}: incomplete_older_than_seconds is at least 3600, not {age}")
    return line


def match_lines(
    lines: Sequence[PlanLine], storages: Sequence[Storage], options: Mapping[str, object]
) -> dict[str, dict[int, PlanLine]]:
    """The lines by save directory (its URL) and step.

    Raises:
        InvalidOptionError: a path is not directly in one of the save directories, or stands there twice.
    """
    found: dict[str, dict[int, PlanLine]] = {storage.url: {} for storage in storages}
    for line in lines:
        parent, _, name = line.path.rpartition("/")
        if parent in found:  # as plans are written; opening each path would take longer than the deletions
            step = parse_step(name)
        else:
            parent, step = _place_of(line.path, options)
        if step is None or step != line.step or parent not in found:
            raise InvalidOptionError(
                f"{line.path}: is in the plan, and is no checkpoint directly in one of the save directories given",
                hint="a plan is carried out on the save directories that it was made of",
            )
        if step in found[parent]:
            raise InvalidOptionError(f"{line.path}: is in the plan twice")
        found[parent][step] = line
    return found


def _place_of(path: str, options: Mapping[str, object]) -> tuple[str, int | None]:
    try:
        storage = open_storage(path, options)
    except SnapctlError as error:
        raise InvalidOptionError(f"{path}: is in the plan, and is no path: {error.message}") from error
    parent = storage.parent()
    return ("" if parent is None else parent.url), parse_step(storage.name)


# -- carrying one out ------------------------------------------------------------------------------------------------


def plan_from_lines(
    subjects: Iterable[Subject],
    lines: Mapping[int, PlanLine],
    *,
    max_delete: DeleteLimit | None,
    save_dir: str,
    clock: Clock,
) -> Plan:
    """What of a plan that was made earlier can still be carried out.

    What is always kept is judged anew, and so is what is incomplete; what is no longer as it was planned is left alone
    (`deviations` tells which).
    """
    verified = any(line.verified for line in lines.values())
    policy = Policy(verified=verified, max_delete=max_delete)
    ordered = sorted(subjects, key=lambda subject: subject.step)
    ranking = rank(ordered, policy)
    newest = dict(_first_reasons(ranking.newest))
    rows: list[Row] = []
    for subject in ordered:
        line = lines.get(subject.step)
        if line is None or line.action != "delete":
            action: Literal["keep", "leave"] = "leave" if subject.checkpoint.state == "incomplete" else "keep"
            rows.append(Row(subject, action, ("not to be deleted by the plan",)))
        elif subject.is_half_deleted:
            rows.append(judge_incomplete(subject, ranking, policy, clock))
        elif (difference := _difference(subject, line)) is not None:
            rows.append(Row(subject, "leave", (difference,)))
        elif line.how == "incomplete":
            aged = Policy(verified=verified, incomplete_older_than_seconds=line.incomplete_older_than_seconds)
            rows.append(judge_incomplete(subject, ranking, aged, clock))
        else:
            rows.append(_row(subject, newest.get(subject.step), clock))
    refused = dict.fromkeys(message for line in lines.values() for message in line.refused)
    refusals = [f"the plan was refused when it was made: {message}" for message in refused]
    return finish_plan(rows, ranking, policy, save_dir=save_dir, warnings=(), refusals=refusals)


def _first_reasons(newest: Iterable[tuple[Subject, str]]) -> Iterable[tuple[int, str]]:
    return ((subject.step, reason) for subject, reason in newest)


def _row(subject: Subject, newest: str | None, clock: Clock) -> Row:
    reasons = ([newest] if newest else []) + always_kept(subject, clock)
    if reasons:
        return Row(subject, "keep", tuple(reasons))
    if (busy := other_prune(subject, clock)) is not None:
        return Row(subject, "leave", (busy,))
    return Row(subject, "delete", ("the plan says so",), "link" if subject.checkpoint.is_link else "complete")


def _difference(subject: Subject, line: PlanLine) -> str | None:
    """In what a checkpoint is not the one that was planned; None if it is."""
    checkpoint = subject.checkpoint
    if checkpoint.is_link != (line.how == "link"):
        return "not as planned: it is a link now" if checkpoint.is_link else "not as planned: it was a link"
    if not _is_of_kind(subject, line.how):
        return f"not as planned: it is {subject.state}, and was to be deleted as {line.how or 'nothing'}"
    if _manifest(checkpoint) != line.manifest:
        return "not as planned: its manifest is another one"
    if {_text(path): version for path, version in _side_files(checkpoint).items()} != line.side_files:
        return "not as planned: its markers, claims or pin have changed"
    return None


def _is_of_kind(subject: Subject, how: How | None) -> bool:
    """Whether a checkpoint, as far as it has been looked at, can be deleted in this way: a plan file can be edited."""
    if subject.checkpoint.state == "unreadable" or subject.manifest_state == "not-looked-at":
        return True  # kept for that already
    if subject.checkpoint.state == "incomplete" or subject.manifest_state == "cut-off":
        return how == "incomplete"
    return how in ("complete", "link") or (how == "incomplete" and subject.manifest_state == "unknown")


def deviations(plan: Plan, lines: Mapping[int, PlanLine]) -> tuple[Row, ...]:
    """The rows that the plan file wanted to delete, and that are left alone."""
    wanted = {step for step, line in lines.items() if line.action == "delete"}
    return tuple(row for row in plan.rows if row.step in wanted and row.action != "delete")
