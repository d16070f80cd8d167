"""Checkpoints: which directories count, what state they are in, when they were written.

A save directory holds checkpoints: its direct child directories whose names are canonical decimal numbers. Everything
else in it is left alone.
"""

from __future__ import annotations

from snapctl.checkpoints.checkpoint import (
    EARLIEST_SAVE_TIME,
    FUTURE_TOLERANCE_SECONDS,
    Checkpoint,
    State,
    parse_step,
    plausible_time,
)
from snapctl.checkpoints.latest import (
    Chooser,
    Judge,
    LatestSearch,
    find_latest,
    find_newest_complete,
    no_complete_checkpoint,
)
from snapctl.checkpoints.looking import (
    WANTED,
    find_checkpoints,
    incomplete,
    judge_scanned,
    look_at_checkpoint,
    read_blob_sums,
    read_manifest,
    record_matches,
)
from snapctl.checkpoints.places import (
    SIGNS_OF_A_CHECKPOINT,
    Place,
    classify,
    find_place,
    no_such_step,
    not_a_save_dir,
    open_checkpoint,
    open_save_dir,
    step_names,
)
from snapctl.checkpoints.training_names import get_checkpoint, get_checkpoints, step_from_checkpoint

__all__ = [
    "EARLIEST_SAVE_TIME",
    "FUTURE_TOLERANCE_SECONDS",
    "SIGNS_OF_A_CHECKPOINT",
    "WANTED",
    "Checkpoint",
    "Chooser",
    "Judge",
    "LatestSearch",
    "Place",
    "State",
    "classify",
    "find_checkpoints",
    "find_latest",
    "find_newest_complete",
    "find_place",
    "get_checkpoint",
    "get_checkpoints",
    "incomplete",
    "judge_scanned",
    "look_at_checkpoint",
    "no_complete_checkpoint",
    "no_such_step",
    "not_a_save_dir",
    "open_checkpoint",
    "open_save_dir",
    "parse_step",
    "plausible_time",
    "read_blob_sums",
    "read_manifest",
    "record_matches",
    "step_from_checkpoint",
    "step_names",
]
