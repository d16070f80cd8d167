"""Mark partitions as evaluated on a checkpoint, ask whether they are, or claim one for evaluation.

Of many evaluators that --claim the same partition one gets it, until it marks it or its time is up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from snapctl.checkpoints import open_checkpoint, parse_step
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import (
    CheckpointArgument,
    JsonOption,
    StepOption,
    StorageOptions,
    parse_duration,
    parse_storage_options,
)
from snapctl.cli.output import Output, format_number
from snapctl.errors import InvalidOptionError, StorageError
from snapctl.evaluation.claims import find_live_claim, release_claim_of, renew_claim_of, require_complete, take_claim
from snapctl.evaluation.evals import assign_metrics, find_marker, mark_each, remove_mark
from snapctl.markers import Claim, Marker, check_partition, format_time, json_number
from snapctl.storage import Storage


def command(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    partitions: Annotated[list[str], typer.Argument(metavar="PARTITION...", help="Parts of the evaluation data.")],
    step: StepOption = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="[P/]NAME=VALUE", help="A result, for partition P if several are marked. Repeatable."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing: end with 0 if all are marked.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the marks.")] = False,
    claim: Annotated[bool, typer.Option("--claim", help="Claim the partition for evaluation, exclusively.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Prolong the claim of --owner, from now on.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Give the claim of --owner back.")] = False,
    ttl: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long a claim lasts (2h; at most 7d).")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="ID", help="Who claims (a fresh random ID), or must hold the claim.")
    ] = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    actions = {"--check": check, "--remove": remove, "--claim": claim, "--renew": renew, "--release": release}
    action = _one_action(actions)
    names = list(dict.fromkeys(check_partition(partition) for partition in partitions))
    _check_options(action, names, metric=metric, ttl=ttl, owner=owner)
    ttl_seconds = parse_duration(ttl or "2h", name="--ttl")
    metrics = assign_metrics(metric or (), names)
    storage = open_checkpoint(checkpoint, step, parse_storage_options(storage_option))
    match action:
        case "--check":
            return _check(out, storage, names)
        case "--remove":
            return _remove(out, storage, names)
        case "--claim":
            return _say_claim(out, storage, take_claim(storage, names[0], owner=owner, ttl_seconds=ttl_seconds))
        case "--renew":
            renewed = renew_claim_of(storage, names[0], owner or "", ttl_seconds=ttl_seconds)
            return _say_claim(out, storage, renewed)
        case "--release":
            release_claim_of(storage, names[0], owner or "")
            return _say(out, storage, {names[0]: None}, f"{names[0]}: released")
        case _:
            return _mark(out, storage, metrics, owner)


def _one_action(actions: Mapping[str, bool]) -> str | None:
    chosen = [name for name, wanted in actions.items() if wanted]
    if len(chosen) > 1:
        raise InvalidOptionError(f"{' and '.join(chosen)} exclude each other")
    return chosen[0] if chosen else None


def _check_options(
    action: str | None, partitions: Sequence[str], *, metric: list[str] | None, ttl: str | None, owner: str | None
) -> None:
    if metric and action is not None:
        raise InvalidOptionError(f"--metric goes with marking, not with {action}")
    if ttl is not None and action not in ("--claim", "--renew"):
        raise InvalidOptionError("--ttl goes with --claim and --renew")
    if owner is not None and action in ("--check", "--remove"):
        raise InvalidOptionError(f"--owner does not go with {action}")
    if owner is None and action in ("--renew", "--release"):
        raise InvalidOptionError(f"{action} needs --owner ID: who holds the claim")
    if action in ("--claim", "--renew", "--release") and len(partitions) > 1:
        raise InvalidOptionError(f"{action} takes one partition, not {len(partitions)}")


def _mark(out: Output, storage: Storage, metrics: Mapping[str, Mapping[str, float]], owner: str | None) -> ExitCode:
    results = mark_each(storage, metrics, owner=owner)
    failed = [result for result in results.values() if isinstance(result, StorageError)]
    if len(failed) == len(results):
        raise failed[0]
    for error in failed:
        out.warn(error.message)
    markers = {name: None if isinstance(result, StorageError) else result for name, result in results.items()}
    _say(out, storage, markers)
    return ExitCode.PARTIAL if failed else ExitCode.OK


def _check(out: Output, storage: Storage, partitions: Sequence[str]) -> ExitCode:
    require_complete(storage)
    markers = {partition: find_marker(storage, partition) for partition in partitions}
    for marker in markers.values():
        if marker is not None and marker.problem:
            out.warn(f"{storage.url}: {marker.problem}")
    claims = {}
    if out.as_json:
        now = storage.now(may_write=False)
        claims = {partition: find_live_claim(storage, partition, now=now) for partition in partitions}
    _say(out, storage, markers, claims=claims)
    return ExitCode.OK if all(markers.values()) else ExitCode.NO


def _remove(out: Output, storage: Storage, partitions: Sequence[str]) -> ExitCode:
    removed = [remove_mark(storage, partition) for partition in partitions]
    lines = [
        f"{name}: {'removed' if was else 'was not evaluated'}" for name, was in zip(partitions, removed, strict=True)
    ]
    return _say(out, storage, dict.fromkeys(partitions), *lines)


def _say_claim(out: Output, storage: Storage, claim: Claim) -> ExitCode:
    out.note(f"{claim.partition}: claimed until {format_time(claim.expires_at)}")
    return _say(out, storage, {claim.partition: None}, claim.owner or "", claims={claim.partition: claim})


def _say(
    out: Output,
    storage: Storage,
    markers: Mapping[str, Marker | None],
    *lines: str,
    claims: Mapping[str, Claim | None] | None = None,
) -> ExitCode:
    """The answer: one document, or these lines, or a line for each partition."""
    if out.as_json:
        items = [_partition_json(name, marker, (claims or {}).get(name)) for name, marker in markers.items()]
        out.document({"path": storage.url, "step": parse_step(storage.name), "partitions": items})
        return ExitCode.OK
    for line in lines or [_marker_line(name, marker) for name, marker in markers.items()]:
        out.line(line)
    return ExitCode.OK


def _marker_line(partition: str, marker: Marker | None) -> str:
    if marker is None:
        return f"{partition}: not evaluated"
    metrics = [f"{name}={format_number(value)}" for name, value in marker.metrics.items()]
    return f"{partition}: evaluated {', '.join([format_time(marker.finished_at) or 'at an unknown time', *metrics])}"


def _partition_json(partition: str, marker: Marker | None, claim: Claim | None) -> dict[str, Any]:
    return {
        "partition": partition,
        "done": marker is not None,
        "finished_at": format_time(marker.finished_at) if marker else None,
        "metrics": {name: json_number(value) for name, value in marker.metrics.items()} if marker else {},
        "claimed_by": claim.owner if claim else None,
        "claim_expires_at": format_time(claim.expires_at) if claim else None,
    }
