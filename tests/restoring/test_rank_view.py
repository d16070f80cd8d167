"""What one rank is given of a checkpoint, decided from manifests alone."""

from __future__ import annotations

from typing import Any

from snapctl.manifest import Manifest, parse_manifest
from snapctl.restoring.rank_view import (
    EmptySource,
    ObjectSource,
    RankView,
    TensorSource,
    Unusable,
    ValueSource,
    replication_test,
)
from tests.support.snapshots import metadata, primitive, tensor_entry


def manifest(entries: dict[str, Any], world_size: int = 2) -> Manifest:
    return parse_manifest(metadata(entries, world_size))


def shards(*boxes: tuple[int, int], kind: str = "ShardedTensor") -> dict[str, Any]:
    """Rows ``(first, count)`` of a table of two columns."""
    found = [
        {"offsets": [first, 0], "sizes": [count, 2], "tensor": tensor_entry(f"sharded/t_{first}", [count, 2])}
        for first, count in boxes
    ]
    return {"type": kind, "shards": found}


def obj(location: str, kind: str = "builtins.tuple", replicated: bool = False) -> dict[str, Any]:
    return {
        "type": "object",
        "location": location,
        "serializer": "torch_save",
        "obj_type": kind,
        "replicated": replicated,
    }


ENTRIES: dict[str, Any] = {
    "0/m": {"type": "dict", "keys": ["own", "rep", "same", "differ", "o", "t", "only0", 3, "l", "d"]},
    "0/m/own": tensor_entry("0/m/own", [2]),
    "0/m/rep": tensor_entry("replicated/m/rep", [2], replicated=True),
    "0/m/same": primitive(5),
    "0/m/differ": primitive(1),
    "0/m/o": obj("0/m/o"),
    "0/m/t": shards((0, 3)),
    "0/m/only0": primitive(1),
    "0/m/3": primitive("three"),
    "0/m/l": {"type": "list"},
    **{f"0/m/l/{index}": primitive(index) for index in range(11)},
    "0/m/d": shards((0, 4), kind="DTensor") | {"mesh": [0, 1], "dim_map": [[-1], [-1]]},
    "1/m": {"type": "dict", "keys": ["own", "same", "differ", "o", "t", "l", "d"]},
    "1/m/own": tensor_entry("1/m/own", [3]),
    "1/m/same": primitive(5),
    "1/m/differ": primitive(2),
    "1/m/o": obj("1/m/o"),
    "1/m/t": shards((3, 1)),
    "1/m/l": {"type": "list"},
    "1/m/l/0": primitive(7),
}


def view(rank: int, entries: dict[str, Any] | None = None, **options: Any) -> RankView:
    return RankView(manifest(entries or ENTRIES), rank=rank, **options)


def location(found: Any) -> str:
    assert isinstance(found, TensorSource)
    return found.layout.boxes[0].location


def test_a_rank_that_saved_gets_its_own() -> None:
    for rank in (0, 1):
        seen = view(rank)
        assert location(seen.find("m/own")) == f"{rank}/m/own"
        assert seen.find("m/differ") == ValueSource(rank + 1)
        found = seen.find("m/o")
        assert isinstance(found, ObjectSource) and found.manifest_path == f"{rank}/m/o"


def test_shards_of_all_ranks_and_what_is_replicated_go_to_every_rank() -> None:
    for rank in range(4):
        seen = view(rank)
        table = seen.find("m/t")
        assert isinstance(table, TensorSource) and table.layout.shape == (4, 2) and len(table.layout.boxes) == 2
        whole = seen.find("m/d")
        assert isinstance(whole, TensorSource) and whole.layout.shape == (4, 2)
        assert location(seen.find("m/rep")) == "replicated/m/rep"


def test_what_is_equal_on_all_ranks_that_saved_goes_to_new_ones() -> None:
    seen = view(2, same_objects=lambda objects: True)
    assert seen.find("m/same") == ValueSource(5) and isinstance(seen.find("m/o"), ObjectSource)
    for path in ("m/differ", "m/own"):
        found = seen.find(path)
        assert isinstance(found, Unusable) and found.kind == "own" and "rank 2 has none" in found.text
    assert isinstance(view(2).find("m/o"), Unusable)  # the objects differ
    found = seen.find("m/only0")
    assert isinstance(found, Unusable) and found.text.startswith("rank 0 saved a value of its own")


