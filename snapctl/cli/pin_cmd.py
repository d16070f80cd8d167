"""Protect a checkpoint from prune, until the pin is removed."""

from __future__ import annotations

from typing import Annotated

import typer

from snapctl.checkpoints import open_checkpoint, parse_step
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import CheckpointArgument, JsonOption, StepOption, StorageOptions, parse_storage_options
from snapctl.cli.output import Output
from snapctl.errors import InvalidOptionError
from snapctl.evaluation.evals import pin, unpin
from snapctl.markers import format_time


def command(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Why it is kept.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    if remove and note is not None:
        raise InvalidOptionError("--note does not go with --remove")
    storage = open_checkpoint(checkpoint, step, parse_storage_options(storage_option))
    found = None
    if remove:
        out.note(f"{storage.url}: {'no longer pinned' if unpin(storage) else 'was not pinned'}")
    else:
        found = pin(storage, note)
        out.note(f"{storage.url}: pinned")
    if as_json:
        out.document(
            {
                "path": storage.url,
                "step": parse_step(storage.name),
                "pinned": found is not None,
                "note": found.note if found else None,
                "owner": found.owner if found else None,
                "pinned_at": format_time(found.pinned_at) if found else None,
            }
        )
    return ExitCode.OK
