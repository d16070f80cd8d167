"""Snapshots that attack whoever looks at them. Each is a function that writes one into a save directory."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.random_snapshots import archive
from tests.support.snapshots import metadata, primitive, tensor_entry

Writer = Callable[[pathlib.Path, pathlib.Path], None]
"""``write(checkpoint, outside)``: into a directory that is there; `outside` is another, which must stay as it is."""

HOSTILE: dict[str, Writer] = {}
"""By name."""
HOSTILE_NAMES = (
    "esc\x1b[31mred\x1b]0;title\x07",
    "[red]markup[/red][link=http://x]",
    "two\nlines\r\n\x85\u2028end",
    "right\u202eto left\u2066\u200f",
    "\x00nul\x9bcsi",
    "..",
    "-o",
    "%2e%2e%2F",
    "{}$(touch owned)`id`;'\"",
    "w" * 5000,
    "",
    " ",
    "\ud800",
)
"""Keys of a state dict that mean something to somebody who only prints them."""


def hostile(name: str) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        HOSTILE[name] = writer
        return writer

    return register


def put(checkpoint: pathlib.Path, entries: dict[str, Any], blobs: dict[str, bytes] | None = None) -> None:
    """A checkpoint of one rank with these entries under ``0/m``."""
    for location, data in (blobs or {}).items():
        target = checkpoint / location
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    manifest: dict[str, Any] = {"0/m": {"type": "dict", "keys": list(entries)}}
    manifest |= {f"0/m/{key.replace('%', '%25').replace('/', '%2F')}": entry for key, entry in entries.items()}
    (checkpoint / ".snapshot_metadata").write_bytes(metadata(manifest))


def put_text(checkpoint: pathlib.Path, text: str | bytes) -> None:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    (checkpoint / ".snapshot_metadata").write_bytes(data)


class Bomb:
    """Its unpickling makes a directory."""

    def __init__(self, target: pathlib.Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


# -- locations -------------------------------------------------------------------------------------------------------


@hostile("locations outside")
def _locations(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    secret = str(outside / "secret")
    ways = (
        secret,
        os.path.relpath(secret, checkpoint),
        "0/../../../" + os.path.basename(str(outside)) + "/secret",
        "./0/m/x",
        "0//m/x",
        "",
        ".",
        "..",
        "/",
        "//etc/passwd",
        "file://" + secret,
        "gs://bucket/secret",
        "~/secret",
        "C:\\secret",
        "0/m/x\x00",
        ".snapshot_metadata",
        "x" * 5000,
        "x/" * 2000 + "x",
        "\ud800",
        "*",
    )
    put(checkpoint, {f"x{number}": tensor_entry(way, [6], "uint8") for number, way in enumerate(ways)})


@hostile("links")
def _links(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    (checkpoint / "0" / "m").mkdir(parents=True)
    (checkpoint / "0/m/file").symlink_to(outside / "secret")
    (checkpoint / "0/m/dir").symlink_to(outside)
    (checkpoint / "0/m/loop").symlink_to("loop")
    (checkpoint / "0/m/hole").symlink_to(outside / "made by a write through a link")
    (checkpoint / "0/m/up").symlink_to("../../..")
    (checkpoint / "evaled_by").symlink_to(outside)
    (checkpoint / ".snapctl").symlink_to(outside)
    (checkpoint / "PINNED").symlink_to(outside / "secret")
    locations = ("0/m/file", "0/m/dir/secret", "0/m/loop", "0/m/hole", "0/m/up/secret")
    put(checkpoint, {f"x{number}": tensor_entry(way, [6], "uint8") for number, way in enumerate(locations)})


@hostile("a manifest behind a link")
def _manifest_link(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    (checkpoint / ".snapshot_metadata").symlink_to(outside / "secret")


@hostile("FIFOs and devices")
def _fifos(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    (checkpoint / "0/m").mkdir(parents=True)
    (checkpoint / "evaled_by").mkdir()
    (checkpoint / ".snapctl").mkdir()
    for name in ("0/m/x0", "evaled_by/val_DONE", "evaled_by/test_CLAIM.1", ".snapctl/save.json", "PINNED"):
        os.mkfifo(checkpoint / name)
    (checkpoint / "0/m/x1").symlink_to("/dev/zero")
    (checkpoint / "0/m/x2").symlink_to("/dev/stdin")
    (checkpoint / "0/m/x3").symlink_to("/proc/self/mem")
    (checkpoint / "0/m/x4").mkdir()
    put(checkpoint, {f"x{n}": tensor_entry(f"0/m/x{n}", [6], "uint8") for n in range(5)})


@hostile("a FIFO for a manifest")
def _fifo_manifest(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    os.mkfifo(checkpoint / ".snapshot_metadata")


@hostile("an endless device for a manifest")
def _device_manifest(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    (checkpoint / ".snapshot_metadata").symlink_to("/dev/zero")


# -- shapes ----------------------------------------------------------------------------------------------------------

_SHAPES: tuple[tuple[Any, Any], ...] = (
    ([2**60], None),
    ([2**31, 2**31], None),
    ([2**62] * 8, None),
    ([-1], None),
    ([-2, -2], None),
    ([0, 2**62], None),
    ([2**62, 0], None),
    ([1] * 64, None),
    ([2**40], [0, 8]),
    ([2], [8, 0]),
    ([2], [-8, 0]),
    ([2], [0, -8]),
    ([2], [2**62, 2**62 + 8]),
    ([2**58], [0, 2**60]),
    ([2], [4, 12]),
)


def _shaped(serializer: str, dtype: str) -> dict[str, Any]:
    return {
        f"x{number}": tensor_entry("0/m/x", shape, dtype, byte_range=byte_range, serializer=serializer)
        for number, (shape, byte_range) in enumerate(_SHAPES)
    }


@hostile("shapes and ranges")
def _shapes(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    put(checkpoint, _shaped("buffer_protocol", "float32"), {"0/m/x": bytes(8)})


@hostile("shapes and ranges of quantized tensors")
def _quantized(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    entries = _shaped("per_tensor_qtensor", "qint8")
    entries |= {f"c{key}": value for key, value in _shaped("per_channel_qtensor", "qint8").items()}
    put(checkpoint, entries, {"0/m/x": bytes(8)})


@hostile("shapes and ranges of torch_save")
def _saved_shapes(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    put(checkpoint, _shaped("torch_save", "complex64"), {"0/m/x": archive()})


@hostile("boxes")
def _boxes(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    blob = {"0/m/x": bytes(16)}

    def cut(kind: str, *boxes: tuple[list[int], list[int]], shape: list[int] | None = None) -> dict[str, Any]:
        parts = [
            {"offsets": offsets, "sizes": sizes, "tensor": tensor_entry("0/m/x", sizes, "float32")}
            for offsets, sizes in boxes
        ]
        if kind == "ChunkedTensor":
            return {"type": kind, "dtype": "torch.float32", "shape": shape, "chunks": parts, "replicated": False}
        mesh = {"mesh": [0], "dim_map": [[0]]} if kind == "DTensor" else {}
        return {"type": kind, "shards": parts, **mesh}

    entries = {}
    for kind in ("ChunkedTensor", "ShardedTensor", "DTensor"):
        entries |= {
            f"{kind} far": cut(kind, ([2**60], [4]), shape=[2**60 + 4]),
            f"{kind} huge": cut(kind, ([0], [2**60]), shape=[2**60]),
            f"{kind} overflow": cut(kind, ([2**63 - 1], [2**63 - 1]), shape=[2**63 - 1]),
            f"{kind} negative": cut(kind, ([-4], [4]), shape=[4]),
            f"{kind} negative size": cut(kind, ([4], [-4]), shape=[4]),
            f"{kind} twice": cut(kind, ([0], [4]), ([0], [4]), shape=[4]),
            f"{kind} many dimensions": cut(kind, ([0] * 64, [1] * 64), shape=[1] * 64),
            f"{kind} other dimensions": cut(kind, ([0, 0], [4]), ([0], [2, 2]), shape=[4]),
            f"{kind} scattered": cut(kind, *(([n * 2**20], [4]) for n in range(50)), shape=[2**26]),
            f"{kind} no shape": cut(kind, ([], []), shape=[2**60]),
            f"{kind} nothing": cut(kind, shape=[2**60]),
            f"{kind} empty boxes": cut(kind, *(([2**61], [0]) for _ in range(500)), shape=[2**61]),
        }
    put(checkpoint, entries, blob)


@hostile("many boxes")
def _many_boxes(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    """A comparison of each with each would take hours."""
    part = tensor_entry("0/m/x", [1, 1, 1], "float32", byte_range=[0, 4])
    side = 16
    places = [[a, b, c] for a in range(side) for b in range(side) for c in range(side)]
    shards = [{"offsets": place, "sizes": [1, 1, 1], "tensor": part} for place in places]
    put(checkpoint, {"x": {"type": "ShardedTensor", "shards": shards}}, {"0/m/x": bytes(4)})


# -- pickles ---------------------------------------------------------------------------------------------------------


def _pickled(checkpoint: pathlib.Path, data: bytes, serializer: str = "torch_save") -> None:
    common = {"location": "0/m/x", "serializer": serializer, "replicated": False}
    put(
        checkpoint,
        {
            "object": {"type": "object", "obj_type": "builtins.dict", **common},
            "old": {"type": "object", "obj_type": "torch.Tensor", **common},
            "state": {"type": "object", "obj_type": "torchsnapshot.state_dict.StateDict", **common},
            "tensor": tensor_entry("0/m/x", [2], "complex64", serializer=serializer),
        },
        {"0/m/x": data},
    )


@hostile("a pickle with a side effect")
def _bomb(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    _pickled(checkpoint, pickle.dumps(Bomb(outside / "owned")))


@hostile("a pickle with a side effect in an archive")
def _bomb_archive(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    data = pickle.dumps({"x": Bomb(outside / "owned")}, protocol=2)
    _pickled(checkpoint, archive({"data.pkl": data, "version": b"3\n"}))


@hostile("a pickle with a side effect and an unknown serializer")
def _bomb_serializer(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    _pickled(checkpoint, pickle.dumps(Bomb(outside / "owned")), serializer="pickle")


@hostile("a pickle that asks for a huge storage")
def _huge_storage(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    """As ``torch.save`` writes a tensor, but for the size of its storage, which the archive does not hold."""
    size = b"\x8a\x08" + (2**60).to_bytes(8, "little")
    tensor = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + size + b"tQK\x00" + size + b"\x85K\x01\x85\x89"
        b"ccollections\nOrderedDict\n)RtR."
    )
    _pickled(checkpoint, archive({"data.pkl": tensor, "version": b"3\n", "data/0": bytes(8)}))


@hostile("a pickle that nests and repeats itself")
def _nested_pickle(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    """Lists of lists, each twice the same: 2^40 leaves for whoever copies or prints them."""
    bomb: Any = [0]
    for _ in range(40):
        bomb = [bomb, bomb]
    _pickled(checkpoint, archive({"data.pkl": pickle.dumps({"x": bomb}, protocol=2), "version": b"3\n"}))


@hostile("an archive that is a bomb")
def _zip_bomb(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    import io
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for member in ("archive/data.pkl", "archive/data/0", "archive/version"):
            with out.open(member, "w", force_zip64=True) as sink:
                for _ in range(256):
                    sink.write(bytes(1 << 20))
    _pickled(checkpoint, file.getvalue())


# -- names -----------------------------------------------------------------------------------------------------------


@hostile("names")
def _names(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    data = np.arange(2, dtype="f4").tobytes()
    entries: dict[str, Any] = {name: tensor_entry("0/m/x", [2]) for name in HOSTILE_NAMES}
    entries |= {f"object of {name}": {
        "type": "object", "location": name, "serializer": name, "obj_type": name, "replicated": False
    } for name in HOSTILE_NAMES[:6]}  # fmt: skip
    entries |= {f"unknown {number}": {"type": name, "x": name} for number, name in enumerate(HOSTILE_NAMES)}
    entries |= {f"text {number}": primitive(name) for number, name in enumerate(HOSTILE_NAMES)}
    put(checkpoint, entries, {"0/m/x": data})
    (checkpoint / "evaled_by").mkdir()
    for name in HOSTILE_NAMES[:4]:
        note = {"partition": name, "finished_at": name, "metrics": {name: 1.0}, "host": name}
        (checkpoint / "evaled_by" / f"{name.replace('/', '|')}_DONE").write_text(json.dumps(note))
        claim = {"owner": name, "nonce": name, "ttl": 1}
        (checkpoint / "evaled_by" / f"{name.replace('/', '|')}_CLAIM.1").write_text(json.dumps(claim))
        (checkpoint / name.replace("/", "|")).write_bytes(b"")
    (checkpoint / "PINNED").write_text(json.dumps({"note": HOSTILE_NAMES[0], "owner": HOSTILE_NAMES[1]}))


@hostile("a version with escape sequences")
def _version(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    document = {"version": "0.\x1b[31m\u202e\n" + "9" * 5000, "world_size": 10**9 - 1, "manifest": {}}
    put_text(checkpoint, json.dumps(document))


# -- manifests -------------------------------------------------------------------------------------------------------

_ALL_BYTES = base64.b64encode(bytes(range(256))).decode()
_HEAD = "version: 0.0.3\nworld_size: 1\nmanifest:\n"


def _text_case(name: str, text: str | bytes) -> None:
    @hostile(name)
    def write(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
        put_text(checkpoint, text)


def _json(entries: str) -> str:
    return '{"version": "0.1.0", "world_size": 1, "manifest": {' + entries + "}}"


_text_case("JSON nested 100 levels", _json('"0/m": {"type": "odd", "x": ' + "[" * 100 + "]" * 100 + "}"))
_text_case("JSON nested 900 levels", _json('"0/m": {"type": "odd", "x": ' + '{"a":' * 900 + "1" + "}" * 900 + "}"))
_text_case("JSON nested 100,000 levels", _json('"0/m": {"type": "odd", "x": ' + "[" * 10**5 + "]" * 10**5 + "}"))
_text_case("a mesh nested 900 levels", _json(
    '"0/m": {"type": "DTensor", "shards": [], "dim_map": [], "mesh": ' + "[" * 900 + "]" * 900 + "}"
))  # fmt: skip
_text_case("a path of 100,000 keys", _json('"0/m' + "/m" * 10**5 + '": {"type": "int", "serialized_value": "1"}'))
_text_case("numbers beyond all bounds", _json(
    f'"0/a": {{"type": "odd", "x": {10**400}}}, "0/b": {{"type": "dict", "keys": [{10**400}, 1e400, -1e400]}}, '
    f'"0/c": {{"type": "int", "serialized_value": "{"9" * 10000}"}}, "0/d": {{"type": "odd", "x": {"9" * 5000}}}'
))  # fmt: skip
_text_case("numbers beyond 64 bits", _json(
    f'"0/a": {{"type": "odd", "x": {10**400}}}, "0/b": {{"type": "dict", "keys": [{10**400}, 1e300]}}, '
    f'"0/c": {{"type": "int", "serialized_value": "{"9" * 4000}"}}, '
    f'"0/extra_state/step": {{"type": "int", "serialized_value": "{"9" * 4000}"}}'
))  # fmt: skip
_text_case("values of other types", _json(
    '"0/extra_state/step": {"type": "float", "serialized_value": "AAAAAAAA8H8="}, '
    f'"0/extra_state/walltime": {{"type": "bytes", "serialized_value": "{_ALL_BYTES}"}}, '
    '"0/c": {"type": "float", "serialized_value": "AAAA"}, "0/d": {"type": "bool", "serialized_value": "perhaps"}'
))  # fmt: skip
_text_case("spaces", b" " * (8 << 20))
_text_case("an object and spaces", b"{" + b" " * (8 << 20))
_text_case("YAML and spaces", b"a:" + b" " * (2 << 20))
_text_case("a billion laughs", "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n},' * 9}]\n" for n in range(20)))
_text_case("YAML that contains itself", _HEAD + "  0/m: &a {type: odd, x: *a}\n")
_text_case("YAML nested in brackets", _HEAD + "  0/m: " + "[" * 50_000)
_text_case("YAML nested in indents", "".join(" " * depth + "a:\n" for depth in range(900)))
_text_case("YAML that runs code", _HEAD + "  0/m: !!python/object/apply:os.mkdir [owned]\n")
_text_case("YAML of dates, sets and bytes", _HEAD + (
    "  0/a: {type: odd, x: 2022-01-01, y: 2022-01-01 10:00:00 +99:00, z: !!set {a, b}, b: !!binary aGVsbG8=}\n"
    "  0/b: {type: odd, 2022-01-01: x, 1.5: y, null: z, true: t}\n"))  # fmt: skip
_text_case("YAML ranks in hexadecimal", f"version: 0.0.3\nworld_size: 0x{'f' * 6000}\nmanifest: {{}}\n")
_text_case("YAML numbers in hexadecimal", _HEAD + f"  0/a: {{type: odd, x: 0x{'f' * 6000}}}\n"
                                                  f"  1/a: {{type: odd, x: 0x{'f' * 6000}}}\n")  # fmt: skip
_text_case("YAML numbers of base sixty", _HEAD + f"  0/a: {{type: odd, x: 1{':59' * 3000}.5}}\n")
_text_case("YAML sixty to the ten thousandth", _HEAD + f"  0/a: {{type: odd, x: 1{':59' * 10000}}}\n")


@hostile("a thousand ranks of one path")
def _ranks(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    """Every rank says something else under the same path."""
    manifest = {f"{rank}/m/x": tensor_entry("0/m/x", [rank + 1]) for rank in range(1000)}
    (checkpoint / ".snapshot_metadata").write_bytes(metadata(manifest, 1000))


@hostile("a sparse manifest of a terabyte")
def _sparse(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    with open(checkpoint / ".snapshot_metadata", "wb") as file:
        file.truncate(1 << 40)


@hostile("sparse markers of a terabyte")
def _sparse_markers(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    put(checkpoint, {"x": tensor_entry("0/m/x", [2])}, {"0/m/x": bytes(8)})
    for name in ("evaled_by/val_DONE", "evaled_by/test_CLAIM.1", "PINNED", ".snapctl/save.json"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        with open(checkpoint / name, "wb") as file:
            file.truncate(1 << 40)


@hostile("markers and records that are nonsense")
def _nonsense(checkpoint: pathlib.Path, outside: pathlib.Path) -> None:
    put(checkpoint, {"x": tensor_entry("0/m/x", [2])}, {"0/m/x": bytes(8)})
    for name in ("evaled_by/val_DONE", "evaled_by/test_CLAIM.1", "PINNED", ".snapctl/save.json"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"[" * 100_000)
    (checkpoint / "evaled_by/test_CLAIM.99999999999999999999999").write_bytes(b"\xff" * 1000)
    for number, note in enumerate((
        {"partition": "p", "finished_at": 1e400, "metrics": {"m": 1e400}}, {"metrics": {"m": 10**400}},
        {"metrics": {"m": "NaN"}, "finished_at": "9999-12-31T23:59:59-23:59"}, {"metrics": []}, [], 0, None,
    )):  # fmt: skip
        (checkpoint / f"evaled_by/p{number}_DONE").write_text(json.dumps(note))
        claim = {"owner": "o" * 10000, "nonce": "n", "ttl": (1e400, -1, 10**400, "x", None, [], 0)[number]}
        (checkpoint / f"evaled_by/q{number}_CLAIM.1").write_text(json.dumps(claim))
