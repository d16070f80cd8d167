"""Every generation of the manifest parses, and what is strange is carried or refused, never dropped."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapctl.errors import ManifestError
from snapctl.manifest import (
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    ObjectEntry,
    PrimitiveEntry,
    TensorEntry,
    UnknownEntry,
    decode_path,
    encode_key,
    parse_manifest,
    split_rank,
)
from tests.support.repository import DATA
from tests.support.snapshots import metadata, primitive, tensor_entry

FIXTURES = sorted(DATA.glob("*/*/.snapshot_metadata"))


def document(manifest: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({"version": "0.1.0", "world_size": 1, "manifest": manifest, **changes}).encode()


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.parent.parent.name)
def test_the_tensors_of_every_real_snapshot_are_found(path: pathlib.Path) -> None:
    manifest = parse_manifest(path.read_bytes())
    assert manifest.extra_fields == {}
    assert not any(isinstance(entry, UnknownEntry) for entry in manifest.entries.values())
    found = {entry.path: entry for entry in manifest.logical_entries()}
    expected = path.parent.parent / "expected.json"
    for name, facts in json.loads(expected.read_text()).items() if expected.exists() else ():
        entry = found[split_rank(name)[1]]
        assert entry.type in ("Tensor", "ChunkedTensor", "ShardedTensor", "DTensor")
        if manifest.version != "0.0.1":  # where dtype and shape stand in the blobs alone
            assert (entry.dtype, list(entry.shape or ())) == (facts["dtype"], facts["shape"])


def test_a_table_that_one_rank_holds_has_only_that_rank(data: Any) -> None:
    manifest = parse_manifest((DATA / "torchrec-2ranks/100/.snapshot_metadata").read_bytes())
    table = {entry.path: entry for entry in manifest.logical_entries()}["model/ebc.embedding_bags.t_tw.weight"]
    assert (table.ranks, table.shards, table.shape, table.size_bytes) == ((1,), 1, (50, 4), 800)


def test_a_dtensor_is_put_together_from_all_ranks() -> None:
    manifest = parse_manifest((DATA / "dtensor-4ranks/1/.snapshot_metadata").read_bytes())
    (_, tensor) = manifest.logical_entries()
    assert (tensor.type, tensor.shape, tensor.shards, tensor.ranks) == ("DTensor", (10, 7), 4, (0, 1, 2, 3))
    entry = manifest.entries["0/m/w"]
    assert isinstance(entry, DTensorEntry) and entry.mesh == [[0, 1], [2, 3]] and entry.dim_map == [[0], [1]]


def test_json_and_yaml_of_one_document_are_the_same() -> None:
    import yaml

    content = {"0/m": {"type": "dict", "keys": ["w", 3]}, "0/m/w": tensor_entry("0/m/w", [2]), "0/m/3": primitive(7)}
    as_yaml = yaml.safe_dump({"version": "0.1.0", "world_size": 1, "manifest": content}, sort_keys=False).encode()
    assert parse_manifest(as_yaml) == parse_manifest(metadata(content))


def test_keys_keep_their_types() -> None:
    manifest = parse_manifest(document({"0/m": {"type": "dict", "keys": [True, 1, "1", "true", 0, False, -1, 2**70]}}))
    entry = manifest.entries["0/m"]
    assert isinstance(entry, DictEntry)
    assert [(type(key).__name__, key) for key in entry.keys] == [
        ("bool", True), ("int", 1), ("str", "1"), ("str", "true"), ("int", 0), ("bool", False), ("int", -1),
        ("int", 2**70),
    ]  # fmt: skip


def test_unknown_types_and_fields_are_carried() -> None:
    manifest = parse_manifest(
        document(
            {
                "0/a": {"type": "SparseTensor", "indices": [1, 2], "replicated": True},
                "0/b": {**tensor_entry("0/b", [2]), "compression": "zstd"},
                "0/c": tensor_entry("0/c", [2]),
            },
            checksum="abc",
        )
    )
    assert manifest.entries["0/a"] == UnknownEntry("SparseTensor", {"indices": [1, 2], "replicated": True})
    assert isinstance(manifest.entries["0/b"], TensorEntry)
    assert manifest.extra_fields == {"0/b": {"compression": "zstd"}, "": {"checksum": "abc"}}
    assert [(e.path, e.type, e.replicated) for e in manifest.logical_entries()] == [
        ("a", "SparseTensor", True), ("b", "Tensor", False), ("c", "Tensor", False),
    ]  # fmt: skip


def test_inline_primitives_have_their_values() -> None:
    import base64

    values = {"i": -7, "s": "x: y", "b": True, "f": 0.1}
    entries = {f"0/{name}": primitive(value) for name, value in values.items()}
    entries["0/y"] = {"type": "bytes", "serialized_value": base64.b64encode(b"\0\xff").decode()}
    manifest = parse_manifest(document(entries))
    found = {path: entry.value for path, entry in manifest.entries.items() if isinstance(entry, PrimitiveEntry)}
    assert found == {"0/i": -7, "0/s": "x: y", "0/b": True, "0/f": 0.1, "0/y": b"\0\xff"}


@pytest.mark.parametrize(
    ("kind", "text"), [("int", "x"), ("bool", "yes"), ("float", "AAA="), ("float", "0.5"), ("bytes", "%")]
)
def test_a_primitive_that_is_none_is_an_error_only_for_who_wants_its_value(kind: str, text: str) -> None:
    manifest = parse_manifest(document({"0/x": {"type": kind, "serialized_value": text, "replicated": False}}))
    entry = manifest.entries["0/x"]
    assert isinstance(entry, PrimitiveEntry)
    with pytest.raises(ManifestError):
        _ = entry.value


def test_0_0_x_objects_and_shards_are_told_apart() -> None:
    text = b"""version: 0.0.1
