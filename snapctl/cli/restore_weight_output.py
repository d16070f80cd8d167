"""What `restore-weight` says on the way, and how it delivers what it has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from snapctl.cli.output import Output, StdoutSink, format_size, json_value
from snapctl.cli.restore_weight_cmd import Destination
from snapctl.errors import InvalidOptionError, UnsupportedEntryError
from snapctl.export.selection import Selection, read_value
from snapctl.export.state_dict_file import check_place, load_state_dict, put_tensor
from snapctl.export.stats import Number, TensorStats, compute_stats
from snapctl.export.weight_file import Content, check_content, describe_left_out, write_content
from snapctl.export.writing import Item, read_torch_items
from snapctl.manifest import LogicalEntry
from snapctl.output_file import NewFile
from snapctl.snapshots import OpenSnapshot
from snapctl.tensors.reader import TensorReader

# -- what it says on the way -----------------------------------------------------------------------------------------


def say_compared(out: Output, entries: Sequence[LogicalEntry]) -> None:
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    ranks = len(entries[0].entries)
    out.note(f"{entries[0].path}{more}: {ranks} ranks hold one each; comparing them (--rank R reads that one alone)")


def say_found(out: Output, chosen: Selection, content: Content) -> None:
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
class Delivery:
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


def deliver(delivery: Delivery, chosen: Selection, to: Destination) -> None:
    if to.kinds == "tensors" and (left_out := describe_left_out(chosen)) is not None:
        delivery.out.warn(left_out)
    if to.file_format is not None:
        _write(delivery, to.file_format, to.path)
    elif to.into is not None:
        _put(delivery, to.into, to.key)
    elif to.stats:
        _show_stats(delivery)
    else:
        _show_values(delivery)


def _write(delivery: Delivery, file_format: str, path: str | None) -> None:
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


def _put(delivery: Delivery, path: str, key: str) -> None:
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


def _show_stats(delivery: Delivery) -> None:
    out, reader, items = delivery.out, delivery.reader, delivery.content.items
    if not items:
        raise UnsupportedEntryError("no tensor to show the statistics of")
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


def _values(delivery: Delivery) -> list[tuple[LogicalEntry, Any]]:
    return [(entry, read_value(delivery.reader, entry)) for _, entry in delivery.content.values]


def _values_json(delivery: Delivery) -> dict[str, Any]:
    found = [{"path": e.path, "type": e.type, "value": _json(value)} for e, value in _values(delivery)]
    return {"values": found} if found else {}


def _show_values(delivery: Delivery) -> None:
    if delivery.out.as_json:
        delivery.document(**_values_json(delivery))
        return
    found = [(entry.path, str(_json(value))) for entry, value in _values(delivery)]
    if len(found) == 1:
        delivery.out.line(found[0][1])
    else:
        delivery.out.fields(found)
