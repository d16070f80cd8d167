"""Reads the data of checkpoints with any executor, and puts together what was found of each."""

from __future__ import annotations

import contextlib
import pickle
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import msgspec

from snapctl.checksums import combine_crc32c
from snapctl.errors import StorageError, WorkerError
from snapctl.save_record import BlobSum
from snapctl.storage import FileInfo, Storage
from snapctl.tensors.layout import item_bytes
from snapctl.verification.data_checks import BlobSource, PartResult, check_load
from snapctl.verification.data_plan import (
    LOCAL_READ_COST,
    LOCAL_SUM_BYTES,
    REMOTE_READ_COST,
    BlobPlan,
    Load,
    Stretch,
    choose_load_bytes,
    cut_loads,
)
from snapctl.verification.remote_work import explain, seal
from snapctl.verification.silence import Silence
from snapctl.verification.size_checks import checksum_problem
from snapctl.verification.verdicts import NonFinite, Problem, Unchecked

_LOOK_SECONDS = 1.0
"""How often somebody else's executor is asked how much it can do, and whether it is still there."""
_WAITING_EACH = 2
"""So many loads for each that is being read: the next one must be there when one is done."""

_MAX_OPEN = 256
"""So many checkpoints are held until the first of them has been read."""

Item = TypeVar("Item")


class BlobFindings(msgspec.Struct):
    """What the data of one blob says, or of all."""

    problems: list[Problem] = []
    unchecked: list[Unchecked] = []
    errors: list[StorageError] = []
    counts: dict[str, NonFinite] = {}
    """By tensor."""
    unsummed: int = 0
    """Blobs without a recorded checksum."""

    def add(self, other: BlobFindings) -> None:
        self.problems += other.problems
        self.unchecked += other.unchecked
        self.errors += other.errors
        for tensor, count in other.counts.items():
            self.counts[tensor] = self.counts.get(tensor, NonFinite()).plus(count)
        self.unsummed += other.unsummed


