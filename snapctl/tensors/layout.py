"""Where the elements of a tensor lie: boxes of it in byte ranges of blobs, and whether they tile it. Pure.

A *box* is a part of a tensor: a shard, a chunk, or the whole of it. In its blob a box is stored row-major by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapctl.errors import DamagedError, UnsupportedEntryError
from snapctl.manifest import (
    DTYPE_SIZES,
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    LogicalEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    encode_key,
    shards_of,
)
from snapctl.tensors.tiling import describe_hole, find_overlap

RAW_SERIALIZER = "buffer_protocol"
"""The elements themselves, little-endian, row-major."""
TORCH_SERIALIZERS = ("torch_save", "per_tensor_qtensor", "per_channel_qtensor")
"""What only torch can decode."""

MAX_BYTES = 1 << 62
"""No tensor is larger; a manifest that says so is damaged, and the arithmetic below stays in 64 bits."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, and where it is stored."""

    entry: str
    """The manifest path of the entry that lists it."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: str
    serializer: str
    dtype: str | None
    """Without ``torch.``; None where only the blob knows it."""
    byte_range: tuple[int, int] | None = None
    """``[start, end)`` in the blob, as the manifest has it; None for the whole blob."""

    @property
    def item_bytes(self) -> int | None:
        return item_bytes(self.dtype)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def start(self) -> int:
        """Where it begins in its blob."""
        return self.byte_range[0] if self.byte_range is not None else 0

    @property
    def size_bytes(self) -> int | None:
        """Bytes that it takes in its blob; None where only the blob knows."""
        needed = self.needed_bytes
        if needed is not None:
            return needed
        return self.byte_range[1] - self.byte_range[0] if self.byte_range is not None else None

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that dtype, shape and serializer ask for; None where these do not tell."""
        each = self.item_bytes
        if each is None:
            return None
        if self.serializer == RAW_SERIALIZER:
            return self.elements * each
        if self.serializer == "per_tensor_qtensor":
            return self.elements * each + 16  # scale, zero point
        return None

    @property
    def end(self) -> int | None:
        """Where it ends in its blob; None: with the blob."""
        size = self.size_bytes
        return None if size is None else self.start + size

    @property
    def needs_blob(self) -> bool:
        """False for a box without elements whose dtype is known: its blob may be missing."""
        return self.dtype is None or self.elements > 0


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor: its dtype and shape, and the boxes that it is made of."""

    path: str
    """The logical path."""
    entry: str
    """The manifest path of the (first) entry that lists it."""
    ranks: tuple[int, ...]
    """The ranks that list it."""
    dtype: str | None
    """Without ``torch.``; None where only the blobs know it (0.0.x)."""
    shape: tuple[int, ...] | None
    """None where only the blob knows it (0.0.x)."""
    boxes: tuple[Box, ...]
    """Sorted by their offsets; those without elements included."""

    @property
    def is_raw(self) -> bool:
        """Its elements can be read without torch, and any part of it by itself."""
        if len(self.boxes) == 1:  # nearly always: worth its own line
            return self.boxes[0].serializer == RAW_SERIALIZER and self.dtype is not None
        return self.dtype is not None and all(box.serializer == RAW_SERIALIZER for box in self.boxes)

    @property
    def item_bytes(self) -> int | None:
        return item_bytes(self.dtype)

    @property
    def size_bytes(self) -> int | None:
        """Of its elements in memory; None where only the blobs know."""
        each = self.item_bytes
        return None if each is None or self.shape is None else math.prod(self.shape) * each

    @property
    def needed_boxes(self) -> tuple[Box, ...]:
        """The boxes that cannot do without their blob."""
        return tuple(box for box in self.boxes if box.needs_blob)


def item_bytes(dtype: str | None) -> int | None:
    """Bytes of one element of a dtype without ``torch.``; None if it is not known."""
    return None if dtype is None else DTYPE_SIZES.get(f"torch.{dtype}")


# -- from entries ----------------------------------------------------------------------------------------------------


def resolve_layouts(entry: LogicalEntry) -> tuple[TensorLayout, ...]:
    """The tensors that the ranks hold under one logical path: one, unless several ranks saved each its own.

    Entries of several ranks that lead to the same bytes are one tensor.

    Raises:
        DamagedError: its boxes contradict each other, the shape or the dtype; the first contradiction found.
        UnsupportedEntryError: it is no tensor, or of a kind that this version does not know.
    """
    layouts, problems = inspect_layouts(entry)
    if problems:
        raise problems[0]
    return layouts


def inspect_layouts(entry: LogicalEntry) -> tuple[tuple[TensorLayout, ...], tuple[DamagedError, ...]]:
    """As `resolve_layouts`, with everything that is wrong as values; the layouts are those without a problem.

    Raises:
        UnsupportedEntryError: it is no tensor, or of a kind that this version does not know.
    """
    first = entry.entries[0][1]
    if type(first) is TensorEntry and len(entry.entries) == 1:  # nearly all of a large manifest: worth its own lines
        layout = _plain_layout(entry, first)
        found = tuple(_box_problems(layout.boxes[0]))
        return (() if found else (layout,)), found
    if isinstance(first, ShardedTensorEntry | DTensorEntry):
        candidates = [_join_shards(entry)]
    elif isinstance(first, TensorEntry | ChunkedTensorEntry) or (isinstance(first, ObjectEntry) and first.is_tensor):
        candidates = _own_tensors(entry)
    else:
        raise UnsupportedEntryError(f"{entry.entries[0][0]}: is of type {entry.type}, not a tensor")
    layouts: list[TensorLayout] = []
    problems: list[DamagedError] = []
    for layout, sources in candidates:
        wrong = list(_layout_problems(layout, sources))
        problems += wrong
        if not wrong:
            layouts.append(layout)
    return tuple(layouts), tuple(problems)


def is_tensor_entry(entry: Entry) -> bool:
    """Whether an entry is (a part of) a tensor, in the form of any generation."""
    if isinstance(entry, ObjectEntry):
        return entry.is_tensor
    return isinstance(entry, TensorEntry | ChunkedTensorEntry | ShardedTensorEntry | DTensorEntry)


def find_missing_shards(entry: LogicalEntry, manifest: Manifest, ranks: Collection[int]) -> list[DamagedError]:
    """The ranks on which a container names a sharded tensor that has no entry there.

    Without this a table whose last shards have lost their entries would seem to be a shorter one.

    Args:
        ranks: those that have entries in the manifest.
    """
    if not isinstance(entry.entries[0][1], ShardedTensorEntry):
        return []  # copies of a DTensor are listed once; a dense tensor is whole on each rank
    have = {manifest_path.partition("/")[0] for manifest_path, _ in entry.entries}
    parent, _, key = entry.path.rpartition("/")
    problems = []
    for rank in sorted(ranks):
        container = manifest.entries.get(f"{rank}/{parent}") if parent and str(rank) not in have else None
        if isinstance(container, DictEntry | OrderedDictEntry) and key in map(encode_key, container.keys):
            path = f"{rank}/{entry.path}"
            problems.append(
                DamagedError(f"{path}: {rank}/{parent} names it, and it has no entry", kind="missing-entry", entry=path)
            )
    return problems


def _plain_layout(entry: LogicalEntry, source: TensorEntry) -> TensorLayout:
    """The layout of a tensor that one rank holds in one piece."""
    manifest_path = entry.entries[0][0]
    shape = tuple(source.shape)
    dtype = _short(source.dtype)
    box = Box(manifest_path, (0,) * len(shape), shape, source.location, source.serializer, dtype, source.byte_range)
    return TensorLayout(entry.path, manifest_path, entry.ranks, dtype, shape, (box,))


def _own_tensors(entry: LogicalEntry) -> list[tuple[TensorLayout, Sequence[Entry]]]:
    """One layout for each tensor that is stored by itself."""
    by_place: dict[object, list[tuple[str, Entry]]] = {}
    for manifest_path, source in entry.entries:
        place = tuple((box.location, box.byte_range, box.offsets) for box in _boxes(manifest_path, source))
        by_place.setdefault(place or manifest_path, []).append((manifest_path, source))
    layouts: list[tuple[TensorLayout, Sequence[Entry]]] = []
    for held in by_place.values():
        manifest_path, source = held[0]
        boxes = _sorted(_boxes(manifest_path, source))
        ranks = tuple(_rank(path) for path, _ in held)
        dtype = getattr(source, "dtype", None)
        shape = getattr(source, "shape", None)
        layouts.append(
            (
                TensorLayout(
                    entry.path,
                    manifest_path,
                    ranks,
                    _short(dtype),
                    None if shape is None else tuple(shape),
                    boxes if not _is_scalar_chunk(shape, boxes) else (replace(boxes[0], offsets=(), sizes=()),),
                ),
                [source],
            )
        )
    return layouts


def _join_shards(entry: LogicalEntry) -> tuple[TensorLayout, Sequence[Entry]]:
    """The union of what the ranks list; a shard that is listed twice (same place, same bytes) counts once."""
    boxes: dict[object, Box] = {}
    for manifest_path, source in entry.entries:
        for box in _boxes(manifest_path, source):
            boxes.setdefault((box.offsets, box.sizes, box.location, box.byte_range), box)
    ordered = _sorted(boxes.values())
    dtypes = [box.dtype for box in ordered if box.dtype is not None]
    layout = TensorLayout(
        entry.path, entry.entries[0][0], entry.ranks, dtypes[0] if dtypes else None, _span_shape(ordered), ordered
    )
    return layout, [source for _, source in entry.entries]


def _sorted(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(sorted(boxes, key=lambda box: (box.offsets, box.sizes)))


def _boxes(manifest_path: str, source: Entry) -> list[Box]:
    if isinstance(source, TensorEntry):
        return [_box(manifest_path, (0,) * len(source.shape), source.shape, source)]
    if isinstance(source, ObjectEntry):
        return [Box(manifest_path, (), (), source.location, source.serializer, None)]
    return [_shard_box(manifest_path, shard) for shard in shards_of(source)]


def _shard_box(manifest_path: str, shard: Shard) -> Box:
    return _box(manifest_path, shard.offsets, shard.sizes, shard.tensor)


def _box(manifest_path: str, offsets: Sequence[int], sizes: Sequence[int], tensor: TensorEntry) -> Box:
    return Box(
        manifest_path,
        tuple(offsets),
        tuple(sizes),
        tensor.location,
        tensor.serializer,
        _short(tensor.dtype),
        tensor.byte_range,
    )


def _is_scalar_chunk(shape: object, boxes: Sequence[Box]) -> bool:
    """A scalar that a nightly of 2022 wrote as one chunk of one row."""
    return shape == [] and len(boxes) == 1 and (boxes[0].offsets, boxes[0].sizes) == ((0,), (1,))


def _span_shape(boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """The largest ``offsets + sizes``; None without boxes, or where these differ in their number of dimensions."""
    widths = {len(box.offsets) for box in boxes} | {len(box.sizes) for box in boxes}
    if len(widths) != 1:
        return None
    ends = [[o + s for o, s in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _rank(manifest_path: str) -> int:
    first = manifest_path.partition("/")[0]
    return int(first) if first.isdecimal() and first.isascii() else 0


def _short(dtype: str | None) -> str | None:
    return dtype.removeprefix("torch.") if dtype else None


# -- what can be wrong -----------------------------------------------------------------------------------------------


def _layout_problems(layout: TensorLayout, sources: Sequence[Entry]) -> Iterator[DamagedError]:
    """Everything about a layout that cannot be; the tiling only where the boxes themselves are sound.

    Args:
        sources: the entries that it was put together from.
    """
    broken = False
    for box in layout.boxes:
        for problem in _box_problems(box):
            broken = True
            yield problem
    if broken:
        return
    yield from _dtype_problems(layout)
    if layout.shape is None:
        yield from _shapeless_problems(layout, sources[0])
        return
    if any(size < 0 for size in layout.shape) or is_beyond_bounds(layout.shape):
        yield _problem(layout, "size-mismatch", f"has the shape {_text(layout.shape)}, which no tensor has")
        return
    for shard in _declared_shapes(sources):
        if tuple(shard.tensor.shape) != tuple(shard.sizes):
            yield _problem(
                layout,
                "size-mismatch",
                f"a part of sizes {_text(shard.sizes)} is stored with the shape {_text(shard.tensor.shape)}",
                blob=shard.tensor.location,
            )
            return
    yield from _tiling_problems(layout, layout.shape)


def _shapeless_problems(layout: TensorLayout, source: Entry) -> Iterator[DamagedError]:
    if isinstance(source, ObjectEntry):
        return  # 0.0.x: the blob knows
    if not layout.boxes:
        yield _problem(layout, "hole", "no rank lists a shard of it")
    else:
        yield _problem(layout, "size-mismatch", "its parts do not agree in their number of dimensions")


def _declared_shapes(sources: Sequence[Entry]) -> Iterator[Shard]:
    for source in sources:
        if not (isinstance(source, ChunkedTensorEntry) and source.shape == []):  # a scalar in one chunk of one row
            yield from shards_of(source)


def _dtype_problems(layout: TensorLayout) -> Iterator[DamagedError]:
    for box in layout.boxes:
        if box.dtype != layout.dtype:
            yield _problem(
                layout,
                "size-mismatch",
                f"its parts disagree on the dtype: {layout.dtype} and {box.dtype} ({box.entry})",
                blob=box.location,
            )
            return


def _box_problems(box: Box) -> Iterator[DamagedError]:
    """What is wrong with a box by itself; at most one problem of each kind."""

    def problem(kind: str, text: str) -> DamagedError:
        return DamagedError(f"{box.entry}: {text}", kind=kind, entry=box.entry, blob=box.location)

    if is_outside(box.location):
        yield problem("outside", f"its location leads out of the checkpoint: {box.location!r}")
    if len(box.offsets) != len(box.sizes):
        yield problem("size-mismatch", f"offsets {_text(box.offsets)} and sizes {_text(box.sizes)} do not fit together")
        return
    if min((*box.offsets, *box.sizes, 0)) < 0:
        yield problem("size-mismatch", f"offsets {_text(box.offsets)} or sizes {_text(box.sizes)} below zero")
        return
    if max((*box.offsets, 0)) > MAX_BYTES or is_beyond_bounds(box.sizes):
        yield problem("size-mismatch", f"has the sizes {_text(box.sizes)}, which no tensor has")
        return
    if box.byte_range is None:
        return
    start, end = box.byte_range
    if not 0 <= start <= end <= MAX_BYTES:
        yield problem("bad-range", f"byte range [{start}, {end})")
        return
    needed = box.needed_bytes
    if needed is not None and end - start != needed:
        yield problem(
            "size-mismatch",
            f"{_text(box.sizes)} of {box.dtype} takes {needed} bytes, and its byte range has {end - start}",
        )


def is_beyond_bounds(sizes: Sequence[int]) -> bool:
    """Whether no array has this shape, of whatever dtype; also where a zero in it leaves nothing to store."""
    return math.prod(max(1, size) for size in sizes) * max(DTYPE_SIZES.values()) > MAX_BYTES


def is_outside(location: str) -> bool:
    """Whether a blob's location leads out of its checkpoint."""
    return not location or location.startswith("/") or "\0" in location or ".." in location.split("/")