def test_objects_of_other_classes_are_not_even_compared() -> None:
    entries = {"0/m/o": obj("a"), "1/m/o": obj("b", "builtins.set")}
    assert isinstance(view(2, entries, same_objects=lambda objects: True).find("m/o"), Unusable)


def test_what_the_caller_says_is_replicated_comes_from_the_first_rank_that_has_it() -> None:
    seen = view(2, is_replicated=replication_test(["m/o*"]))
    assert location(seen.find("m/own")) == "0/m/own"
    assert isinstance(seen.find("m/differ"), Unusable)
    assert location(view(1, is_replicated=replication_test(["**"])).find("m/own")) == "1/m/own"


def test_keys_are_those_of_the_rank_in_their_order_and_types() -> None:
    assert list(view(0).keys("m").values()) == ["own", "rep", "same", "differ", "o", "t", "only0", 3, "l", "d"]
    assert list(view(1).keys("m")) == ["own", "same", "differ", "o", "t", "l", "d"]
    assert list(view(5).keys("m")) == list(view(0).keys("m"))  # a new rank takes after the first
    assert list(view(0).keys("m/l")) == [str(index) for index in range(11)]
    assert list(view(1).keys("m/l")) == ["0"]
    assert [view(0).container(path) for path in ("m", "m/l", "m/own", "none")] == ["dict", "list", None, None]


def test_containers_without_an_entry_are_dicts_of_what_is_in_them() -> None:
    seen = view(0, {"0/a/b%2Fc/x": primitive(1), "0/a/b%2Fc/y": primitive(2)})
    assert seen.container("a") == seen.container("a/b%2Fc") == "dict"
    assert seen.keys("a") == {"b%2Fc": "b/c"} and list(seen.keys("a/b%2Fc")) == ["x", "y"]
    assert seen.find("a") is None and seen.names() == {"a"}


def test_damage_is_named() -> None:
    entries = {
        "0/m": {"type": "dict", "keys": ["t", "lost", "v", "u", "x"]},
        "0/m/t": shards((1, 2)),
        "0/m/lost": shards(),
        "0/m/v": primitive(1) | {"serialized_value": "one"},
        "0/m/u": {"type": "hologram", "location": "x"},
        "0/m/x": shards((0, 2)),
        "1/m": {"type": "dict", "keys": ["x"]},
    }
    seen = view(0, entries)
    table, value, unknown, missing = (seen.find(f"m/{key}") for key in ("t", "v", "u", "x"))
    assert isinstance(table, Unusable) and table.error is not None and table.error.kind == "hole"
    assert isinstance(value, Unusable) and value.kind == "damaged"
    assert isinstance(unknown, Unusable) and unknown.kind == "unsupported" and "hologram" in unknown.text
    assert isinstance(missing, Unusable) and missing.error is not None and missing.error.kind == "missing-entry"
    assert seen.find("m/lost") == EmptySource("0/m/lost")
    assert seen.find("m/none") is None


def test_what_ranks_that_are_gone_had_for_themselves() -> None:
    same = {"same_objects": lambda objects: True}
    assert list(view(0, **same).iter_gone(1)) == ["m/own", "m/differ", "m/l/0"]
    assert list(view(0).iter_gone(1)) == ["m/own", "m/differ", "m/o", "m/l/0"]
    assert list(view(0, is_replicated=replication_test(["m/own"]), **same).iter_gone(1)) == ["m/differ", "m/l/0"]
    assert list(view(0, **same).iter_gone(2)) == []


def test_only_the_names_that_matter_are_looked_at() -> None:
    seen = view(0, ENTRIES | {"0/other/x": primitive(1)}, names={"other"})
    assert seen.find("m/own") is None and seen.find("other/x") == ValueSource(1)