class Reading:
    """The data of one checkpoint, on its way to what is found in it.

    Only the blobs that are being read are held: a checkpoint may have millions of parts.
    """

    def __init__(
        self,
        storage: Storage,
        plans: Iterator[BlobPlan],
        *,
        blobs: int,
        size_bytes: int,
        recorded: Mapping[str, BlobSum],
        files: Mapping[str, FileInfo],
        judged: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            plans: how each blob is read; asked for one by one.
            blobs, size_bytes: of all these plans.
            recorded: by location, what the save recorded.
            judged: locations whose checksum is known to be wrong already.
        """
        self.storage = storage
        self.blobs = blobs
        self.size_bytes = size_bytes
        self.bytes_read = 0
        self.pending = 0
        """Loads that are being read."""
        self.is_cut = False
        """All loads have been handed out."""
        self._plans = plans
        self._recorded = recorded
        self._files = files
        self._judged = judged
        self._open: dict[int, _BlobTally] = {}
        self._found: dict[int, BlobFindings] = {}
        self._elements: Counter[str] = Counter()

    def loads(self, *, load_bytes: Callable[[], int], read_cost: int) -> Iterator[Load]:
        """What is to be read; see `cut_loads`."""
        yield from cut_loads(self._opened(), load_bytes=load_bytes, read_cost=read_cost)
        self.is_cut = True

    def _opened(self) -> Iterator[BlobPlan]:
        for number, plan in enumerate(self._plans):
            self._open[number] = _BlobTally(plan)
            if not plan.parts:
                self._judge(number)
            yield plan

    def take(self, load: Load, results: Iterable[PartResult]) -> None:
        """Adds what was found in a load."""
        for stretch, result in zip(load, results, strict=True):
            self.bytes_read += result.bytes_read
            if self._open[stretch.blob].take(stretch, result):
                self._judge(stretch.blob)

    def _judge(self, number: int) -> None:
        tally = self._open.pop(number)
        plan = tally.plan
        found = judge_blob(tally, self._recorded.get(plan.location), self._files[plan.location].crc32c)
        if plan.location in self._judged:
            found = BlobFindings(errors=found.errors)
        elif not (found.errors or found.problems):
            for span in (span for part in plan.parts for span in part.floats):
                self._elements[span.tensor] += (span.end - span.start) // (item_bytes(span.dtype) or 1)
        if found != BlobFindings():
            self._found[number] = found

    def findings(self) -> BlobFindings:
        """What was found in all blobs, in the order of the manifest, whatever the order in which they were read."""
        total = BlobFindings()
        for number in sorted(self._found):
            total.add(self._found[number])
        for tensor, count in total.counts.items():
            total.counts[tensor] = count.plus(NonFinite(elements=self._elements[tensor]))
        return total


class _BlobTally:
    """What has come of one blob."""

    def __init__(self, plan: BlobPlan) -> None:
        self.plan = plan
        self.results: dict[int, tuple[int, PartResult]] = {}
        """``(length, result)`` by the first byte."""
        self._parts_left = len(plan.parts)

    def take(self, stretch: Stretch, result: PartResult) -> bool:
        """Adds a result; whether it was the last one."""
        self.results[stretch.start] = stretch.size_bytes, result
        self._parts_left -= len(stretch.parts)
        return self._parts_left == 0


def judge_blob(tally: _BlobTally, recorded: BlobSum | None, kept_crc32c: int | None) -> BlobFindings:
    """Puts together what was found in the stretches of a blob. One with the wrong checksum has that problem alone.

    Args:
        kept_crc32c: what the storage says of it, if it says anything.
    """
    plan, found = tally.plan, BlobFindings()
    ordered = [tally.results[start] for start in sorted(tally.results)]
    found.errors = [result.error for _, result in ordered if result.error is not None]
    if found.errors:
        return found
    crc = 0
    for size, result in ordered:
        crc = combine_crc32c(crc, result.crc32c, size)
    if recorded is None:
        found.unsummed = 1
    elif recorded.crc32c != crc:
        found.problems.append(checksum_problem(plan.uses, crc, recorded.crc32c))
        return found
    if kept_crc32c is not None and kept_crc32c != crc:
        found.problems.append(checksum_problem(plan.uses, crc, kept_crc32c, by="the storage says"))
        return found
    found.problems = [problem for _, result in ordered for problem in result.problems]
    if recorded is None:
        suspect = [problem for _, result in ordered for problem in result.crc_problems]
        found.problems = suspect + [p for p in found.problems if p.entry not in {other.entry for other in suspect}]
    for _, result in ordered:
        found.unchecked += result.unchecked
        if not found.problems:
            for tensor, count in result.counts:
                found.counts[tensor] = found.counts.get(tensor, NonFinite()).plus(count)
    return found


class _Entry(Generic[Item]):
    """An item on its way."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.is_done = False


class DataReader(Generic[Item]):
    """Hands loads to an executor, no more at a time than it has use for, and takes the results as they come."""

    def __init__(
        self,
        executor: Executor,
        capacity: Callable[[], int],
        *,
        options: Mapping[str, object] | None,
        silence: Silence,
        is_foreign: bool,
        left: Callable[[], int],
        on_read: Callable[[int], None],
    ) -> None:
        """
        Args:
            capacity: how many loads the executor reads at a time; of a foreign one it is asked again and again, and may
                raise a `WorkerError` when there is nobody left to read.
            is_foreign: its workers are other processes, perhaps, which take a while to reach.
            left: how many checkpoints there are to read, about, with the one that is being handed out.
            on_read: called with how many bytes more are done.
        """
        self._executor = executor
        self._capacity = capacity
        self._options = options
        self._silence = silence
        self._is_foreign = is_foreign
        self._left = left
        self._on_read = on_read
        self._pace = _Pace()
        self._running: dict[Future[tuple[PartResult, ...]], tuple[_Entry[Item], Reading, Load]] = {}
        self._done: queue.SimpleQueue[Future[tuple[PartResult, ...]]] = queue.SimpleQueue()
        self._lost: WorkerError | None = None
        self._workers = 1
        self._look_at = 0.0

    def read(self, items: Iterable[tuple[Item, Reading | None]]) -> Iterator[Item]:
        """The items in their order, each as soon as its data and that of those before it has been read.

        Raises:
            WorkerSetupError: a worker has another snapctl, or none.
        """
        waiting: deque[_Entry[Item]] = deque()
        try:
            for entry in self._read(items, waiting):
                entry.is_done = True
                while waiting and waiting[0].is_done:
                    yield waiting.popleft().item
        except GeneratorExit:
            raise
        except BaseException:
            yield from [entry.item for entry in waiting if entry.is_done]  # what is known is told all the same
            raise

    def _read(
        self, items: Iterable[tuple[Item, Reading | None]], waiting: deque[_Entry[Item]]
    ) -> Iterator[_Entry[Item]]:
        """The entries as they are done; all of them go to the end of `waiting` before."""
        try:
            for item, reading in items:
                entry = _Entry(item)
                waiting.append(entry)
                while len(waiting) > _MAX_OPEN and self._running:
                    yield from self._take_next()
                if reading is None:
                    yield entry
                    continue
                source = BlobSource(reading.storage, self._options)
                for load in self._loads_of(reading):
                    self._submit(entry, reading, source, load)
                    while len(self._running) >= _WAITING_EACH * self._workers:
                        yield from self._take_next()
                if reading.pending == 0:
                    yield entry
            while self._running:
                yield from self._take_next()
        finally:
            for future in self._running:
                future.cancel()

    def _loads_of(self, reading: Reading) -> Iterator[Load]:
        self._look()
        read_cost = _read_cost(reading)

        def load_bytes() -> int:
            if not self._is_foreign:
                return LOCAL_SUM_BYTES if _is_local(reading) else 0  # remotely each part is a request that waits
            return choose_load_bytes(
                reading.size_bytes,
                reading.blobs,
                left=max(1, self._left()),
                workers=self._workers,
                read_cost=read_cost,
                bytes_per_second=self._pace.per_worker(self._workers),
            )

        return reading.loads(load_bytes=load_bytes, read_cost=read_cost)

    def _look(self) -> None:
        """Asks now and then how much the executor can do by now."""
        now = time.monotonic()
        if self._lost is not None or now < self._look_at:
            return
        try:
            self._workers = max(1, self._capacity())
        except WorkerError as error:
            self._lost = error
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def _submit(self, entry: _Entry[Item], reading: Reading, source: BlobSource, load: Load) -> None:
        error = self._silence.error(reading.storage) if self._silence.is_over else self._lost
        if error is not None:
            self._add(reading, load, [PartResult(error=error)] * len(load))
            return
        if self._is_foreign:
            future = self._executor.submit(pickle.load, seal(source, load))
        else:
            future = self._executor.submit(check_load, source, load)
        reading.pending += 1
        self._running[future] = entry, reading, load
        future.add_done_callback(self._done.put)

    def _take_next(self) -> Iterator[_Entry[Item]]:
        """Waits a while for a result; yields the entry whose last one it is, or those that are given up."""
        with contextlib.suppress(queue.Empty):
            future = self._done.get(timeout=_LOOK_SECONDS if self._is_foreign else None)
            if future in self._running:  # else it was given up, and is done all the same
                entry, reading, load = self._running.pop(future)
                self._pace.count(sum(s.size_bytes + len(s.parts) * _read_cost(reading) for s in load))
                yield from self._taken(entry, reading, load, self._results_of(future, load))
        self._look()
        if self._lost is not None:
            yield from self._give_up(self._lost)

    def _results_of(self, future: Future[tuple[PartResult, ...]], load: Load) -> Iterable[PartResult]:
        try:
            return future.result()
        except WorkerError as error:
            if error.is_final:
                self._lost = error
            return [PartResult(error=error)] * len(load)
        except Exception as error:
            explained = explain(error) if self._is_foreign else None
            if explained is None:
                raise
            raise explained from error

    def _give_up(self, error: WorkerError) -> Iterator[_Entry[Item]]:
        given_up, self._running = self._running, {}
        for future, (entry, reading, load) in given_up.items():
            future.cancel()
            yield from self._taken(entry, reading, load, [PartResult(error=error)] * len(load))

    def _taken(
        self, entry: _Entry[Item], reading: Reading, load: Load, results: Iterable[PartResult]
    ) -> Iterator[_Entry[Item]]:
        reading.pending -= 1
        self._add(reading, load, results)
        if reading.is_cut and reading.pending == 0:
            yield entry

    def _add(self, reading: Reading, load: Load, results: Iterable[PartResult]) -> None:
        found = list(results)
        for result in found:
            self._silence.note(result.error)
        reading.take(load, found)
        self._on_read(sum(stretch.size_bytes for stretch in load))


class _Pace:
    """How fast all workers together are, from the first result on: before that they may have had to start."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._cost = 0

    def count(self, cost: int) -> None:
        """A load of so many bytes and read costs is done."""
        if self._began is None:
            self._began = time.monotonic()
        else:
            self._cost += cost

    def per_worker(self, workers: int) -> float | None:
        """Bytes and read costs a second; None if there is nothing yet to tell it from."""
        if self._began is None or not self._cost:
            return None
        return self._cost / max(1e-3, time.monotonic() - self._began) / workers


def _is_local(reading: Reading) -> bool:
    return reading.storage.scheme == "file"


def _read_cost(reading: Reading) -> int:
    return LOCAL_READ_COST if _is_local(reading) else REMOTE_READ_COST
