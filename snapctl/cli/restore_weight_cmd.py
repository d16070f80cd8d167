"""Tensors out of a checkpoint, without the model and without the other ranks, shards put together.

NAME is a path with or without its rank (as show prints it), a glob ('model/*'), or the end of a path that begins after
a slash or a dot. Only the bytes that are needed are read, and nothing is unpickled beyond PyTorch's weights-only
loading. The values of entries that are no tensors are printed, unless there is a file for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import (
    CheckpointOrSaveDirArgument,
    JsonOption,
    StepOption,
    StorageOptions,
    parse_storage_options,
)
from snapctl.cli.output import Output
from snapctl.entry_names import EntryIndex
from snapctl.errors import InvalidOptionError
from snapctl.export import FORMATS
from snapctl.output_file import check_output_path
from snapctl.snapshots import open_snapshot


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the tensors go; neither a format nor `into` nor `stats`: nowhere."""

    file_format: str | None = None
    path: str | None = None
    """Absolute; None for standard output."""
    into: str | None = None
    key: str = ""
    stats: bool = False

    @property
    def kinds(self) -> Literal["all", "tensors", "values"]:
        """What there is room for."""
        if self.file_format == "pt":
            return "all"
        return "tensors" if self.file_format or self.into or self.stats else "values"


def command(
    context: typer.Context,
    checkpoint: CheckpointOrSaveDirArgument,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Which entries: paths, ends of paths, globs.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A .safetensors, .npy or .pt file to write; - is standard output."
        ),
    ] = None,
    file_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="safetensors, npy or pt, whatever the suffix.")
    ] = None,
    into: Annotated[
        str | None, typer.Option("--into", metavar="FILE.pt", help="Put the tensor into the state dict in this file.")
    ] = None,
    key: Annotated[str | None, typer.Option("--as", metavar="KEY", help="Its key in that state dict.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show minimum, maximum, mean, NaN, Inf and the first values.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="START:STOP", help="Only these rows of dimension 0.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert to this dtype.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help="What this rank holds, where they differ.")
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="PREFIX", help="Leave this out of the names in the file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing file.")] = False,
    step: StepOption = None,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    from snapctl.cli.restore_weight_output import Delivery, deliver, say_compared, say_found
    from snapctl.export.selection import select
    from snapctl.export.weight_file import make_content, parse_rows
    from snapctl.export.writing import parse_dtype
    from snapctl.tensors.reader import TensorReader  # numpy: --help and completion do without it, in half the time

    out: Output = context.obj
    bounds = None if rows is None else parse_rows(rows)
    wanted = None if dtype is None else parse_dtype(dtype)
    to = _destination(out, output, file_format, into, key, stats=stats, force=force)
    if strip_prefix is not None and to.file_format not in ("safetensors", "pt"):
        raise InvalidOptionError("--strip-prefix is for the names in a .safetensors or .pt file")
    snapshot = open_snapshot(checkpoint, step, parse_storage_options(storage_option))
    for warning in snapshot.warnings:
        out.warn(warning)
    if rank is not None and rank >= snapshot.manifest.world_size:
        raise InvalidOptionError(f"--rank {rank}: {snapshot.manifest.world_size} ranks saved this checkpoint")
    with TensorReader(snapshot.storage) as reader:
        chosen = select(
            reader,
            EntryIndex(snapshot.manifest),
            names,
            rank=rank,
            kinds=to.kinds,
            on_compare=lambda entries: say_compared(out, entries),
        )
        content = make_content(
            reader, chosen, rows=bounds, dtype=wanted, strip_prefix=strip_prefix, with_values=to.kinds != "tensors"
        )
        say_found(out, chosen, content)
        deliver(Delivery(out, reader, snapshot, content), chosen, to)
    return ExitCode.OK


# -- the command line ------------------------------------------------------------------------------------------------


def _destination(
    out: Output,
    output: str | None,
    file_format: str | None,
    into: str | None,
    key: str | None,
    *,
    stats: bool,
    force: bool,
) -> Destination:
    if sum((output is not None, into is not None, stats)) > 1:
        raise InvalidOptionError("--output, --into and --stats exclude each other")
    if (into is None) != (key is None):
        raise InvalidOptionError("--into FILE.pt and --as KEY go together")
    if output is None and (file_format is not None or force):
        raise InvalidOptionError("--format and --force go with --output")
    if output is None:
        return Destination(into=into, key=key or "", stats=stats)
    if file_format is None:
        file_format = output.rpartition(".")[2]
        if file_format not in FORMATS:
            hint = "--format safetensors, npy or pt" if output == "-" else "name it .safetensors, .npy or .pt"
            raise InvalidOptionError(f"--output {output}: which format?", hint=hint)
    if file_format not in FORMATS:
        raise InvalidOptionError(f"--format takes {', '.join(FORMATS)}, not {file_format!r}")
    if output != "-":
        return Destination(file_format, check_output_path(output, force=force))
    if out.as_json:
        raise InvalidOptionError("--json and --output - both want standard output")
    return Destination(file_format)
