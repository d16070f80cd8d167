"""Verifies checkpoints: their manifests, their blobs, and the data in these.

`snapctl.verification.targets.find_targets` says which checkpoints a path means; `verify` judges them, the next ones
being looked at meanwhile, and yields a `CheckpointReport` for each. The data is read in parts that need nothing of each
other, by threads or by any other executor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from snapctl.checkpoints import incomplete
from snapctl.errors import (
    CheckpointNotFoundError,
    ManifestError,
    PreconditionError,
    SnapctlError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.manifest import MANIFEST_NAME, Manifest, parse_manifest
from snapctl.storage import FileInfo
from snapctl.verification.data_plan import LOCAL_SUM_BYTES, PART_BYTES, Sample, choose_sample, plan_blobs
from snapctl.verification.silence import Silence
from snapctl.verification.structure_checks import check_structure
from snapctl.verification.targets import Target, Targets
from snapctl.verification.verdicts import CheckpointReport, Level, Problem, Unchecked, Verdict
from snapctl.verification.wholeness import Wholeness, check_whole

if TYPE_CHECKING:
    from snapctl.verification.data_reading import Reading

REMOTE_JOBS = 16
LOCAL_JOBS = 4
"""At most; no more than there are processors."""
FOREIGN_TASKS = 64
"""At a time by an executor of somebody else that does not say how many it can do."""
AHEAD_MANIFEST_BYTES = 48 << 20
"""So many bytes of manifests are looked at ahead of the one that is being judged."""


class Thoroughness(msgspec.Struct, frozen=True):
    """How closely checkpoints are looked at."""

    level: Level = "size"
    finite: bool = False
    """Count NaN and infinities; only with the level ``data``."""
    sample: Sample | None = None
    """Read only this sample of the blobs of each checkpoint; only with the level ``data``."""
    jobs: int | None = None
    """Reads at a time; None: as many as pay off."""


class Progress(msgspec.Struct):
    """How far `verify` has come."""

    checkpoints: int
    """How many there are to be verified, at most."""
    planned: int = 0
    """How many of them have been looked at."""
    done: int = 0
    planned_bytes: int = 0
    """Of the data of those that have been looked at."""
    read_bytes: int = 0

    @property
    def estimated_bytes(self) -> int:
        """Of the data of all, if those that have not been looked at are like the others."""
        return self.planned_bytes * max(self.checkpoints, self.planned) // max(1, self.planned)


class _Job:
    """One checkpoint on its way to its report."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.manifest_file: FileInfo | None = None
        self.blobs = 0
        self.reading: Reading | None = None
        self.has_record = False
        self.problems: list[Problem] = []
        self.unchecked: list[Unchecked] = []
        self.warnings: list[str] = []
        self.errors: list[SnapctlError] = []
        self.unsummed = 0
        self.is_unreadable = False
        self.is_incomplete = False


