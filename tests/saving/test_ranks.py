"""How the ranks of a save agree, fail and notice each other's death, in threads over one store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

dist = pytest.importorskip("torch.distributed")

from snapctl.errors import NoSpaceError, SaveError  # noqa: E402
from snapctl.ranks import PART_BYTES, Ranks, RootOnly, StoreRanks  # noqa: E402

pytestmark = pytest.mark.torch


class Clock:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds * 50
        time.sleep(0.0005)


def run(world_size: int, work: Callable[[StoreRanks], Any], *, store: Any = None, patience: float = 5.0) -> list[Any]:
    """What `work` returns or raises on each rank."""
    store = store or dist.HashStore()

    def one(rank: int) -> Any:
        ranks = StoreRanks(store, rank, world_size, patience_seconds=patience)
        try:
            return work(ranks)
        except SaveError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def test_one_rank_agrees_with_itself() -> None:
    ranks = Ranks()
    assert ranks.meet(5, "/x") == "/x"
    assert ranks.gather(1) == [1] and ranks.share(2) == 2
    ranks.barrier()
    objects: list[Any] = [None]
    ranks.all_gather_object(objects, "a")
    ranks.broadcast_object_list(objects)
    assert objects == ["a"]
    ranks.fail(ValueError())
    ranks.check()
    ranks.leave()


def test_ranks_meet_gather_and_share() -> None:
    def work(ranks: StoreRanks) -> Any:
        path = ranks.meet(5, f"/x{ranks.rank}")
        gathered = ranks.gather(ranks.rank * 10)
        shared = ranks.share(gathered)
        everybody: list[Any] = [None] * 3
        ranks.all_gather_object(everybody, str(ranks.rank))
        told: list[Any] = [ranks.rank]
        ranks.broadcast_object_list(told)
        ranks.barrier()
        ranks.leave()
        return path, gathered, shared, everybody, told

    found = run(3, work)
    assert [item[0] for item in found] == ["/x0"] * 3
    assert [item[1] for item in found] == [[0, 10, 20], None, None]
    assert all(item[2:] == ([0, 10, 20], ["0", "1", "2"], [0]) for item in found)


def test_nothing_is_left_in_the_store() -> None:
    store = dist.HashStore()

    def work(ranks: StoreRanks) -> None:
        ranks.meet(5, "/x")
        ranks.share(ranks.gather("x" * 100_000))
        ranks.barrier()
        ranks.leave()

    run(3, work, store=store)
    end = time.monotonic() + 5
    while store.num_keys() > 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert store.num_keys() == 3  # the last save's name, and an empty hello of each rank but 0


def test_values_of_any_size_go_through() -> None:
    import random

    noise = random.Random(0).randbytes(2 * PART_BYTES + 17)

    def work(ranks: StoreRanks) -> bool:
        ranks.meet(5, "/x")
        gathered = ranks.gather(noise)
        shared = ranks.share(noise if ranks.rank == 0 else None)
        ranks.leave()
        return shared == noise and gathered in (None, [noise, noise])

    assert run(2, work) == [True, True]


def test_what_only_rank_0_looks_at_is_not_sent_back() -> None:
    def work(ranks: StoreRanks) -> list[Any]:
        ranks.meet(5, "/x")
        found: list[Any] = [None, None]
        RootOnly(ranks).all_gather_object(found, ranks.rank)
        ranks.leave()
        return found

    assert run(2, work) == [[0, 1], [1, 1]]


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_wait_of_all_others_and_is_named() -> None:
    def work(ranks: StoreRanks) -> Any:
        ranks.meet(5, "/x")
        if ranks.rank == 2:
            ranks.fail(NoSpaceError("/x: full"))
            return None
        started = time.monotonic()
        with pytest.raises(SaveError) as caught:
            ranks.barrier()
        return str(caught.value), caught.value.ranks, time.monotonic() - started < 2

    assert run(4, work, patience=30)[:2] == [("rank 2: NoSpaceError: /x: full", (2,), True)] * 2


def test_a_failure_is_heard_without_asking() -> None:
    def work(ranks: StoreRanks) -> Any:
        ranks.meet(5, "/x")
        if ranks.rank == 1:
            ranks.fail(ValueError("bad"), unknown=True)
            return None
        end = time.monotonic() + 5
        while ranks.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        return ranks.failure

    found = run(2, work, patience=1.0)[0]
    assert str(found) == "rank 1: ValueError: bad" and found.unknown


def test_ranks_that_save_different_steps_are_told() -> None:
    found = run(2, lambda ranks: ranks.meet(5 + ranks.rank, "/x"))
    assert [str(error) for error in found] == ["rank 1 saves step 6 while rank 0 saves step 5"] * 2


def test_a_hello_that_has_its_answer_is_not_taken_for_the_next_save() -> None:
    """Rank 1 is slow to read that the steps differ, and rank 0 is waiting for its next save already."""
    store, waits_again = dist.HashStore(), threading.Event()

    def meet(rank: int, step: int, sleep: Callable[[float], object]) -> str:
        ranks = StoreRanks(store, rank, 2, patience_seconds=5, sleep=sleep)
        try:
            return ranks.meet(step, "/x")
        except SaveError as error:
            return str(error)

    def rank_0() -> list[str]:
        return [meet(0, 5, time.sleep), meet(0, 7, lambda seconds: (waits_again.set(), time.sleep(seconds)))]

    def rank_1() -> list[str]:
        return [meet(1, 6, lambda _: waits_again.wait(5)), meet(1, 7, time.sleep)]

    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(rank_0), pool.submit(rank_1)]]
    assert found == [["rank 1 saves step 6 while rank 0 saves step 5", "/x"]] * 2


def meet_alone(rank: int, world_size: int, store: Any) -> tuple[SaveError, float]:
    clock = Clock()
    ranks = StoreRanks(store, rank, world_size, patience_seconds=60, clock=lambda: clock.now, sleep=clock.sleep)
    with pytest.raises(SaveError) as caught:
        ranks.meet(5, "/x")
    return caught.value, clock.now


def test_rank_0_waits_for_the_others_as_long_as_its_patience() -> None:
    error, waited = meet_alone(0, 3, dist.HashStore())
    assert str(error) == "ranks 1, 2 did not come to save step 5 within 60 s"
    assert error.ranks == (1, 2)
    assert 60 <= waited < 62


def test_the_others_wait_for_rank_0_as_long_as_their_patience() -> None:
    error, waited = meet_alone(1, 3, dist.HashStore())
    assert str(error) == "rank 0 did not come to save step 5 within 60 s"
    assert 60 <= waited < 70  # a little longer than rank 0, which may tell who else is missing


@pytest.mark.parametrize("alone", [0, 1])
def test_a_save_to_which_only_one_rank_came_does_not_disturb_the_next(alone: int) -> None:
    store = dist.HashStore()
    meet_alone(alone, 2, store)

    def work(ranks: StoreRanks) -> str:
        path = ranks.meet(6, "/x")
        ranks.barrier()
        ranks.leave()
        return path

    assert run(2, work, store=store) == ["/x", "/x"]


def test_a_rank_that_falls_silent_is_named() -> None:
    gone = threading.Event()

    def work(ranks: StoreRanks) -> Any:
        ranks.meet(5, "/x")
        if ranks.rank == 1:
            ranks._messenger.stop()  # as if its process had been killed
            gone.set()
            return None
        gone.wait()
        started = time.monotonic()
        with pytest.raises(SaveError) as caught:
            ranks.barrier()
        ranks.fail(caught.value)
        return str(caught.value), caught.value.ranks, time.monotonic() - started

    first, _, third = run(3, work, patience=0.5)
    assert first[:2] == ("rank 1 gave no sign of life for 0.5 s", (1,))
    assert third[0] == "rank 1 gave no sign of life for 0.5 s"  # told by rank 0
    assert first[2] < 3 and third[2] < 3


def test_a_slow_rank_is_not_a_dead_one() -> None:
    def work(ranks: StoreRanks) -> bool:
        ranks.meet(5, "/x")
        if ranks.rank == 1:
            time.sleep(1.2)
        ranks.barrier()
        ranks.leave()
        return True

    assert run(2, work, patience=0.4) == [True, True]


class Frozen:
    """A store that stops answering after some requests."""

    def __init__(self, store: Any, answers: int) -> None:
        self._store = store
        self._left = itertools.count(answers, -1)

    def __getattr__(self, name: str) -> Any:
        if next(self._left) <= 0:
            threading.Event().wait(20)
        return getattr(self._store, name)


def test_a_store_that_gives_no_answer_is_not_waited_for() -> None:
    ranks = StoreRanks(Frozen(dist.HashStore(), 3), 1, 2, patience_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(SaveError, match=r"the store of the ranks gave no answer for 0\.3 s"):
        ranks.meet(5, "/x")
    assert time.monotonic() - started < 3


def test_a_store_that_is_gone_is_said() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    ranks = StoreRanks(Gone(), 1, 2, patience_seconds=5)
    with pytest.raises(SaveError, match="the store of the ranks is gone: RuntimeError: Connection reset by peer"):
        ranks.meet(5, "/x")
    ranks.leave()
