"""Boxes that are not raw, decoded; the last ones are kept, as far as they are small."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from snapctl.errors import DamagedError, UnsupportedEntryError
from snapctl.tensors.blob_reader import BlobReader
from snapctl.tensors.blocks import Array, as_buffer
from snapctl.tensors.dtypes import numpy_dtype
from snapctl.tensors.layout import RAW_SERIALIZER, TORCH_SERIALIZERS, Box, TensorLayout
from snapctl.tensors.memory import aligned_empty
from snapctl.tensors.torch_decoding import decode_quantized, load_tensor, numpy_to_torch, torch_to_numpy

if TYPE_CHECKING:
    import torch

DECODED_CACHE_BYTES = 64 << 20


class BoxDecoder:
    """Decodes boxes of one checkpoint.

    All methods raise DamagedError (``undecodable``, ``size-mismatch``, missing or short), UnsupportedEntryError,
    RefusedError (it would have to be unpickled), MissingExtraError (no torch) and StorageError.
    """

    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._held: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def array(self, layout: TensorLayout, box: Box) -> Array:
        if not box.needs_blob:
            return np.empty(box.sizes, numpy_dtype(layout.dtype or ""))
        return torch_to_numpy(self.decode(box, layout), entry=box.entry)

    def decode(self, box: Box, layout: TensorLayout) -> torch.Tensor:
        """A box as a torch tensor, which must have the box's sizes and the layout's dtype, where these are known."""
        place = _place(box)
        found = self._held.get(place)
        if found is None:
            found = self._decode(box)
            self._held[place] = found
            while len(self._held) > 1 and sum(map(_tensor_bytes, self._held.values())) > DECODED_CACHE_BYTES:
                self._held.popitem(last=False)
        dtype = str(found.dtype).removeprefix("torch.")
        if (layout.dtype or dtype) != dtype or (layout.shape is not None and tuple(found.shape) != box.sizes):
            raise DamagedError(
                f"{box.entry}: {box.location} holds {dtype} {list(found.shape)}, and the manifest says "
                f"{layout.dtype or 'any dtype'} {list(box.sizes)}",
                kind="size-mismatch",
                entry=box.entry,
                blob=box.location,
            )
        return found

    def _decode(self, box: Box) -> torch.Tensor:
        if box.serializer == RAW_SERIALIZER:
            raw: Array = aligned_empty(box.sizes, numpy_dtype(box.dtype or ""))
            self._blobs.fill(box.location, box.start, as_buffer(raw), box.entry)
            return numpy_to_torch(raw, box.dtype or "")
        if box.serializer not in TORCH_SERIALIZERS:
            raise UnsupportedEntryError(f"{box.entry}: serializer {box.serializer!r} is not known")
        with self._blobs.open(box) as file:
            if box.serializer == "torch_save":
                return load_tensor(file, entry=box.entry, blob=box.location)
            data = memoryview(file.readall())
        return decode_quantized(data, box.sizes, box.dtype or "", box.serializer, entry=box.entry, blob=box.location)

    def forget(self, box: Box) -> None:
        """Lets go of a decoded box: it is somebody else's now."""
        self._held.pop(_place(box), None)


def _place(box: Box) -> tuple[str, int]:
    return box.location, box.start


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
