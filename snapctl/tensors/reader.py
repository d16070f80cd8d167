"""Tensors out of a checkpoint: only the bytes that are needed, in bounded memory, without the model and the ranks.

`TensorReader` takes layouts (`snapctl.tensors.layout`), asks for what their blobs must hold, and fills arrays or hands
out blocks of rows. Exporting, verifying and restoring stand on it; `snapctl.read_tensor` is the function for users.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from snapctl.checksums import BlobSums
from snapctl.errors import DamagedError, InvalidOptionError, UnsupportedEntryError
from snapctl.manifest import ObjectEntry
from snapctl.output_file import NewFile
from snapctl.storage import FileInfo, Storage
from snapctl.tensors.blob_file import BlobFile
from snapctl.tensors.blob_reader import BlobReader, blob_problem, wait_for
from snapctl.tensors.blocks import Arena, Array, Block, PlannedBlock, as_buffer, iter_batches, part_of, slices_of
from snapctl.tensors.box_decoder import BoxDecoder
from snapctl.tensors.dtypes import QUANTIZED_DTYPES, bits, numpy_dtype
from snapctl.tensors.layout import RAW_SERIALIZER, Box, TensorLayout, is_outside
from snapctl.tensors.memory import aligned_empty
from snapctl.tensors.read_plan import BoxIndex, Read, Span, cut_into_blocks, find_extents, merge_spans, plan_box
from snapctl.tensors.tiling import Region
from snapctl.tensors.torch_decoding import import_torch, join_quantized, load_object, torch_dtype, torch_elements

if TYPE_CHECKING:
    import torch

REMOTE_BATCH_BYTES = 32 << 20
"""What is under way at a time in `TensorReader.iter_blocks`; two batches are held."""
LOCAL_BATCH_BYTES = 8 << 20
"""The same for a local disk: small enough for the processor's caches, between reading and writing."""
COPY_BYTES = 64 << 20
"""What the operating system is asked to copy at a time."""
MIN_COPIED_BYTES = 4 << 20

Rows = tuple[int, int | None]
"""``(start, stop)`` of dimension 0; without a stop: to the end."""

_FEW_BOXES = 4
_MAX_INDEXES = 256

