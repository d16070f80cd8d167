"""One tensor of a checkpoint into an existing weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapctl.entry_names import EntryIndex, find_entries
from snapctl.errors import EntryNotFoundError, InvalidOptionError, RestoreError
from snapctl.manifest import LogicalEntry, decode_path
from snapctl.restoring.plan import fit_problem
from snapctl.restoring.targets import describe, fill, must_be_replaced, regions
from snapctl.snapshots import open_snapshot
from snapctl.tensors.layout import is_tensor_entry
from snapctl.tensors.reader import TensorReader
from snapctl.tensors.weights import choose_layout


def load_weight(checkpoint: str, name: str, weight: Any, storage_options: Mapping[str, Any] | None = None) -> None:
    """Reads a tensor of a checkpoint into a weight, in place: only the bytes of what this rank holds of it.

    It is no collective: each rank does it by itself.

    Raises:
        EntryNotFoundError: no such tensor, or several.
        RestoreError: shape or dtype are others, or nothing can be read into the weight.
        InvalidOptionError: the weight is no tensor.
        DamagedError, UnsupportedEntryError, CheckpointNotFoundError, ManifestError, StorageError: as everywhere.
    """
    target = describe(weight)
    if target is None:
        raise InvalidOptionError(f"the weight is a {type(weight).__name__}, not a tensor")
    snapshot = open_snapshot(checkpoint, None, storage_options)
    index = EntryIndex(snapshot.manifest)
    entry = find_tensor(index, name)
    with TensorReader(snapshot.storage) as reader:
        layout = reader.learn(choose_layout(reader, index, entry))
        if target.refusal or must_be_replaced(target):
            raise RestoreError(f"{layout.path}: cannot be loaded into {target.refusal or 'such a tensor'}")
        if layout.shape != target.shape:
            found, wanted = list(layout.shape or ()), list(target.shape)
            raise RestoreError(f"{layout.path}: has the shape {found} in {snapshot.storage.url}, the weight {wanted}")
        problem = fit_problem(layout.path, layout, target)
        if problem is not None:
            raise RestoreError(f"{layout.path}: is {layout.dtype} in {snapshot.storage.url}, the weight {target.dtype}")
        for region in regions(target):
            reader.check([layout], region)
        fill(reader, [(layout, target)])


def find_tensor(index: EntryIndex, name: str) -> LogicalEntry:
    """The one tensor that a name stands for: as ``snapctl restore-weight`` takes it, or a part of its path.

    Raises:
        EntryNotFoundError: none, or several.
    """
    try:
        found = find_entries(index, name).entries
    except EntryNotFoundError:
        found = tuple(entry for entry in index if _is_tensor(entry) and _has_part(entry.path, name))
        if not found:
            raise
    if len(found) == 1:
        return found[0]
    paths = tuple(entry.path for entry in found)
    raise EntryNotFoundError(
        f"{name}: {len(paths)} tensors fit: {', '.join(paths[:20])}{', …' if len(paths) > 20 else ''}",
        candidates=paths,
        hint="name one of them in full",
    )


def _is_tensor(entry: LogicalEntry) -> bool:
    return is_tensor_entry(entry.entries[0][1])


def _has_part(path: str, name: str) -> bool:
    return bool(name) and (name in path or name in decode_path(path))
