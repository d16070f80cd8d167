"""torchsnapshot checkpoints for ``torch.distributed.checkpoint`` (DCP): load them with it, and save them as its own.

::

    import torch.distributed.checkpoint as dcp
    from snapctl.dcp import StorageReader

    reader = StorageReader("gs://bucket/run/100")
    state = reader.empty_state_dict()
    dcp.load(state, storage_reader=reader)
    dcp.save(state, checkpoint_id="converted/100")
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from snapctl.entry_names import EntryIndex
from snapctl.errors import InvalidOptionError, RestoreError, UnpicklingError, UnsupportedEntryError
from snapctl.manifest import decode_path
from snapctl.restoring.object_reading import STATE_DICT, ObjectReader
from snapctl.restoring.rank_view import (
    EmptySource,
    ObjectSource,
    RankView,
    Source,
    TensorSource,
    Unusable,
    ValueSource,
    replication_test,
)
from snapctl.restoring.state_tree import TensorTarget
from snapctl.restoring.targets import fill
from snapctl.snapshots import OpenSnapshot, open_snapshot
from snapctl.tensors.layout import TensorLayout
from snapctl.tensors.reader import TensorReader
from snapctl.tensors.torch_decoding import torch_dtype

logger = logging.getLogger("snapctl.dcp")


@dataclass(frozen=True, slots=True)
class _Item:
    """One entry of DCP's flat state dict."""

    keys: tuple[str | int, ...]
    """The way to it through the nested state dict."""
    layout: TensorLayout | None
    """Of a tensor; None for anything else."""
    content: Callable[[], Any] = lambda: None
    """Of anything else."""


