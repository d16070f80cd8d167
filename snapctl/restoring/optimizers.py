"""What is particular to restoring a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from snapctl.manifest import encode_key
from snapctl.restoring.state_tree import TensorTarget
from snapctl.restoring.targets import describe


def find_parameter(
    optimizer: torch.optim.Optimizer, state_dict: Any, path: str
) -> Callable[[str], TensorTarget | None]:
    """For the path of a tensor in the optimizer's state, the sharded parameter that it belongs to.

    An optimizer that has not made a step lacks its state; what it will have is sharded as the parameters are.

    Args:
        path: of the optimizer.
    """
    parameters: dict[str, TensorTarget] = {}
    for key, parameter in _parameters(optimizer, state_dict).items():
        target = describe(parameter)
        if target is not None and target.kind != "tensor":
            parameters[encode_key(key)] = target
    prefix = f"{path}/state/"

    def find(inside: str) -> TensorTarget | None:
        return parameters.get(inside.removeprefix(prefix).partition("/")[0]) if inside.startswith(prefix) else None

    return find


def _parameters(optimizer: torch.optim.Optimizer, state_dict: Any) -> dict[Any, Any]:
    """The parameters by the names that the state dict gives them."""
    found: dict[Any, Any] = {}
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return found
    for mine, named in zip(optimizer.param_groups, groups, strict=True):
        names = named.get("params") if isinstance(named, Mapping) else None
        if isinstance(names, list) and len(names) == len(mine["params"]):
            found.update(zip(names, mine["params"], strict=True))
    return found


def undo_conversions(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Gives the optimizer's state the dtypes of the checkpoint back.

    ``Optimizer.load_state_dict`` converts floating-point state to the dtype of its parameter: momenta in float32 of
    parameters in bfloat16 would lose their lower half, silently.
    """
    states = loaded.get("state") if isinstance(loaded, Mapping) else None
    if not isinstance(states, Mapping):
        return
    for name, parameter in _parameters(optimizer, loaded).items():
        for key, value in (states.get(name) or {}).items() if isinstance(states.get(name), Mapping) else ():
            held = optimizer.state.get(parameter, {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(device=held.device)
