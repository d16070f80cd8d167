"""What a look costs, and what it remembers."""

from __future__ import annotations

import gc
import pathlib
import shutil
import tracemalloc
from collections.abc import Iterator

import pytest

from snapctl.errors import DeadlineError
from snapctl.evaluation.waiting import Pace, Wanted, follow_checkpoints, wait_for_checkpoint
from snapctl.evaluation.watching import Watch
from snapctl.storage import open_storage
from tests.support.clock import FakeClock
from tests.support.servers import Bucket, Controlled, mini_gcs
from tests.support.snapshots import local_writer, write_checkpoint

STEPS = 10_000
BUDGET = 3 * STEPS // 1000 + 100
"""Requests that a look at 10,000 steps may cost."""


@pytest.fixture(scope="module")
def server_of_many() -> Iterator[Controlled]:
    """``gs://bk/run``: 10,000 complete checkpoints of three blobs each, without content."""
    with mini_gcs() as server:
        Bucket(server.endpoint, "bk")
        names = [f"run/{step * 100}/{inner}" for step in range(STEPS) for inner in (".snapshot_metadata", "0/a", "0/b")]
        server.seed("bk", [(name, 100) for name in names])
        yield server


@pytest.fixture
def server(server_of_many: Controlled, monkeypatch: pytest.MonkeyPatch) -> Controlled:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server_of_many.endpoint)
    server_of_many.reset()
    return server_of_many


def requests_of_each_look(server: Controlled, watch: Watch, looks: int) -> list[int]:
    counts = []
    for _ in range(looks):
        server.reset()
        watch.look()
        counts.append(server.stats()["n"])
    return counts


def test_a_look_at_ten_thousand_steps_keeps_within_its_budget(server: Controlled) -> None:
    watch = Watch(open_storage("gs://bk/run"))
    counts = requests_of_each_look(server, watch, 3)
    assert max(counts) <= BUDGET, counts
    assert counts[1:] == [110, 110]
    below_and_again = [(f"run/{step}/.snapshot_metadata", 90) for step in (150, 999900)]  # new, and the newest again
    server.seed("bk", below_and_again)
    server.reset()
    assert watch.look().new == {"150", "999900"}
    assert server.stats()["n"] <= BUDGET


def test_ones_that_stay_incomplete_do_not_break_the_budget(server: Controlled) -> None:
    complete = [(f"run2/{step}/.snapshot_metadata", 1) for step in range(2000)]
    server.seed("bk", complete + [(f"run2/{step}/0/x", 1) for step in range(2000, 3000)])
    counts = requests_of_each_look(server, Watch(open_storage("gs://bk/run2")), 3)
    assert max(counts) <= 3 * 3 + 100, counts


def test_incomplete_ones_at_the_top_do_not_break_the_budget_of_the_first_look(server: Controlled) -> None:
    server.seed("bk", [(f"run4/{step}/{'.snapshot_metadata' if step < 900 else '0/x'}", 1) for step in range(980)])
    counts = requests_of_each_look(server, Watch(open_storage("gs://bk/run4")), 2)
    assert max(counts) <= 3 + 100, counts


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(newer_than=10**9),
        Wanted(at_least=10**9),
        Wanted(step=1_000_050),
        Wanted(step=51),
        Wanted(not_evaluated_by=("val",), at_least=10**9),
    ],
)
def test_every_condition_keeps_within_the_budget(server: Controlled, wanted: Wanted) -> None:
    fake = FakeClock()
    with pytest.raises(DeadlineError):
        wait_for_checkpoint(open_storage("gs://bk/run"), wanted, Pace(0, 10, fake.clock, fake.sleep))
    assert server.stats()["n"] <= BUDGET


def test_a_follower_of_what_is_not_evaluated_keeps_within_the_budget(server: Controlled) -> None:
    names = [f"run3/{step}/{inner}" for step in range(STEPS) for inner in (".snapshot_metadata", "evaled_by/val_DONE")]
    server.seed("bk", [(name, 100) for name in names])
    server.reset()
    fake = FakeClock()
    with pytest.raises(DeadlineError):
        for _ in follow_checkpoints(
            open_storage("gs://bk/run3"), Wanted(not_evaluated_by=("val",)), Pace(10, 10, fake.clock, fake.sleep)
        ):
            raise AssertionError("all are evaluated")
    assert server.stats()["n"] <= 2 * BUDGET


def test_a_follower_remembers_no_more_after_thousands_of_looks(tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    for step in range(10):
        write_checkpoint(write, step)
    fake = FakeClock()
    looks = 0
    sizes: list[int] = []

    def sleep(seconds: float) -> None:
        nonlocal looks
        fake.advance(seconds)
        looks += 1
        if looks in (150, 600):
            gc.collect()
            ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/snapctl/*.py")])
            sizes.append(sum(trace.size for trace in ours.traces))
        if looks % 3 == 0:  # the oldest is deleted, and another comes
            shutil.rmtree(tmp_path / str(looks // 3 - 1))
            write_checkpoint(write, looks // 3 + 9)

    tracemalloc.start()
    found = 0
    try:
        for _ in follow_checkpoints(open_storage(tmp_path), Wanted(), Pace(None, 1, fake.clock, sleep)):
            found += 1
            if looks > 600:
                break
    finally:
        tracemalloc.stop()
    assert found >= 200
    assert sizes[1] - sizes[0] < 4_000, sizes
