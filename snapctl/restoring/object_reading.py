"""Pickled objects of a checkpoint: read once, decoded weights-only unless unpickling was asked for, compared."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchsnapshot

from snapctl.errors import SnapctlError, UnsupportedEntryError
from snapctl.manifest import ObjectEntry
from snapctl.save_record import BlobSum
from snapctl.tensors.reader import TensorReader
from snapctl.tensors.torch_decoding import load_object

STATE_DICT = "torchsnapshot.state_dict.StateDict"
"""As the manifest names it."""
KEPT_BYTES = 1 << 20
"""Larger blobs are not kept after they were decoded."""


class ObjectReader:
    """Reads the objects of one checkpoint."""

    def __init__(self, reader: TensorReader, *, allow_pickle: bool) -> None:
        """
        Args:
            allow_pickle: unpickle anything, which runs whatever code the checkpoint says.
        """
        self._reader = reader
        self._allow_pickle = allow_pickle
        self._bytes: dict[str, bytes] = {}
        self._values: dict[str, Any] = {}
        self._handed_out: set[str] = set()
        self.needed_bytes = 0
        """Of the blobs that were decoded."""

    def read(self, manifest_path: str, entry: ObjectEntry) -> Any:
        """The object; the same one each time.

        Raises:
            RefusedError: it would have to be unpickled.
            DamagedError, UnsupportedEntryError, StorageError: it cannot be read or decoded.
        """
        if entry.location not in self._values:
            if entry.serializer != "torch_save":
                raise UnsupportedEntryError(f"{manifest_path}: serializer {entry.serializer!r} is not known")
            self._values[entry.location] = self._decode(manifest_path, entry)
        return self._values[entry.location]

    def _decode(self, manifest_path: str, entry: ObjectEntry) -> Any:
        data = self._read_bytes(manifest_path, entry)
        self.needed_bytes += len(data)

        def load() -> Any:
            return load_object(
                io.BytesIO(data),
                entry=manifest_path,
                blob=entry.location,
                obj_type=entry.obj_type,
                allow_pickle=self._allow_pickle,
            )

        # A StateDict of torchsnapshot is a dict with two methods. 0.0.x pickles it as the dict that it was then; as the
        # UserDict of today it can only be made by its own class.
        if entry.obj_type == STATE_DICT:
            with torch.serialization.safe_globals([(dict, STATE_DICT)]), contextlib.suppress(SnapctlError):
                return load()
        with torch.serialization.safe_globals([torchsnapshot.StateDict]):
            return load()

    def take(self, manifest_path: str, entry: ObjectEntry) -> Any:
        """The object, for keeps: nobody else is given the same one."""
        value = self.read(manifest_path, entry)
        if entry.location in self._handed_out:
            return copy.deepcopy(value)
        self._handed_out.add(entry.location)
        return value

    def _read_bytes(self, manifest_path: str, entry: ObjectEntry) -> bytes:
        data = self._bytes.get(entry.location)
        if data is None:
            data = self._reader.read_object_bytes(manifest_path, entry)
            if len(data) <= KEPT_BYTES:
                self._bytes[entry.location] = data
        return data

    def comparison(self, recorded: Mapping[str, BlobSum]) -> Callable[[Sequence[tuple[str, ObjectEntry]]], bool]:
        """Tells whether objects are equal: by their recorded checksums, or else byte by byte."""

        def are_same(objects: Sequence[tuple[str, ObjectEntry]]) -> bool:
            if len({entry.location for _, entry in objects}) == 1:
                return True
            sums = {recorded.get(entry.location) for _, entry in objects}
            if None not in sums:
                return len(sums) == 1
            first = self._read_bytes(*objects[0])
            return all(self._read_bytes(*other) == first for other in objects[1:])

        return are_same