world_size: 2
manifest:
  0/emb:
    type: ShardedTensor
    shards:
    - {offsets: [0, 0], sizes: [2, 3], location: 0/emb_0_0}
  1/emb:
    type: ShardedTensor
    shards:
    - {offsets: [2, 0], sizes: [1, 3], location: 1/emb_2_0}
  0/w: {type: torch.Tensor, location: 0/w, replicated: false}
  0/n: {type: builtins.int, location: 0/n, replicated: false}
"""
    manifest = parse_manifest(text)
    found = {entry.path: entry for entry in manifest.logical_entries()}
    assert (found["emb"].shape, found["emb"].dtype, found["emb"].shards) == ((3, 3), None, 2)
    assert (found["w"].type, found["n"].type) == ("Tensor", "object")
    assert manifest.entries["0/n"] == ObjectEntry("0/n", "torch_save", "builtins.int", False)


def test_a_chunked_scalar_of_2022_is_a_scalar() -> None:
    manifest = parse_manifest((DATA / "yaml-chunked-2022-08/5/.snapshot_metadata").read_bytes())
    step = {entry.path: entry for entry in manifest.logical_entries()}["optim/state/0/step"]
    assert (step.type, step.shape, step.shards) == ("ChunkedTensor", (), 1)


def test_a_zero_size_tensor_without_chunks_is_an_entry() -> None:
    entry = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [0, 3], "chunks": [], "replicated": False}
    manifest = parse_manifest(document({"0/z": entry}))
    assert isinstance(manifest.entries["0/z"], ChunkedTensorEntry)
    (found,) = manifest.logical_entries()
    assert (found.shape, found.size_bytes) == ((0, 3), 0)


def test_plain_tensors_of_several_ranks_are_one_entry_where_they_are_alike() -> None:
    entries = {f"{rank}/m/w": tensor_entry(f"{rank}/m/w", [2]) for rank in range(3)}
    entries["2/m/w"] = tensor_entry("2/m/w", [5])
    found = parse_manifest(document(entries, world_size=3)).logical_entries()
    assert [(entry.path, entry.shape, entry.ranks, entry.size_bytes) for entry in found] == [
        ("m/w", (2,), (0, 1), 16),
        ("m/w", (5,), (2,), 20),
    ]


def test_ranks_are_in_the_order_of_numbers() -> None:
    entries = {f"{rank}/n": primitive(1) for rank in (10, 9, 100, 0)}
    (found,) = parse_manifest(document(entries, world_size=101)).logical_entries()
    assert found.ranks == (0, 9, 10, 100)


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (b"", "unparsable", "holds nothing"),
        (b"  \n ", "unparsable", "holds nothing"),
        (b'{"version": "0.1.0", "world_size": 1, "manif', "unparsable", "neither JSON nor YAML"),
        (b"version: 0.0.3\nworld_size: 1\nmanifest:\n  0/x: {type: d", "unparsable", "neither JSON nor YAML"),
        (b"\x00\x01\x02", "unparsable", "neither JSON nor YAML"),
        (b"\xff\xfe{}", "unparsable", "neither JSON nor YAML"),
        (b"[" * 100_000, "unparsable", "neither JSON nor YAML"),
        (b'{"a":' * 100_000, "unparsable", "neither JSON nor YAML"),
        (b"[1, 2]", "invalid", "not a mapping"),
        (b"just text", "invalid", "not a mapping"),
        (b"{}", "invalid", "lacks version"),
        (b'{"version": "0.1.0", "world_size": "1", "manifest": {}}', "invalid", "lacks version"),
        (b'{"version": "0.1.0", "world_size": true, "manifest": {}}', "invalid", "lacks version"),
        (b'{"version": "0.1.0", "world_size": 1, "manifest": {"0/x": 5}}', "invalid", "'0/x'"),
        (b'{"version": "0.1.0", "world_size": 1, "manifest": {"0/x": {"type": "Tensor"}}}', "invalid", "'0/x'"),
        (b'{"version": "0.1.0", "world_size": 1, "manifest": {"0/x": {"type": "dict"}}}', "invalid", "'0/x'"),
        (b'{"version": "7.0.0", "world_size": 1, "manifest": {}}', "unsupported-version", "7.0.0"),
        (b'{"version": "7.0.0", "entries": []}', "unsupported-version", "7.0.0"),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_kind(data: bytes, kind: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as caught:
        parse_manifest(data)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_broken_json_is_never_tried_as_yaml() -> None:
    """Flow mappings of YAML look like JSON: half a manifest must not become a smaller one."""
    with pytest.raises(ManifestError) as caught:
        parse_manifest(b"{version: '0.1.0', world_size: 1, manifest: {}}")
    assert caught.value.kind == "unparsable"


def test_aliases_that_would_explode_are_refused_at_once() -> None:
    lines = [b"version: 0.0.3", b"world_size: 1", b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]".encode() for n in range(1, 12)]
    began = time.monotonic()
    with pytest.raises(ManifestError) as caught:
        parse_manifest(b"\n".join([*lines, b"manifest: *a11"]))
    assert caught.value.kind == "unparsable"
    assert time.monotonic() - began < 5


def test_yaml_tags_run_nothing(tmp_path: pathlib.Path) -> None:
    flag = tmp_path / "flag"
    with pytest.raises(ManifestError):
        parse_manifest(f"version: !!python/object/apply:os.system ['touch {flag}']".encode())
    assert not flag.exists()


def test_emoji_written_as_surrogate_pairs_and_lone_surrogates_are_read() -> None:
    data = document({"0/m": {"type": "dict", "keys": ["🙂", "\udcff"]}})
    assert b"\\ud83d" in data
    entry = parse_manifest(data).entries["0/m"]
    assert isinstance(entry, DictEntry) and entry.keys == ["🙂", "\udcff"]


@pytest.mark.parametrize(
    ("key", "segment"), [("a/b", "a%2Fb"), ("50%", "50%25"), ("a%2Fb", "a%252Fb"), (0, "0"), ("", ""), ("ü", "ü")]
)
def test_keys_are_encoded_as_torchsnapshot_does(key: Any, segment: str) -> None:
    assert encode_key(key) == segment
    assert decode_path(segment) == str(key)


@given(st.text())
def test_every_key_comes_back(key: str) -> None:
    assert "/" not in encode_key(key)
    assert decode_path(encode_key(key)) == key


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_manifest_parses_or_is_refused_but_never_crashes(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from([path.read_bytes() for path in FIXTURES]))
    mutated = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        choice = data.draw(st.sampled_from(["flip", "cut", "drop", "double"]))
        if choice == "flip":
            mutated[position] = data.draw(st.integers(0, 255))
        elif choice == "cut":
            del mutated[position + 1 :]
        elif choice == "drop":
            del mutated[position : position + 20]
            mutated = mutated or bytearray(b"x")
        else:
            mutated[position:position] = mutated[position : position + 50]
    try:
        parse_manifest(bytes(mutated)).logical_entries()
    except ManifestError as error:
        assert error.kind in ("unparsable", "invalid", "unsupported-version")
