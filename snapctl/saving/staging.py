"""Staging: torchsnapshot plans a snapshot and copies it out of the training state, corrected where it errs.

Planning and staging are torchsnapshot's own (``Snapshot._take_impl``, the same in 0.1.0 and in the nightlies), so that
the result is its format. What it gets wrong is put right by replacing single functions of it, only while one of our
takes runs: staging is synchronous, and everything is put back before training goes on.

Source: snapshots that torchsnapshot 0.1.0 and 2024.7.26 took on torch 2.13, and what was missing in them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import importlib
import inspect
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchsnapshot
import torchsnapshot.batcher
import torchsnapshot.flatten
import torchsnapshot.io_preparer
import torchsnapshot.io_preparers.sharded_tensor
import torchsnapshot.io_preparers.tensor
import torchsnapshot.partitioner
import torchsnapshot.serialization
import torchsnapshot.snapshot
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from torchsnapshot.io_preparers.object import ObjectBufferStager
from torchsnapshot.io_types import WriteReq
from torchsnapshot.manifest import ChunkedTensorEntry, ObjectEntry

from snapctl.errors import RefusedError, SaveError
from snapctl.ranks import Ranks, RootOnly
from snapctl.saving.savable import PICKLED_DTYPES, RAW_DTYPES, SAVES_DTENSORS, find_refused, is_dtensor, refuse_together
from snapctl.storage import parent_paths
from snapctl.storage.local_paths import TEMPORARY_MARK
from snapctl.tensors.torch_decoding import flat_bytes

_SERIALIZATION = torchsnapshot.serialization
_TENSORS = torchsnapshot.io_preparers.tensor
_SHARDS = torchsnapshot.io_preparers.sharded_tensor
_PREPARER = torchsnapshot.io_preparer
_SNAPSHOT = torchsnapshot.snapshot

LONGEST_SEGMENT_BYTES = 150
"""Of a key in a blob's location: the offsets of a shard and a temporary mark must still fit into a file's name."""
LONGEST_LOCATION_BYTES = 700
"""GCS allows 1,024 for an object's name, with the save directory's prefix."""
_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot that no longer depends on the training state."""

    work: Any
    """torchsnapshot's ``PendingIOWork``: what remains to be written."""
    metadata: Any
    """torchsnapshot's ``SnapshotMetadata``; its manifest is whole on rank 0 and empty on the others."""


def stage(
    app_state: Mapping[str, Any],
    *,
    replicated: Sequence[str],
    ranks: Ranks,
    plugin: Any,
    loop: Any,
    before_writing: Callable[[Collection[str]], None],
) -> Staged:
    """Plans a snapshot on all ranks and copies this rank's part; writing begins as far as memory is short.

    Args:
        app_state: by name, objects with ``state_dict()``.
        replicated: globs of logical paths that are the same on all ranks.
        plugin: torchsnapshot's ``StoragePlugin`` that gets the blobs.
        loop: the event loop in which it is called; the rest of the work must be done in it, too.
        before_writing: called once everything is planned and nothing has been refused, before the first write; on rank
            0 with the locations of the blobs of all ranks.

    Raises:
        UnsavableError: the state holds something that cannot be saved exactly; on all ranks, with all that was found.
        SaveError: another rank failed, or is silent.
    """
    _SNAPSHOT.Snapshot._validate_app_state(app_state)
    patterns = _agree_on_patterns(app_state, replicated, ranks)
    pickled: dict[str, memoryview] = {}
    locations: set[str] = set()
    base: Any = _SNAPSHOT.Snapshot

    class Take(base):  # type: ignore[misc]
        """torchsnapshot's plan, with our answers to what the ranks have to agree on."""

        @staticmethod
        def _calculate_replicated_entries(flattened: Mapping[str, Any], replicated: set[str], pg: Ranks) -> set[str]:
            refused = find_refused(flattened, pickled)
            refuse_together(refused, pg)
            wait_for_devices(flattened.values())
            return _find_replicated(flattened, replicated, pg)

        @staticmethod
        def _gather_manifest(manifest: dict[str, Any], pg: Ranks) -> dict[str, Any]:
            gathered = _gather_manifest(manifest, pg)
            locations.update(_check_locations(gathered))
            return gathered

    with _corrected(pickled, lambda: before_writing(locations)):
        work, metadata = Take._take_impl(
            path="",
            app_state=dict(app_state),
            replicated=patterns,
            pg_wrapper=ranks,
            storage=plugin,
            event_loop=loop,
            is_async_snapshot=True,
        )
    return Staged(work, metadata)


# -- what the ranks agree on -----------------------------------------------------------------------------------------


