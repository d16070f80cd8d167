"""Reads parts of blobs and judges them: the work of ``verify --level data``, which any executor can do anywhere."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np

from snapctl.checksums import combine_crc32c, extend_crc32c
from snapctl.errors import InvalidPathError, PreconditionError, ShortReadError, StorageError
from snapctl.storage import Storage, open_storage, run_parallel
from snapctl.tensors.blob_file import BlobFile
from snapctl.tensors.dtypes import QUANTIZED_DTYPES
from snapctl.tensors.layout import item_bytes
from snapctl.tensors.memory import aligned_empty
from snapctl.verification.archive_checks import ArchiveFindings, check_held_archive, check_large_archive
from snapctl.verification.blob_uses import BlobUse
from snapctl.verification.data_plan import HELD_BYTES, BlobPart, Load
from snapctl.verification.float_counts import count_non_finite
from snapctl.verification.verdicts import NonFinite, Problem, Unchecked

_LOCAL_BLOCK_BYTES = 1 << 20
_REMOTE_BLOCK_BYTES = 4 << 20
LOAD_JOBS = 4
"""Reads at a time of one load from an object store, where a single one waits more than it reads."""


class PartResult(msgspec.Struct, frozen=True):
    """What was found in one part of a blob, or in a stretch of it."""

    crc32c: int = 0
    bytes_read: int = 0
    problems: tuple[Problem, ...] = ()
    crc_problems: tuple[Problem, ...] = ()
    """See `ArchiveFindings.crc_problems`."""
    unchecked: tuple[Unchecked, ...] = ()
    counts: tuple[tuple[str, NonFinite], ...] = ()
    """Of plain tensors only those with NaN or infinities, and without the number of elements, which follows from the
    plan: the thousands of a slab need not come back from a worker."""
    error: StorageError | None = None
    """It could not be read."""


class BlobSource:
    """A checkpoint's directory that can be sent to another process, which opens it anew."""

    def __init__(self, storage: Storage, options: Mapping[str, Any] | None = None) -> None:
        self._url = storage.url
        self._options = dict(options or {})
        self._storage: Storage | None = storage

    def open(self) -> Storage:
        """The directory; in another process one connection for each save directory."""
        if self._storage is None:
            self._storage = _open(self._url, pickle.dumps(self._options))
        return self._storage

    def __getstate__(self) -> dict[str, Any]:
        return {"_url": self._url, "_options": self._options, "_storage": None}


@functools.lru_cache(maxsize=256)
def _open(url: str, options: bytes) -> Storage:
    parent, _, name = url.rpartition("/")
    if parent and not parent.endswith("/") and name not in ("", ".", ".."):
        return _open_parent(parent, options).child(name)
    return open_storage(url, pickle.loads(options))  # noqa: S301 - pickled a moment ago, above


@functools.lru_cache(maxsize=16)
def _open_parent(url: str, options: bytes) -> Storage:
    return open_storage(url, pickle.loads(options))  # noqa: S301 - as above


def check_load(source: BlobSource, load: Load) -> tuple[PartResult, ...]:
    """Reads a load and judges it: a result for each stretch."""
    parts = [part for stretch in load for part in stretch.parts]
    if len(parts) == 1:
        return (check_part(source, parts[0]),)
    jobs = 1 if source.open().scheme == "file" else LOAD_JOBS
    checked = iter(run_parallel(lambda part: check_part(source, part), parts, jobs=jobs))
    return tuple(_join(stretch.parts, list(islice(checked, len(stretch.parts)))) for stretch in load)


def _join(parts: Sequence[BlobPart], results: Sequence[PartResult]) -> PartResult:
    """What was found in neighbouring parts as one result: small, however many there were."""
    error = next((result.error for result in results if result.error is not None), None)
    bytes_read = sum(result.bytes_read for result in results)
    if error is not None:
        return PartResult(bytes_read=bytes_read, error=error)
    crc = 0
    counts: dict[str, NonFinite] = {}
    for part, result in zip(parts, results, strict=True):
        crc = combine_crc32c(crc, result.crc32c, part.size_bytes)
        for tensor, count in result.counts:
            counts[tensor] = counts.get(tensor, NonFinite()).plus(count)
    return PartResult(
        crc,
        bytes_read,
        tuple(chain.from_iterable(result.problems for result in results)),
        tuple(chain.from_iterable(result.crc_problems for result in results)),
        tuple(chain.from_iterable(result.unchecked for result in results)),
        tuple(counts.items()),
    )