_Batch = tuple[list[PlannedBlock], list[Array], list["Future[None]"]]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A part of a tensor, and the array that it goes into."""

    layout: TensorLayout
    region: Region
    """``(offsets, sizes)`` in the tensor."""
    out: Array
    """Of the region's shape, any strides; its dtype has the width of the tensor's, and takes the bits as they are."""


class TensorReader:
    """Reads tensors of one checkpoint. May be used from one thread; it uses several itself.

    Blobs are looked up once (`look_up`), and on GCS read in the generation that was found then.
    """

    def __init__(self, storage: Storage, *, batch_bytes: int | None = None) -> None:
        self._batch_bytes = batch_bytes or (LOCAL_BATCH_BYTES if storage.scheme == "file" else REMOTE_BATCH_BYTES)
        self._blobs = BlobReader(storage)
        self._blobs.read_bytes = min(self._blobs.read_bytes, self._batch_bytes)
        self._indexes: dict[int, tuple[TensorLayout, BoxIndex]] = {}
        self._decoder = BoxDecoder(self._blobs)

    def on_read(self, report: Callable[[int], None]) -> None:
        """Calls a function with `bytes_read` whenever some have come, from any thread."""
        self._blobs.on_read = report

    @property
    def bytes_read(self) -> int:
        """What has come from blobs so far, gaps included."""
        return self._blobs.bytes_read

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends its threads; what has not begun is cancelled."""
        self._blobs.close()

    # -- blobs -------------------------------------------------------------------------------------------------

    def use_listing(self, files: Iterable[FileInfo]) -> None:
        """Takes a listing of the whole checkpoint instead of looking up blobs one by one."""
        self._blobs.use_listing(files)

    def look_up(self, locations: Iterable[str]) -> Mapping[str, FileInfo | None]:
        """What the storage says of blobs, None for one that is not there; asked once for each.

        Raises:
            StorageError: it could not be asked.
        """
        return self._blobs.look_up(locations)

    def use_checksums(self, expected: Mapping[str, tuple[int, int]]) -> None:
        """Compares blobs that are read whole, in whatever pieces, with ``(length, CRC32C)``; a difference raises.

        Args:
            expected: by location; those that will only be read in part cost time and are better left out.
        """
        if self._blobs.sums is None:
            self._blobs.sums = BlobSums()
        self._blobs.sums.expected = expected

    @property
    def blobs_checked(self) -> int:
        """Blobs whose checksum was found right."""
        return 0 if self._blobs.sums is None else self._blobs.sums.checked

    def find_blob_problems(self, layouts: Iterable[TensorLayout], region: Region | None = None) -> list[DamagedError]:
        """What is missing of the blobs that tensors need, without reading any.

        Args:
            region: only the boxes that share elements with it.

        Raises:
            StorageError: the storage could not be asked.
        """
        boxes = [box for layout in layouts for box in self._needed(layout, region)]
        files = self.look_up(box.location for box in boxes)
        return [problem for box in boxes if (problem := blob_problem(box, files[box.location])) is not None]

    def check_parts(self, parts: Sequence[tuple[TensorLayout, Region]]) -> None:
        """As `check`, for parts of many tensors, whose blobs are looked up together."""
        boxes = [box for layout, region in parts for box in self._needed(layout, region)]
        files = self.look_up(box.location for box in boxes)
        for box in boxes:
            problem = blob_problem(box, files[box.location])
            if problem is not None:
                raise problem

    def stored_bytes(self, parts: Sequence[tuple[TensorLayout, Region]]) -> int:
        """What has to be read for parts of tensors whose blobs have been looked up."""
        total = 0
        for layout, region in parts:
            if layout.is_raw:
                total += math.prod(region[1]) * (layout.item_bytes or 0)
                continue
            for box in self._needed(layout, region):
                found = self.look_up([box.location])[box.location]
                total += box.size_bytes or (found.size_bytes if found is not None else 0)
        return total

    def check(self, layouts: Iterable[TensorLayout], region: Region | None = None) -> None:
        """Raises the first of `find_blob_problems`."""
        for problem in self.find_blob_problems(layouts, region):
            raise problem

    def find_needed(self, layout: TensorLayout, region: Region) -> Iterator[tuple[Box, int]]:
        """The boxes that share elements with a region, and how many bytes of each are needed (or all that it has)."""
        if not layout.is_raw:
            for box in layout.needed_boxes:
                found = self.look_up([box.location])[box.location]
                yield box, box.size_bytes if box.size_bytes is not None else 0 if found is None else found.size_bytes
            return
        for box, shared in self._index(layout).find(region):
            yield box, math.prod(shared[1]) * (layout.item_bytes or 0)

    def _needed(self, layout: TensorLayout, region: Region | None) -> Iterator[Box]:
        if region is None or layout.shape is None or not layout.is_raw:
            yield from layout.needed_boxes
        else:
            yield from (box for box, _ in self._index(layout).find(region))

    def _index(self, layout: TensorLayout) -> BoxIndex:
        """The index of a layout; only those worth keeping are kept, by identity."""
        if len(layout.boxes) <= _FEW_BOXES:
            return BoxIndex(layout)
        held = self._indexes.get(id(layout))
        if held is None:
            if len(self._indexes) > _MAX_INDEXES:
                self._indexes.clear()
            held = self._indexes[id(layout)] = (layout, BoxIndex(layout))
        return held[1]

    # -- whole arrays ------------------------------------------------------------------------------------------

    def read(self, layout: TensorLayout, rows: Rows | None = None) -> Array:
        """A tensor, or some of its rows, as a numpy array of its own (ml_dtypes for bfloat16 and float8).

        Raises:
            DamagedError: a blob is missing, short, or cannot be decoded; nothing was allocated for what is not there.
            UnsupportedEntryError: numpy has no such dtype, or the serializer is not known.
            RefusedError: it would have to be unpickled. MissingExtraError: it needs torch.
            InvalidOptionError: there are no such rows.
            StorageError: it could not be read.
        """
        known = self.learn(layout)
        region = region_of_rows(known, rows)
        self.check([known], region)
        out = aligned_empty(region[1], numpy_dtype(known.dtype or ""))
        self.read_into([ReadRequest(known, region, out)])
        return out

    def read_into(self, requests: Sequence[ReadRequest]) -> None:
        """Fills arrays, with as few requests as the bounds allow, several at once.

        Nothing is checked beforehand but what `look_up` must ask anyway; a blob that is missing or short raises.

        Raises:
            DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `read`.
        """
        targets = [_checked_bits(request) for request in requests]
        reads = self._plan([(request.layout, request.region) for request in requests])
        self.look_up(read.location for read in reads)
        wait_for(self._submit(reads, targets))
        for request, target in zip(requests, targets, strict=True):
            if not request.layout.is_raw:
                self._copy_decoded(request.layout, request.region, target)

    def _plan(self, parts: Sequence[tuple[TensorLayout, Region]]) -> list[Read]:
        """The requests for the raw boxes of parts of tensors."""
        spans: list[Span] = []
        for number, (layout, region) in enumerate(parts):
            item_bytes = layout.item_bytes
            if item_bytes is None:
                continue
            for box, shared in self._index(layout).find(region):
                if box.serializer == RAW_SERIALIZER:
                    spans += plan_box(
                        box,
                        shared,
                        number,
                        region,
                        item_bytes,
                        gap_bytes=self._blobs.gap_bytes,
                        read_bytes=self._blobs.read_bytes,
                    )
        return merge_spans(spans, gap_bytes=self._blobs.gap_bytes, read_bytes=self._blobs.read_bytes)

    # -- blocks ------------------------------------------------------------------------------------------------

    def iter_blocks(self, parts: Iterable[tuple[TensorLayout, Region]]) -> Iterator[Block]:
        """Parts of tensors in blocks that follow each other in row-major order, part after part.

        While a block is looked at the next ones are being read. Memory: two batches, whatever the sizes and
        the sharding; tensors that are not raw take their own size besides.

        Args:
            parts: tensors whose dtype and shape are known (see `learn`), with the region that is wanted.

        Raises:
            DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `read`.
        """
        batches = iter_batches(self._blocks(parts), self._batch_bytes)
        arenas = [Arena(), Arena()]
        waiting: _Batch | None = None
        try:
            for number, batch in enumerate(itertools.chain(batches, [None])):
                begun = None if batch is None else self._begin(batch, arenas[number % 2])
                if waiting is not None:
                    planned, arrays, futures = waiting
                    waiting = begun
                    wait_for(futures)
                    for item, array in zip(planned, arrays, strict=True):
                        yield Block(item.index, item.region, self._finished(item, array))
                else:
                    waiting = begun
        finally:
            if waiting is not None:
                for future in waiting[2]:
                    future.cancel()

    def _blocks(self, parts: Iterable[tuple[TensorLayout, Region]]) -> Iterator[PlannedBlock]:
        for index, (layout, region) in enumerate(parts):
            dtype = numpy_dtype(layout.dtype or "")
            if not layout.is_raw:
                yield PlannedBlock(index, layout, region, dtype, False)
                continue
            for part in cut_into_blocks(region, dtype.itemsize, self._batch_bytes):
                yield PlannedBlock(index, layout, part, dtype, True)

    def _begin(self, batch: list[PlannedBlock], arena: Arena) -> _Batch:
        raw = [item for item in batch if item.is_raw]
        arrays = arena.arrays(batch)
        targets = [bits(array) for item, array in zip(batch, arrays, strict=True) if item.is_raw]
        reads = self._plan([(item.layout, item.region) for item in raw])
        self.look_up(read.location for read in reads)
        return batch, arrays, self._submit(reads, targets)

    def _finished(self, item: PlannedBlock, array: Array) -> Array:
        if item.is_raw:
            return array
        if len(item.layout.boxes) == 1:
            box = item.layout.boxes[0]
            part = part_of(self._decoder.array(item.layout, box), item.region, box.offsets)
            return np.ascontiguousarray(part).reshape(item.region[1])
        whole = aligned_empty(item.region[1], item.dtype)
        self.read_into([ReadRequest(item.layout, item.region, whole)])
        return whole

    def copy_raw(self, layout: TensorLayout, region: Region, file: NewFile) -> bool:
        """Has the operating system append a region to a file, where it lies row after row in local blobs.

        Returns:
            False if that is not so, or not worth it: nothing was appended, and `iter_blocks` is the way.

        Raises:
            DamagedError, StorageError: as `read`, or the file cannot be written.
        """
        if self._blobs.storage.scheme != "file" or not layout.is_raw:
            return False
        extents = find_extents(layout, self._index(layout), region)
        if sum(end - start for _, start, end in extents) < MIN_COPIED_BYTES:
            return False
        self.look_up(box.location for box, _, _ in extents)
        for number, (box, start, end) in enumerate(extents):
            while start < end:
                stop = min(end, start + COPY_BYTES)
                copied = self._blobs.copy(box.location, start, stop, file, box.entry)
                if copied == 0:
                    if number == 0 and start == extents[0][1]:
                        return False
                    buffer = as_buffer(aligned_empty((min(stop - start, self._blobs.read_bytes),)))
                    self._blobs.fetch(box.location, start, buffer, box.entry)
                    copied = file.write(buffer)
                start += copied
        return True

    # -- decoding ----------------------------------------------------------------------------------------------

    def prefetch(self, layouts: Sequence[TensorLayout]) -> None:
        """Reads the small blobs of tensors that are not raw all at once, before they are decoded one by one.

        Raises:
            DamagedError, StorageError: as `read`.
        """
        self._blobs.prefetch([box for layout in layouts if not layout.is_raw for box in layout.needed_boxes])

    def learn(self, layout: TensorLayout) -> TensorLayout:
        """The layout with dtype and shape, which for snapshots of 0.0.x have to be taken from a blob.

        Raises:
            DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `read`.
        """
        if layout.dtype is not None and layout.shape is not None:
            return layout
        boxes = layout.boxes
        tensor = self._decoder.decode(boxes[0], layout)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if layout.shape is not None:
            return replace(layout, dtype=dtype, boxes=tuple(replace(box, dtype=dtype) for box in boxes))
        shape = tuple(tensor.shape)
        only = replace(boxes[0], dtype=dtype, offsets=(0,) * len(shape), sizes=shape)
        return replace(layout, dtype=dtype, shape=shape, boxes=(only,))

    def read_torch(self, layout: TensorLayout, rows: Rows | None = None) -> torch.Tensor:
        """A tensor of any kind, or some of its rows, as a torch tensor with a storage of just its size.

        Raises:
            As `read`; MissingExtraError without torch, whatever the tensor.
        """
        known = self.learn(layout)
        region = region_of_rows(known, rows)
        if known.is_raw:
            return self.read_torch_raw([(known, region)])[0]
        self.check([known], region)
        if len(known.boxes) == 1 and not known.is_raw and known.boxes[0].needs_blob:
            whole = self._decoder.decode(known.boxes[0], known)
            self._decoder.forget(known.boxes[0])
            return whole if region[1] == known.shape else whole[region[0][0] : region[0][0] + region[1][0]].clone()
        if known.dtype in QUANTIZED_DTYPES:
            parts = [(self._decoder.decode(box, known), shared) for box, shared in self._index(known).find(region)]
            return join_quantized(parts, region, known.dtype, entry=known.entry)
        out: torch.Tensor = import_torch(known.entry).empty(region[1], dtype=torch_dtype(known.dtype or ""))
        for box, shared in self._index(known).find(region):
            out[slices_of(shared, region[0])] = self._decoder.decode(box, known)[slices_of(shared, box.offsets)]
        return out

    def read_torch_raw(self, parts: Sequence[tuple[TensorLayout, Region]]) -> list[torch.Tensor]:
        """Parts of many raw tensors as torch tensors, read together.

        Raises:
            As `read`; MissingExtraError without torch.
        """
        numerics = import_torch("a torch tensor")
        self.check_parts(parts)
        tensors = [numerics.empty(region[1], dtype=torch_dtype(layout.dtype or "")) for layout, region in parts]
        self.read_into(
            [
                ReadRequest(layout, region, torch_elements(tensor))
                for (layout, region), tensor in zip(parts, tensors, strict=True)
                if tensor.numel()
            ]
        )
        return tensors

    def read_object(self, manifest_path: str, entry: ObjectEntry) -> Any:
        """What a blob of ``torch.save`` holds, weights-only.

        Raises:
            DamagedError, RefusedError, MissingExtraError, StorageError: as `read`.
        """
        if entry.serializer != "torch_save":
            raise UnsupportedEntryError(f"{manifest_path}: serializer {entry.serializer!r} is not known")
        with self.open_object(manifest_path, entry) as file:
            return load_object(file, entry=manifest_path, blob=entry.location, obj_type=entry.obj_type)

    def read_object_bytes(self, manifest_path: str, entry: ObjectEntry) -> bytes:
        """The blob of an object, whole; raises as `open_object`."""
        with self.open_object(manifest_path, entry):
            found = self.look_up([entry.location])[entry.location]
            data = bytearray(0 if found is None else found.size_bytes)
            self._blobs.fill(entry.location, 0, memoryview(data), manifest_path)
            return bytes(data)

    def open_object(self, manifest_path: str, entry: ObjectEntry) -> BlobFile:
        """The blob of an object as a file.

        Raises:
            DamagedError: it is missing, or its location leads out of the checkpoint. StorageError: it cannot be read.
        """
        if is_outside(entry.location):
            raise DamagedError(
                f"{manifest_path}: its location leads out of the checkpoint: {entry.location!r}",
                kind="outside",
                entry=manifest_path,
                blob=entry.location,
            )
        return self._blobs.open(Box(manifest_path, (), (), entry.location, entry.serializer, None))

    def _copy_decoded(self, layout: TensorLayout, region: Region, target: Array) -> None:
        for box, shared in self._index(layout).find(region):
            if box.serializer == RAW_SERIALIZER:
                continue
            part = bits(self._decoder.array(layout, box))
            part_of(target, shared, region[0])[...] = part_of(part, shared, box.offsets)

    # -- requests ----------------------------------------------------------------------------------------------

    def _submit(self, reads: Sequence[Read], targets: Sequence[Array]) -> list[Future[None]]:
        return [self._blobs.submit(self._carry_out, read, targets) for read in reads]

    def _carry_out(self, read: Read, targets: Sequence[Array]) -> None:
        first = read.spans[0]
        if len(read.spans) == 1 and first.is_contiguous:
            place = _place_in(targets[first.target], first)
            if place.flags.c_contiguous:
                self._blobs.fetch(read.location, read.start, as_buffer(place), first.entry)
                return
        buffer: Array = aligned_empty((read.end - read.start,))
        self._blobs.fetch(read.location, read.start, as_buffer(buffer), first.entry)
        for span in read.spans:
            target = targets[span.target]
            source: Array = np.ndarray(span.sizes, target.dtype, buffer.data, span.start - read.start, span.strides)
            _place_in(target, span)[...] = source