def _agree_on_patterns(app_state: Mapping[str, Any], replicated: Sequence[str], ranks: Ranks) -> set[str]:
    """Globs of what all ranks say is replicated."""
    gathered = ranks.gather(replicated_globs(app_state, replicated))
    return set(ranks.share(set.intersection(*gathered) if gathered is not None else None))


def replicated_globs(app_state: Mapping[str, Any], replicated: Sequence[str]) -> set[str]:
    """Globs of what is replicated; what is wrapped in DistributedDataParallel is so by itself."""
    mine = set(replicated)
    for key, value in app_state.items():
        if isinstance(value, DistributedDataParallel):
            base = glob.escape(_encode(key))
            ignored = set(value.parameters_to_ignore)
            if not ignored:
                mine.add(f"{base}/**")
                continue
            named = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            mine.update(f"{base}/{glob.escape(_encode(name))}" for name in named if name not in ignored)
    return mine


def _encode(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def _find_replicated(flattened: Mapping[str, Any], patterns: set[str], ranks: Ranks) -> set[str]:
    """The logical paths that are replicated: they match, and every rank has the same kind of thing there.

    torchsnapshot compares the paths alone, and then fails, or keeps one rank's tensor of several shapes.
    """
    mine = {
        path: _likeness(value)
        for path, value in flattened.items()
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns) and not _is_sharded(value)
    }
    gathered = ranks.gather(mine)
    found: list[str] = []
    if gathered is not None:
        found = [path for path, likeness in mine.items() if all(other.get(path) == likeness for other in gathered)]
    return set(ranks.share(found))


def _likeness(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape))
    if type(value) in (int, float, str, bool, bytes):
        return (type(value).__name__, repr(value))
    return (f"{type(value).__module__}.{type(value).__qualname__}",)


def _is_sharded(value: Any) -> bool:
    if isinstance(value, ShardedTensor):
        return True
    return is_dtensor(value) and any(not isinstance(placement, Replicate) for placement in value.placements)


