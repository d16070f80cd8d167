"""What goes where, decided from a manifest and the form of a state alone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from snapctl.manifest import encode_key, parse_manifest
from snapctl.restoring.plan import (
    Given,
    ObjectRead,
    PlannedList,
    PlannedMapping,
    PlannedNode,
    RestorePlan,
    Rules,
    TensorCopy,
    TensorRead,
    plan_restore,
)
from snapctl.restoring.rank_view import RankView
from snapctl.restoring.state_tree import TensorTarget, build_tree
from tests.support.snapshots import metadata, primitive, tensor_entry


@dataclass(frozen=True)
class Tensor:
    """As much of a tensor as a plan looks at."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    refusal: str = ""


def describe(value: Any) -> TensorTarget | None:
    if not isinstance(value, Tensor):
        return None
    whole = ((0,) * len(value.shape), value.shape)
    return TensorTarget(value.dtype, value.shape, (whole,), refusal=value.refusal, handle=value)


def plan(entries: dict[str, Any], state: Any, *, rank: int = 0, world_size: int = 1, unpacked: Any = None,
         **rules: Any) -> RestorePlan:  # fmt: skip
    view = RankView(parse_manifest(metadata(entries, world_size)), rank=rank)
    trees = {"m": ("m", build_tree(state, describe), Rules(**rules))}
    return plan_restore(view, trees, unpacked=unpacked, describe=describe)


def shown(node: PlannedNode) -> Any:
    """A planned tree as plain containers."""
    if isinstance(node, PlannedMapping):
        return {key: shown(child) for key, child in node.items}
    if isinstance(node, PlannedList):
        return [shown(child) for child in node.items]
    if isinstance(node, TensorRead):
        return f"read {node.path}" + ("" if node.target else " anew")
    if isinstance(node, TensorCopy):
        return f"copy {node.path}"
    if isinstance(node, ObjectRead):
        return f"load {node.path}"
    assert isinstance(node, Given)
    return node.value


def texts(found: RestorePlan) -> list[str]:
    return [problem.text for problem in found.problems]


def container(**entries: Any) -> dict[str, Any]:
    return {"0/m": {"type": "dict", "keys": list(entries)}} | {f"0/m/{key}": value for key, value in entries.items()}


PICKLED = {"type": "object", "location": "0/m/o", "serializer": "torch_save", "obj_type": "builtins.tuple"}


def test_every_leaf_says_where_it_comes_from() -> None:
    entries = container(w=tensor_entry("0/m/w", [2]), n=primitive(3), o=PICKLED)
    found = plan(entries, {"w": Tensor((2,)), "n": 0, "o": None})
    assert shown(found.roots["m"]) == {"w": "read m/w", "n": 3, "o": "load m/o"} and not found.problems


def test_at_the_top_the_state_says_what_there_is_and_inside_the_checkpoint() -> None:
    entries = container(d={"type": "OrderedDict", "keys": ["y", "x", 5]}, extra=primitive(1))
    entries |= {"0/m/d/y": primitive(1), "0/m/d/x": tensor_entry("0/m/d/x", [2]), "0/m/d/5": primitive(2)}
    found = plan(entries, {"d": {"x": Tensor((2,))}})
    assert shown(found.roots["m"]) == {"d": {"y": 1, "x": "read m/d/x", 5: 2}}
    assert list(shown(found.roots["m"])["d"]) == ["y", "x", 5]
    assert found.unused == ["m/extra"]
    anew = plan(entries, {}, takes_all=True)
    assert shown(anew.roots["m"]) == {"d": {"y": 1, "x": "read m/d/x anew", 5: 2}, "extra": 1}
    assert shown(plan(entries, {}).roots["m"]) == {}


def test_an_ordered_dict_stays_one_where_the_state_has_none() -> None:
    entries = container(d={"type": "OrderedDict", "keys": []}, p={"type": "dict", "keys": []})
    found = plan(entries, {"d": None, "p": OrderedDict()}).roots["m"]
    assert isinstance(found, PlannedMapping)
    nodes = dict(found.items)
    assert isinstance(nodes["d"], PlannedMapping) and nodes["d"].ordered
    assert isinstance(nodes["p"], PlannedMapping) and isinstance(nodes["p"].original, OrderedDict)


