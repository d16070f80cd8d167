"""The bytes of a manifest of any generation to a `Manifest`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from snapctl.errors import ManifestError, ManifestProblem
from snapctl.manifest.entries import (
    BaseEntry,
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    ShardedTensorEntry,
    TensorEntry,
    UnknownEntry,
)
from snapctl.manifest.logical import Manifest, no_garbage_collection

_PRIMITIVES = ("int", "str", "bool", "bytes", "float")
_TYPED: Mapping[str, type[BaseEntry]] = {
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
        _check_depth(entries)
        for path, entry in entries.items():
            if isinstance(entry, _Primitive):
                entries[path] = _primitive(entry)
        return Manifest(document.version, document.world_size, entries)


_DECODER = msgspec.json.Decoder(_Document)
MAX_RANKS = 1 << 20
"""More than any job has: what a manifest says costs memory for each."""
MAX_DEPTH = 256
"""Keys on the way to an entry."""
_MAX_NUMBER_BITS = 14_000
"""Python refuses to print numbers of more than 4,300 digits."""


def _primitive(entry: _Primitive) -> PrimitiveEntry:
    return PrimitiveEntry(type(entry).__name__[1:].lower(), entry.serialized_value, entry.replicated)


def _fail(message: str, kind: ManifestProblem) -> ManifestError:
    return ManifestError(f"the manifest {message}", kind=kind)


def _check_version(version: str) -> None:
    if version.partition(".")[0] != "0":
        raise _fail(f"is of version {version!r:.40}, which this snapctl does not know", "unsupported-version")


def _check_world_size(world_size: int) -> None:
    if not 1 <= world_size <= MAX_RANKS:
        raise _fail(f"speaks of {str(world_size)[:20]} ranks", "invalid")


def _check_depth(entries: Mapping[str, object]) -> None:
    """Whoever looks for the end of a name makes as many texts of it as it has keys."""
    for path in entries:
        if len(path) > 2 * MAX_DEPTH and path.count("/") > MAX_DEPTH:
            raise _fail(f"has an entry {path.count('/')} keys deep: {path[:40]!r}…", "invalid")


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
    _check_depth(entries)
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
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # what its constructors make of scalars
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
