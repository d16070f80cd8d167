"""Tensors by name: from an opened checkpoint and what a user typed to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from snapctl.dtypes import convert, numpy_dtype
from snapctl.entry_names import EntryIndex, find_entries
from snapctl.errors import EntryNotFoundError, InvalidOptionError
from snapctl.manifest import LogicalEntry
from snapctl.read_plan import cut_into_blocks
from snapctl.snapshots import open_snapshot
from snapctl.tensor_layout import TensorLayout, find_missing_shards, resolve_layouts
from snapctl.tensors import TensorReader, region_of_rows

_COMPARED_BYTES = 4 << 20


def read_tensor(
    checkpoint: str,
    name: str,
    *,
    rows: tuple[int, int] | slice | None = None,
    dtype: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """A tensor out of a checkpoint, its shards put together, reading only the bytes that are needed.

    Args:
        checkpoint: its path or URL, or a save directory: then its latest, or the one of `step`.
        name: a path with or without rank, or the end of one: as ``snapctl restore-weight`` takes it.
        rows: only ``(start, stop)`` of dimension 0.
        dtype: convert to this dtype (``float32``; torch's names). Needed for quantized tensors.
        rank: whose tensor, where each rank holds its own.
        step: of a save directory.
        storage_options: for fsspec.

    Returns:
        An array of its own; bfloat16 and float8 in the dtypes of ml_dtypes.

    Raises:
        EntryNotFoundError: no such entry, or several; `candidates` names them.
        DamagedError: a hole, an overlap, a missing or short blob.
        UnsupportedEntryError: it is no tensor, or one that numpy has no dtype for.
        MissingExtraError: it can only be decoded by torch, which is not installed.
        InvalidOptionError: there are no such rows.
        CheckpointNotFoundError, SaveDirNotFoundError, ManifestError, StorageError: as everywhere.
    """
    bounds = _bounds(rows)
    wanted = None if dtype is None else numpy_dtype(dtype.removeprefix("torch."))
    snapshot = open_snapshot(checkpoint, step, storage_options)
    index = EntryIndex(snapshot.manifest)
    found = find_entries(index, name, rank=rank).entries
    if len(found) != 1:
        raise EntryNotFoundError(
            f"{name}: {len(found)} entries fit", candidates=tuple(entry.path for entry in found[:20])
        )
    with TensorReader(snapshot.storage) as reader:
        layout = reader.learn(choose_layout(reader, index, found[0]))
        if wanted is None:
            return reader.read(layout, bounds)
        return read_converted(reader, layout, bounds, wanted)


def read_converted(
    reader: TensorReader, layout: TensorLayout, rows: tuple[int, int] | None, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """The values of a tensor in another dtype; of a quantized one the values that it stands for."""
    if layout.dtype in TORCH_ONLY_DTYPES:
        return convert(values_of(reader.read_torch(layout, rows)), dtype)
    return convert(reader.read(layout, rows), dtype)


TORCH_ONLY_DTYPES = ("qint8", "quint8", "qint32", "complex32")
"""Dtypes that numpy lacks and whose values can be had all the same."""


def values_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The values of a quantized or complex32 torch tensor in a dtype that numpy has."""
    import torch

    plain = tensor.dequantize() if tensor.is_quantized else tensor.to(torch.complex64)
    array: np.ndarray[Any, Any] = plain.numpy()
    return array


def choose_layout(reader: TensorReader, index: EntryIndex, entry: LogicalEntry) -> TensorLayout:
    """The one tensor that an entry stands for.

    Where several ranks saved each its own, they are compared (in bounded memory): equal ones are one tensor.

    Raises:
        EntryNotFoundError: they differ; the candidates are the paths with their ranks.
        DamagedError: its parts contradict each other, or some have no entry.
        UnsupportedEntryError: it is no tensor.
    """
    for problem in find_missing_shards(entry, index.manifest, index.ranks):
        raise problem
    layouts = resolve_layouts(entry)
    if len(layouts) == 1:
        return layouts[0]
    other = find_difference(reader, layouts)
    if other is None:
        return layouts[0]
    paths = tuple(path for path, _ in entry.entries)
    raise EntryNotFoundError(
        f"{entry.path}: the ranks hold different tensors: {layouts[0].entry} is not {other.entry}",
        candidates=paths[:20],
        hint="say which with --rank, or with the rank in the name",
    )


def find_difference(reader: TensorReader, layouts: Sequence[TensorLayout]) -> TensorLayout | None:
    """The first of some tensors that is not, bit by bit, like the first one; None if all are."""
    known = [reader.learn(layout) for layout in layouts]
    first = known[0]
    for layout in known[1:]:
        if (layout.dtype, layout.shape) != (first.dtype, first.shape):
            return layout
    reader.check(known)
    if any(layout.dtype in TORCH_ONLY_DTYPES for layout in known):
        import torch

        reference = reader.read_torch(first)
        return next((layout for layout in known[1:] if not torch.equal(reference, reader.read_torch(layout))), None)
    item_bytes = numpy_dtype(first.dtype or "").itemsize
    regions = cut_into_blocks(region_of_rows(first), item_bytes, _COMPARED_BYTES)
    held = b""
    for block in reader.iter_blocks((layout, region) for region in regions for layout in known):
        data = block.array.reshape(-1).view(np.uint8).data
        number = block.index % len(known)
        if number == 0:
            held = bytes(data)
        elif held != data:
            return known[number]
    return None


def _bounds(rows: tuple[int, int] | slice | None) -> tuple[int, int] | None:
    if not isinstance(rows, slice):
        return rows
    if rows.step not in (None, 1) or rows.stop is None:
        raise InvalidOptionError(f"rows must have a stop and no step, not {rows}")
    return rows.start or 0, rows.stop
