"""``show A --diff B``: what is different between two checkpoints, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from snapctl.checkpoints import Checkpoint, read_blob_sums
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.output import Output, format_size
from snapctl.cli.tables import Cell
from snapctl.comparison import Change, ChangeGroup, Comparison, compare, describe, group_changes
from snapctl.errors import StorageError
from snapctl.inspection import summarize
from snapctl.manifest import Manifest
from snapctl.markers import format_time
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum
from snapctl.storage import Storage

_STYLES = {"added": "green", "removed": "red"}
_PATHS_SHOWN = 3


class Side(msgspec.Struct, frozen=True):
    """One of the two checkpoints."""

    storage: Storage
    found: Checkpoint
    manifest: Manifest


def show_difference(
    out: Output, old: Side, new: Side, *, globs: Sequence[str], group: bool, describe_entry: Any
) -> ExitCode:
    """Prints what is different.

    Args:
        describe_entry: an entry as ``show --json`` has it.

    Returns:
        1 if anything is different, else 0.
    """
    result = compare(old.manifest, new.manifest, old_sums=_sums(out, old), new_sums=_sums(out, new), globs=globs)
    if out.as_json:
        out.document(_document(old, new, result, describe_entry, group=group))
    else:
        _print(out, old, new, result, group=group)
    return ExitCode.NO if result.changes else ExitCode.OK


def _sums(out: Output, side: Side) -> Mapping[str, BlobSum] | None:
    """The recorded checksums; else those that the storage keeps, as GCS does."""
    storage = side.storage
    try:
        record = storage.find_file(SAVE_RECORD_PATH)
        recorded, _ = read_blob_sums(storage, record, side.found.manifest)  # what is wrong with it has been said
        if recorded is not None or storage.scheme == "file":
            return recorded
        kept = {f.path: BlobSum(f.size_bytes, f.crc32c) for f in storage.list_tree() if f.crc32c is not None}
        return kept or None
    except StorageError as error:
        out.warn(f"checksums could not be read: {error.message}")
        return None


# -- for people ------------------------------------------------------------------------------------------------------


def _print(out: Output, old: Side, new: Side, result: Comparison, *, group: bool) -> None:
    out.table(
        ["", "STEP", "CREATED", "RANKS", "SIZE", "PATH"],
        [[name, *_head_row(side)] for name, side in (("A", old), ("B", new))],
        right=("STEP", "RANKS", "SIZE"),
    )
    counts = {"added": result.added, "removed": result.removed, "changed": result.changed}
    told = [f"{count} {kind}" for kind, count in counts.items() if count]
    out.line("")
    out.line(
        f"{', '.join(told) if told else 'no differences'}; {result.same} the same"
        + (f"; content of {len(result.not_compared)} not compared" if result.not_compared else "")
    )
    if result.changes:
        groups = group_changes(result.changes) if group else [ChangeGroup(c.path, (c,)) for c in result.changes]
        out.line("")
        out.table(["CHANGE", "PATH", "A", "B"], [_row(item) for item in groups])
    for line in _not_compared_lines(result):
        out.warn(line)


def _head_row(side: Side) -> list[str]:
    created = format_time(side.found.created_at)
    return [
        "-" if side.found.step is None else str(side.found.step),
        f"{created[:10]} {created[11:19]}Z" if created else "-",
        str(side.manifest.world_size),
        format_size(summarize(side.manifest).size_bytes),
        side.found.path,
    ]


def _row(item: ChangeGroup) -> list[str]:
    change = item.changes[0]
    count = len(item.changes)
    return [
        Cell(change.kind, _STYLES.get(change.kind, "yellow")),
        item.path + (f" ×{count}" if count > 1 else ""),
        describe(change.old),
        describe(change.new),
    ]


def _not_compared_lines(result: Comparison) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for item in result.not_compared:
        by_reason.setdefault(item.reason, []).append(item.path)
    return [
        f"content not compared: {', '.join(paths[:_PATHS_SHOWN])}"
        + (f", … ({len(paths)} in all)" if len(paths) > _PATHS_SHOWN else "")
        + f": {reason}"
        for reason, paths in by_reason.items()
    ]


# -- for programs ----------------------------------------------------------------------------------------------------


def _document(old: Side, new: Side, result: Comparison, describe_entry: Any, *, group: bool) -> dict[str, Any]:
    changed = [change for change in result.changes if change.old is not None and change.new is not None]
    body = {
        "a": _head_json(old),
        "b": _head_json(new),
        "added": [describe_entry(change.new) for change in result.changes if change.old is None],
        "removed": [describe_entry(change.old) for change in result.changes if change.new is None],
        "changed": [
            {
                "path": change.path,
                "changes": list(change.aspects),
                "a": describe_entry(change.old),
                "b": describe_entry(change.new),
            }
            for change in changed
        ],
        "same": result.same,
        "not_compared": [{"path": item.path, "reason": item.reason} for item in result.not_compared],
    }
    if group:
        body["groups"] = [_group_json(item) for item in group_changes(result.changes)]
    return body


def _group_json(item: ChangeGroup) -> dict[str, Any]:
    change: Change = item.changes[0]
    kind = change.kind if change.old is None or change.new is None else "changed"
    return {"path": item.path, "kind": kind, "changes": list(change.aspects), "count": len(item.changes)}


def _head_json(side: Side) -> dict[str, Any]:
    return {
        "path": side.found.path,
        "step": side.found.step,
        "created_at": format_time(side.found.created_at),
        "version": side.manifest.version,
        "world_size": side.manifest.world_size,
        "size_bytes": summarize(side.manifest).size_bytes,
    }
