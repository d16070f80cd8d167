"""Tensors by name: from an opened checkpoint and what a user typed to arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from snapctl.entry_names import MAX_CANDIDATES, EntryIndex, differing_ranks, find_entries
from snapctl.errors import EntryNotFoundError, InvalidOptionError
from snapctl.manifest import LogicalEntry
from snapctl.snapshots import open_snapshot
from snapctl.tensors.blocks import as_buffer
from snapctl.tensors.dtypes import TORCH_ONLY_DTYPES, convert, numpy_dtype
from snapctl.tensors.layout import TensorLayout, find_missing_shards, resolve_layouts
from snapctl.tensors.read_plan import cut_into_blocks
from snapctl.tensors.reader import Rows, TensorReader, region_of_rows
from snapctl.tensors.tiling import Region
from snapctl.tensors.torch_decoding import import_torch, values_of

_COMPARED_BYTES = 4 << 20


def read_tensor(
    checkpoint: str,
    name: str,
    *,
    rows: Rows | slice | None = None,
    dtype: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """A tensor out of a checkpoint, its shards put together, reading only the bytes that are needed.

    Args:
        checkpoint: its path or URL, or a save directory: then its latest, or the one of `step`.
        name: a path with or without rank, or the end of one: as ``snapctl restore-weight`` takes it.
        rows: only ``(start, stop)`` of dimension 0, or a slice without a step; nothing is counted from the end.
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
    match = find_entries(index, name, rank=rank)
    for entries in match.ambiguous:
        raise differing_ranks(name, entries)
    found = match.entries
    if len(found) != 1:
        raise EntryNotFoundError(
            f"{name}: {len(found)} entries fit", candidates=tuple(entry.path for entry in found[:MAX_CANDIDATES])
        )
    with TensorReader(snapshot.storage) as reader:
        layout = reader.learn(choose_layout(reader, index, found[0]))
        if wanted is None:
            return reader.read(layout, bounds)
        return read_converted(reader, layout, bounds, wanted)


def read_converted(
    reader: TensorReader, layout: TensorLayout, rows: Rows | None, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """The values of a tensor in another dtype; of a quantized one the values that it stands for."""
    if layout.dtype in TORCH_ONLY_DTYPES:
        return convert(values_of(reader.read_torch(layout, rows), entry=layout.entry), dtype)
    return convert(reader.read(layout, rows), dtype)


def choose_layout(reader: TensorReader, index: EntryIndex, entry: LogicalEntry) -> TensorLayout:
    """As `choose_layouts`, for one entry."""
    return choose_layouts(reader, index, [entry])[0]


def choose_layouts(
    reader: TensorReader,
    index: EntryIndex,
    entries: Sequence[LogicalEntry],
    *,
    on_compare: Callable[[Sequence[LogicalEntry]], None] | None = None,
) -> list[TensorLayout]:
    """The one tensor that each entry stands for.

    Where several ranks saved each its own, they are compared (in bounded memory): equal ones are one tensor.

    Args:
        on_compare: called before that with the entries of which several are read.

    Raises:
        EntryNotFoundError: they differ; the candidates are the paths with their ranks.
        DamagedError: the parts of a tensor contradict each other, or some have no entry.
        UnsupportedEntryError: one is no tensor.
    """
    found: list[tuple[TensorLayout, ...]] = []
    for entry in entries:
        for problem in find_missing_shards(entry, index.manifest, index.ranks):
            raise problem
        found.append(resolve_layouts(entry))
    several = [number for number, layouts in enumerate(found) if len(layouts) > 1]
    if several:
        if on_compare is not None:
            on_compare([entries[number] for number in several])
        difference = find_difference(reader, [found[number] for number in several])
        if difference is not None:
            raise _different(entries[several[difference[0]]], *difference[1])
    return [layouts[0] for layouts in found]


def _different(entry: LogicalEntry, one: TensorLayout, other: TensorLayout) -> EntryNotFoundError:
    paths = tuple(path for path, _ in entry.entries)
    return EntryNotFoundError(
        f"{entry.path}: the ranks hold different tensors: {one.entry} is not {other.entry}",
        candidates=paths[:MAX_CANDIDATES],
        hint="say which with --rank, or with the rank in the name",
    )


def find_difference(
    reader: TensorReader, groups: Sequence[Sequence[TensorLayout]]
) -> tuple[int, tuple[TensorLayout, TensorLayout]] | None:
    """The first group of tensors that are not, bit by bit, all the same, and two of them that differ; or None.

    All groups are read in one go, block by block, so that many small tensors do not cost a request each.
    """
    known = [[reader.learn(layout) for layout in group] for group in groups]
    for number, group in enumerate(known):
        for layout in group[1:]:
            if (layout.dtype, layout.shape) != (group[0].dtype, group[0].shape):
                return number, (group[0], layout)
    reader.check_parts([(layout, region_of_rows(layout)) for group in known for layout in group])
    order: list[tuple[int, int]] = []  # group and member of each part, in the order of the parts

    def parts() -> Iterator[tuple[TensorLayout, Region]]:
        for number, group in enumerate(known):
            if group[0].dtype in TORCH_ONLY_DTYPES:
                continue
            for region in _compared_regions(group):
                order.extend((number, member) for member in range(len(group)))
                yield from ((layout, region) for layout in group)

    held = b""
    for block in reader.iter_blocks(parts()):
        number, member = order[block.index]
        data = as_buffer(block.array)
        if member == 0:
            held = bytes(data)
        elif held != data:
            return number, (known[number][0], known[number][member])
    for number, group in enumerate(known):
        found = _torch_difference(reader, number, group)
        if found is not None:
            return found
    return None


def _compared_regions(group: Sequence[TensorLayout]) -> Iterator[Region]:
    whole = region_of_rows(group[0])
    if all(layout.is_raw for layout in group):
        return cut_into_blocks(whole, group[0].item_bytes or 1, _COMPARED_BYTES)
    return iter([whole])  # decoding them once for each block would take for ever


def _torch_difference(
    reader: TensorReader, number: int, group: Sequence[TensorLayout]
) -> tuple[int, tuple[TensorLayout, TensorLayout]] | None:
    if group[0].dtype not in TORCH_ONLY_DTYPES:
        return None
    numerics = import_torch(group[0].entry)
    first = reader.read_torch(group[0])
    for layout in group[1:]:
        if not numerics.equal(first, reader.read_torch(layout)):
            return number, (group[0], layout)
    return None


def _bounds(rows: Rows | slice | None) -> Rows | None:
    if not isinstance(rows, slice):
        return rows
    if rows.step not in (None, 1):
        raise InvalidOptionError(f"rows must not have a step: {rows}")
    return rows.start or 0, rows.stop
