"""`Snapshot`: what a training loop uses."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torchsnapshot

from snapctl.checkpoints import find_place, get_checkpoint
from snapctl.errors import (
    CheckpointNotFoundError,
    InvalidOptionError,
    RestoreError,
    SaveDirNotFoundError,
    SnapctlError,
)
from snapctl.restoring.restorer import restore
from snapctl.restoring.weight_loading import load_weight
from snapctl.save_record import RestoreTimings
from snapctl.saving.plugin import plugin_url
from snapctl.saving.saver import PendingSnapshot, SaveOptions, start_save
from snapctl.storage import open_storage

EXTRA_STATE = "extra_state"


class Snapshot:
    """Saves a training state into the steps of a save directory.

    Example::

        snapshot = Snapshot("gs://bucket/run", {"model": model, "optimizer": optimizer})
        pending = snapshot.save(global_step=100)   # training goes on
        pending.wait()                             # gs://bucket/run/100 is complete
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        storage_options: Mapping[str, Any] | None = None,
        replicated: Sequence[str] = (),
        options: SaveOptions | None = None,
    ) -> None:
        """
        Args:
            save_dir: a local path or a URL that fsspec knows; checkpoints are its children named by their steps.
            state: by name, objects with ``state_dict()`` and ``load_state_dict()``. An ``extra_state`` with the step
                and the walltime is added to it, unless it has one.
            storage_options: for fsspec.
            replicated: globs of logical paths (``model/**``) that hold the same on all ranks, and are saved once.
                ``DistributedDataParallel`` modules are known to be so.
            options: durability, checksums, patience.

        Raises:
            InvalidPathError, MissingExtraError, CredentialsError: the save directory cannot be used.
        """
        self._storage = open_storage(save_dir, storage_options or {})
        self.save_dir = self._storage.url
        self.state = state
        self._storage_options = storage_options
        self._replicated = tuple(replicated)
        self._options = options or SaveOptions()
        self._pending: PendingSnapshot | None = None
        self._restored: RestoreTimings | None = None
        extra = state.setdefault(EXTRA_STATE, torchsnapshot.StateDict())
        extra.setdefault("step", 0)
        extra.setdefault("walltime", 0.0)

    @property
    def step(self) -> int:
        """The step that is saved with every snapshot, and restored from it."""
        return int(self.state[EXTRA_STATE]["step"])

    @step.setter
    def step(self, step: int) -> None:
        self.state[EXTRA_STATE]["step"] = step

    @property
    def walltime(self) -> float:
        """Seconds of training so far, by whatever clock the training loop uses; saved with every snapshot."""
        return float(self.state[EXTRA_STATE]["walltime"])

    @walltime.setter
    def walltime(self, walltime: float) -> None:
        self.state[EXTRA_STATE]["walltime"] = walltime

    def save(self, global_step: int) -> PendingSnapshot:
        """Saves the state into ``save_dir/<global_step>``, asynchronously; on all ranks of a job at the same time.

        What changes after it returns never gets into the snapshot. A save that this object began before is waited for
        first (its failure is logged, and raised by its own ``wait``). A checkpoint that is there already is void from
        the moment when writing begins: its manifest, markers and claims go, a pin stays.

        Raises:
            UnsavableError: something in the state cannot be saved exactly; nothing was written or deleted.
            SaveError: it was not saved; on all ranks alike.
            InvalidOptionError: not a step.
        """
        self._pending = start_save(
            self._storage,
            _check_step(global_step),
            self.state,
            storage_options=self._storage_options,
            replicated=self._replicated,
            options=self._options,
            after=self._pending,
            restored=self._restored,
        )
        return self._pending

    def restore(
        self,
        checkpoint: str | os.PathLike[str] | torchsnapshot.Snapshot,
        *,
        allow_pickle: bool = False,
        checksums: bool | None = None,
    ) -> None:
        """Restores a checkpoint into the state; on all ranks of a job at the same time, however many saved it.

        Tensors are read in place; every later save records how long it took. ``step`` and ``walltime`` stay as they are
        where the checkpoint has none.

        Args:
            checkpoint: its path or URL, a save directory (then its latest), or what `get_torch_snapshot` returns.
            allow_pickle: also unpickle objects that are not on PyTorch's weights-only list. **Unpickling runs whatever
                code the checkpoint says**: only for checkpoints of people whom you would let run code here.
            checksums: compare what is read with the checksums that the save recorded; None: as ``options`` says.

        Raises:
            RestoreError: it does not fit the state, or broke off; everything that was found, on every rank.
            RestoreDamagedError: blobs are missing, short, or not what was saved.
            RestoreRefusedError: objects would have to be unpickled.
            CheckpointNotFoundError, ManifestError, StorageError: it could not be opened.
        """
        path, found_options = _path_and_options(checkpoint)
        try:
            self._restored = restore(
                path,
                self.state,
                storage_options=found_options if found_options is not None else self._storage_options,
                replicated=self._replicated,
                optional=frozenset({f"{EXTRA_STATE}/step", f"{EXTRA_STATE}/walltime"}),
                allow_pickle=allow_pickle,
                checksums=self._options.checksums if checksums is None else checksums,
                patience_seconds=self._options.patience_seconds,
            )
        except BaseException as error:
            if _has_touched(error):
                self._restored = None  # the state comes from nowhere in particular
            raise

    @staticmethod
    def load_snapshot_to_weight(
        embedding_snapshot: str | os.PathLike[str] | torchsnapshot.Snapshot,
        snapshot_emb_name: str,
        weight_tensor: Any,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Loads one tensor of a checkpoint into an existing weight, in place; each rank what it holds of it.

        Args:
            embedding_snapshot: what `get_torch_snapshot` returns, or a path: of a checkpoint, or of a save directory
                (then its latest).
            snapshot_emb_name: the tensor's path, the end of it, or any part of it that no other tensor's path has.
            weight_tensor: a tensor, a ShardedTensor or a DTensor of the same shape and dtype.
            storage_options: for fsspec.

        Raises:
            EntryNotFoundError: no such tensor, or several; `candidates` names them.
            RestoreError: its shape or dtype is another one.
            DamagedError, CheckpointNotFoundError, ManifestError, StorageError: as everywhere.
        """
        path, found_options = _path_and_options(embedding_snapshot)
        load_weight(path, snapshot_emb_name, weight_tensor, storage_options or found_options)

    @staticmethod
    def get_torch_snapshot(
        snapshot_path: str,
        global_step: int | None = None,
        missing_ok: bool = False,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> torchsnapshot.Snapshot:
        """torchsnapshot's own view of a checkpoint, read through snapctl's storage.

        Args:
            snapshot_path: a save directory, or a checkpoint.
            global_step: of this step; None: the newest complete one.
            missing_ok: return a snapshot with an empty path where there is none, instead of raising.

        Raises:
            CheckpointNotFoundError: there is no such complete checkpoint.
        """
        path = _checkpoint_path(snapshot_path, global_step, missing_ok, storage_options)
        return torchsnapshot.Snapshot(plugin_url(path) if path else "", storage_options=dict(storage_options or {}))


def _has_touched(error: BaseException) -> bool:
    """Whether a restore that ended with this error may have changed the state."""
    if isinstance(error, RestoreError):
        return bool(error.loaded or error.incomplete)
    return not isinstance(error, SnapctlError)


def _path_and_options(
    checkpoint: str | os.PathLike[str] | torchsnapshot.Snapshot,
) -> tuple[str, Mapping[str, Any] | None]:
    """Where a checkpoint is; the storage options that a torchsnapshot snapshot brings along."""
    if isinstance(checkpoint, str | os.PathLike):
        return os.fspath(checkpoint), None
    path = getattr(checkpoint, "path", None)
    if not isinstance(path, str):
        raise InvalidOptionError(f"not a checkpoint: {checkpoint!r}")
    if not path:
        raise CheckpointNotFoundError(
            "the snapshot is none: get_torch_snapshot(…, missing_ok=True) found no checkpoint"
        )
    options = getattr(checkpoint, "_storage_options", None)
    return path.removeprefix(plugin_url("")), options or None


def _checkpoint_path(path: str, step: int | None, missing_ok: bool, storage_options: Mapping[str, Any] | None) -> str:
    if step is None:
        try:
            place = find_place(path, storage_options)
        except SaveDirNotFoundError:
            if missing_ok:
                return ""
            raise
        if place.kind == "checkpoint":
            return place.storage.url
    return get_checkpoint(path, step, missing_ok, storage_options=storage_options)


def _check_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise InvalidOptionError(f"a step is an integer from 0 on, not {step!r}")
    return number
