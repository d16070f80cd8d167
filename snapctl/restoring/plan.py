"""What of a checkpoint goes where in a training state, and what stands in the way. Pure: nothing is read or changed.

The plan has the form of the new state dict: `PlannedMapping` and `PlannedList` with leaves that say where each value
comes from. What the checkpoint has and the state lacks is part of it inside of containers (the state of an optimizer
that has not made a step), and left out at the top of a state dict (a layer that the model no longer has).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from snapctl.manifest import Key
from snapctl.restoring.rank_view import EmptySource, ObjectSource, RankView, Source, TensorSource, Unusable, ValueSource
from snapctl.restoring.state_tree import (
    StateList,
    StateMapping,
    StateNode,
    StateValue,
    TensorTarget,
    has_tensors,
    iter_leaves,
)
from snapctl.tensors.layout import TensorLayout


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that stands in the way of a restore, on one rank."""

    kind: str
    """``missing``, ``mismatch``, ``own``, ``damaged``, ``unsupported``, ``pickle``, ``storage`` or ``failed``."""
    path: str
    text: str
    """With the path."""
    damage: str = ""
    """The kind of the damage, as ``snapctl verify`` calls it."""
    entry: str | None = None
    blob: str | None = None


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A tensor to read."""

    path: str
    layout: TensorLayout
    target: TensorTarget | None
    """None: into a new one."""
    like: TensorTarget | None = None
    """A new one that is sharded like this one."""


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor that came out of an object, to be copied."""

    path: str
    value: Any
    target: TensorTarget


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """An object to decode."""

    path: str
    source: ObjectSource


@dataclass(frozen=True, slots=True)
class Given:
    """A value that is known: out of the manifest or out of an object, or what the state has already."""

    value: Any


@dataclass(frozen=True, slots=True)
class PlannedMapping:
    """A dict to be built."""

    items: tuple[tuple[Any, PlannedNode], ...]
    ordered: bool
    original: Any = field(default=None, compare=False, repr=False)
    """What the state has there."""


@dataclass(frozen=True, slots=True)
class PlannedList:
    """A list to be built."""

    items: tuple[PlannedNode, ...]


PlannedNode: TypeAlias = "TensorRead | TensorCopy | ObjectRead | Given | PlannedMapping | PlannedList"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is particular to one object of the state."""

    optional: frozenset[str] = frozenset()
    """Paths that may be missing from the checkpoint: the state keeps what it has."""
    keeps_options: bool = False
    """It is an optimizer: options of its parameter groups that the checkpoint does not have stay as they are, lists in
    them have to agree in length, and an empty ``state`` of the checkpoint is one."""
    takes_all: bool = False
    """What the checkpoint has beyond an empty state dict goes into it."""
    find_like: Callable[[str], TensorTarget | None] = lambda path: None
    """What a tensor that the state lacks is sharded like."""


@dataclass
class RestorePlan:
    """What to do on one rank."""

    roots: dict[str, PlannedNode] = field(default_factory=dict)
    """By the name of the object in the state."""
    problems: list[Problem] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Paths of the checkpoint that the state has no place for."""
    kept: list[str] = field(default_factory=list)
    """Paths of the state that stay as they are, since the checkpoint does not have them."""
    packed: dict[str, ObjectSource] = field(default_factory=dict)
    """Objects that stand for a container of the state. Decode them, and plan again with `unpacked`."""

    def leaves(self, name: str) -> Iterator[PlannedNode]:
        """All but the containers of one object of the state."""
        return iter_planned(self.roots[name])


def iter_planned(node: PlannedNode) -> Iterator[PlannedNode]:
    """The leaves of a planned tree."""
    if isinstance(node, PlannedMapping):
        for _, child in node.items:
            yield from iter_planned(child)
    elif isinstance(node, PlannedList):
        for child in node.items:
            yield from iter_planned(child)
    else:
        yield node


