"""Steps that the tests of restore-weight take again and again."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from tests.support.command import Finished, snapctl, snapctl_here
from tests.support.shards import Builder, grid
from tests.support.snapshots import tensor_entry

TABLE = np.arange(48, dtype="f4").reshape(12, 4)


def restore(*arguments: str, **options: Any) -> Finished:
    """In this process, unless it is to be another one for `options`."""
    return snapctl("restore-weight", *arguments, **options) if options else snapctl_here("restore-weight", *arguments)


def left(directory: pathlib.Path) -> list[str]:
    return sorted(os.listdir(directory))


def load_npy(path: pathlib.Path) -> np.ndarray[Any, Any]:
    return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def write_two_ranks(builder: Builder) -> None:
    builder.sharded("m/rows.weight", TABLE, {0: grid((12, 4), (4, 1))[:2], 1: grid((12, 4), (4, 1))[2:]})
    builder.sharded("m/cols.weight", TABLE, {0: grid((12, 4), (1, 2))[:1], 1: grid((12, 4), (1, 2))[1:]})
    builder.sharded("m/only1.weight", TABLE, {0: [], 1: [((0, 0), (12, 4))]})
    builder.finish(2)


def shard_entry(offset: int, rows: int, dtype: str = "float32") -> dict[str, Any]:
    return {"offsets": [offset, 0], "sizes": [rows, 4], "tensor": tensor_entry(f"s/{offset}", [rows, 4], dtype)}


def write_simple(builder: Builder) -> None:
    builder.dense("0/model/weight", np.arange(1 << 18, dtype="f4"))
    builder.finish()
