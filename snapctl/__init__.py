"""torchsnapshot checkpoints: find, judge, save, restore, verify and prune them.

The public names are loaded when they are first used, so that ``import snapctl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "get_checkpoint": "snapctl.checkpoints",
    "get_checkpoints": "snapctl.checkpoints",
    "step_from_checkpoint": "snapctl.checkpoints",
    "infer_fs": "snapctl.storage.filesystems",
    "is_gcs_fs": "snapctl.storage.filesystems",
    "is_local_fs": "snapctl.storage.filesystems",
    "PendingSnapshot": "snapctl.saving",
    "SaveOptions": "snapctl.saving",
    "SnapctlError": "snapctl.errors",
    "Snapshot": "snapctl.training",
    "read_tensor": "snapctl.weights",
}

if TYPE_CHECKING:
    from snapctl.checkpoints import get_checkpoint, get_checkpoints, step_from_checkpoint
    from snapctl.errors import SnapctlError
    from snapctl.saving import PendingSnapshot, SaveOptions
    from snapctl.storage.filesystems import infer_fs, is_gcs_fs, is_local_fs
    from snapctl.training import Snapshot
    from snapctl.weights import read_tensor

__all__ = [
    "PendingSnapshot",
    "SaveOptions",
    "SnapctlError",
    "Snapshot",
    "get_checkpoint",
    "get_checkpoints",
    "infer_fs",
    "is_gcs_fs",
    "is_local_fs",
    "read_tensor",
    "step_from_checkpoint",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'snapctl' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
