"""What is in a checkpoint: where it comes from, how large it is, and its entries. Nothing is ever unpickled.

With --diff B: what is different in B. Ends with 0 if nothing is, with 1 if anything is; content that could not be
compared is said, and is no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from snapctl.cadence import find_save_time
from snapctl.checkpoints import (
    Checkpoint,
    Place,
    find_latest,
    look_at_checkpoint,
    open_checkpoint,
    read_manifest,
)
from snapctl.cli.checkpoint_json import metrics_json
from snapctl.cli.exit_codes import ExitCode, worst
from snapctl.cli.options import (
    CheckpointOrSaveDirArgument,
    JsonOption,
    StepOption,
    StorageOptions,
    parse_storage_options,
)
from snapctl.cli.output import Output, format_number, format_size, json_value
from snapctl.cli.show_diff import Side, show_difference
from snapctl.errors import InvalidOptionError, StorageError
from snapctl.inspection import (
    RolledUp,
    Summary,
    extra_state_values,
    group_layers,
    primitive_value,
    roll_up,
    select_entries,
    summarize,
)
from snapctl.manifest import LogicalEntry, Manifest
from snapctl.markers import Claim, format_time, is_live
from snapctl.save_record import RestoreTimings
from snapctl.storage import Storage

_RANKS_SHOWN = 4


def command(
    context: typer.Context,
    checkpoint: CheckpointOrSaveDirArgument,
    step: StepOption = None,
    entries: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only entries whose path matches. Repeatable.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="One line for each beginning of N keys.")
    ] = None,
    group: Annotated[bool, typer.Option("--group", help="Roll up repeated layers: layers.#.weight ×48.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="Only what this rank holds.")] = None,
    values: Annotated[bool, typer.Option("--values", help="Show the values of inline primitives.")] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff", metavar="B", help="What is different in the checkpoint B (or the latest of a directory)."
        ),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    if diff is not None and (depth is not None or values or rank is not None):
        raise InvalidOptionError("--diff goes with none of --depth, --rank, --values")
    if depth is not None and (group or entries or values or rank is not None):
        raise InvalidOptionError("--depth goes with none of --group, --entries, --rank, --values")
    if group and values:
        raise InvalidOptionError("--values does not go with --group")
    options = parse_storage_options(storage_option)
    storage, found, manifest, missed = _open(out, checkpoint, step, options)
    if diff is not None:
        there = _open(out, diff, None, options)
        for warning in (*found.warnings, *there[1].warnings):
            out.warn(warning)
        sides = Side(storage, found, manifest), Side(*there[:3])
        code = show_difference(out, *sides, globs=entries or (), group=group, describe_entry=_entry_json)
        return worst(code, ExitCode.PARTIAL if missed or there[3] else ExitCode.OK)
    if rank is not None and rank >= manifest.world_size:
        raise InvalidOptionError(f"--rank {rank}: {manifest.world_size} ranks saved this checkpoint")
    now = storage.now(may_write=False)
    summary = summarize(manifest)
    if summary.size_bytes is None:
        summary = summarize(manifest, _blob_sizes(out, storage))
    problem = found.problem  # its manifest was read; its markers may not be listed
    for warning in (*found.warnings, *found.unread, *([problem] if problem else ())):
        out.warn(warning)
    code = ExitCode.PARTIAL if missed or found.unread or found.state == "unreadable" else ExitCode.OK
    if depth is not None:
        rolled: Sequence[RolledUp] | None = roll_up(manifest, depth)
        chosen: Sequence[LogicalEntry] = ()
    else:
        chosen = select_entries(manifest.logical_entries(), globs=entries or (), rank=rank)
        rolled = group_layers(chosen) if group else None
    if as_json:
        items = [_rolled_json(item) for item in rolled] if rolled is not None else [_entry_json(e) for e in chosen]
        out.document({**_head_json(found, manifest, summary, now), "entries": items})
        return code
    out.fields(_head_fields(found, manifest, summary, now))
    if rolled is not None:
        _print_rolled(out, rolled)
    else:
        _print_entries(out, chosen, values=values)
    return code


def _open(
    out: Output, path: str, step: int | None, options: dict[str, Any]
) -> tuple[Storage, Checkpoint, Manifest, bool]:
    """The last of them: whether a newer one could not be looked at."""
    opened = open_checkpoint(path, step, options, allow_save_dir=True)
    if isinstance(opened, Place):
        latest = find_latest(opened)
        for message in (*latest.unparsable, *latest.not_looked_at):
            out.warn(f"passed over: {message}")
        storage = opened.storage.child(str(latest.checkpoint.step))
        return storage, latest.checkpoint, latest.manifest, bool(latest.not_looked_at)
    manifest = read_manifest(opened)
    found = look_at_checkpoint(opened)
    return opened, found, manifest, False


def _live_claims(found: Checkpoint, now: float) -> list[Claim]:
    return [claim for claim in found.claims if is_live(claim, found.markers, now)]


def _blob_sizes(out: Output, storage: Storage) -> dict[str, int] | None:
    """Sizes of what lies there, for entries whose size only their blob knows."""
    try:
        return {file.path: file.size_bytes for file in storage.list_tree()}
    except StorageError as error:
        out.warn(f"sizes are incomplete: {error.message}")
        return None


# -- for people ------------------------------------------------------------------------------------------------------


def _head_fields(found: Checkpoint, manifest: Manifest, summary: Summary, now: float) -> list[tuple[str, str]]:
    extra = extra_state_values(manifest)
    dtypes = ", ".join(f"{dtype} {format_size(size)}" for dtype, size in summary.dtype_bytes.items() if size)
    fields = [
        ("step", "-" if found.step is None else str(found.step)),
        ("path", found.path),
        ("state", found.state + (", pinned" if found.pinned else "") + (", deleting" if found.deleting else "")),
        ("created", format_time(found.created_at) or "unknown"),
        ("world size", str(manifest.world_size)),
        ("version", manifest.version),
        ("size", format_size(summary.size_bytes) + (f" ({dtypes})" if dtypes else "")),
        ("entries", f"{summary.entries} in {summary.blobs} blobs"),
    ]
    for name in ("step", "walltime"):
        if name in extra:
            fields.append((f"extra_state/{name}", str(json_value(extra[name]))))
    for marker in found.markers:
        metrics = ", ".join(f"{name}={format_number(value)}" for name, value in marker.metrics.items())
        when = format_time(marker.finished_at)
        fields.append(("evaluated by", " ".join(filter(None, [marker.partition, when, metrics]))))
    for claim in _live_claims(found, now):
        expires = format_time(claim.created_at + claim.ttl_seconds)
        fields.append(("claimed", f"{claim.partition} by {claim.owner or 'unknown'}, until {expires}"))
    if found.pin is not None and found.pin.note:
        fields.append(("pinned", found.pin.note))
    save = find_save_time(found)
    if save is not None:
        fields.append(("save", f"blocked {save.blocked_seconds:.2f} s, durable after {save.durable_seconds:.2f} s"))
    restored = None if found.record is None else found.record.restored
    if restored is not None:
        source = "a checkpoint" if restored.step is None else f"step {restored.step}"
        when = format_time(restored.restored_at)
        fields.append(("restored from", f"{source} in {restored.restored_seconds:.2f} s, {when}"))
    return fields


def _print_entries(out: Output, entries: Sequence[LogicalEntry], *, values: bool) -> None:
    headers = ["PATH", "TYPE", "DTYPE", "SHAPE", "SIZE", "RANKS", *(["VALUE"] if values else [])]
    rows = []
    for entry in entries:
        row = [
            entry.path,
            entry.type + (f" ×{entry.shards}" if entry.shards > 1 else ""),
            entry.dtype or "-",
            _shape(entry.shape),
            format_size(entry.size_bytes) if entry.size_bytes != 0 or entry.shards else "-",
            "all" if entry.replicated else _ranks(entry.ranks),
        ]
        if values:
            value = primitive_value(entry.entries[0][1])
            row.append("-" if value is None else str(json_value(value)))
        rows.append(row)
    _print_table(out, headers, rows)


def _print_rolled(out: Output, lines: Sequence[RolledUp]) -> None:
    rows = [
        [
            line.path + (f" ×{line.count}" if line.count > 1 else ""),
            ", ".join(line.types),
            ", ".join(line.dtypes) or "-",
            _shape(line.shape),
            "-" if line.size_bytes == 0 and not line.dtypes else format_size(line.size_bytes),
        ]
        for line in lines
    ]
    _print_table(out, ["PATH", "TYPE", "DTYPE", "SHAPE", "SIZE"], rows)


def _print_table(out: Output, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        out.note("no entries")
        return
    out.line("")
    out.table(headers, rows, right=("SIZE",))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else "[" + ", ".join(map(str, shape)) + "]"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > _RANKS_SHOWN and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


# -- for programs ----------------------------------------------------------------------------------------------------


def _head_json(found: Checkpoint, manifest: Manifest, summary: Summary, now: float) -> dict[str, Any]:
    extra = {name: json_value(value) for name, value in extra_state_values(manifest).items()}
    record = found.record
    return {
        "path": found.path,
        "step": found.step,
        "state": found.state,
        "created_at": format_time(found.created_at),
        "version": manifest.version,
        "world_size": manifest.world_size,
        "size_bytes": summary.size_bytes,
        "dtype_bytes": dict(summary.dtype_bytes),
        "blobs": summary.blobs,
        "extra_state": {"step": None, "walltime": None, **extra},
        "evaluated_by": list(found.evaluated_by),
        "metrics": metrics_json(found),
        "claims": [
            {
                "partition": claim.partition,
                "number": claim.number,
                "owner": claim.owner,
                "expires_at": format_time(claim.created_at + claim.ttl_seconds),
            }
            for claim in _live_claims(found, now)
        ],
        "pinned": found.pinned,
        "save_timings": None
        if record is None
        else [
            {
                "rank": rank.rank,
                "blocked_seconds": rank.blocked_seconds,
                "durable_seconds": rank.durable_seconds,
                "size_bytes": rank.size_bytes,
            }
            for rank in record.ranks
        ],
        "restored": None if record is None else _restored_json(record.restored),
    }


def _restored_json(restored: RestoreTimings | None) -> dict[str, Any] | None:
    if restored is None:
        return None
    return {**msgspec.structs.asdict(restored), "restored_at": format_time(restored.restored_at)}


def _entry_json(entry: LogicalEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "type": entry.type,
        "dtype": entry.dtype,
        "shape": None if entry.shape is None else list(entry.shape),
        "size_bytes": entry.size_bytes,
        "ranks": list(entry.ranks),
        "replicated": entry.replicated,
        "shards": entry.shards,
        "value": json_value(primitive_value(entry.entries[0][1])),
    }


def _rolled_json(line: RolledUp) -> dict[str, Any]:
    return {
        "path": line.path,
        "count": line.count,
        "types": list(line.types),
        "dtypes": list(line.dtypes),
        "shape": None if line.shape is None else list(line.shape),
        "size_bytes": line.size_bytes,
        "ranks": None if line.ranks is None else list(line.ranks),
        "replicated": line.replicated,
    }