def check_part(source: BlobSource, part: BlobPart) -> PartResult:
    """Reads a part and judges it; what goes wrong with the storage is in the result."""
    try:
        storage = source.open()
        if part.archives and part.size_bytes > HELD_BYTES:
            return _check_streamed(storage, part)
        return _check_sum(storage, part) if part.is_only_summed else _check_held(storage, part)
    except ShortReadError as error:
        changed = PreconditionError(f"{error.message}: it is shorter than it was when it was listed", url=error.url)
        return PartResult(error=changed)
    except StorageError as error:
        return PartResult(error=error)
    except InvalidPathError as error:
        return PartResult(problems=(Problem("outside", None, part.location, error.message),))


_BUFFERS = threading.local()


def _buffer(size: int) -> memoryview:
    """Memory of this thread, used again and again: fresh pages for each part would cost as much as reading it."""
    held = getattr(_BUFFERS, "array", None)
    if held is None or len(held) < size:
        held = _BUFFERS.array = aligned_empty((size,))
    view: memoryview = held[:size].data
    return view


def _block_buffer(storage: Storage) -> memoryview:
    """Locally small enough to stay in the processor's cache until it has been summed; remotely one request."""
    return _buffer(_LOCAL_BLOCK_BYTES if storage.scheme == "file" else _REMOTE_BLOCK_BYTES)


def _check_sum(storage: Storage, part: BlobPart) -> PartResult:
    crc = 0
    buffer = _block_buffer(storage)
    for block in storage.read_blocks(part.location, part.start, part.end, buffer, version=part.version):
        crc = extend_crc32c(crc, block)
    return PartResult(crc, part.size_bytes)


def _check_held(storage: Storage, part: BlobPart) -> PartResult:
    data = _buffer(part.size_bytes)
    storage.read_into(part.location, part.start, data, version=part.version)
    crc = extend_crc32c(0, data)
    counts = []
    for span in part.floats:
        elements = data[span.start - part.start : span.end - part.start]
        count = count_non_finite(elements, span.dtype)
        if count.nan or count.infinite:
            counts.append((span.tensor, count._replace(elements=0)))
    problems = [problem for use in part.axes if (problem := _axis_problem(use, data[use.start - part.start :]))]
    found = ArchiveFindings(problems=problems, counts=counts)
    for use in part.archives:
        end = part.end if use.end is None else use.end
        inside = data[use.start - part.start : end - part.start]
        _add(found, check_held_archive(inside, use, finite=part.finite))
    return _result(crc, part.size_bytes, found)


def _check_streamed(storage: Storage, part: BlobPart) -> PartResult:
    crc, bytes_read = 0, 0

    def fill(start: int, buffer: memoryview) -> None:
        nonlocal bytes_read
        storage.read_into(part.location, start, buffer, version=part.version)
        bytes_read += len(buffer)

    def blocks() -> Iterator[memoryview]:
        nonlocal crc, bytes_read
        buffer = _block_buffer(storage)
        for block in storage.read_blocks(part.location, part.start, part.end, buffer, version=part.version):
            crc = extend_crc32c(crc, block)
            bytes_read += len(block)
            yield block

    file = BlobFile(fill, part.start, part.end)
    found = check_large_archive(file, blocks, part.archives[0], finite=part.finite)
    return _result(crc, bytes_read, found)


def _result(crc: int, bytes_read: int, found: ArchiveFindings) -> PartResult:
    return PartResult(
        crc,
        bytes_read,
        tuple(found.problems),
        tuple(found.crc_problems),
        tuple(found.unchecked),
        tuple(found.counts),
    )


def _add(one: ArchiveFindings, other: ArchiveFindings) -> None:
    one.problems += other.problems
    one.crc_problems += other.crc_problems
    one.unchecked += other.unchecked
    one.counts += other.counts


def _axis_problem(use: BlobUse, data: memoryview) -> Problem | None:
    """What is wrong with a ``per_channel_qtensor``: its axis, or its length for that axis.

    Source: axis as int64, elements, scales as doubles, zero points as int64s.
    """
    if use.end is None or use.dtype not in QUANTIZED_DTYPES or len(data) < 8:
        return None
    axis = int.from_bytes(data[:8], "little", signed=True)
    if not 0 <= axis < len(use.shape):
        text = f"its axis is {axis}, and it has {len(use.shape)} dimensions"
        return Problem("undecodable", use.entry, use.location, text)
    size = int(np.prod(use.shape, dtype=np.int64)) * (item_bytes(use.dtype) or 1)
    needed = 8 + size + 16 * use.shape[axis]
    if use.end - use.start != needed:
        text = f"{use.end - use.start} bytes, and a per_channel_qtensor of {list(use.shape)} takes {needed}"
        return Problem("undecodable", use.entry, use.location, text)
    return None