def test_everything_that_is_missing_or_does_not_fit_is_listed() -> None:
    entries = container(a=tensor_entry("0/m/a", [2]), b=tensor_entry("0/m/b", [2], "int64"), c=primitive(1),
                        l={"type": "list"}, d={"type": "dict", "keys": []}, r=tensor_entry("0/m/r", [1]))  # fmt: skip
    state = {"a": Tensor((3,)), "b": Tensor((2,)), "c": Tensor(()), "l": {"x": Tensor(())}, "d": [1], "z": [Tensor(())],
             "q": {"k": {"v": 1}}, "r": Tensor((1,), refusal="a nested tensor")}  # fmt: skip
    assert texts(plan(entries, state)) == [
        "m/a: has the shape [2] in the checkpoint and [3] in the state",
        "m/b: is int64 in the checkpoint and float32 in the state",
        "m/c: is of type int in the checkpoint and a tensor in the state",
        "m/l/x: is not in the checkpoint",
        "m/d: is of type dict in the checkpoint, a list in the state",
        "m/z/0: is not in the checkpoint",
        "m/q/k/v: is not in the checkpoint",
        "m/r: cannot be restored into a nested tensor",
    ]


def test_lists_have_the_length_that_the_checkpoint_says() -> None:
    entries = container(l={"type": "list"}) | {"0/m/l/0": primitive(1), "0/m/l/1": primitive(2)}
    assert shown(plan(entries, {"l": []}).roots["m"]) == {"l": [1, 2]}
    assert shown(plan(entries, {"l": [9, 9, 9]}).roots["m"]) == {"l": [1, 2]}
    assert texts(plan(entries, {"l": [9, 9, {"w": Tensor((1,))}]})) == ["m/l/2/w: is not in the checkpoint"]


def test_what_is_optional_stays_as_it_is() -> None:
    found = plan(container(a=primitive(1)), {"a": 0, "b": 7}, optional=frozenset({"m/b"}))
    assert shown(found.roots["m"]) == {"a": 1, "b": 7} and found.kept == ["m/b"] and not found.problems
    assert shown(plan({}, {"b": 7}, optional=frozenset({"m/b"})).roots["m"]) == {"b": 7}


OPTIMIZER = {
    "0/m": {"type": "dict", "keys": ["state", "param_groups"]},
    "0/m/state": {"type": "dict", "keys": [0]},
    "0/m/state/0": {"type": "dict", "keys": ["momentum"]},
    "0/m/state/0/momentum": tensor_entry("0/m/x", [2]),
    "0/m/param_groups": {"type": "list"},
    "0/m/param_groups/0": {"type": "dict", "keys": ["lr", "params"]},
    "0/m/param_groups/0/lr": primitive(0.5),
    "0/m/param_groups/0/params": {"type": "list"},
    "0/m/param_groups/0/params/0": primitive(0),
}


def test_an_optimizer_gets_the_state_that_it_lacks_sharded_as_its_parameter_is() -> None:
    like = TensorTarget("float32", (2,), ())
    fresh = {"state": {}, "param_groups": [{"lr": 0.1, "new": True, "params": [0]}]}
    found = plan(
        OPTIMIZER, fresh, keeps_options=True, find_like=lambda path: like if path.endswith("0/momentum") else None
    )
    expected = {
        "state": {0: {"momentum": "read m/state/0/momentum anew"}},
        "param_groups": [{"lr": 0.5, "params": [0], "new": True}],
    }
    assert shown(found.roots["m"]) == expected and found.kept == ["m/param_groups/0/new"]
    (read,) = [leaf for leaf in found.leaves("m") if isinstance(leaf, TensorRead)]
    assert read.like is like


