"""Which bytes are read to verify the data of a checkpoint, in parts to be read anywhere and in any order. Pure."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from snapctl.errors import InvalidOptionError
from snapctl.storage import FileInfo
from snapctl.tensors.layout import item_bytes
from snapctl.verification.blob_uses import BlobUse, UseIndex, distinct

LOCAL_SUM_BYTES = 32 << 20
"""A part of which only the checksum is taken, block by block."""
PART_BYTES = 4 << 20
"""A part that is held in memory because more is done with it, or that is one request."""
HELD_BYTES = 16 << 20
"""A blob of ``torch.save`` up to this size is held in memory while it is decoded; a larger one is streamed."""
LOAD_SECONDS = 1.0
"""How long a worker of somebody else's executor has to do with what it is given at a time: enough that handing it over
costs next to nothing, and not so much that progress is not seen, or that much is lost with the worker."""
FIRST_LOAD_BYTES = 128 << 20
"""The same as long as nobody knows how fast they are."""
MAX_LOAD_BYTES = 1 << 30
MIN_LOAD_BYTES = 8 << 20
LOADS_EACH = 4
"""So many loads for each worker, where there is enough to read: so that all of them end at about the same time."""
LOCAL_READ_COST = 64 << 10
REMOTE_READ_COST = 1 << 20
"""What a read costs besides its bytes: as much as so many bytes more."""
_SLACK = 0.1
"""A load may be so much larger than was wanted, lest a small rest becomes a load of its own."""
_AXIS_BYTES = 8
MAX_SAMPLES = 100_000


class FloatSpan(msgspec.Struct, frozen=True, gc=False):
    """Elements of a tensor in which NaN and infinities are counted."""

    tensor: str
    dtype: str
    start: int
    """In the blob."""
    end: int


class BlobPart(msgspec.Struct, frozen=True, gc=False):
    """A stretch of one blob, and what is to be found out about it while it is in memory."""

    location: str
    version: str
    """The version that was listed (see `FileInfo.version`)."""
    start: int
    end: int
    floats: tuple[FloatSpan, ...] = ()
    archives: tuple[BlobUse, ...] = ()
    """What ``torch.save`` wrote, whole; if the part is larger than `HELD_BYTES`, it is exactly one of them."""
    axes: tuple[BlobUse, ...] = ()
    """Quantized tensors whose axis lies in this part."""
    finite: bool = False
    """Also count in the tensors of the archives."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def is_only_summed(self) -> bool:
        """Nothing but its checksum is wanted: it need not be held as a whole."""
        return not (self.floats or self.archives or self.axes)