def plan_restore(
    view: RankView,
    trees: Mapping[str, tuple[str, StateNode, Rules]],
    *,
    unpacked: Mapping[str, Any] | None = None,
    describe: Callable[[Any], TensorTarget | None] = lambda value: None,
) -> RestorePlan:
    """Plans a restore.

    Args:
        view: the checkpoint as this rank sees it.
        trees: by name, the encoded name, the state dict's tree and its rules.
        unpacked: what objects of `RestorePlan.packed` turned out to be, by path.
        describe: tells a tensor in what was unpacked.
    """
    planner = _Planner(view, unpacked or {}, describe)
    for name, (path, tree, rules) in trees.items():
        planner.plan.roots[name] = planner.root(tree, path, rules)
    return planner.plan


def fit_problem(path: str, layout: TensorLayout, target: TensorTarget) -> Problem | None:
    """What keeps a tensor of the checkpoint from going into one of the state bit by bit."""
    if layout.shape is not None and layout.shape != target.shape:
        found, wanted = list(layout.shape), list(target.shape)
        return Problem("mismatch", path, f"{path}: has the shape {found} in the checkpoint and {wanted} in the state")
    if layout.dtype is not None and layout.dtype != target.dtype:
        return Problem("mismatch", path, f"{path}: is {layout.dtype} in the checkpoint and {target.dtype} in the state")
    return None


_OPTION = re.compile(r"param_groups/\d+/[^/]+")
_GROUP_LIST = re.compile(r"param_groups(/\d+/params)?")


