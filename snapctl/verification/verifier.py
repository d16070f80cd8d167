"""Verifies checkpoints: their manifests, their blobs, and the data in these.

`snapctl.verification.targets.find_targets` says which checkpoints a path means; `verify` judges them, the next ones
being looked at meanwhile, and yields a `CheckpointReport` for each. The data is read in parts that need nothing of each
other, by threads or by any other executor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import msgspec

from snapctl.checkpoints import incomplete
from snapctl.crc_combine import combine_crc32c
from snapctl.errors import (
    CheckpointNotFoundError,
    ManifestError,
    PreconditionError,
    SnapctlError,
    StorageError,
    StorageNotFoundError,
    UnavailableError,
)
from snapctl.manifest import MANIFEST_NAME, Manifest, parse_manifest
from snapctl.save_record import BlobSum
from snapctl.storage import FileInfo
from snapctl.verification.data_plan import LOCAL_SUM_BYTES, PART_BYTES, BlobPlan, Sample, choose_sample, plan_blobs
from snapctl.verification.size_checks import checksum_problem
from snapctl.verification.structure_checks import check_structure
from snapctl.verification.targets import Target, Targets
from snapctl.verification.verdicts import CheckpointReport, Level, NonFinite, Problem, Unchecked, Verdict
from snapctl.verification.wholeness import Wholeness, check_whole

if TYPE_CHECKING:
    from snapctl.verification.data_checks import PartResult

REMOTE_JOBS = 16
LOCAL_JOBS = 4
"""At most; no more than there are processors."""
FOREIGN_JOBS = 64
"""Handed to an executor of somebody else, whose workers nobody can count here; twice as many wait."""
AHEAD_MANIFEST_BYTES = 48 << 20
"""So many bytes of manifests are looked at ahead of the one that is being judged."""
GIVE_UP_AFTER = 24
"""After so many reads in a row that the storage did not answer, nothing more is asked of it."""


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
        self.recorded: Mapping[str, BlobSum] = {}
        self.files: Mapping[str, FileInfo] = {}
        self.plans: tuple[BlobPlan, ...] = ()
        self.results: list[list[PartResult | None]] = []
        self.parts_left = 0
        self.bytes_read = 0
        self.problems: list[Problem] = []
        self.unchecked: list[Unchecked] = []
        self.warnings: list[str] = []
        self.errors: list[SnapctlError] = []
        self.counts: dict[str, NonFinite] = {}
        self.unsummed = 0
        self.is_unreadable = False
        self.is_incomplete = False


def verify(
    targets: Targets,
    how: Thoroughness = Thoroughness(),  # noqa: B008 - it is frozen
    *,
    options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[CheckpointReport]:
    """Judges checkpoints, one report each, about in the order of the targets.

    One that is damaged or cannot be looked at does not end it. Those of `Targets.all_of` that turn out to be incomplete
    have no report.

    Args:
        options: for the storage, where another process has to open it.
        executor: reads the data; any `concurrent.futures.Executor`, also of processes on other machines that see the
            same storage. Default: threads of this process.
        on_progress: called now and then, from the calling thread.
    """
    yield from _Run(targets, how, options, executor, on_progress).reports()


class _Run:
    def __init__(
        self,
        targets: Targets,
        how: Thoroughness,
        options: Mapping[str, Any] | None,
        executor: Executor | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._targets = targets
        self._how = how
        self._options = options
        self._executor = executor
        self._on_progress = on_progress
        self._progress = Progress(targets.count)
        self._silences = 0

    def reports(self) -> Iterator[CheckpointReport]:
        own = None
        try:
            executor = self._executor
            if executor is None and self._how.level == "data":
                own = executor = ThreadPoolExecutor(self._read_jobs(), thread_name_prefix="snapctl-verify")
            for job in self._read_data(self._looked_at(), executor) if executor else self._looked_at():
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
            return FOREIGN_JOBS
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
                self._progress.planned_bytes += sum(part.size_bytes for plan in job.plans for part in plan.parts)
                yield job
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, target: Target) -> _Job:
        job = _Job(target)
        try:
            if target.error is not None:
                raise target.error
            if self._silences >= GIVE_UP_AFTER:
                raise UnavailableError(f"{target.storage.url}: the storage has stopped answering")
            manifest = self._read_manifest(job)
            if self._how.level == "structure":
                structure = check_structure(manifest)
                job.blobs = len(structure.uses)
                job.problems += structure.problems
                job.unchecked += structure.unchecked
                job.warnings += structure.warnings
            else:
                self._look_at_blobs(job, check_whole(target.storage, manifest, target.files))
            self._silences = 0
        except ManifestError as error:
            job.is_unreadable = True
            job.problems.append(Problem("unreadable-manifest", None, MANIFEST_NAME, error.message))
        except CheckpointNotFoundError as error:
            job.is_incomplete = True
            job.errors.append(error)
        except StorageError as error:
            self._silences += isinstance(error, UnavailableError)
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
        job.plans = tuple(
            plan_blobs(
                found.uses,
                found.files,
                finite=self._how.finite,
                part_bytes=LOCAL_SUM_BYTES if storage.scheme == "file" else PART_BYTES,
                without=unread,
                unclear={p.blob for p in found.problems if p.kind == "overlap" and p.blob},
            )
        )
        job.results = [[None] * len(plan.parts) for plan in job.plans]
        job.parts_left = sum(len(plan.parts) for plan in job.plans)
        job.recorded = found.recorded or {}
        job.files = {plan.location: found.files[plan.location] for plan in job.plans}

    # -- reading -----------------------------------------------------------------------------------------------

    def _read_data(self, jobs: Iterable[_Job], executor: Executor) -> Iterator[_Job]:
        """The checkpoints whose data has been read."""
        from snapctl.verification.data_checks import (  # numpy: only where data is read
            BlobSource,
            PartResult,
            check_part,
        )

        running: dict[Future[PartResult], tuple[_Job, int, int]] = {}
        window = 2 * self._read_jobs()
        try:
            for job in jobs:
                if job.parts_left == 0:
                    yield self._judged(job)
                    continue
                source = BlobSource(job.target.storage, self._options)
                for plan_number, plan in enumerate(job.plans):
                    for part_number, part in enumerate(plan.parts):
                        if self._silences >= GIVE_UP_AFTER:
                            error = UnavailableError(f"{job.target.storage.url}: the storage has stopped answering")
                            yield from self._take(PartResult(error=error), job, plan_number, part_number)
                            continue
                        running[executor.submit(check_part, source, part)] = (job, plan_number, part_number)
                        if len(running) >= window:
                            yield from self._take_finished(running)
            while running:
                yield from self._take_finished(running)
        finally:
            for future in running:
                future.cancel()

    def _take_finished(self, running: dict[Future[PartResult], tuple[_Job, int, int]]) -> Iterator[_Job]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield from self._take(future.result(), *running.pop(future))
        self._tell()

    def _take(self, result: PartResult, job: _Job, plan_number: int, part_number: int) -> Iterator[_Job]:
        """Adds a result to its checkpoint, and yields that if it was the last one."""
        self._silences = self._silences + 1 if isinstance(result.error, UnavailableError) else 0
        job.results[plan_number][part_number] = result
        job.parts_left -= 1
        job.bytes_read += result.bytes_read
        self._progress.read_bytes += job.plans[plan_number].parts[part_number].size_bytes
        if job.parts_left == 0:
            yield self._judged(job)

    def _judged(self, job: _Job) -> _Job:
        before = len(job.problems), len(job.errors)
        for plan, results in zip(job.plans, job.results, strict=True):
            _judge_blob(job, plan, [result for result in results if result is not None])
        for tensor, count in job.counts.items():
            if count.nan or count.infinite:
                detail = f"{count.nan} NaN and {count.infinite} infinite of {count.elements} elements"
                job.problems.append(Problem("not-finite", tensor, None, detail))
        job.results.clear()
        if (len(job.problems), len(job.errors)) != before:
            _look_again(job)
        return job

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
        if job.unsummed and job.recorded:
            warnings.append(f"{job.unsummed} of its blobs have no recorded checksum")
        return CheckpointReport(
            job.target.step,
            job.target.storage.url,
            self._how.level,
            verdict,
            job.blobs,
            job.bytes_read,
            tuple(job.problems),
            tuple(job.unchecked),
            tuple(warnings),
            error,
        )


def _judge_blob(job: _Job, plan: BlobPlan, results: list[PartResult]) -> None:
    """Puts together what was found in the parts of a blob. A blob with the wrong checksum has that problem alone."""
    errors = [result.error for result in results if result.error is not None]
    if errors:
        job.errors += errors
        return
    crc = 0
    for part, result in zip(plan.parts, results, strict=True):
        crc = combine_crc32c(crc, result.crc32c, part.size_bytes)
    recorded, kept = job.recorded.get(plan.location), job.files[plan.location].crc32c
    is_known = any(problem.kind == "checksum" and problem.blob == plan.location for problem in job.problems)
    if is_known:
        return
    if recorded is None:
        job.unsummed += 1
    elif recorded.crc32c != crc:
        job.problems.append(checksum_problem(plan.uses, crc, recorded.crc32c))
        return
    if kept is not None and kept != crc:
        job.problems.append(checksum_problem(plan.uses, crc, kept, by="the storage says"))
        return
    problems = [problem for result in results for problem in result.problems]
    if recorded is None:
        suspect = [problem for result in results for problem in result.crc_problems]
        problems = suspect + [p for p in problems if p.entry not in {other.entry for other in suspect}]
    job.problems += problems
    for result in results:
        job.unchecked += result.unchecked
        if not problems:
            for tensor, count in result.counts:
                job.counts[tensor] = job.counts.get(tensor, NonFinite()).plus(count)


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