class BlobPlan(msgspec.Struct, frozen=True, gc=False):
    """The parts of one blob, in order and without gaps."""

    location: str
    uses: tuple[BlobUse, ...]
    parts: tuple[BlobPart, ...]


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Neighbouring parts of one blob, which one worker reads."""

    blob: int
    """The number of its plan among those of the checkpoint."""
    parts: tuple[BlobPart, ...]

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def size_bytes(self) -> int:
        return self.parts[-1].end - self.parts[0].start


Load: TypeAlias = tuple[Stretch, ...]
"""What is read by one worker at a time: stretches of one checkpoint."""


class Sample(msgspec.Struct, frozen=True):
    """The n-th of `total` parts, counted from 1."""

    number: int
    total: int


def parse_sample(text: str) -> Sample:
    """``2/7``.

    Raises:
        InvalidOptionError: it is no such thing.
    """
    first, slash, second = text.partition("/")
    if slash and all(part.isdecimal() and part.isascii() and len(part) < 10 for part in (first, second)):
        sample = Sample(int(first), int(second))
        if 1 <= sample.number <= sample.total <= MAX_SAMPLES:
            return sample
    raise InvalidOptionError(f"--sample takes N/T with 1 <= N <= T <= {MAX_SAMPLES}, not {text!r}")


def choose_sample(sizes: Mapping[str, int], sample: Sample, *, name: str) -> set[str]:
    """The blobs of one sample: whole ones, since checksums are of whole blobs, and about equally many bytes in each.

    The choice depends on the names and sizes of the blobs alone, so that the samples 1/T to T/T cover everything and
    nothing twice, whenever and wherever they are taken.

    Args:
        name: of the checkpoint: from which sample on its blobs are dealt out, so that the largest ones of many
            checkpoints are not all in the first.
    """
    shift = zlib.crc32(name.encode("utf-8", "surrogateescape")) % sample.total
    wanted = (sample.number - 1 - shift) % sample.total
    loads = [(0, index) for index in range(min(sample.total, len(sizes)))]
    chosen = set()
    for location in sorted(sizes, key=lambda location: (-sizes[location], location)):
        load, index = loads[0]
        heapq.heapreplace(loads, (load + sizes[location] + 1, index))
        if index == wanted:
            chosen.add(location)
    return chosen


def plan_blobs(
    uses: Mapping[str, Sequence[BlobUse]],
    files: Mapping[str, FileInfo],
    *,
    finite: bool,
    part_bytes: int,
    without: Collection[str] = (),
    unclear: Collection[str] = (),
) -> Iterator[BlobPlan]:
    """How each blob is read.

    Args:
        uses: by location.
        finite: also count NaN and infinities.
        part_bytes: the size of a part of which only the checksum is taken; others are at most `PART_BYTES`.
        without: locations that are not read.
        unclear: locations in which entries overlap: these are read, and nothing in them is decoded.
    """
    for location, held in uses.items():
        if location in without:
            continue
        file = files[location]
        decoded = [] if location in unclear else [use for use in held if finite or not use.is_raw]
        known = [_ending(use, file.size_bytes) for use in distinct(decoded)]
        version = "" if file.is_link else file.version
        parts = _parts(location, version, known, file.size_bytes, finite, part_bytes)
        yield BlobPlan(location, tuple(held), tuple(parts))


def choose_load_bytes(
    size_bytes: int,
    reads: int,
    *,
    left: int = 1,
    workers: int,
    read_cost: int,
    bytes_per_second: float | None = None,
) -> int:
    """The most that a load of a checkpoint costs, so that it is divided evenly, and all workers have something to do.

    Args:
        size_bytes, reads: of the checkpoint, about.
        left: so many checkpoints are still to be read, this one included.
        read_cost: see `cut_loads`.
        bytes_per_second: what a worker gets done of bytes and read costs; None if nobody knows yet.
    """
    cost = size_bytes + reads * read_cost
    share = left * cost / (LOADS_EACH * max(1, workers))
    wanted = FIRST_LOAD_BYTES if bytes_per_second is None else min(LOAD_SECONDS * bytes_per_second, MAX_LOAD_BYTES)
    loads = max(1, round(cost / max(MIN_LOAD_BYTES, min(wanted, share))))
    return max(MIN_LOAD_BYTES, int(cost / loads * (1 + _SLACK)))


def cut_loads(plans: Iterable[BlobPlan], *, load_bytes: Callable[[], int], read_cost: int) -> Iterator[Load]:
    """The parts of all blobs in loads of about the same cost: small blobs go together, large ones are divided.

    A plan is asked for only when the ones before it have been cut.

    Args:
        load_bytes: asked for each load: the most that it costs, unless a single part costs more; 0: each part is a load
            of its own.
        read_cost: what a part costs besides its bytes.
    """
    ready: list[Stretch] = []
    cost, most = 0, load_bytes()
    for number, plan in enumerate(plans):
        parts: list[BlobPart] = []
        for part in plan.parts:
            more = part.size_bytes + read_cost
            if cost and cost + more > most:
                yield (*ready, *([Stretch(number, tuple(parts))] if parts else []))
                ready, parts, cost, most = [], [], 0, load_bytes()
            parts.append(part)
            cost += more
        if parts:
            ready.append(Stretch(number, tuple(parts)))
    if ready:
        yield tuple(ready)


def _ending(use: BlobUse, size: int) -> BlobUse:
    return use if use.end is not None else msgspec.structs.replace(use, end=size)


def _parts(
    location: str, version: str, uses: Sequence[BlobUse], size: int, finite: bool, part_bytes: int
) -> Iterator[BlobPart]:
    index = UseIndex(uses)
    part_bytes = min(part_bytes, PART_BYTES) if uses else part_bytes
    for start, end, whole in _join(_segments(uses, index, size, part_bytes), part_bytes):
        inside = index.between(start, end)
        yield BlobPart(
            location,
            version,
            start,
            end,
            tuple(_float_spans(inside, start, end)) if finite else (),
            whole,
            tuple(use for use in inside if use.serializer == "per_channel_qtensor" and start <= use.start),
            finite,
        )


_Segment = tuple[int, int, tuple[BlobUse, ...]]


def _segments(uses: Sequence[BlobUse], index: UseIndex, size: int, part_bytes: int) -> Iterator[_Segment]:
    """What cannot be cut any further: archives as a whole, and the rest between the cuts."""
    position = 0
    for use in [use for use in uses if use.serializer == "torch_save"]:
        yield from _cut(index, position, use.start, part_bytes)
        position = size if use.end is None else use.end
        yield use.start, position, (use,)
    yield from _cut(index, position, size, part_bytes)


def _cut(index: UseIndex, start: int, end: int, part_bytes: int) -> Iterator[_Segment]:
    """A stretch cut between elements, never inside of one."""
    points = [start]
    for cut in range(start + part_bytes, end, part_bytes):
        use = index.find(cut)
        if use is not None:
            each = _AXIS_BYTES if not use.is_raw else item_bytes(use.dtype) or 1
            cut = use.start + (cut - use.start) // each * each
        if cut > points[-1]:
            points.append(cut)
    if end > start:
        yield from ((first, last, ()) for first, last in pairwise([*points, end]))


def _join(segments: Iterable[_Segment], part_bytes: int) -> Iterator[_Segment]:
    """Neighbours together, as long as they are no more than a part; a large archive stays by itself."""
    held: _Segment | None = None
    for start, end, whole in segments:
        if held is not None and end - held[0] <= part_bytes:
            held = held[0], end, held[2] + whole
            continue
        if held is not None:
            yield held
        held = start, end, whole
    if held is not None:
        yield held


def _float_spans(uses: Iterable[BlobUse], start: int, end: int) -> Iterator[FloatSpan]:
    for use in uses:
        if use.is_raw and use.end is not None and use.dtype is not None and has_non_finite(use.dtype):
            yield FloatSpan(use.tensor, use.dtype, max(start, use.start), min(end, use.end))


def has_non_finite(dtype: str) -> bool:
    """Whether a dtype (without ``torch.``) can hold a NaN or an infinity."""
    return dtype.startswith(("float", "bfloat", "complex")) and item_bytes(dtype) is not None
