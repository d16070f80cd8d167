"""The entries of a manifest, typed, and their paths.

Source: snapshots that torchsnapshot 0.0.1 to 0.1.0 and its nightlies to 2024-07 wrote.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec

from snapctl.errors import ManifestError

MANIFEST_NAME = ".snapshot_metadata"
"""Written last: its presence, not empty, is what makes a checkpoint complete."""

Key: TypeAlias = bool | int | float | str | None
"""A key of a state dict. ``True`` and ``1`` are different keys here, as they are in the manifest."""

TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter")
"""What 0.0.x calls an object that is a tensor."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Dimensions: TypeAlias = Annotated[list[_Int64], msgspec.Meta(max_length=64)]
"""A shape, offsets or sizes, of a kind that torch has. Whether the numbers make sense is for `verify` to say."""

DTYPE_SIZES: Mapping[str, int] = {
    "torch.float64": 8,
    "torch.float32": 4,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float8_e4m3fn": 1,
    "torch.float8_e5m2": 1,
    "torch.float8_e4m3fnuz": 1,
    "torch.float8_e5m2fnuz": 1,
    "torch.float8_e8m0fnu": 1,
    "torch.complex128": 16,
    "torch.complex64": 8,
    "torch.complex32": 4,
    "torch.int64": 8,
    "torch.int32": 4,
    "torch.int16": 2,
    "torch.int8": 1,
    "torch.uint64": 8,
    "torch.uint32": 4,
    "torch.uint16": 2,
    "torch.uint8": 1,
    "torch.bool": 1,
    "torch.qint32": 4,
    "torch.qint8": 1,
    "torch.quint8": 1,
}
"""Bytes of one element."""


class BaseEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    type_name: ClassVar[str] = ""


class TensorEntry(BaseEntry, tag="Tensor", frozen=True, gc=False):
    """A tensor in one blob, or in a part of one."""

    location: str
    serializer: str
    dtype: str | None
    """``torch.float32``, …; None where only the blob knows it (0.0.x)."""
    shape: Dimensions
    replicated: bool = False
    byte_range: tuple[int, int] | None = None
    """``[start, end)`` in the blob; None for the whole of it."""

    type_name: ClassVar[str] = "Tensor"

    @property
    def size_bytes(self) -> int | None:
        """Bytes in the blob; None where only the blob knows, and for numbers that cannot be."""
        if self.byte_range is not None:
            size = self.byte_range[1] - self.byte_range[0]
            return size if size >= 0 else None
        item_bytes = DTYPE_SIZES.get(self.dtype or "")
        if item_bytes is None or self.serializer != "buffer_protocol":
            return None
        size = math.prod(self.shape) * item_bytes
        return size if size >= 0 else None


class Shard(BaseEntry, frozen=True, gc=False):
    """A box of a larger tensor: a shard (of a rank) or a chunk (for its size)."""

    offsets: Dimensions
    sizes: Dimensions
    tensor: TensorEntry


class ChunkedTensorEntry(BaseEntry, tag="ChunkedTensor", frozen=True, gc=False):
    """A tensor of one rank, cut into several blobs."""

    dtype: str
    shape: Dimensions
    chunks: list[Shard]
    replicated: bool = False

    type_name: ClassVar[str] = "ChunkedTensor"


class ShardedTensorEntry(BaseEntry, tag="ShardedTensor", frozen=True, gc=False):
    """The shards that one rank holds of a tensor; ``[]`` for a rank that holds none."""

    shards: list[Shard]

    type_name: ClassVar[str] = "ShardedTensor"


class DTensorEntry(BaseEntry, tag="DTensor", frozen=True, gc=False):
    """The shards that one rank saved of a DTensor; copies are listed by the first rank that holds them."""

    shards: list[Shard]
    mesh: Any = None
    """Nested lists of ranks."""
    dim_map: Any = None
    """For each dimension of the tensor the mesh dimensions that it is sharded over; ``[-1]`` for none."""

    type_name: ClassVar[str] = "DTensor"


class ObjectEntry(BaseEntry, tag="object", frozen=True, gc=False):
    """Whatever was pickled into a blob with ``torch.save``."""

    location: str
    serializer: str
    obj_type: str
    """``module.qualname`` of its class."""
    replicated: bool = False

    type_name: ClassVar[str] = "object"

    @property
    def is_tensor(self) -> bool:
        """A tensor that 0.0.x saved as an object: its dtype and shape are in the blob alone."""
        return self.obj_type in TENSOR_TYPES