def region_of_rows(layout: TensorLayout, rows: Rows | None = None) -> Region:
    """The region of some rows of a tensor whose shape is known, or of all of it.

    Raises:
        InvalidOptionError: there are no such rows, or it has no dimension 0.
    """
    shape = layout.shape
    if shape is None:
        raise UnsupportedEntryError(f"{layout.entry}: its shape is not known")
    if rows is None:
        return (0,) * len(shape), shape
    if not shape:
        raise InvalidOptionError(f"{layout.path}: is a scalar: it has no rows")
    start, stop = rows[0], shape[0] if rows[1] is None else rows[1]
    if not 0 <= start <= stop <= shape[0]:
        raise InvalidOptionError(f"{layout.path}: no rows {start}:{stop}: it has {shape[0]}")
    return (start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:])


def _checked_bits(request: ReadRequest) -> Array:
    layout, out = request.layout, request.out
    if tuple(out.shape) != request.region[1] or out.dtype.itemsize != layout.item_bytes:
        raise ValueError(
            f"{layout.path}: {request.region[1]} of {layout.dtype} do not go into {out.shape} of {out.dtype}"
        )
    return bits(out)


def _place_in(target: Array, span: Span) -> Array:
    return part_of(target, (span.offsets, span.sizes), (0,) * len(span.offsets))