class _Planner:
    def __init__(
        self, view: RankView, unpacked: Mapping[str, Any], describe: Callable[[Any], TensorTarget | None]
    ) -> None:
        self.view = view
        self.plan = RestorePlan()
        self._unpacked = unpacked
        self._describe = describe
        self._rules = Rules()
        self._root = ""

    def _problem(self, kind: str, path: str, text: str) -> None:
        self.plan.problems.append(Problem(kind, path, f"{path}: {text}"))

    def root(self, tree: StateNode, path: str, rules: Rules) -> PlannedNode:
        self._rules, self._root = rules, path
        if isinstance(tree, StateMapping) and (tree.items or not rules.takes_all):
            packed = self._unpack(path)
            if packed is not None:
                return self._from_value(tree, path, packed[0], is_root=True)
            return self._mapping(tree, path, is_root=True)
        return self._node(tree, path)

    # -- where the state says what there has to be -----------------------------------------------------------------

    def _node(self, node: StateNode, path: str) -> PlannedNode:
        if isinstance(node, TensorTarget):
            return self._tensor(node, path)
        if isinstance(node, StateValue):
            if self.view.container(path) is not None:
                return self._extra(path)
            return self._value(path, self.view.find(path), node)
        packed = self._unpack(path)
        if packed is not None:
            return self._from_value(node, path, packed[0])
        if self.view.container(path) is None:
            return self._no_container(node, path)
        return self._list(node, path) if isinstance(node, StateList) else self._mapping(node, path)

    def _no_container(self, node: StateMapping | StateList, path: str) -> PlannedNode:
        found = self.view.find(path)
        if found is None or isinstance(found, Unusable):
            return self._missing(node, path)
        if has_tensors(node):
            self._problem("mismatch", path, "holds tensors in the state and is no container in the checkpoint")
            return Given(None)
        return self._value(path, found, None)

    def _missing(self, node: StateNode, path: str) -> PlannedNode:
        """The checkpoint does not have it: every leaf of it by itself, so that all are listed."""
        if isinstance(node, StateMapping):
            items = tuple((key, self._missing(child, f"{path}/{part}")) for part, (key, child) in node.items.items())
            return PlannedMapping(items, False, node.original)
        if isinstance(node, StateList):
            return PlannedList(tuple(self._missing(child, f"{path}/{i}") for i, child in enumerate(node.items)))
        relative = path.removeprefix(f"{self._root}/")
        is_option = self._rules.keeps_options and _OPTION.match(relative) is not None
        if path in self._rules.optional or (is_option and not relative.endswith("/params")):
            self.plan.kept.append(path)
            return Given(node.handle if isinstance(node, TensorTarget) else node.value)
        found = self.view.find(path)
        if isinstance(found, Unusable):
            self._unusable(path, found)
        else:
            self._problem("missing", path, "is not in the checkpoint")
        return Given(None)

    def _unusable(self, path: str, found: Unusable) -> None:
        error = found.error
        text = found.text if error is not None else f"{path}: {found.text}"
        self.plan.problems.append(
            Problem(
                found.kind,
                path,
                text,
                error.kind if error is not None else "",
                error.entry if error is not None else None,
                error.blob if error is not None else None,
            )
        )

    def _tensor(self, target: TensorTarget, path: str) -> PlannedNode:
        found = self.view.find(path)
        if found is None and self.view.container(path) is None:
            return self._missing(target, path)
        if isinstance(found, Unusable):
            self._unusable(path, found)
        elif isinstance(found, EmptySource):
            if 0 in target.shape:
                return Given(target.handle)
            hole = f"{found.manifest_path}: no rank lists a shard of it"
            self.plan.problems.append(Problem("damaged", path, hole, "hole", found.manifest_path))
        elif not isinstance(found, TensorSource):
            kind = _kind_of(found) or self.view.container(path)
            self._problem("mismatch", path, f"is of type {kind} in the checkpoint and a tensor in the state")
        elif target.refusal:
            self._problem("unsupported", path, f"cannot be restored into {target.refusal}")
        elif (problem := fit_problem(path, found.layout, target)) is not None:
            self.plan.problems.append(problem)
        else:
            return TensorRead(path, found.layout, target)
        return Given(None)

    def _value(self, path: str, found: Source | Unusable | None, node: StateValue | None) -> PlannedNode:
        if found is None:
            return self._missing(node or StateValue(None), path)
        if isinstance(found, Unusable):
            self._unusable(path, found)
            return Given(None)
        if isinstance(found, ObjectSource):
            if path in self._unpacked:
                return Given(self._unpacked[path])
            return ObjectRead(path, found)
        if isinstance(found, ValueSource):
            return Given(found.value)
        if isinstance(found, EmptySource):
            self._problem("missing", path, "has no shard in the checkpoint to tell its dtype")
            return Given(None)
        return TensorRead(path, found.layout, None, self._rules.find_like(path))

    def _mapping(self, node: StateMapping, path: str, *, is_root: bool = False) -> PlannedNode:
        keys = self.view.keys(path)
        if not keys and self._rules.keeps_options and path == f"{self._root}/state" and self.view.container(path):
            self.plan.kept += [] if not node.items else [f"{path}: emptied, as in the checkpoint"]
            return PlannedMapping((), False, node.original)
        mine = {
            segment: (key, self._node(child, f"{path}/{segment}") if self.view.has(f"{path}/{segment}")
                      else self._missing(child, f"{path}/{segment}"))
            for segment, (key, child) in node.items.items()
        }  # fmt: skip
        ordered = self.view.container(path) == "OrderedDict"
        if is_root:
            self.plan.unused += [f"{path}/{segment}" for segment in keys if segment not in mine]
            return PlannedMapping(tuple(mine.values()), ordered, node.original)
        items = [
            mine.pop(segment) if segment in mine else (key, self._extra(f"{path}/{segment}"))
            for segment, key in keys.items()
        ]
        return PlannedMapping((*items, *mine.values()), ordered, node.original)

    def _list(self, node: StateList, path: str) -> PlannedNode:
        keys = self.view.keys(path)
        if self.view.container(path) != "list":
            self._problem(
                "mismatch", path, f"is of type {self.view.container(path)} in the checkpoint, a list in the state"
            )
            return Given(None)
        relative = path.removeprefix(f"{self._root}/")
        if self._rules.keeps_options and _GROUP_LIST.fullmatch(relative) and len(keys) != len(node.items):
            self._problem("mismatch", path, f"has {len(keys)} items in the checkpoint and {len(node.items)} here")
            return Given(None)
        items = []
        for segment in keys:
            index = int(segment)
            child = node.items[index] if index < len(node.items) else None
            items.append(self._extra(f"{path}/{segment}") if child is None else self._node(child, f"{path}/{segment}"))
        for index in range(len(keys), len(node.items)):
            for leaf_path, leaf in iter_leaves(node.items[index], f"{path}/{index}"):
                if isinstance(leaf, TensorTarget):  # values beyond the list's old end just go
                    self._problem("missing", leaf_path, "is not in the checkpoint")
        return PlannedList(tuple(items))

    # -- where the checkpoint says what there has to be ----------------------------------------------------------

    def _extra(self, path: str) -> PlannedNode:
        """Something that the state lacks, as the checkpoint has it."""
        kind = self.view.container(path)
        if kind == "list":
            return PlannedList(tuple(self._extra(f"{path}/{segment}") for segment in self.view.keys(path)))
        if kind is not None:
            keys = self.view.keys(path)
            items = tuple((key, self._extra(f"{path}/{segment}")) for segment, key in keys.items())
            return PlannedMapping(items, kind == "OrderedDict")
        found = self.view.find(path)
        if found is None:
            entry = f"{self.view.rank}/{path}"
            text = f"{path}: its container names it, and it has no entry"
            self.plan.problems.append(Problem("damaged", path, text, "missing-entry", entry))
            return Given(None)
        return self._value(path, found, None)

    # -- out of an object that stands for a container (0.0.x, odd keys) --------------------------------------------

    def _unpack(self, path: str) -> tuple[Any] | None:
        """The decoded object under a path; None if there is none, or it still has to be decoded."""
        if self.view.container(path) is not None:
            return None
        found = self.view.find(path)
        if not isinstance(found, ObjectSource):
            return None
        if path not in self._unpacked:
            self.plan.packed[path] = found
            return (None,)
        return (self._unpacked[path],)

    def _from_value(self, node: StateNode, path: str, value: Any, *, is_root: bool = False) -> PlannedNode:
        if path in self.plan.packed:
            return Given(None)  # it is planned again once that is known
        if isinstance(node, StateValue):
            return Given(value)
        if isinstance(node, TensorTarget):
            return self._copy(node, path, value)
        if isinstance(node, StateList):
            if not isinstance(value, list):
                self._problem(
                    "mismatch", path, f"is of type {type(value).__name__} in the checkpoint, a list in the state"
                )
                return Given(None)
            pairs = enumerate(value)
            return PlannedList(
                tuple(
                    self._from_value(node.items[i], f"{path}/{i}", item) if i < len(node.items) else Given(item)
                    for i, item in pairs
                )
            )
        if not isinstance(value, Mapping):
            self._problem("mismatch", path, f"is of type {type(value).__name__} in the checkpoint, a dict in the state")
            return Given(None)
        return self._from_mapping(node, path, value, is_root=is_root)

    def _from_mapping(self, node: StateMapping, path: str, value: Mapping[Any, Any], *, is_root: bool) -> PlannedNode:
        by_text: dict[str, Any] = {str(key): key for key in value}
        items: list[tuple[Any, PlannedNode]] = []
        for segment, (key, child) in node.items.items():
            stored = by_text.pop(str(key), _ABSENT)
            inside = f"{path}/{segment}"
            planned = self._missing(child, inside) if stored is _ABSENT else self._from_value(
                child, inside, value[stored])  # fmt: skip
            items.append((key, planned))
        if is_root:
            self.plan.unused += [f"{path}/{text}" for text in by_text]
        else:
            items += [(key, Given(value[key])) for key in by_text.values()]
        return PlannedMapping(tuple(items), False, node.original)

    def _copy(self, target: TensorTarget, path: str, value: Any) -> PlannedNode:
        found = self._describe(value)
        if found is None:
            self._problem(
                "mismatch", path, f"is of type {type(value).__name__} in the checkpoint and a tensor in the state"
            )
        elif (found.dtype, found.shape) != (target.dtype, target.shape) or target.kind != "tensor":
            have = f"{found.dtype} {list(found.shape)}"
            self._problem("mismatch", path, f"is {have} in the checkpoint and {target.dtype} {list(target.shape)} here")
        else:
            return TensorCopy(path, value, target)
        return Given(None)


_ABSENT: Key = "\0absent"


def _kind_of(found: Source | Unusable | None) -> str:
    if isinstance(found, ObjectSource):
        return found.entry.obj_type.removeprefix("builtins.")
    if isinstance(found, ValueSource):
        return type(found.value).__name__
    return ""
