"""Saving: staged by torchsnapshot, written through our storage, committed by a protocol of our own.

A save goes through these phases; whatever goes wrong in one of them ends it on all ranks (see `snapctl.ranks`)::

    meet       all ranks have come, for the same step
    stage      planned and refused together; rank 0 clears the step; every rank copies its part      <- save() returns
    write      blobs, each made durable and its CRC32C taken; then their names in the directories
    report     every rank tells rank 0 what it has written
    commit     rank 0 writes .snapctl/save.json, then the manifest, and tells the others             <- wait() returns
    tidy       rank 0 deletes what an earlier save of this step has left
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torchsnapshot
from torchsnapshot.dist_store import get_or_create_store
from torchsnapshot.pg_wrapper import PGWrapper

from snapctl.errors import RefusedError, SaveError, StorageError, UnsavableError
from snapctl.ranks import Ranks, StoreRanks, describe
from snapctl.save_record import RankTimings, RestoreTimings, SaveRecord
from snapctl.saving import exiting
from snapctl.saving.commit import (
    Announcement,
    announce,
    blob_sum,
    check_alone,
    check_visible,
    clear_step,
    commit,
    delete_blobs,
    encode_manifest,
    merge_blobs,
    plan_old_blobs,
    withdraw,
)
from snapctl.saving.plugin import SnapctlPlugin, plugin_url
from snapctl.saving.staging import Staged, stage
from snapctl.storage import FileInfo, Storage, open_storage

logger = logging.getLogger(__package__)

WATCH_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""How often to look for another job's save into the same step, which would write blobs of the same names."""
GRACE_SECONDS = 5.0
"""How long a failure is held back so that its blobs can be removed first: not longer than a request that hangs."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; the defaults are safe."""

    fsync: bool = True
    """Make blobs, directories and the manifest durable (local only): without, a power cut can leave a checkpoint that
    looks complete and is not."""
    checksums: bool = True
    """Take a CRC32C of each blob, and compare it with the one that GCS computes."""
    patience_seconds: float = 60.0
    """A rank that gives no sign of life for so long ends the save on all ranks."""


class PendingSnapshot:
    """A save under way."""

    def __init__(self, path: str, step: int, storage_options: Mapping[str, Any] | None) -> None:
        self.path = path
        """The checkpoint's path."""
        self.step = step
        self._storage_options = storage_options
        self._over = threading.Event()
        self._released = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._over.is_set()

    def wait(self) -> torchsnapshot.Snapshot:
        """Waits until the checkpoint is complete: the manifest is durable, and this rank knows it.

        Returns:
            The snapshot, for reading.

        Raises:
            SaveError: it was not saved, on any rank; the message names the rank that failed, `unknown` tells whether
                it may be complete all the same.
        """
        self._over.wait()
        if self._error is not None:
            self._released.wait(GRACE_SECONDS)
            raise self._error
        return torchsnapshot.Snapshot(plugin_url(self.path), storage_options=dict(self._storage_options or {}))


def start_save(
    save_dir: Storage,
    step: int,
    app_state: Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
    replicated: Sequence[str] = (),
    options: SaveOptions | None = None,
    after: PendingSnapshot | None = None,
    restored: RestoreTimings | None = None,
) -> PendingSnapshot:
    """Saves a state into ``save_dir/<step>``; on all ranks of a job at the same time.

    When it returns, what training does to the state no longer matters.

    Args:
        after: an earlier save that has to be over first; its failure is not this one's.
        restored: on rank 0, the restore that the state comes from: it goes into the save record.

    Raises:
        UnsavableError: the state holds something that cannot be saved exactly. Nothing was written or deleted.
        SaveError: it was not saved.
    """
    started = time.monotonic()
    options = options or SaveOptions()
    with _one_at_a_time():
        if after is not None:
            after._released.wait()
        save = _Save(save_dir, step, app_state, storage_options, tuple(replicated), options, started, restored)
        save.stage()
        return save.pending


