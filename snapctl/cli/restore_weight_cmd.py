"""Tensors out of a checkpoint, without the model and without the other ranks, shards put together.

NAME is a path with or without its rank (as show prints it), a glob ('model/*'), or the end of a path that begins after
a slash or a dot. Only the bytes that are needed are read, and nothing is unpickled beyond PyTorch's weights-only
loading. The values of entries that are no tensors are printed, unless there is a file for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import (
    CheckpointOrSaveDirArgument,
    JsonOption,
    StepOption,
    StorageOptions,
    parse_storage_options,
)
from snapctl.cli.output import Output, StdoutSink, format_size, json_value
from snapctl.entry_names import EntryIndex
from snapctl.errors import InvalidOptionError
from snapctl.export.selection import Kinds, Selection, read_value, select
from snapctl.export.state_dict_file import check_place, load_state_dict, put_tensor
from snapctl.export.stats import Number, TensorStats, compute_stats
from snapctl.export.weight_file import (
    Content,
    check_content,
    describe_left_out,
    make_content,
    parse_rows,
    write_content,
)
from snapctl.export.writing import FORMATS, Item, parse_dtype, read_torch_items
from snapctl.manifest import LogicalEntry
from snapctl.output_file import NewFile, check_output_path
from snapctl.snapshots import OpenSnapshot, open_snapshot
from snapctl.tensors.reader import TensorReader


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where the tensors go; neither a format nor `into` nor `stats`: nowhere."""

    file_format: str | None = None
    path: str | None = None
    """Absolute; None for standard output."""
    into: str | None = None
    key: str = ""
    stats: bool = False

    @property
    def kinds(self) -> Kinds:
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
            on_compare=lambda entries: _say_compared(out, entries),
        )
        content = make_content(
            reader, chosen, rows=bounds, dtype=wanted, strip_prefix=strip_prefix, with_values=to.kinds != "tensors"
        )
        _say_found(out, chosen, content)
        _deliver(_Delivery(out, reader, snapshot, content), chosen, to)
    return ExitCode.PARTIAL if snapshot.is_unsure else ExitCode.OK


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
) -> _Destination:
    if sum((output is not None, into is not None, stats)) > 1:
        raise InvalidOptionError("--output, --into and --stats exclude each other")
    if (into is None) != (key is None):
        raise InvalidOptionError("--into FILE.pt and --as KEY go together")
    if output is None and (file_format is not None or force):
        raise InvalidOptionError("--format and --force go with --output")
    if output is None:
        return _Destination(into=into, key=key or "", stats=stats)
    if file_format is None:
        file_format = output.rpartition(".")[2]
        if file_format not in FORMATS:
            hint = "--format safetensors, npy or pt" if output == "-" else "name it .safetensors, .npy or .pt"
            raise InvalidOptionError(f"--output {output}: which format?", hint=hint)
    if file_format not in FORMATS:
        raise InvalidOptionError(f"--format takes {', '.join(FORMATS)}, not {file_format!r}")
    if output != "-":
        return _Destination(file_format, check_output_path(output, force=force))
    if out.as_json:
        raise InvalidOptionError("--json and --output - both want standard output")
    return _Destination(file_format)


# -- what it says on the way -----------------------------------------------------------------------------------------


def _say_compared(out: Output, entries: Sequence[LogicalEntry]) -> None:
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    ranks = len(entries[0].entries)
    out.note(f"{entries[0].path}{more}: {ranks} ranks hold one each; comparing them (--rank R reads that one alone)")


def _say_found(out: Output, chosen: Selection, content: Content) -> None:
    if len(content.items) == 1:
        (item,) = content.items
        parts = f", in {len(item.layout.boxes)} parts" if len(item.layout.boxes) > 1 else ""
        out.note(f"found {item.layout.entry}: {item.layout.dtype} {list(item.layout.shape or ())}{parts}")
    elif content.items:
        out.note(f"found {len(content.items)} tensors")
    if chosen.is_one and chosen.values:
        out.note(f"found {chosen.values[0].entries[0][0]}: {chosen.values[0].type}")


# -- delivery --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Delivery:
    out: Output
    reader: TensorReader
    snapshot: OpenSnapshot
    content: Content

    def document(self, *, output: str | None = None, stats: Sequence[TensorStats] = (), **more: Any) -> None:
        """The JSON document."""
        items = self.content.items
        self.out.document(
            {
                "path": self.snapshot.path,
                "step": self.snapshot.step,
                "tensors": [
                    {
                        "path": item.layout.path,
                        "entry": item.layout.entry,
                        "name": item.name,
                        "dtype": item.dtype,
                        "shape": list(item.shape),
                        "size_bytes": item.size_bytes,
                        "output": output,
                        "stats": _stats_json(stats[number]) if stats else None,
                    }
                    for number, item in enumerate(items)
                ],
                **more,
                "bytes_read": self.reader.bytes_read,
            }
        )


