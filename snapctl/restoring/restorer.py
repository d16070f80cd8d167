"""Restoring: a checkpoint into a training state, on all ranks of a job at once.

torchsnapshot's own restore cannot be stood on: it reads the whole checkpoint once for each object of the state, takes a
short blob for a whole one, reshards at the root of a state dict only. A restore here goes through these phases; what
goes wrong in one of them is told to all ranks before any of them begins the next (see `snapctl.ranks`)::

    open       rank 0 says which checkpoint; everybody reads its manifest and lists its blobs
    plan       what goes where (`snapctl.restoring.plan`); objects are decoded, blobs compared with the listing
    -------    up to here nothing of the state has been touched
    read       the tensors of one object of the state after the other, straight into their memory where that can be
    load       its load_state_dict, when all ranks have read it; a random number generator comes last
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import torchsnapshot

from snapctl.checkpoints import record_matches
from snapctl.checksums import crc32c
from snapctl.errors import (
    RestoreError,
    SaveError,
    SnapctlError,
)
from snapctl.manifest import MANIFEST_NAME, encode_key, split_rank
from snapctl.restoring.object_reading import ObjectReader
from snapctl.restoring.optimizers import find_parameter, undo_conversions
from snapctl.restoring.plan import (
    Given,
    ObjectRead,
    PlannedList,
    PlannedMapping,
    PlannedNode,
    Problem,
    RestorePlan,
    Rules,
    TensorCopy,
    TensorRead,
    fit_problem,
    plan_restore,
)
from snapctl.restoring.problems import Found, as_problem, blob_damage, make_error, merge_problems
from snapctl.restoring.rank_view import RankView, replication_test
from snapctl.restoring.state_tree import StateNode, TensorTarget, build_tree
from snapctl.restoring.targets import describe, fill, must_be_replaced, new_target, regions
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum, RestoreTimings, parse_save_record
from snapctl.saving.saver import open_ranks
from snapctl.saving.staging import replicated_globs
from snapctl.snapshots import OpenSnapshot, open_snapshot
from snapctl.tensors.blob_reader import blob_problem
from snapctl.tensors.reader import TensorReader

logger = logging.getLogger(__package__)


def restore(
    checkpoint: str,
    app_state: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
    replicated: Sequence[str] = (),
    optional: frozenset[str] = frozenset(),
    allow_pickle: bool = False,
    checksums: bool = True,
    patience_seconds: float = 60.0,
) -> RestoreTimings | None:
    """Restores a checkpoint into a state; on all ranks of a job at the same time.

    Args:
        checkpoint: its path or URL, or a save directory: then its latest.
        app_state: by name, objects with ``state_dict()`` and ``load_state_dict()``.
        replicated: globs of logical paths that are the same on all ranks.
        optional: logical paths that the checkpoint need not have.
        allow_pickle: unpickle objects of any class, which runs whatever code the checkpoint says.
        checksums: compare blobs that are read whole with what was recorded when they were saved.
        patience_seconds: a rank that gives no sign of life for so long ends the restore on all ranks.

    Returns:
        How it went, on rank 0; None on the others.

    Raises:
        RestoreError: it does not fit, or broke off; `loaded` and `incomplete` say what was touched.
        RestoreDamagedError, RestoreRefusedError: damage; objects that would have to be unpickled.
        CheckpointNotFoundError, ManifestError, StorageError, …: it could not be opened; nothing was touched.
    """
    work = _Restore(checkpoint, app_state, storage_options, replicated, optional, allow_pickle, checksums)
    return work.run(patience_seconds)


@dataclass
class _Timings:
    """How a restore went on one rank."""

    started: float = field(default_factory=time.monotonic)
    planned_seconds: float = 0.0
    read_seconds: float = 0.0
    needed_bytes: int = 0
    read_bytes: int = 0
    total_seconds: float = 0.0


class _Restore:
    """One restore on one rank, from beginning to end."""

    def __init__(
        self,
        checkpoint: str,
        app_state: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None,
        replicated: Sequence[str],
        optional: frozenset[str],
        allow_pickle: bool,
        checksums: bool,
    ) -> None:
        self._path = checkpoint
        self._app_state = app_state
        self._storage_options = storage_options
        self._replicated = replicated
        self._optional = optional
        self._allow_pickle = allow_pickle
        self._checksums = checksums
        self._timings = _Timings()
        self._problems: list[Problem] = []
        self._cause: BaseException | None = None
        self._loaded: list[str] = []
        self._under_way = ""
        self._names: list[str] = []
        self._trees: dict[str, tuple[str, StateNode, Rules]] = {}
        self._plan = RestorePlan()
        self._view: RankView | None = None

    def run(self, patience_seconds: float) -> RestoreTimings | None:
        self._ranks = open_ranks(patience_seconds)
        with contextlib.ExitStack() as stack:
            stack.callback(self._ranks.leave)
            try:
                self._path = self._ranks.meet("restore", self._path)
                snapshot = self._open()
                self._reader = stack.enter_context(TensorReader(snapshot.storage))
                self._prepare(snapshot)
                self._timings.planned_seconds = time.monotonic() - self._timings.started
                for name in self._names:
                    self._restore_object(name)
                return self._report(snapshot)
            except SaveError as error:  # a rank is silent, or the store is gone
                raise self._error([(Problem("failed", "", error.message), error.ranks)]) from error
            except BaseException as error:
                if not isinstance(error, SnapctlError):  # Ctrl-C, a bug: the others would wait in vain
                    self._ranks.fail(error)
                raise

    # -- together ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _noting(self, path: str = "") -> Iterator[None]:
        """What goes wrong inside becomes a problem, of which all ranks hear at the next `_agree`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - load_state_dict raises whatever it likes
            self._cause = self._cause or error
            self._problems.append(as_problem(error, path))

    def _agree(self) -> None:
        """Raises on every rank what any rank has found."""
        gathered = self._ranks.gather(self._problems)
        merged = self._ranks.share(merge_problems(gathered) if gathered is not None else None)
        if merged:
            raise self._error(merged) from self._cause

    def _error(self, found: Sequence[Found]) -> RestoreError:
        incomplete = (self._under_way,) if self._under_way else ()
        return make_error(
            self._path, found, world_size=self._ranks.world_size, loaded=tuple(self._loaded), incomplete=incomplete
        )

    # -- before anything is touched ----------------------------------------------------------------------------------

    def _open(self) -> OpenSnapshot:
        found: OpenSnapshot | None = None
        if self._ranks.rank == 0:
            with self._noting():
                found = open_snapshot(self._path, None, self._storage_options)
        path: str | None = self._ranks.share(found.storage.url if found is not None else None)
        if path is not None and self._ranks.rank != 0:
            with self._noting():
                found = open_snapshot(path, None, self._storage_options)
        try:
            self._agree()
        except RestoreError:
            if isinstance(self._cause, SnapctlError):
                raise self._cause from None  # as everywhere: not there, unreadable, no permission
            raise
        assert found is not None
        self._path = found.storage.url
        if self._ranks.rank == 0:
            for warning in found.warnings:
                logger.warning("%s", warning)
        return found

    def _prepare(self, snapshot: OpenSnapshot) -> None:
        """Everything that can go wrong without touching the state."""
        with self._noting():
            self._reader.use_listing(snapshot.storage.list_tree())
        gathered = self._ranks.gather((sorted(self._app_state), self._digest(snapshot)))
        names: list[str] | None = None
        if gathered is not None:
            names = sorted({name for mine, _ in gathered for name in mine})
            if len({digest for _, digest in gathered}) > 1:
                self._problems.append(Problem("failed", "", "the ranks see different manifests: it is being saved"))
        self._names = self._in_order(self._ranks.share(names))
        self._agree()
        with self._noting():
            self._describe_state()
        self._agree()  # before planning: a state_dict() may have been a collective
        with self._noting():
            self._make_plan(snapshot)
        self._agree()
        self._say_what_is_left(snapshot)

    def _digest(self, snapshot: OpenSnapshot) -> int:
        if self._ranks.world_size == 1:
            return 0
        return crc32c(msgspec.json.encode(snapshot.manifest.entries))

    def _in_order(self, names: Sequence[str]) -> list[str]:
        """By name, generators of random numbers last: loading anything else may use them."""
        return sorted(names, key=lambda name: isinstance(self._app_state.get(name), torchsnapshot.RNGState))

    def _describe_state(self) -> None:
        for name in self._names:
            if name not in self._app_state:
                continue
            stateful = self._app_state[name]
            if not hasattr(stateful, "state_dict") or not hasattr(stateful, "load_state_dict"):
                text = f"{name}: a {type(stateful).__name__} has no state_dict() and load_state_dict()"
                self._problems.append(Problem("failed", name, text))
                continue
            state_dict = stateful.state_dict()
            path = encode_key(name)
            rules = Rules(optional=self._optional, takes_all=not isinstance(stateful, torch.nn.Module))
            if isinstance(stateful, torch.optim.Optimizer):
                find_like = find_parameter(stateful, state_dict, path)
                rules = replace(rules, keeps_options=True, find_like=find_like)
            self._trees[name] = (path, build_tree(state_dict, describe), rules)

    def _make_plan(self, snapshot: OpenSnapshot) -> None:
        self._objects = ObjectReader(self._reader, allow_pickle=self._allow_pickle)
        globs = replicated_globs(self._app_state, self._replicated)
        recorded = self._recorded(snapshot)
        self._reader.use_checksums({location: (found.size_bytes, found.crc32c) for location, found in recorded.items()})
        self._view = RankView(
            snapshot.manifest,
            rank=self._ranks.rank,
            names={path for path, _, _ in self._trees.values()},
            is_replicated=replication_test(globs),
            same_objects=self._objects.comparison(recorded),
        )
        unpacked: dict[str, Any] = {}
        while True:
            self._plan = plan_restore(self._view, self._trees, unpacked=unpacked, describe=describe)
            if not self._plan.packed:
                break
            for path, source in self._plan.packed.items():
                unpacked[path] = None
                with self._noting(path):
                    unpacked[path] = self._objects.read(source.manifest_path, source.entry)
            if self._problems:
                break
        self._problems += self._plan.problems
        reads = self._learn()
        for leaf in self._leaves():
            if isinstance(leaf, ObjectRead):
                with self._noting(leaf.path):
                    self._objects.read(leaf.source.manifest_path, leaf.source.entry)
        self._compare_with_listing(reads, recorded)

    def _leaves(self) -> Iterator[PlannedNode]:
        for name in self._plan.roots:
            yield from self._plan.leaves(name)

    def _learn(self) -> list[TensorRead]:
        """The tensors to read, with the dtypes and shapes that for 0.0.x only their blobs tell."""
        self._layouts = {}
        reads = []
        for leaf in self._leaves():
            if not isinstance(leaf, TensorRead):
                continue
            reads.append(leaf)
            if leaf.layout.dtype is None or leaf.layout.shape is None:
                with self._noting(leaf.path):
                    layout = self._layouts[leaf.path] = self._reader.learn(leaf.layout)
                    if leaf.target is not None and (problem := fit_problem(leaf.path, layout, leaf.target)) is not None:
                        self._problems.append(problem)
        return reads

    def _recorded(self, snapshot: OpenSnapshot) -> Mapping[str, BlobSum]:
        """Lengths and checksums of blobs, where the save has recorded them and they are to be used."""
        manifest = self._reader.look_up([MANIFEST_NAME])[MANIFEST_NAME]
        if (
            not self._checksums
            or manifest is None
            or self._reader.look_up([SAVE_RECORD_PATH])[SAVE_RECORD_PATH] is None
        ):
            return {}
        storage, why = snapshot.storage, "saved again by something else than snapctl"
        try:
            record = parse_save_record(storage.read(SAVE_RECORD_PATH), with_blobs=True)
            if record_matches(record, storage, manifest):
                return record.blobs or {}
        except ValueError as error:
            why = f"not a save record: {error}"
        if self._ranks.rank == 0:
            logger.warning("%s: its recorded checksums are not used: %s", self._path, why)
        return {}

    def _compare_with_listing(self, reads: Sequence[TensorRead], recorded: Mapping[str, BlobSum]) -> None:
        """Whether all needed blobs are there, in their full length; and which of them will be read whole."""
        needed: dict[str, int] = {}
        owners: dict[str, str] = {}
        for read in reads:
            layout = self._layouts.get(read.path, read.layout)
            for region in _wanted(read, layout):
                for box, size_bytes in self._reader.find_needed(layout, region):
                    needed[box.location] = needed.get(box.location, 0) + size_bytes
                    owners.setdefault(box.location, box.entry)
                    found = self._reader.look_up([box.location])[box.location]
                    problem = blob_problem(box, found)
                    if problem is not None:
                        self._problems.append(as_problem(problem, read.path))
        self._timings.needed_bytes = sum(needed.values()) + self._objects.needed_bytes
        whole = {}
        for location, entry in owners.items():
            file, record = self._reader.look_up([location])[location], recorded.get(location)
            if file is None or record is None:
                continue
            if record.size_bytes != file.size_bytes:
                kind = "short-blob" if file.size_bytes < record.size_bytes else "checksum"
                text = f"has {file.size_bytes} bytes, and {record.size_bytes} were written when it was saved"
                self._problems.append(blob_damage(kind, entry, location, text))
            elif file.crc32c not in (None, record.crc32c):
                self._problems.append(
                    blob_damage("checksum", entry, location, "is not what was written when it was saved")
                )
            if needed[location] >= record.size_bytes:
                whole[location] = (record.size_bytes, record.crc32c)
        self._reader.use_checksums(whole)
        self._problems = list(dict.fromkeys(self._problems))

    def _say_what_is_left(self, snapshot: OpenSnapshot) -> None:
        """What the checkpoint has and the state does not, what ranks that are no more leave, what stays as it is."""
        kept = self._plan.kept
        if kept:
            level = logging.WARNING if self._ranks.rank == 0 else logging.INFO
            logger.log(level, "%s: not in the checkpoint, and left as they are: %s", self._path, _some(kept))
        if self._ranks.rank != 0:
            return
        known = {encode_key(name) for name in self._names}
        others = {split_rank(path)[1].partition("/")[0] for path in snapshot.manifest.entries} - known
        unused = sorted(others) + self._plan.unused
        if unused:
            logger.info("%s: in the checkpoint and not in the state: %s", self._path, _some(unused))
        if self._view is not None and self._ranks.world_size < snapshot.manifest.world_size:
            gone = list(self._view.iter_gone(self._ranks.world_size))
            if gone:
                first, last = self._ranks.world_size, snapshot.manifest.world_size - 1
                who = f"rank {first}" if first == last else f"ranks {first} to {last}"
                logger.warning("%s: what %s saved for themselves is left behind: %s", self._path, who, _some(gone))

    # -- and then ----------------------------------------------------------------------------------------------------

    def _restore_object(self, name: str) -> None:
        """Reads and loads one object of the state."""
        planned = self._plan.roots.get(name)
        values: dict[str, Any] = {}
        if planned is not None:
            started = time.monotonic()
            self._under_way = name
            with self._noting(name):
                values = self._read(name)
            self._timings.read_seconds += time.monotonic() - started
        self._agree()
        with self._noting(name):
            if planned is not None:
                self._load(name, planned, values)
        self._agree()

    def _load(self, name: str, planned: PlannedNode, values: Mapping[str, Any]) -> None:
        stateful = self._app_state[name]
        state_dict = self._build(planned, values, is_root=True)
        stateful.load_state_dict(state_dict)
        if isinstance(stateful, torch.optim.Optimizer):
            undo_conversions(stateful, state_dict)
        self._loaded.append(name)
        self._under_way = ""

    def _read(self, name: str) -> dict[str, Any]:
        """The tensors of one object of the state, by path."""
        values: dict[str, Any] = {}
        wanted = []
        for leaf in self._plan.leaves(name):
            if isinstance(leaf, TensorCopy):
                with torch.no_grad():
                    leaf.target.handle.detach().copy_(leaf.value)
                continue
            if not isinstance(leaf, TensorRead):
                continue
            layout = self._layouts.get(leaf.path, leaf.layout)
            target = leaf.target
            is_new = target is None or must_be_replaced(target)
            if is_new and layout.dtype in _QUANTIZED:
                values[leaf.path] = self._reader.read_torch(layout)
                continue
            if target is None or is_new:
                target = new_target(layout, leaf.like)
            values[leaf.path] = target.handle
            wanted.append((layout, target))
        fill(self._reader, wanted)
        return values

    def _build(self, node: PlannedNode, values: Mapping[str, Any], *, is_root: bool = False) -> Any:
        """The new state dict, in the containers that the state has, where it has some."""
        if isinstance(node, PlannedMapping):
            items = [(key, self._build(child, values)) for key, child in node.items]
            if is_root and node.original is not None:
                root = copy.copy(node.original)  # with what modules hang onto it (_metadata)
                root.update(items)
                return root
            is_ordered = isinstance(node.original, OrderedDict) if node.original is not None else node.ordered
            return OrderedDict(items) if is_ordered else dict(items)
        if isinstance(node, PlannedList):
            return [self._build(child, values) for child in node.items]
        if isinstance(node, TensorRead):
            return values[node.path]
        if isinstance(node, TensorCopy):
            return node.target.handle
        if isinstance(node, ObjectRead):
            return self._objects.take(node.source.manifest_path, node.source.entry)
        assert isinstance(node, Given)
        return node.value

    def _report(self, snapshot: OpenSnapshot) -> RestoreTimings | None:
        """Logs how it went; on rank 0 also returns it."""
        mine = self._timings
        mine.total_seconds = time.monotonic() - mine.started
        mine.read_bytes = self._reader.bytes_read
        gathered = self._ranks.gather(mine)
        self._ranks.share(None)
        fields: dict[str, Any] = {
            "step": snapshot.step,
            "path": self._path,
            "rank": self._ranks.rank,
            "world_size": self._ranks.world_size,
            "saved_world_size": snapshot.manifest.world_size,
            "planned_seconds": round(mine.planned_seconds, 3),
            "read_seconds": round(mine.read_seconds, 3),
            "restored_seconds": round(mine.total_seconds, 3),
            "bytes": mine.needed_bytes,
            "bytes_read": mine.read_bytes,
            "bytes_per_second": round(mine.needed_bytes / mine.read_seconds) if mine.read_seconds > 0 else 0,
            "checked_blobs": self._reader.blobs_checked,
        }
        if gathered is not None and len(gathered) > 1:
            slowest = max(range(len(gathered)), key=lambda rank: gathered[rank].read_seconds)
            fields["total_bytes"] = sum(timings.needed_bytes for timings in gathered)
            fields["slowest_rank"] = slowest
            fields["slowest_read_seconds"] = round(gathered[slowest].read_seconds, 3)
        logger.info(
            "restored %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra={"snapctl": fields}
        )
        if gathered is None:
            return None
        return RestoreTimings(
            time.time(),
            snapshot.step,
            self._ranks.world_size,
            max(timings.total_seconds for timings in gathered),
            sum(timings.needed_bytes for timings in gathered),
        )


_QUANTIZED = ("qint8", "quint8", "qint32")


def _wanted(read: TensorRead, layout: Any) -> Iterator[Any]:
    """The regions of a tensor that this rank needs."""
    like: TensorTarget | None = read.target or read.like
    if like is None or like.shape != layout.shape:
        yield (0,) * len(layout.shape or ()), layout.shape or ()
    else:
        yield from regions(like)


def _some(paths: Sequence[str], limit: int = 20) -> str:
    more = f", … ({len(paths)} in all)" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more