def _gather_manifest(manifest: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The manifest of all ranks, on rank 0; an empty one on the others, which have no use for it."""
    gathered = ranks.gather(manifest)
    if gathered is None:
        return {}
    merged = torchsnapshot.partitioner.consolidate_replicated_entries(rank_to_entries=gathered)
    return {f"{rank}/{path}": entry for rank, held in enumerate(merged) for path, entry in held.items()}


def _check_locations(entries: Mapping[str, Any]) -> Collection[str]:
    """Refuses two tensors of one location: the chunk ``w_0_0`` of ``w``, and a tensor whose name is ``w_0_0``; and one
    whose location is a directory of another's.

    Returns:
        The locations.
    """
    owners: dict[str, str] = {}
    slabs: set[str] = set()
    for path, entry in entries.items():
        logical = path.partition("/")[2]
        for part in getattr(entry, "shards", None) or getattr(entry, "chunks", None) or (entry,):
            stored = getattr(part, "tensor", part)
            location = getattr(stored, "location", None)
            if location is None:
                continue
            if getattr(stored, "byte_range", None) is not None:
                slabs.add(location)
                continue
            other = owners.setdefault(location, logical)
            if other != logical:
                raise RefusedError(
                    f"{other} and {logical} would both be stored as {location}", hint="rename one of the two"
                )
    for location, logical in owners.items():
        for above in parent_paths(location):
            if above in owners:
                raise RefusedError(
                    f"{owners[above]} would be stored as {above}, and {logical} inside it as {location}",
                    hint="rename one of the two",
                )
    return owners.keys() | slabs


def wait_for_devices(values: Any) -> None:
    """Lets the current streams finish: torchsnapshot copies in threads, in which another stream is the current one."""
    devices: set[torch.device] = set()
    for value in values:
        if isinstance(value, ShardedTensor):
            devices.update(shard.tensor.device for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            devices.add(value.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


# -- corrections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _corrected(pickled: Mapping[str, memoryview], before_writing: Callable[[], None]) -> Iterator[None]:
    """Replaces what torchsnapshot gets wrong, and puts it back."""
    with _LOCK, contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            if not hasattr(owner, name):
                raise SaveError(
                    f"torchsnapshot {torchsnapshot.__version__} has no {getattr(owner, '__name__', owner)}.{name}",
                    hint="snapctl saves with torchsnapshot 0.1.0 and with the nightlies to 2024.7.26",
                )
            undo.callback(setattr, owner, name, inspect.getattr_static(owner, name))  # a staticmethod stays one
            setattr(owner, name, value)

        _add_dtypes(undo)
        put(torchsnapshot.flatten, "_should_flatten_dict", _should_flatten_dict)
        put(_PREPARER, "get_storage_path", _safe_storage_path(_PREPARER.get_storage_path))
        put(_SHARDS.ShardedTensorIOPreparer, "subdivide_shard", _subdivide(_SHARDS.ShardedTensorIOPreparer))
        put(_TENSORS.TensorBufferStager, "stage_buffer", _stage_buffer)
        if SAVES_DTENSORS:
            dtensors = importlib.import_module("torchsnapshot.io_preparers.dtensor")
            put(dtensors.DTensorIOPreparer, "_get_dim_map", staticmethod(_dim_map))
        left_to_others: set[str] = set()
        put(_SNAPSHOT, "prepare_write", _prepare_write(_SNAPSHOT.prepare_write, pickled, left_to_others))
        put(_SNAPSHOT, "partition_write_reqs", _partition(_SNAPSHOT.partition_write_reqs, left_to_others))
        put(_SNAPSHOT, "sync_execute_write_reqs", _execute(_SNAPSHOT.sync_execute_write_reqs, before_writing))
        yield


def _add_dtypes(undo: contextlib.ExitStack) -> None:
    """Makes the dtypes known that came after torchsnapshot."""
    for name in RAW_DTYPES + PICKLED_DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None or dtype in _SERIALIZATION._DTYPE_TO_STRING:
            continue
        for table, key, value in (
            (_SERIALIZATION._DTYPE_TO_STRING, dtype, f"torch.{name}"),
            (_SERIALIZATION._STRING_TO_DTYPE, f"torch.{name}", dtype),
            (_SERIALIZATION._DTYPE_TO_ELEMENT_SIZE, dtype, dtype.itemsize),
        ):
            table[key] = value
            undo.callback(table.pop, key)
        if name in RAW_DTYPES:
            _SERIALIZATION.BUFFER_PROTOCOL_SUPPORTED_DTYPES.append(dtype)
            undo.callback(_SERIALIZATION.BUFFER_PROTOCOL_SUPPORTED_DTYPES.remove, dtype)


def _should_flatten_dict(found: Mapping[Any, Any]) -> bool:
    """Only keys that a manifest gives back as they were: a ``numpy.str_`` or an enum is pickled with its dict."""
    if not all(type(key) in (str, int, bool) for key in found):
        return False
    if any(type(key) is int and key.bit_length() > 63 for key in found):
        return False
    return len({str(key) for key in found}) == len(found)


def _safe_storage_path(original: Callable[..., str]) -> Callable[..., str]:
    """Locations that stay in their folder and are names to every storage, whatever the keys."""

    def get_storage_path(obj: Any, logical_path: str, rank: int, replicated: bool) -> str:
        root = original(obj, "x", rank, replicated).removesuffix("/x")
        return f"{root}/{safe_location(logical_path)}"

    return get_storage_path


def safe_location(logical_path: str) -> str:
    """A logical path as a part of a blob's location: the same, but where a segment of it cannot be a file's name.

    Such a segment becomes ``%`` and a hash, which no encoded key can be.
    """
    location = "/".join(_safe_segment(segment) for segment in logical_path.split("/"))
    return location if len(location.encode()) <= LONGEST_LOCATION_BYTES else _hashed(logical_path)


def _safe_segment(segment: str) -> str:
    raw = segment.encode("utf-8", "surrogatepass")
    is_safe = (
        segment not in ("", ".", "..")
        and len(raw) <= LONGEST_SEGMENT_BYTES
        and TEMPORARY_MARK not in segment
        and not any(ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in segment)
    )
    return segment if is_safe else _hashed(segment)


def _hashed(text: str) -> str:
    return "%" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _subdivide(preparer: Any) -> Any:
    original = preparer.subdivide_shard

    def subdivide_shard(shard: torch.Tensor, offsets: Any, sizes: Any, dim: int, max_shard_sz_bytes: int) -> list[Any]:
        """No parts of a shard without elements, by which torchsnapshot divides."""
        if 0 in sizes:
            return []
        return list(original(shard, offsets, sizes, dim, max_shard_sz_bytes))

    return staticmethod(subdivide_shard)


def _prepare_write(
    original: Callable[..., Any], pickled: Mapping[str, memoryview], left_to_others: set[str]
) -> Callable[..., Any]:
    def prepare_write(obj: Any, logical_path: str, rank: int, replicated: bool, **options: Any) -> Any:
        if logical_path in pickled:
            location = _PREPARER.get_storage_path(obj, logical_path, rank, replicated)
            kind = f"{type(obj).__module__}.{type(obj).__name__}"
            entry = ObjectEntry(location=location, serializer="torch_save", obj_type=kind, replicated=replicated)
            return entry, [WriteReq(path=location, buffer_stager=_Pickled(pickled[logical_path]))]
        is_plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and obj.numel() == 0 and not obj.is_quantized:
            dtype = _SERIALIZATION.dtype_to_string(obj.dtype)
            return ChunkedTensorEntry(dtype=dtype, shape=list(obj.shape), chunks=[], replicated=replicated), []
        if is_plain and obj.is_quantized:  # no chunks: each would have its own quantizer
            location = _PREPARER.get_storage_path(obj, logical_path, rank, replicated)
            entry, requests = _TENSORS.TensorIOPreparer.prepare_write(location, obj, is_async_snapshot=True)
            entry.replicated = replicated
            return entry, requests
        if is_dtensor(obj) and not _is_writer(obj, logical_path):
            left_to_others.add(logical_path)
        return original(obj=obj, logical_path=logical_path, rank=rank, replicated=replicated, **options)

    return prepare_write


class _Pickled(ObjectBufferStager):  # type: ignore[misc]
    """An object that has been pickled already."""

    async def stage_buffer(self, executor: Any = None) -> memoryview:
        data: memoryview = self.obj
        return data


def _partition(original: Callable[..., Any], left_to_others: set[str]) -> Callable[..., Any]:
    def partition_write_reqs(entries: dict[str, Any], write_reqs: dict[str, Any], pg: Ranks) -> tuple[Any, Any]:
        """Keeps out of it what torchsnapshot would lose or write twice.

        Those are replicated entries without blobs, and DTensors: it looks for copies along the dimensions of the
        tensor, and not of the mesh.
        """
        apart = {path for path, entry in entries.items() if not write_reqs[path] or entry.type == "DTensor"}
        mine = apart - left_to_others
        divided, requests = original(
            entries={path: entry for path, entry in entries.items() if path not in apart},
            write_reqs={path: found for path, found in write_reqs.items() if path not in apart},
            pg=RootOnly(pg),
        )
        divided.update((path, entry) for path, entry in entries.items() if path in mine)
        requests.update((path, found) for path, found in write_reqs.items() if path in mine)
        return divided, requests

    return partition_write_reqs


def _dim_map(tensor: Any) -> list[list[int]]:
    """For each dimension of a DTensor the mesh dimensions that cut it, strided or not; ``[-1]`` for none."""
    cuts: list[list[int]] = [[] for _ in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            cuts[placement.dim].append(mesh_dim)
    return [found or [-1] for found in cuts]


def _is_writer(tensor: Any, logical_path: str) -> bool:
    """Whether this rank writes its shard of a DTensor: of those that hold a copy of it, one does.

    Which one depends on the path, so that the work is spread, and all know it without asking.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False  # not on the mesh
    copies = index = 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(dim)
            copies, index = max(copies, 1) * size, index * size + coordinate[dim]
    return copies == 0 or zlib.crc32(logical_path.encode("utf-8", "surrogatepass")) % copies == index


def _execute(original: Callable[..., Any], before_writing: Callable[[], None]) -> Callable[..., Any]:
    def sync_execute_write_reqs(write_reqs: Sequence[Any], **options: Any) -> Any:
        for request in write_reqs:
            if isinstance(request.buffer_stager, _TENSORS.TensorBufferStager):
                request.buffer_stager.snapctl_must_own = True  # in a slab the slab is the copy
        before_writing()
        return original(write_reqs=write_reqs, **options)

    return sync_execute_write_reqs


async def _stage_buffer(self: Any, executor: Any = None) -> Any:
    """In place of ``TensorBufferStager.stage_buffer``, whose rule for copying compares a str with an Enum."""
    staged = await _TENSORS._run_in_executor(executor, _stage_tensor, self)
    self.tensor = None  # torchsnapshot keeps the stager until its blob is written
    return staged


def _stage_tensor(stager: Any) -> memoryview | bytes:
    """The bytes of a tensor: its own, where nothing else copies them before training goes on."""
    tensor: torch.Tensor = stager.tensor.detach()
    must_own: bool = getattr(stager, "snapctl_must_own", False)
    if _TENSORS.is_uvm_tensor(tensor):
        tensor = _TENSORS.uvm_to_cpu(tensor)
    elif tensor.device.type != "cpu":
        tensor, must_own = tensor.cpu(), False
    tensor = tensor.resolve_conj().resolve_neg()
    if stager.entry.serializer == "torch_save":
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # torch.save stores the whole storage behind a view
        data: bytes = _SERIALIZATION.torch_save_as_bytes(tensor)
        return data
    if must_own:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat: Any = flat_bytes(tensor).numpy()
    return memoryview(flat)