def _deliver(delivery: _Delivery, chosen: Selection, to: _Destination) -> None:
    if to.file_format is not None:
        if to.kinds == "tensors" and (left_out := describe_left_out(chosen)) is not None:
            delivery.out.warn(left_out)
        _write(delivery, to.file_format, to.path)
    elif to.into is not None:
        _put(delivery, to.into, to.key)
    elif to.stats:
        _show_stats(delivery)
    else:
        _show_values(delivery)


def _write(delivery: _Delivery, file_format: str, path: str | None) -> None:
    out, reader, content = delivery.out, delivery.reader, delivery.content
    check_content(reader, content, file_format)
    found = delivery.snapshot
    metadata = {"format": "pt", "source": found.path} | ({} if found.step is None else {"step": str(found.step)})
    total = reader.stored_bytes([(item.layout, item.region) for item in content.items])
    with out.progress("reading", total) as report:
        reader.on_read(report)
        if path is None:
            write_content(reader, content, file_format, StdoutSink(), metadata=metadata)
            return
        with NewFile(path) as file:
            write_content(reader, content, file_format, file, metadata=metadata)
            file.commit()
    out.note(f"wrote {path}: {format_size(file.size_bytes)}")
    if out.as_json:
        delivery.document(output=path, **_values_json(delivery))


def _put(delivery: _Delivery, path: str, key: str) -> None:
    out, reader, content = delivery.out, delivery.reader, delivery.content
    if len(content.items) != 1:
        raise InvalidOptionError(f"--into takes one tensor, not {len(content.items)}")
    (item,) = content.items
    full, state = load_state_dict(path)
    check_place(full, state, key, item.dtype, item.shape)
    with out.progress("reading", reader.stored_bytes([(item.layout, item.region)])) as report:
        reader.on_read(report)
        (tensor,) = read_torch_items(reader, [item])
    size_bytes = put_tensor(full, state, key, tensor)
    out.note(f"put it into {full} as {key}: {format_size(size_bytes)}")
    if out.as_json:
        delivery.document(output=full)


def _show_stats(delivery: _Delivery) -> None:
    out, reader, items = delivery.out, delivery.reader, delivery.content.items
    parts = [(item.layout, item.region) for item in items]
    reader.check_parts(parts)
    with out.progress("reading", reader.stored_bytes(parts)) as report:
        reader.on_read(report)
        stats = compute_stats(reader, items)
    if out.as_json:
        delivery.document(stats=stats)
        return
    rows = [_stats_row(item, found) for item, found in zip(items, stats, strict=True)]
    headers = ["PATH", "DTYPE", "SHAPE", "MIN", "MAX", "MEAN", "NAN", "INF", "FIRST"]
    out.table(headers, rows, right=("MIN", "MAX", "MEAN", "NAN", "INF"))


def _stats_row(item: Item, stats: TensorStats) -> list[str]:
    numbers = [_number_text(number) for number in (stats.min, stats.max, stats.mean)]
    first = " ".join(map(_number_text, stats.first)) + (" …" if stats.count > len(stats.first) else "")
    return [item.layout.path, item.dtype, str(list(item.shape)), *numbers, str(stats.nan), str(stats.inf), first or "-"]


def _number_text(number: Number | None) -> str:
    return "-" if number is None else f"{number:.6g}" if isinstance(number, float | complex) else str(number)


def _stats_json(stats: TensorStats) -> dict[str, Any]:
    return {name: _json(value) for name, value in asdict(stats).items()}


def _json(value: Any) -> Any:
    """Any value for JSON; what it has no form for as Python shows it."""
    if isinstance(value, dict):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return json_value(value)
    return str(value)


def _values(delivery: _Delivery) -> list[tuple[LogicalEntry, Any]]:
    return [(entry, read_value(delivery.reader, entry)) for _, entry in delivery.content.values]


def _values_json(delivery: _Delivery) -> dict[str, Any]:
    found = [{"path": e.path, "type": e.type, "value": _json(value)} for e, value in _values(delivery)]
    return {"values": found} if found else {}


def _show_values(delivery: _Delivery) -> None:
    if delivery.out.as_json:
        delivery.document(**_values_json(delivery))
        return
    found = [(entry.path, str(_json(value))) for entry, value in _values(delivery)]
    if len(found) == 1:
        delivery.out.line(found[0][1])
    else:
        delivery.out.fields(found)