def verify(
    targets: Targets,
    how: Thoroughness = Thoroughness(),  # noqa: B008 - it is frozen
    *,
    options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    capacity: Callable[[], int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[CheckpointReport]:
    """Judges checkpoints, one report each, about in the order of the targets.

    One that is damaged or cannot be looked at does not end it. Those of `Targets.all_of` that turn out to be incomplete
    have no report.

    Args:
        options: for the storage, where another process has to open it.
        executor: reads the data; any `concurrent.futures.Executor`, also of processes on other machines that see the
            same storage and have the same snapctl. Each task is a load of some megabytes, from small blobs or of a
            large one. Default: threads of this process.
        capacity: how many tasks the executor does at a time, asked again every second; it may raise a `WorkerError`
            when nobody is left. Default: `Thoroughness.jobs`, or 64.
        on_progress: called now and then, from the calling thread.

    Raises:
        WorkerSetupError: a worker of the executor has another snapctl, or none.
        Exception: whatever else the executor itself fails with, a `BrokenProcessPool` for one.
    """
    yield from _Run(targets, how, options, executor, capacity, on_progress).reports()


class _Run:
    def __init__(
        self,
        targets: Targets,
        how: Thoroughness,
        options: Mapping[str, Any] | None,
        executor: Executor | None,
        capacity: Callable[[], int] | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._targets = targets
        self._how = how
        self._options = options
        self._executor = executor
        self._capacity = capacity
        self._on_progress = on_progress
        self._progress = Progress(targets.count)
        self._silence = Silence()

    def reports(self) -> Iterator[CheckpointReport]:
        own = None
        try:
            jobs = self._looked_at()
            if self._how.level == "data":
                if self._executor is None:
                    own = ThreadPoolExecutor(self._read_jobs(), thread_name_prefix="snapctl-verify")
                jobs = self._read_data(jobs, self._executor or own)
            for job in jobs:
                if job.is_incomplete and self._targets.all_of is not None:
                    self._progress.checkpoints -= 1
                    continue
                self._progress.done += 1
                self._tell()
                yield self._report(job)
        finally:
            if own is not None:
                own.shutdown(wait=False, cancel_futures=True)

    def _read_jobs(self) -> int:
        if self._how.jobs is not None:
            return self._how.jobs
        if self._executor is not None:
            return FOREIGN_TASKS
        is_local = self._targets.storage.scheme == "file"
        return min(LOCAL_JOBS, os.cpu_count() or 1) if is_local else REMOTE_JOBS

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress)

    # -- looking -----------------------------------------------------------------------------------------------

    def _looked_at(self) -> Iterator[_Job]:
        """The checkpoints after everything but their data, in order; several are looked at ahead."""
        waiting: deque[tuple[Future[_Job], int]] = deque()
        pool: ThreadPoolExecutor | None = None
        ahead = 0
        try:
            targets = iter(self._targets.items)
            target = next(targets, None)
            while target is not None or waiting:
                if target is not None and (not waiting or ahead < AHEAD_MANIFEST_BYTES) and len(waiting) < 64:
                    if pool is None:
                        jobs = self._how.jobs or self._targets.storage.parallel_requests + 1
                        pool = ThreadPoolExecutor(jobs, thread_name_prefix="snapctl-look")
                    waiting.append((pool.submit(self._look, target), target.weight_bytes))
                    ahead += target.weight_bytes
                    target = next(targets, None)
                    continue
                future, weight = waiting.popleft()
                ahead -= weight
                job = future.result()
                self._progress.planned += 1
                self._progress.planned_bytes += job.reading.size_bytes if job.reading is not None else 0
                yield job
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, target: Target) -> _Job:
        job = _Job(target)
        try:
            if target.error is not None:
                raise target.error
            if self._silence.is_over:
                raise self._silence.error(target.storage)
            manifest = self._read_manifest(job)
            if self._how.level == "structure":
                structure = check_structure(manifest)
                job.blobs = len(structure.uses)
                job.problems += structure.problems
                job.unchecked += structure.unchecked
                job.warnings += structure.warnings
            else:
                self._look_at_blobs(job, check_whole(target.storage, manifest, target.files))
            self._silence.note(None)
        except ManifestError as error:
            job.is_unreadable = True
            job.problems.append(Problem("unreadable-manifest", None, MANIFEST_NAME, error.message))
        except CheckpointNotFoundError as error:
            job.is_incomplete = True
            job.errors.append(error)
        except StorageError as error:
            self._silence.note(error)
            job.errors.append(error)
        if job.problems or job.errors:
            _look_again(job)
        return job

    def _read_manifest(self, job: _Job) -> Manifest:
        """The manifest in the version that is listed.

        Raises:
            CheckpointNotFoundError: there is none, or an empty one.
        """
        storage, files = job.target.storage, job.target.files
        if files is not None:
            job.manifest_file = next(file for file in files if file.path == MANIFEST_NAME)
        elif self._how.level != "structure":
            job.manifest_file = storage.find_file(MANIFEST_NAME)
            if job.manifest_file is None:
                raise incomplete(storage)
        file = job.manifest_file
        try:
            data = storage.read(MANIFEST_NAME, version=file.version if file is not None else "")
        except StorageNotFoundError as error:
            if files is None:
                raise incomplete(storage) from error
            raise
        if not data and (file is None or file.size_bytes == 0):
            raise incomplete(storage)
        if file is not None and len(data) != file.size_bytes and not file.is_link:
            raise PreconditionError(f"{storage.url_of(MANIFEST_NAME)}: was replaced while it was being looked at")
        return parse_manifest(data)

    def _look_at_blobs(self, job: _Job, found: Wholeness) -> None:
        job.blobs = len(found.uses)
        job.problems += found.problems
        job.unchecked += found.unchecked
        job.warnings += found.warnings
        if self._how.level != "data":
            return
        storage = job.target.storage
        unread = {p.blob for p in found.problems if p.kind in ("missing-blob", "short-blob", "outside") and p.blob}
        if self._how.sample is not None:
            sizes = {location: found.files[location].size_bytes for location in found.uses if location in found.files}
            unread |= sizes.keys() - choose_sample(sizes, self._how.sample, name=storage.name)
        locations = [location for location in found.uses if location not in unread]
        plans = plan_blobs(
            found.uses,
            found.files,
            finite=self._how.finite,
            part_bytes=LOCAL_SUM_BYTES if storage.scheme == "file" else PART_BYTES,
            without=unread,
            unclear={p.blob for p in found.problems if p.kind == "overlap" and p.blob},
        )
        if locations:
            from snapctl.verification.data_reading import Reading  # numpy: only where data is read

            job.reading = Reading(
                storage,
                plans,
                blobs=len(locations),
                size_bytes=sum(found.files[location].size_bytes for location in locations),
                recorded=found.recorded or {},
                files={location: found.files[location] for location in locations},
                judged=frozenset(p.blob for p in found.problems if p.kind == "checksum" and p.blob),
            )
            job.has_record = bool(found.recorded)

    # -- reading -----------------------------------------------------------------------------------------------

    def _read_data(self, jobs: Iterable[_Job], executor: Executor | None) -> Iterator[_Job]:
        """The checkpoints whose data has been read."""
        from snapctl.verification.data_reading import DataReader

        assert executor is not None
        reader: DataReader[_Job] = DataReader(
            executor,
            self._capacity or self._read_jobs,
            options=self._options,
            silence=self._silence,
            is_foreign=self._executor is not None,
            left=lambda: self._progress.checkpoints - self._progress.planned + 1,
            on_read=self._count,
        )
        for job in reader.read((job, job.reading) for job in jobs):
            if job.reading is not None:
                _add_findings(job, job.reading)
            yield job

    def _count(self, size_bytes: int) -> None:
        self._progress.read_bytes += size_bytes
        self._tell()

    # -- reporting ---------------------------------------------------------------------------------------------

    def _report(self, job: _Job) -> CheckpointReport:
        verdict: Verdict | None = "sound"
        error = job.errors[0] if job.errors else None
        if isinstance(error, CheckpointNotFoundError | PreconditionError):
            verdict = None
            job.problems.clear()
        elif job.problems:
            verdict = "unreadable" if job.is_unreadable else "damaged"
        elif error is not None:
            verdict = None
        elif job.unsummed:
            verdict = "unverifiable"
        warnings = list(job.warnings)
        if len(job.errors) > 1:
            warnings.append(f"{len(job.errors)} reads failed")
        if job.unsummed and job.has_record:
            warnings.append(f"{job.unsummed} of its blobs have no recorded checksum")
        return CheckpointReport(
            job.target.step,
            job.target.storage.url,
            self._how.level,
            verdict,
            job.blobs,
            job.reading.bytes_read if job.reading is not None else 0,
            tuple(job.problems),
            tuple(job.unchecked),
            tuple(warnings),
            error,
        )


def _add_findings(job: _Job, reading: Reading) -> None:
    found = reading.findings()
    job.problems += found.problems
    job.unchecked += found.unchecked
    job.errors += found.errors
    job.unsummed = found.unsummed
    for tensor, count in found.counts.items():
        if count.nan or count.infinite:
            detail = f"{count.nan} NaN and {count.infinite} infinite of {count.elements} elements"
            job.problems.append(Problem("not-finite", tensor, None, detail))
    if found.problems or found.errors or found.counts:
        _look_again(job)


def _look_again(job: _Job) -> None:
    """Whether the checkpoint that something is wrong with is still there, and the same."""
    if job.is_incomplete:
        return
    storage = job.target.storage
    try:
        found = storage.find_file(MANIFEST_NAME)
    except StorageError:
        return
    if found is None:
        job.errors.insert(0, CheckpointNotFoundError(f"{storage.url}: vanished while it was being verified (pruned?)"))
    elif job.manifest_file is not None and found.version != job.manifest_file.version:
        job.errors.insert(0, PreconditionError(f"{storage.url}: was saved again while it was being verified"))
