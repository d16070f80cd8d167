"""The torchsnapshot manifest, typed. Pure: bytes in, values out.

A manifest maps a *manifest path* (``0/model/fc.weight``: the rank that saved it, then the keys of the state dict,
percent-encoded) to an entry. Seen without its rank it is a *logical path*; `Manifest.logical_entries` puts together
what the ranks hold under one.

Source: snapshots that torchsnapshot 0.0.1 to 0.1.0 and its nightlies to 2024-07 wrote.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import gc
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec

from snapctl.errors import ManifestError, ManifestProblem

MANIFEST_NAME = ".snapshot_metadata"
"""Written last: its presence, not empty, is what makes a checkpoint complete."""

Key: TypeAlias = bool | int | float | str | None
"""A key of a state dict. ``True`` and ``1`` are different keys here, as they are in the manifest."""

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


class _Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    type_name: ClassVar[str] = ""


class TensorEntry(_Entry, tag="Tensor", frozen=True, gc=False):
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


class Shard(_Entry, frozen=True, gc=False):
    """A box of a larger tensor: a shard (of a rank) or a chunk (for its size)."""

    offsets: Dimensions
    sizes: Dimensions
    tensor: TensorEntry


class ChunkedTensorEntry(_Entry, tag="ChunkedTensor", frozen=True, gc=False):
    """A tensor of one rank, cut into several blobs."""

    dtype: str
    shape: Dimensions
    chunks: list[Shard]
    replicated: bool = False

    type_name: ClassVar[str] = "ChunkedTensor"


class ShardedTensorEntry(_Entry, tag="ShardedTensor", frozen=True, gc=False):
    """The shards that one rank holds of a tensor; ``[]`` for a rank that holds none."""

    shards: list[Shard]

    type_name: ClassVar[str] = "ShardedTensor"


class DTensorEntry(_Entry, tag="DTensor", frozen=True, gc=False):
    """The shards that one rank saved of a DTensor; copies are listed by the first rank that holds them."""

    shards: list[Shard]
    mesh: Any = None
    """Nested lists of ranks."""
    dim_map: Any = None
    """For each dimension of the tensor the mesh dimensions that it is sharded over; ``[-1]`` for none."""

    type_name: ClassVar[str] = "DTensor"


class ObjectEntry(_Entry, tag="object", frozen=True, gc=False):
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
        return self.obj_type in _TENSOR_TYPES


class PrimitiveEntry(_Entry, frozen=True, gc=False):
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


class ListEntry(_Entry, tag="list", frozen=True, gc=False):
    """A list; its items are the entries ``<path>/0``, ``<path>/1``, …"""

    type_name: ClassVar[str] = "list"


class DictEntry(_Entry, tag="dict", frozen=True, gc=False):
    """A dict; its items are the entries ``<path>/<encoded key>``."""

    keys: list[Key]

    type_name: ClassVar[str] = "dict"


class OrderedDictEntry(_Entry, tag="OrderedDict", frozen=True, gc=False):
    """An ``OrderedDict``, as `DictEntry`."""

    keys: list[Key]

    type_name: ClassVar[str] = "OrderedDict"


class UnknownEntry(_Entry, frozen=True, gc=False):
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

_TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter")
_PRIMITIVES = ("int", "str", "bool", "bytes", "float")
_TYPED: Mapping[str, type[_Entry]] = {
    kind.type_name: kind
    for kind in (
        TensorEntry,
        ChunkedTensorEntry,
        ShardedTensorEntry,
        DTensorEntry,
        ObjectEntry,
        ListEntry,
        DictEntry,
        OrderedDictEntry,
    )
}


# Inline primitives, only for decoding in one pass: all become `PrimitiveEntry`.
class _Primitive(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    serialized_value: str
    replicated: bool = False
    readable: str | None = None


class _Int(_Primitive, tag="int", gc=False): ...


class _Str(_Primitive, tag="str", gc=False): ...


class _Bool(_Primitive, tag="bool", gc=False): ...


class _Bytes(_Primitive, tag="bytes", gc=False): ...


class _Float(_Primitive, tag="float", gc=False): ...


_AnyTyped = (
    TensorEntry
    | ChunkedTensorEntry
    | ShardedTensorEntry
    | DTensorEntry
    | ObjectEntry
    | ListEntry
    | DictEntry
    | OrderedDictEntry
    | _Int
    | _Str
    | _Bool
    | _Bytes
    | _Float
)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    world_size: int
    manifest: dict[str, _AnyTyped]


class LogicalEntry(msgspec.Struct, frozen=True, gc=False):
    """What the ranks hold under one logical path, put together."""

    path: str
    """Without a rank; keys percent-encoded, as in the manifest."""
    type: str
    """The entry's type; ``Tensor`` also for what 0.0.x stored as ``torch.Tensor``."""
    dtype: str | None
    """Without ``torch.``; None for what is no tensor, or where only the blob knows it."""
    shape: tuple[int, ...] | None
    """Of the whole tensor; None like `dtype`."""
    size_bytes: int | None
    """Of all that the ranks stored under this path; None where only the blobs know."""
    ranks: tuple[int, ...]
    """The ranks that list it, ascending."""
    replicated: bool
    shards: int
    """Shards or chunks; 1 for a whole tensor, 0 for what is no tensor."""
    entries: tuple[tuple[str, Entry], ...]
    """The entries behind it with their manifest paths, in the order of the ranks."""