_staging = threading.Lock()
_staging_thread: int | None = None


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """One thread stages at a time; the handler of a signal that comes meanwhile cannot."""
    global _staging_thread
    if _staging_thread == threading.get_ident():
        raise SaveError("a save is being staged already by this very thread: a signal's handler must not save")
    with _staging:
        _staging_thread = threading.get_ident()
        try:
            yield
        finally:
            _staging_thread = None


class _Save:
    """One save on one rank, from beginning to end."""

    def __init__(
        self,
        save_dir: Storage,
        step: int,
        app_state: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None,
        replicated: Sequence[str],
        options: SaveOptions,
        started: float,
        restored: RestoreTimings | None,
    ) -> None:
        self._save_dir = save_dir
        self._step = step
        self._app_state = app_state
        self._storage_options = storage_options
        self._replicated = replicated
        self._options = options
        self._started = started
        self._restored = restored
        self._ranks = open_ranks(options.patience_seconds)
        self._loop = asyncio.new_event_loop()
        # After the first failure nobody asks for those of the other blobs, about which asyncio would complain.
        self._loop.set_exception_handler(lambda _, context: logger.debug("%s", context.get("message")))
        self._plugin: SnapctlPlugin | None = None
        self._staged: Staged | None = None
        self._old: list[FileInfo] = []
        self._announced: Announcement | None = None
        self._next_look = 0.0
        self._has_reported = False
        self._unknown = False
        self._kept: Collection[str] = ()
        self._blocked_seconds = 0.0
        self.pending = PendingSnapshot("", step, storage_options)

    # -- while training stands still ---------------------------------------------------------------------------

    def stage(self) -> None:
        """Everything up to the moment when the training state is free again; the rest goes on by itself."""
        try:
            url = self._ranks.meet(self._step, self._save_dir.url)
            if url != self._save_dir.url:
                logger.warning("saving to %s, as rank 0 does, and not to %s", url, self._save_dir.url)
                self._save_dir = open_storage(url, self._storage_options or {})
            storage = self._save_dir.child(str(self._step))
            self.pending.path = storage.url
            self._await_same_path()
            self._plugin = SnapctlPlugin(
                storage, durable=self._options.fsync, checksums=self._options.checksums, check=self._check
            )
            self._staged = stage(
                self._app_state,
                replicated=self._replicated,
                ranks=self._ranks,
                plugin=self._plugin,
                loop=self._loop,
                before_writing=self._clear,
            )
            self._blocked_seconds = time.monotonic() - self._started
            self._in_background(self._finish)
        except BaseException as error:
            self._fail(error)
            raise_as = self.pending._error
            self._wind_up()
            with contextlib.suppress(RuntimeError):  # no more threads
                self._in_background(self._leave)
            if raise_as is error or raise_as is None:
                raise
            raise raise_as from error
        finally:
            self._app_state = {}  # the state may be far larger than what is left to write

    def _await_same_path(self) -> None:
        """Another `Snapshot` of this process may be at the same step."""
        for other in exiting.unfinished():
            if isinstance(other, PendingSnapshot) and other.path == self.pending.path:
                other._released.wait()

    def _clear(self, locations: Collection[str]) -> None:
        """Every rank has planned its part, and none has refused: from here on the step's old content is void."""
        self._ranks.gather(None)
        if self._ranks.rank == 0 and self._plugin is not None:
            self._old = clear_step(self._plugin.storage, locations, durable=self._options.fsync)
            self._announced = announce(self._plugin.storage)
            self._next_look = time.monotonic() + LOOK_SECONDS
        self._ranks.share(None)

    # -- while training goes on --------------------------------------------------------------------------------

    def _in_background(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"snapctl-save-{self._step}", daemon=True)
        exiting.register(self.pending, thread, f"the save of {self.pending.path}")
        thread.start()

    def _finish(self) -> None:
        try:
            timings = self._write()
            everybody = self._commit(timings)
        except BaseException as error:  # noqa: BLE001 - it is raised again by wait()
            self._fail(error)
            logger.error("%s: %s", self.pending.path, self.pending._error)  # noqa: TRY400 - wait() has the traceback
        else:
            with self._tidying():
                self._withdraw(has_looked=True)
            self.pending._over.set()
            self._log(timings, everybody)
            with self._tidying():
                self._tidy()
        finally:
            self._wind_up()
            self._leave()

    def _leave(self) -> None:
        try:
            self._ranks.leave()
        finally:
            exiting.unregister(self.pending)

    def _write(self) -> RankTimings:
        """Writes this rank's blobs and makes them durable."""
        assert self._plugin is not None
        self._loop.run_until_complete(self._complete())
        self._plugin.seal()
        size_bytes = sum(written.sum.size_bytes for written in self._plugin.written.values())
        durable_seconds = time.monotonic() - self._started
        return RankTimings(self._ranks.rank, self._blocked_seconds, durable_seconds, size_bytes)

    def _check(self) -> None:
        """Called before each blob, in the thread that writes it; raises what ends the save."""
        self._ranks.check()
        now = time.monotonic()
        if self._plugin is not None and self._announced is not None and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            with contextlib.suppress(StorageError):  # the look before the commit must succeed; this one need not
                check_alone(self._plugin.storage, self._announced)

    async def _complete(self) -> None:
        """Until all is written, or another rank has failed: then what is under way is left to itself."""
        assert self._staged is not None
        work = asyncio.ensure_future(self._staged.work.complete())
        while not work.done():
            await asyncio.wait({work}, timeout=WATCH_SECONDS)
            self._ranks.check()
        await work

    def _commit(self, timings: RankTimings) -> tuple[RankTimings, ...]:
        """Makes the checkpoint complete, or hears that it is; the timings of all ranks on rank 0."""
        assert self._plugin is not None and self._staged is not None
        blobs = {path: written.sum for path, written in self._plugin.written.items()}
        gathered = self._ranks.gather((timings, blobs))
        self._has_reported = True
        all_timings: tuple[RankTimings, ...] = (timings,)
        if gathered is not None:
            storage = self._plugin.storage
            held = [found for _, found in gathered]
            if len(held) > 1:
                check_visible(storage, held)
            merged = merge_blobs(held)
            manifest = encode_manifest(self._staged.metadata)
            all_timings = tuple(found for found, _ in gathered)
            record = SaveRecord(
                saved_at=time.time(),
                world_size=self._ranks.world_size,
                manifest=blob_sum(manifest),
                ranks=all_timings,
                blobs=merged if self._options.checksums else {},
                restored=self._restored,
            )
            self._kept = merged.keys()
            self._ranks.check()
            if self._announced is not None:
                check_alone(storage, self._announced)
            commit(storage, manifest, record, durable=self._options.fsync)
        self._tell_of_the_commit()
        return all_timings

    def _tell_of_the_commit(self) -> None:
        """From here on the checkpoint stands, whatever becomes of the other ranks."""
        try:
            self._ranks.share(None)
        except SaveError as error:
            if self._ranks.rank != 0:
                raise
            logger.warning("%s is complete, but the other ranks may not have heard: %s", self.pending.path, error)

    def _log(self, mine: RankTimings, everybody: Sequence[RankTimings]) -> None:
        slowest = max(everybody, key=lambda timings: timings.durable_seconds)
        fields: dict[str, Any] = {
            "step": self._step,
            "path": self.pending.path,
            "rank": mine.rank,
            "world_size": self._ranks.world_size,
            "blocked_seconds": round(mine.blocked_seconds, 3),
            "durable_seconds": round(mine.durable_seconds, 3),
            "committed_seconds": round(time.monotonic() - self._started, 3),
            "bytes": mine.size_bytes,
            "bytes_per_second": round(mine.bytes_per_second),
        }
        if mine.rank == 0 and len(everybody) > 1:
            fields["total_bytes"] = sum(timings.size_bytes for timings in everybody)
            fields["slowest_rank"] = slowest.rank
            fields["slowest_durable_seconds"] = round(slowest.durable_seconds, 3)
        logger.info("saved %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra={"snapctl": fields})

    @contextlib.contextmanager
    def _tidying(self) -> Iterator[None]:
        """What goes wrong in it is only told: the outcome stands, and the next save waits for the end of this one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            logger.warning("%s: not all is tidied up: %s", self.pending.path, describe(error))

    def _withdraw(self, *, has_looked: bool = False) -> None:
        if self._plugin is not None and self._announced is not None:
            withdraw(self._plugin.storage, self._announced, has_looked=has_looked)

    def _tidy(self) -> None:
        if self._plugin is None or not self._old:
            return
        self._delete(self._plugin.storage, plan_old_blobs(self._old, self._kept))

    def _delete(self, storage: Storage, files: Sequence[FileInfo]) -> None:
        failed = delete_blobs(storage, files).failed
        if failed:
            logger.warning("%s: blobs are left behind (%d): %s", self.pending.path, len(failed), failed[0])

    # -- the end, good or bad ----------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Tells everybody, and keeps what `wait` is to raise."""
        heard = error is self._ranks.failure
        unknown = isinstance(error, SaveError) and error.unknown
        if self._ranks.rank == 0 and heard:
            unknown = False  # it has not committed, and will not
        elif self._ranks.rank != 0 and self._has_reported and not heard:
            unknown = True  # contact was lost while rank 0 may have been about to commit
        if not isinstance(error, UnsavableError):  # of which all ranks have learned together
            self._ranks.fail(error, unknown=unknown)
        if isinstance(error, RefusedError | KeyboardInterrupt | SystemExit):
            self.pending._error = error
        else:
            ranks = error.ranks if isinstance(error, SaveError) else (self._ranks.rank,)
            who = "" if isinstance(error, SaveError) or self._ranks.world_size == 1 else f"rank {self._ranks.rank}: "
            what = "may not have been saved" if unknown else "was not saved"
            told = SaveError(
                f"step {self._step} {what}: {who}{describe(error)}",
                ranks=ranks,
                unknown=unknown,
                hint=getattr(error, "hint", None),
            )
            told.__cause__ = error
            self.pending._error = told
        self._unknown = unknown

    def _wind_up(self) -> None:
        """Leaves nothing behind: no tasks, no threads, and after a failure no blobs."""
        failed = self.pending._error is not None
        self.pending._over.set()
        try:
            with self._tidying():
                self._close_loop()
                if self._plugin is not None:
                    self._plugin.shut_down()
                    if failed and not self._unknown:
                        self._remove_blobs()
        finally:
            self._staged = None
            self.pending._released.set()

    def _close_loop(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _remove_blobs(self) -> None:
        """Makes room again: the blobs of a checkpoint that will never be complete."""
        assert self._plugin is not None
        self._delete(self._plugin.storage, [written.file for written in self._plugin.written.values()])
        self._withdraw()
        self._plugin.storage.delete_empty_dirs()


def open_ranks(patience_seconds: float) -> Ranks:
    """The ranks of this job: of ``torch.distributed``, if it is in use."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    store = get_or_create_store(PGWrapper(None))
    prefixed = dist.PrefixStore("snapctl", _own_connection(store))  # type: ignore[attr-defined]
    return StoreRanks(prefixed, dist.get_rank(), dist.get_world_size(), patience_seconds=patience_seconds)


_connections: list[tuple[Any, Any]] = []


def _own_connection(store: Any) -> Any:
    """A second connection to a store: on the first one, training may wait for something."""
    for known, connection in _connections:
        if known is store:
            return connection
    try:
        connection = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        connection = store
    _connections[:] = [(store, connection)]
    return connection
