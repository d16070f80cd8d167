"""A selection of tensors and values as the content of one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snapctl.errors import InvalidOptionError, UnsupportedEntryError
from snapctl.export.selection import Selection, file_names, read_value
from snapctl.export.writing import (
    Item,
    check_items,
    make_item,
    read_torch_items,
    write_npy,
    write_pt,
    write_safetensors,
)
from snapctl.manifest import LogicalEntry
from snapctl.output_file import Sink
from snapctl.tensors.reader import Rows, TensorReader

_NAMED = 5
_ROWS = re.compile("([0-9]{0,18}):([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into a file."""

    items: tuple[Item, ...]
    values: tuple[tuple[str, LogicalEntry], ...]
    """Primitives and objects, with their names."""
    is_one: bool
    """The thing itself, not a collection of one: a ``.pt`` file then holds no dict."""


def make_content(
    reader: TensorReader,
    selection: Selection,
    *,
    rows: Rows | None = None,
    dtype: str | None = None,
    strip_prefix: str | None = None,
    with_values: bool = True,
) -> Content:
    """The content of a file.

    Args:
        rows: only these rows of each tensor.
        dtype: as `make_item`.
        strip_prefix: as `file_names`.
        with_values: also what is no tensor.

    Raises:
        InvalidOptionError: there are no such rows, or the prefix makes no sense.
        EntryNotFoundError: two tensors would have the same name.
        DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `TensorReader.learn`.
    """
    values = selection.values if with_values else ()
    names = file_names([*(entry for entry, _ in selection.tensors), *values], strip_prefix)
    count = len(selection.tensors)
    reader.prefetch([layout for _, layout in selection.tensors])
    items = [
        make_item(reader, name, layout, rows, dtype)
        for name, (_, layout) in zip(names[:count], selection.tensors, strict=True)
    ]
    return Content(tuple(items), tuple(zip(names[count:], values, strict=True)), selection.is_one)


def check_content(reader: TensorReader, content: Content, file_format: str) -> None:
    """Whether a format can hold it, and whether the blobs are all there in full length; nothing is read.

    Raises:
        UnsupportedEntryError: the format cannot hold it. DamagedError: a blob is missing or short.
        StorageError: the storage could not be asked.
    """
    if file_format != "pt" and not content.items:
        raise UnsupportedEntryError(f"no tensor to write: a .{file_format} file holds nothing else")
    check_items(content.items, file_format)
    reader.check_parts([(item.layout, item.region) for item in content.items])


def write_content(
    reader: TensorReader, content: Content, file_format: str, sink: Sink, *, metadata: Mapping[str, str]
) -> None:
    """Writes a file of one of `snapctl.export.FORMATS`.

    Args:
        metadata: for the header of a ``.safetensors`` file.

    Raises:
        DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, ManifestError, StorageError: something
            cannot be read or written. What the sink has got by then is of no use.
    """
    if file_format == "npy":
        write_npy(reader, content.items[0], sink)
    elif file_format == "safetensors":
        write_safetensors(reader, content.items, sink, metadata)
    else:
        tensors = read_torch_items(reader, content.items)
        named = dict(zip((item.name for item in content.items), tensors, strict=True))
        whole: dict[str, Any] = named | {name: read_value(reader, entry) for name, entry in content.values}
        write_pt(next(iter(whole.values())) if content.is_one else whole, sink)


def describe_left_out(selection: Selection) -> str | None:
    """What was asked for and is no tensor, in words, where only tensors count: it is never dropped in silence."""
    if not selection.values:
        return None
    listed = ", ".join(f"{entry.path} ({entry.type})" for entry in selection.values[:_NAMED])
    more = f" and {len(selection.values) - _NAMED} more" if len(selection.values) > _NAMED else ""
    return f"left out, since they are no tensors: {listed}{more}"


def parse_rows(text: str) -> Rows:
    """``START:STOP``; either may be left out. None for a stop that is the end.

    Raises:
        InvalidOptionError: it is something else.
    """
    found = _ROWS.fullmatch(text)
    if found is None:
        raise InvalidOptionError(f"--rows takes START:STOP, such as 0:1000, not {text!r}")
    start, stop = found.groups()
    return int(start or 0), int(stop) if stop else None