class Manifest(msgspec.Struct, frozen=True):
    """A parsed manifest."""

    version: str
    world_size: int
    """How many ranks saved the snapshot, whether or not each has an entry."""
    entries: dict[str, Entry]
    """By manifest path, in the manifest's order."""
    extra_fields: Mapping[str, Mapping[str, Any]] = {}
    """Fields that this version does not know, by manifest path; under ``""`` those of the document itself."""

    def logical_entries(self) -> list[LogicalEntry]:
        """What is in the snapshot, in the manifest's order.

        Entries of several ranks under one path are one logical entry where they are parts of one tensor, or alike
        (type, dtype, shape, value); where they differ, each kind stands by itself. A rank that holds no shard of a
        sharded tensor is not among its ranks.
        """
        with no_garbage_collection():
            return list(_logical_entries(self.entries))

    def blob_locations(self) -> set[str]:
        """The blobs that the manifest speaks of."""
        return {tensor.location for _, tensor in self.iter_blobs()}

    def iter_blobs(self) -> Iterator[tuple[str, TensorEntry | ObjectEntry]]:
        """Each place where an entry lies in a blob, with the manifest path of its entry."""
        for path, entry in self.entries.items():
            if isinstance(entry, TensorEntry | ObjectEntry):
                yield path, entry
            else:
                for shard in shards_of(entry):
                    yield path, shard.tensor


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


# -- parsing ---------------------------------------------------------------------------------------------------------


def parse_manifest(data: bytes) -> Manifest:
    """Parses a manifest of any generation.

    JSON first; YAML (0.0.x) where it cannot be JSON, that is, where it does not begin with a brace.

    Raises:
        ManifestError: with the `kind` that says whether it is no document at all (``unparsable``: cut off, empty,
            something else), a document of another form (``invalid``) or of a version to come.
    """
    with no_garbage_collection():
        try:
            document = _DECODER.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return _parse_slowly(data)
        _check_version(document.version)
        _check_world_size(document.world_size)
        entries: dict[str, Any] = document.manifest
        for path, entry in entries.items():
            if isinstance(entry, _Primitive):
                entries[path] = _primitive(entry)
        return Manifest(document.version, document.world_size, entries)


_DECODER = msgspec.json.Decoder(_Document)
_MAX_NUMBER_BITS = 14_000
"""Python refuses to print numbers of more than 4,300 digits."""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While many values are made: nothing in a manifest forms a cycle, and collecting among 200,000 new objects costs
    more than decoding them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _primitive(entry: _Primitive) -> PrimitiveEntry:
    return PrimitiveEntry(type(entry).__name__[1:].lower(), entry.serialized_value, entry.replicated)


def _fail(message: str, kind: ManifestProblem) -> ManifestError:
    return ManifestError(f"the manifest {message}", kind=kind)


def _check_version(version: str) -> None:
    if version.partition(".")[0] != "0":
        raise _fail(f"is of version {version!r:.40}, which this snapctl does not know", "unsupported-version")


def _check_world_size(world_size: int) -> None:
    if not 1 <= world_size < 10**9:
        raise _fail(f"speaks of {str(world_size)[:20]} ranks", "invalid")


