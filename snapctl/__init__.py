"""torchsnapshot checkpoints: find, judge, save, restore, verify and prune them.

The public names are loaded when they are first used, so that ``import snapctl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from snapctl.release import __version__ as __version__

_HOMES = {
    "get_checkpoint": "snapctl.checkpoints",
    "get_checkpoints": "snapctl.checkpoints",
    "step_from_checkpoint": "snapctl.checkpoints",
    "ClaimRefusedError": "snapctl.evaluation.claims",
    "claim_eval": "snapctl.evaluation.claims",
    "release_claim": "snapctl.evaluation.claims",
    "renew_claim": "snapctl.evaluation.claims",
    "DeadlineError": "snapctl.errors",
    "EvaluationTimeoutError": "snapctl.errors",
    "SnapctlError": "snapctl.errors",
    "is_done_eval": "snapctl.evaluation.evals",
    "mark_done_eval": "snapctl.evaluation.evals",
    "PendingSnapshot": "snapctl.saving.saver",
    "SaveOptions": "snapctl.saving.saver",
    "infer_fs": "snapctl.storage.filesystems",
    "is_gcs_fs": "snapctl.storage.filesystems",
    "is_local_fs": "snapctl.storage.filesystems",
    "Snapshot": "snapctl.training",
    "checkpoints_iterator": "snapctl.evaluation.waiting",
    "wait_for_evaluators": "snapctl.evaluation.waiting",
    "read_tensor": "snapctl.tensors.weights",
}

if TYPE_CHECKING:
    from snapctl.checkpoints import get_checkpoint, get_checkpoints, step_from_checkpoint
    from snapctl.errors import DeadlineError, EvaluationTimeoutError, SnapctlError
    from snapctl.evaluation.claims import ClaimRefusedError, claim_eval, release_claim, renew_claim
    from snapctl.evaluation.evals import is_done_eval, mark_done_eval
    from snapctl.evaluation.waiting import checkpoints_iterator, wait_for_evaluators
    from snapctl.saving.saver import PendingSnapshot, SaveOptions
    from snapctl.storage.filesystems import infer_fs, is_gcs_fs, is_local_fs
    from snapctl.tensors.weights import read_tensor
    from snapctl.training import Snapshot

__all__ = [
    "ClaimRefusedError",
    "DeadlineError",
    "EvaluationTimeoutError",
    "PendingSnapshot",
    "SaveOptions",
    "SnapctlError",
    "Snapshot",
    "checkpoints_iterator",
    "claim_eval",
    "get_checkpoint",
    "get_checkpoints",
    "infer_fs",
    "is_done_eval",
    "is_gcs_fs",
    "is_local_fs",
    "mark_done_eval",
    "read_tensor",
    "release_claim",
    "renew_claim",
    "step_from_checkpoint",
    "wait_for_evaluators",
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