class PrimitiveEntry(BaseEntry, frozen=True, gc=False):
    """A value that stands in the manifest itself."""

    kind: str
    """``int``, ``str``, ``bool``, ``bytes`` or ``float``."""
    serialized_value: str
    replicated: bool = False

    @property
    def type_name(self) -> str:  # type: ignore[override]
        return self.kind

    @property
    def value(self) -> int | str | bool | bytes | float:
        """The value.

        Raises:
            ManifestError: the text is not one of that type.
        """
        text = self.serialized_value
        try:
            if self.kind == "int":
                return int(text)
            if self.kind == "bool":
                return {"True": True, "False": False}[text]
            if self.kind == "bytes":
                return base64.b64decode(text, validate=True)
            if self.kind == "float":
                (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
                return float(number)
        except (ValueError, KeyError, binascii.Error, struct.error) as error:
            raise ManifestError(f"not a {self.kind}: {text[:80]!r}", kind="invalid") from error
        return text


class ListEntry(BaseEntry, tag="list", frozen=True, gc=False):
    """A list; its items are the entries ``<path>/0``, ``<path>/1``, …"""

    type_name: ClassVar[str] = "list"


class DictEntry(BaseEntry, tag="dict", frozen=True, gc=False):
    """A dict; its items are the entries ``<path>/<encoded key>``."""

    keys: list[Key]

    type_name: ClassVar[str] = "dict"


class OrderedDictEntry(BaseEntry, tag="OrderedDict", frozen=True, gc=False):
    """An ``OrderedDict``, as `DictEntry`."""

    keys: list[Key]

    type_name: ClassVar[str] = "OrderedDict"


class UnknownEntry(BaseEntry, frozen=True, gc=False):
    """An entry of a type that this version does not know, carried as it is."""

    type: str
    fields: dict[str, Any]
    """All of it but the type."""

    @property
    def type_name(self) -> str:  # type: ignore[override]
        return self.type

    @property
    def replicated(self) -> bool:
        return self.fields.get("replicated") is True


Entry: TypeAlias = (
    TensorEntry
    | ChunkedTensorEntry
    | ShardedTensorEntry
    | DTensorEntry
    | ObjectEntry
    | PrimitiveEntry
    | ListEntry
    | DictEntry
    | OrderedDictEntry
    | UnknownEntry
)
ContainerEntry: TypeAlias = ListEntry | DictEntry | OrderedDictEntry
TENSOR_ENTRIES = (TensorEntry, ChunkedTensorEntry, ShardedTensorEntry, DTensorEntry)
SHARDED_ENTRIES = (ShardedTensorEntry, DTensorEntry)
CONTAINER_ENTRIES = (ListEntry, DictEntry, OrderedDictEntry)


def shards_of(entry: Entry) -> Sequence[Shard]:
    """The shards or chunks of an entry; empty for one that is not cut."""
    if isinstance(entry, ChunkedTensorEntry):
        return entry.chunks
    if isinstance(entry, ShardedTensorEntry | DTensorEntry):
        return entry.shards
    return ()


def split_rank(manifest_path: str) -> tuple[int | None, str]:
    """``(rank, logical path)``; no rank where the first segment is none."""
    first, slash, rest = manifest_path.partition("/")
    if slash and first.isdecimal() and first.isascii() and len(first) <= 9:
        return int(first), rest
    return None, manifest_path


def encode_key(key: Key) -> str:
    """A key of a state dict as a segment of a path.

    Source: torchsnapshot writes ``%`` as ``%25`` and ``/`` as ``%2F`` and nothing else.
    """
    return str(key).replace("%", "%25").replace("/", "%2F")


def decode_path(path: str) -> str:
    """A path with its keys decoded; for people, since ``a/b`` no longer tells one key from two."""
    return path.replace("%2F", "/").replace("%2f", "/").replace("%25", "%")


def stored_bytes(entry: Entry) -> int | None:
    """Bytes that an entry has in blobs; None where only the blob knows, 0 for what has none."""
    match entry:
        case TensorEntry():
            return entry.size_bytes
        case ChunkedTensorEntry() | ShardedTensorEntry() | DTensorEntry():
            total = 0
            for shard in shards_of(entry):
                size = shard.tensor.size_bytes
                if size is None:
                    return None
                total += size
            return total
        case ObjectEntry() | UnknownEntry():
            return None
        case _:
            return 0
