"""A training state as a tree of what a restore has to fill. Pure: what a tensor is, the caller's `describe` says.

Containers are what torchsnapshot takes apart: a ``dict``, an ``OrderedDict`` or a ``list``, not one derived from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from snapctl.manifest import encode_key
from snapctl.tensors.tiling import Region


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """A tensor of the state, to be read into."""

    dtype: str
    """Without ``torch.``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    parts: tuple[Region, ...]
    """What this rank holds of it; the whole, if it is not sharded."""
    kind: str = "tensor"
    """For messages: ``tensor``, ``ShardedTensor``, ``DTensor``."""
    refusal: str = ""
    """Why nothing can be read into it; empty if it can."""
    handle: Any = field(default=None, compare=False, repr=False)
    """The tensor itself."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """Anything that is no tensor and no container: it is replaced."""

    value: Any


@dataclass(frozen=True, slots=True)
class StateMapping:
    """A dict."""

    items: Mapping[str, tuple[Any, StateNode]]
    """By the segment of the path that the key makes: ``(key, what is there)``."""
    original: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class StateList:
    """A list."""

    items: tuple[StateNode, ...]


StateNode: TypeAlias = "TensorTarget | StateValue | StateMapping | StateList"


def build_tree(value: Any, describe: Callable[[Any], TensorTarget | None]) -> StateNode:
    """The tree of a state dict."""
    if type(value) is list:
        return StateList(tuple(build_tree(item, describe) for item in value))
    if type(value) in (dict, OrderedDict) and _is_taken_apart(value):
        return StateMapping({encode_key(key): (key, build_tree(item, describe)) for key, item in value.items()}, value)
    return describe(value) or StateValue(value)


def _is_taken_apart(found: Mapping[Any, Any]) -> bool:
    if not all(isinstance(key, str | int) for key in found):
        return False
    return len({encode_key(key) for key in found}) == len(found)


def iter_leaves(node: StateNode, path: str) -> Iterator[tuple[str, TensorTarget | StateValue]]:
    """Everything but the containers, with its path."""
    if isinstance(node, StateMapping):
        for segment, (_, child) in node.items.items():
            yield from iter_leaves(child, f"{path}/{segment}")
    elif isinstance(node, StateList):
        for index, child in enumerate(node.items):
            yield from iter_leaves(child, f"{path}/{index}")
    else:
        yield path, node


def has_tensors(node: StateNode) -> bool:
    """Whether a tensor is anywhere in it."""
    return any(isinstance(leaf, TensorTarget) for _, leaf in iter_leaves(node, ""))