class StorageReader(dcp_storage.StorageReader):
    """A ``StorageReader`` of DCP over a torchsnapshot checkpoint of any generation, local or remote.

    The names are DCP's: the keys of the nested state dict with dots between them (``model.fc.weight``); lists without
    a tensor in them are one value. Only the bytes of what a rank holds are read.

    Sharded tensors are whole, whoever asks. Of what each rank saved for itself, a rank gets its own; one that did not
    save gets what is equal on all ranks that did. Where DCP is not distributed, that is rank 0.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        rank: int | None = None,
        replicated: Collection[str] = (),
        allow_pickle: bool = False,
    ) -> None:
        """
        Args:
            checkpoint: its path or URL, or a save directory: then its latest.
            storage_options: for fsspec.
            rank: whose part to read of what each rank saved for itself; None: of this process.
            replicated: globs of logical paths (``model/**``) that are the same on all ranks that saved.
            allow_pickle: also hand out objects that are not on PyTorch's weights-only list: DCP will unpickle them,
                which runs whatever code the checkpoint says.
        """
        self._checkpoint = os.fspath(checkpoint)
        self._options = storage_options
        self._rank = rank
        self._replicated = tuple(replicated)
        self._allow_pickle = allow_pickle
        self._opened: OpenSnapshot | None = None
        self._reader: TensorReader | None = None
        self._items: dict[str, _Item] = {}
        self.left_out: tuple[str, ...] = ()
        """Logical paths that this rank cannot be given, known once the metadata has been read."""

    # -- DCP's protocol ----------------------------------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can be meant by a path; it is never chosen by itself."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins anew, with another checkpoint where one is named."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self._checkpoint:
            self._checkpoint = os.fspath(checkpoint_id)
            self._opened = None
        self.close()

    def read_metadata(self) -> Metadata:
        """What is in the checkpoint, in DCP's words.

        Raises:
            CheckpointNotFoundError, ManifestError, StorageError: it cannot be opened.
            DamagedError: its manifest contradicts itself.
        """
        self._open()
        described: dict[str, Any] = {}
        for name, item in self._items.items():
            described[name] = BytesStorageMetadata() if item.layout is None else _tensor_metadata(item.layout)
        keys = {name: item.keys for name, item in self._items.items()}
        return Metadata(described, planner_data=keys)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Opens the checkpoint, where `read_metadata` has not been called here."""
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Looks at all blobs of the plan, before anything is read.

        Raises:
            DamagedError: one is missing or short.
        """
        reader = self._open()
        for item in plan.items:
            layout = self._items[item.storage_index.fqn].layout
            if layout is not None and item.type != LoadItemType.BYTE_IO:
                reader.check([layout], _region(item))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing has to be agreed on."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan says.

        Raises:
            RestoreError: dtypes differ; DCP itself would convert.
            DamagedError, StorageError, …: as everywhere.
        """
        reader = self._open()
        wanted: list[tuple[TensorLayout, TensorTarget]] = []
        resolved: list[tuple[ReadItem, torch.Tensor]] = []
        mismatches: list[str] = []
        for item in plan.items:
            stored = self._items[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO or stored.layout is None:
                planner.load_bytes(item, _pickled(stored.content()))
                continue
            tensor = planner.resolve_tensor(item).detach()
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype != stored.layout.dtype:
                mismatches.append(f"{item.storage_index.fqn}: is {stored.layout.dtype} in the checkpoint, not {dtype}")
                continue
            region = _region(item)
            wanted.append((stored.layout, TensorTarget(dtype, stored.layout.shape or (), (region,), handle=tensor)))
            resolved.append((item, tensor))
        if mismatches:
            raise RestoreError("; ".join(mismatches), problems=tuple(mismatches))
        fill(reader, wanted)
        for item, tensor in resolved:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- beside it ---------------------------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        """What has come from blobs since the last `reset`."""
        return 0 if self._reader is None else self._reader.bytes_read

    def close(self) -> None:
        """Ends the threads that read; the next call begins anew."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def empty_state_dict(self, select: Callable[[str], bool] | None = None) -> dict[str, Any]:
        """A nested state dict to load the checkpoint into: its tensors are there, whole and on the CPU, with nothing
        in them; everything else is None until it is loaded.

        Args:
            select: which names to have (``lambda name: name.startswith("model.")``); None: all.

        Raises:
            As `read_metadata`.
        """
        self._open()
        root: dict[str, Any] = {}
        for name, item in self._items.items():
            if select is None or select(name):
                value = None
                if item.layout is not None:
                    value = torch.empty(item.layout.shape or (), dtype=torch_dtype(item.layout.dtype or ""))
                _put(root, item.keys, value)
        return root

    def _open(self) -> TensorReader:
        if self._opened is None:
            self._opened = open_snapshot(self._checkpoint, None, self._options)
            self._items = {}
        if self._reader is None:
            self._reader = TensorReader(self._opened.storage)
            self._objects = ObjectReader(self._reader, allow_pickle=self._allow_pickle)
        if not self._items:
            self._items = self._read_items(self._opened, self._reader)
        return self._reader

    def _read_items(self, snapshot: OpenSnapshot, reader: TensorReader) -> dict[str, _Item]:
        reader.use_listing(snapshot.storage.list_tree())
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        view = RankView(
            snapshot.manifest,
            rank=rank,
            is_replicated=replication_test(self._replicated),
            same_objects=self._objects.comparison({}),
        )
        walk = _Walk(view, reader, self._objects)
        for name in sorted(view.names()):
            walk.visit((decode_path(name),), name)
        others = _saved_by_others(snapshot, rank, walk.seen)
        self.left_out = tuple(walk.left_out + others)
        if self.left_out:
            shown = ", ".join(self.left_out[:20]) + (", …" if len(self.left_out) > 20 else "")
            logger.warning("%s: not for rank %d, and left out: %s", snapshot.storage.url, rank, shown)
        return walk.items


class _Walk:
    """From the manifest to DCP's flat names, as ``torch.distributed.checkpoint`` flattens a state dict itself."""

    def __init__(self, view: RankView, reader: TensorReader, objects: ObjectReader) -> None:
        self.view = view
        self.items: dict[str, _Item] = {}
        self.left_out: list[str] = []
        self.seen: set[str] = set()
        self._reader = reader
        self._objects = objects

    def visit(self, keys: tuple[str | int, ...], path: str) -> None:
        kind = self.view.container(path)
        if kind is None:
            self._leaf(keys, path)
        elif kind == "list" and not self._is_taken_apart(path):
            self._look_at(path)
            self._enter(keys, _Item(keys, None, lambda: self._value(path)))
        else:
            for segment, key in self.view.keys(path).items():
                child: str | int = int(segment) if kind == "list" else str(key)
                self.visit((*keys, child), f"{path}/{segment}")

    def _is_taken_apart(self, path: str) -> bool:
        """A list is, if it has a tensor or a dict in it, or a list that is."""
        for segment in self.view.keys(path):
            inside = f"{path}/{segment}"
            kind = self.view.container(inside)
            if kind in ("dict", "OrderedDict") or (kind == "list" and self._is_taken_apart(inside)):
                return True
            if kind is None and isinstance(self.view.find(inside), TensorSource):
                return True
        return False

    def _look_at(self, path: str) -> None:
        """What cannot be used in a list that is one value shows now, and not when it is read."""
        if self.view.container(path) is None:
            self._find(path)
        for segment in self.view.keys(path) if self.view.container(path) is not None else ():
            self._look_at(f"{path}/{segment}")

    def _enter(self, keys: tuple[str | int, ...], item: _Item) -> None:
        name = ".".join(map(str, keys))
        if name in self.items:
            raise InvalidOptionError(f"two entries have the name {name} in DCP: {self.items[name].keys} and {keys}")
        self.items[name] = item

    def _leaf(self, keys: tuple[str | int, ...], path: str) -> None:
        found = self._find(path)
        if found is None:
            return
        if isinstance(found, TensorSource):
            layout = self._reader.learn(found.layout)
            if layout.dtype is not None and layout.dtype.startswith(("qint", "quint")):
                self._enter(keys, _Item(keys, None, lambda: self._reader.read_torch(layout)))
            else:
                self._enter(keys, _Item(keys, layout))
        elif isinstance(found, ObjectSource) and found.entry.obj_type == STATE_DICT:  # 0.0.x: of several values
            for key, value in self._content(found).items():
                self._enter((*keys, str(key)), _Item((*keys, str(key)), None, functools.partial(_same, value)))
        else:
            self._enter(keys, _Item(keys, None, lambda: self._content(found)))

    def _find(self, path: str) -> Source | None:
        self.seen.add(path)
        found = self.view.find(path)
        if found is None or isinstance(found, EmptySource):
            self.left_out.append(path)
            return None
        if isinstance(found, Unusable):
            if found.error is not None:
                raise found.error
            self.left_out.append(path)
            return None
        return found

    def _value(self, path: str) -> Any:
        """A list, or something in one."""
        kind = self.view.container(path)
        if kind == "list":
            return [self._value(f"{path}/{segment}") for segment in self.view.keys(path)]
        found = self._find(path)
        return None if found is None else self._content(found)

    def _content(self, found: Source) -> Any:
        if isinstance(found, ValueSource):
            return found.value
        if isinstance(found, ObjectSource):
            try:
                return self._objects.read(found.manifest_path, found.entry)
            except UnpicklingError as error:
                hint = "StorageReader(…, allow_pickle=True), if you trust everybody who could write to the checkpoint"
                raise UnpicklingError(error.message, hint=hint) from error
        raise UnsupportedEntryError(f"{found}: is no value")


def _same(value: Any) -> Any:
    return value


def _saved_by_others(snapshot: OpenSnapshot, rank: int, seen: Collection[str]) -> list[str]:
    """What only other ranks have."""
    return [path for path in EntryIndex(snapshot.manifest).by_path if path not in seen]


def _tensor_metadata(layout: TensorLayout) -> TensorStorageMetadata:
    boxes = [box for box in layout.boxes if box.elements > 0]
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    shape = torch.Size(layout.shape or ())
    if not chunks:
        chunks = [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(layout.dtype or "")), shape, chunks)


def _region(item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What an item reads, in the coordinates of the whole tensor."""
    base: Sequence[int] = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(a + b for a, b in zip(base, item.storage_offsets, strict=True))
    return offsets, tuple(item.lengths)


def _pickled(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _put(root: dict[str, Any], keys: Sequence[str | int], value: Any) -> None:
    """Puts a value where the keys lead, making the dicts and lists on the way."""
    place: Any = root
    for key, following in zip(keys, (*keys[1:], None), strict=True):
        if isinstance(key, int):
            place.extend([None] * (key + 1 - len(place)))
            present = place[key]
        else:
            present = place.get(key)
        if following is None:
            place[key] = value
        else:
            if present is None:
                present = place[key] = [] if isinstance(following, int) else {}
            place = present