def _parse_slowly(data: bytes) -> Manifest:
    """Any generation and any surprise: unknown types and fields, lone surrogates, YAML."""
    document = _load_document(data)
    if not isinstance(document, dict):
        raise _fail(f"is not a mapping but {type(document).__name__}", "invalid")
    version, world_size, manifest = (document.get(key) for key in ("version", "world_size", "manifest"))
    if isinstance(version, str):
        _check_version(version)
    if not isinstance(version, str) or type(world_size) is not int or not isinstance(manifest, dict):
        raise _fail("lacks version, world_size or manifest", "invalid")
    _check_world_size(world_size)
    entries: dict[str, Entry] = {}
    extras: dict[str, Mapping[str, Any]] = {}
    surplus = {key: value for key, value in document.items() if key not in ("version", "world_size", "manifest")}
    if surplus:
        extras[""] = surplus
    for path, fields in manifest.items():
        if not isinstance(path, str) or not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
            raise _fail(f"has an entry that is none: {str(path)[:200]!r}", "invalid")
        try:
            entries[path], extra = _convert_entry(fields)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise _fail(f"has an entry that cannot be read: {path[:200]!r}: {error}", "invalid") from error
        if extra:
            extras[path] = extra
    return Manifest(version, world_size, entries, extras)


def _load_document(data: bytes) -> Any:
    text = data.lstrip(b" \t\r\n\xef\xbb\xbf")
    if not text:
        raise _fail(f"holds nothing ({len(data)} bytes of white space)", "unparsable")
    try:
        if text[:1] in b'{["':
            return json.loads(text.decode("utf-8"))
        return _load_yaml(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise _fail(f"is neither JSON nor YAML: {reason}", "unparsable") from error


def _load_yaml(text: str) -> Any:
    """YAML 1.1, as the releases of 2022 wrote it; without aliases, which they never wrote and which can explode."""
    import yaml

    loader = _yaml_loader()(text)
    try:
        node = loader.get_single_node()
        _refuse_aliases(node)
        return loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (
        LookupError,
        AttributeError,
        TypeError,
        ArithmeticError,
    ) as error:  # what its constructors make of odd scalars
        raise ValueError(f"{type(error).__name__} in a scalar") from error
    finally:
        loader.dispose()


@functools.cache
def _yaml_loader() -> Any:
    """One that makes nothing but what JSON has: no dates, sets or bytes, and no numbers that Python cannot print."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_short_int(self, node: Any) -> int:
            number: int = self.construct_yaml_int(node)
            if number.bit_length() > _MAX_NUMBER_BITS:
                raise ValueError(f"a number of {number.bit_length()} bits")
            return number

    known = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
    Loader.yaml_constructors = {
        tag: make for tag, make in Loader.yaml_constructors.items() if tag is None or tag in known
    }
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in known]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_short_int)
    return Loader


def _refuse_aliases(root: Any) -> None:
    """An alias is a node that stands in several places."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            raise ValueError("an alias, which a manifest never has")
        seen.add(id(node))
        value = getattr(node, "value", None)
        for item in value if isinstance(value, list) else ():
            todo += item if isinstance(item, tuple) else (item,)


def _convert_entry(fields: dict[str, Any]) -> tuple[Entry, dict[str, Any]]:
    """One entry of any generation, and the fields that its type does not have."""
    kind: str = fields["type"]
    rest = {key: value for key, value in fields.items() if key != "type"}
    if kind in _PRIMITIVES:
        known: dict[str, Any] = {key: rest.pop(key) for key in ("serialized_value", "replicated") if key in rest}
        rest.pop("readable", None)
        return msgspec.convert({"kind": kind, **known}, PrimitiveEntry), rest
    if kind in ("ShardedTensor", "DTensor"):
        rest["shards"] = [_modern_shard(shard) for shard in rest["shards"]]
    elif kind not in _TYPED and "location" in rest and "." in kind and "serializer" not in rest:
        # 0.0.1 to 0.0.3: anything but a container is its class, and lies in a blob of torch.save
        rest = {"serializer": "torch_save", "obj_type": kind, **rest}
        kind = "object"
    typed = _TYPED.get(kind)
    if typed is None:
        return UnknownEntry(kind, rest), {}
    known = {key: rest.pop(key) for key in typed.__struct_fields__ if key in rest}
    if typed is TensorEntry and "dtype" not in known:
        known["dtype"] = None
    entry: Any = msgspec.convert({"type": kind, **known}, typed)
    return entry, rest


def _modern_shard(shard: dict[str, Any]) -> dict[str, Any]:
    """A shard of 0.0.x carries its location directly, where later ones carry a tensor entry."""
    if "tensor" in shard or "location" not in shard:
        return shard
    tensor = {
        "type": "Tensor",
        "location": shard["location"],
        "serializer": "torch_save",
        "dtype": None,
        "shape": shard["sizes"],
    }
    return {"offsets": shard["offsets"], "sizes": shard["sizes"], "tensor": tensor}


# -- putting together ------------------------------------------------------------------------------------------------


def _logical_entries(entries: Mapping[str, Entry]) -> Iterator[LogicalEntry]:
    by_path: dict[str, list[tuple[int, str, Entry]]] = {}
    for manifest_path, entry in entries.items():
        rank, path = split_rank(manifest_path)
        held = by_path.get(path)
        if held is None:
            by_path[path] = [(rank or 0, manifest_path, entry)]
        else:
            held.append((rank or 0, manifest_path, entry))
    for path, held in by_path.items():
        if len(held) == 1:
            yield _combine(path, held)
            continue
        alike: dict[object, list[tuple[int, str, Entry]]] = {}
        for item in sorted(held, key=lambda item: item[0]):
            alike.setdefault(_likeness(item[2]), []).append(item)
        for group in alike.values():
            yield _combine(path, group)


def _likeness(entry: Entry) -> object:
    """Equal for entries of several ranks that are one logical entry."""
    match entry:
        case TensorEntry() | ChunkedTensorEntry():
            return ("tensor", entry.dtype, tuple(entry.shape), entry.replicated)
        case ShardedTensorEntry() | DTensorEntry():
            return entry.type_name
        case ObjectEntry():
            return ("object", entry.obj_type)
        case PrimitiveEntry():
            return (entry.kind, entry.serialized_value)
        case UnknownEntry():
            return (entry.type, repr(entry.fields))
        case _:
            return entry.type_name


def _combine(path: str, held: Sequence[tuple[int, str, Entry]]) -> LogicalEntry:
    rank, manifest_path, first = held[0]
    if type(first) is TensorEntry and len(held) == 1:  # nearly all of a large manifest: worth its own line
        shape, size, sources = tuple(first.shape), first.size_bytes, ((manifest_path, first),)
        return LogicalEntry(path, "Tensor", _short(first.dtype), shape, size, (rank,), first.replicated, 1, sources)
    if isinstance(first, SHARDED_ENTRIES):
        return _combine_shards(path, held)
    sizes = [stored_bytes(entry) for _, _, entry in held]
    size_bytes = sum(size for size in sizes if size is not None) if None not in sizes else None
    tensor = first if isinstance(first, TensorEntry | ChunkedTensorEntry) else None
    is_tensor_object = isinstance(first, ObjectEntry) and first.is_tensor
    return LogicalEntry(
        path,
        "Tensor" if is_tensor_object else first.type_name,
        _short(tensor.dtype) if tensor else None,
        tuple(tensor.shape) if tensor else None,
        size_bytes,
        tuple(rank for rank, _, _ in held),
        bool(getattr(first, "replicated", False)),
        max(len(shards_of(entry)) for _, _, entry in held) or int(tensor is not None or is_tensor_object),
        _sources(held),
    )


def _sources(held: Sequence[tuple[int, str, Entry]]) -> tuple[tuple[str, Entry], ...]:
    return tuple((manifest_path, entry) for _, manifest_path, entry in held)


def _combine_shards(path: str, held: Sequence[tuple[int, str, Entry]]) -> LogicalEntry:
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], TensorEntry] = {}
    for _, _, entry in held:
        for shard in shards_of(entry):
            boxes.setdefault((tuple(shard.offsets), tuple(shard.sizes)), shard.tensor)
    dtypes = {tensor.dtype for tensor in boxes.values()}
    sizes = [tensor.size_bytes for tensor in boxes.values()]
    return LogicalEntry(
        path,
        held[0][2].type_name,
        _short(dtypes.pop()) if len(dtypes) == 1 else None,
        global_shape(list(boxes)),
        sum(size for size in sizes if size is not None) if None not in sizes else None,
        tuple(rank for rank, _, entry in held if shards_of(entry)) or tuple(rank for rank, _, _ in held),
        False,
        len(boxes),
        _sources(held),
    )


def global_shape(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...] | None:
    """The shape of the tensor that ``(offsets, sizes)`` boxes are parts of; None if there is none to tell it.

    Source: a sharded entry does not state its shape: it is the largest ``offsets + sizes`` over all ranks.
    """
    widths = {len(sizes) for _, sizes in boxes} | {len(offsets) for offsets, _ in boxes}
    if len(widths) != 1:
        return None
    return tuple(max(ends) for ends in zip(*([o + s for o, s in zip(*box, strict=True)] for box in boxes), strict=True))


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


def _short(dtype: str | None) -> str | None:
    return dtype.removeprefix("torch.") if dtype else None