def _tiling_problems(layout: TensorLayout, shape: tuple[int, ...]) -> Iterator[DamagedError]:
    boxes = [box for box in layout.boxes if box.elements > 0]
    for box in layout.boxes:
        if len(box.sizes) != len(shape):
            yield _problem(layout, "size-mismatch", f"a part has the sizes {_text(box.sizes)}, it {_text(shape)}")
            return
        if any(o + s > full for o, s, full in zip(box.offsets, box.sizes, shape, strict=True)) and box.elements:
            yield _problem(
                layout,
                "size-mismatch",
                f"a part at {_text(box.offsets)} of sizes {_text(box.sizes)} reaches beyond its shape {_text(shape)}",
                blob=box.location,
            )
            return
    if len(boxes) == 1 and boxes[0].sizes == shape:
        return
    pair = find_overlap([(box.offsets, box.sizes) for box in boxes])
    if pair is not None:
        one, other = boxes[pair[0]], boxes[pair[1]]
        yield _problem(
            layout,
            "overlap",
            f"parts overlap: {_text(one.offsets)} + {_text(one.sizes)} of {one.entry} and "
            f"{_text(other.offsets)} + {_text(other.sizes)} of {other.entry}",
            blob=other.location,
        )
        return
    if sum(box.elements for box in boxes) != math.prod(shape):
        yield _problem(layout, "hole", describe_hole([(box.offsets, box.sizes) for box in boxes], shape))


def _problem(layout: TensorLayout, kind: str, text: str, *, blob: str | None = None) -> DamagedError:
    return DamagedError(f"{layout.entry}: {text}", kind=kind, entry=layout.entry, blob=blob)


def _text(numbers: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"