def test_parameter_groups_must_agree_in_number_and_size() -> None:
    group = {"lr": 0.1, "params": [0]}
    found = plan(OPTIMIZER, {"state": {}, "param_groups": [group, group]}, keeps_options=True)
    assert texts(found) == ["m/param_groups: has 1 items in the checkpoint and 2 here"]
    found = plan(OPTIMIZER, {"state": {}, "param_groups": [group | {"params": [0, 1]}]}, keeps_options=True)
    assert texts(found) == ["m/param_groups/0/params: has 1 items in the checkpoint and 2 here"]
    found = plan(OPTIMIZER, {"state": {}, "param_groups": [{"lr": 0.1, "new": 1, "params": [0]}]})
    assert texts(found) == ["m/param_groups/0/new: is not in the checkpoint"]  # it is no optimizer


def test_an_object_in_the_place_of_a_container_is_decoded_first() -> None:
    entries = {"0/m": PICKLED | {"location": "0/m", "obj_type": "torchsnapshot.state_dict.StateDict"}}
    state = {"n": 0, "w": Tensor((2,)), "d": {"a": 0}, "l": [0], "gone": 1}
    first = plan(entries, state)
    assert list(first.packed) == ["m"] and not first.problems
    stored = {"n": 5, "w": Tensor((2,)), "d": {"a": 1, "b": 2}, "l": [1, 2], "unused": 0}
    second = plan(entries, state, unpacked={"m": stored})
    assert texts(second) == ["m/gone: is not in the checkpoint"] and second.unused == ["m/unused"]
    expected = {"n": 5, "w": "copy m/w", "d": {"a": 1, "b": 2}, "l": [1, 2], "gone": None}
    assert shown(second.roots["m"]) == expected
    wrong = plan(entries, state, unpacked={"m": {"n": 1, "w": Tensor((3,)), "d": 1, "l": {}, "gone": 1}})
    assert texts(wrong) == [
        "m/w: is float32 [3] in the checkpoint and float32 [2] here",
        "m/d: is of type int in the checkpoint, a dict in the state",
        "m/l: is of type dict in the checkpoint, a list in the state",
    ]
    assert texts(plan(entries, state, unpacked={"m": 3})) == [
        "m: is of type int in the checkpoint, a dict in the state"
    ]


def test_a_container_that_names_what_has_no_entry_is_damage() -> None:
    entries = container(d={"type": "dict", "keys": ["a", "b"]}) | {"0/m/d/a": primitive(1)}
    (problem,) = plan(entries, {"d": {}}).problems
    assert (problem.kind, problem.damage) == ("damaged", "missing-entry")


KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.booleans())
TREES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.floats(allow_nan=False), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)


def entries_of(value: Any, path: str) -> dict[str, Any]:
    """The entries that a save makes of nested containers and values."""
    if isinstance(value, dict):
        found = {path: {"type": "dict", "keys": list(value)}}
        for key, child in value.items():
            found |= entries_of(child, f"{path}/{encode_key(key)}")
        return found
    if isinstance(value, list):
        found = {path: {"type": "list"}}
        for index, child in enumerate(value):
            found |= entries_of(child, f"{path}/{index}")
        return found
    return {path: primitive(value)}


def is_taken_apart(value: Any) -> bool:
    if isinstance(value, dict):
        return len({encode_key(key) for key in value}) == len(value) and all(map(is_taken_apart, value.values()))
    return all(map(is_taken_apart, value)) if isinstance(value, list) else True


@given(st.dictionaries(KEYS, TREES, max_size=4).filter(is_taken_apart))
def test_whatever_the_state_holds_inside_it_becomes_what_was_saved(saved: dict[Any, Any]) -> None:
    for state in (saved, dict.fromkeys(saved)):
        found = plan(entries_of(saved, "0/m"), state)
        assert not found.problems and same(shown(found.roots["m"]), saved)


def same(one: Any, other: Any) -> bool:
    """Equal in the types too, those of the keys and their order included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(
            type(a) is type(b) and a == b and same(one[a], other[b]) for a, b in pairs
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
