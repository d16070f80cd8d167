"""Walking over everything below a prefix: whole, in order, in few requests, whatever fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from snapctl.errors import PermissionDeniedError, StorageError, UnavailableError
from snapctl.storage import Storage, WalkFailure, open_storage
from snapctl.storage.gcs import walking
from tests.support.servers import Bucket, Controlled

Names = list[str]


def run_names(run: str, checkpoints: int, blobs: int) -> Names:
    steps = [str(100 * number) for number in range(checkpoints)]
    return [f"{run}/{step}/{name}" for step in steps for name in [".snapshot_metadata", *blob_names(blobs)]]


def blob_names(count: int) -> Names:
    return [f"0/model/layers/{number}/weight" for number in range(count)]


SHAPES: dict[str, Callable[[], Names]] = {
    "nothing-much": lambda: ["a/1/.snapshot_metadata"],
    "many-equal-runs": lambda: [name for run in range(40) for name in run_names(f"run-{run}", 5, 10)],
    "one-large-run": lambda: run_names("deep/below/run", 120, 100),
    "tiny-directories": lambda: [f"{number:05}/readme" for number in range(6000)],
    "one-full-directory": lambda: [f"flat/{number:06}" for number in range(6000)],
    "files-between-directories": lambda: [
        *(f"file-{number:04}.txt" for number in range(1500)),
        *(f"file-{number:04}/inner/{item}" for number in range(300) for item in range(10)),
    ],
    "a-huge-one-first": lambda: run_names("a", 100, 30) + [f"b{number}/x" for number in range(3000)],
    "odd-names": lambda: ["a//b", "a/./c", "a/../d", "-/1/x", "ä/ü", "a/b/", "[x]*?", *run_names("z%2F", 30, 50)],
}


def seed(server: Controlled, names: Iterable[str]) -> Storage:
    bucket = Bucket(server.endpoint, "bk")
    server.seed(bucket.name, [(f"root/{name}", 1) for name in names] + [("root2/x", 1), ("roos/x", 1)])
    server.reset()
    return open_storage("gs://bk/root")


def walked(storage: Storage) -> tuple[Names, list[WalkFailure]]:
    names: Names = []
    failures: list[WalkFailure] = []
    for part in storage.walk():
        if isinstance(part, WalkFailure):
            failures.append(part)
        else:
            assert len(part) <= 1000
            names += [file.path for file in part]
    return names, failures


@pytest.mark.parametrize("shape", SHAPES)
def test_every_object_comes_once_and_in_order_in_few_requests(shape: str, minigcs: Controlled) -> None:
    names = sorted(SHAPES[shape]())
    storage = seed(minigcs, names)
    assert walked(storage) == (names, [])
    pages = -(-len(names) // 1000)
    assert minigcs.stats()["n"] <= 2 * pages + 30, f"{len(names)} objects"


def test_a_bucket_itself_can_be_walked_over(minigcs: Controlled) -> None:
    names = sorted(SHAPES["many-equal-runs"]() + SHAPES["odd-names"]() + SHAPES["files-between-directories"]())
    Bucket(minigcs.endpoint, "bk")
    minigcs.seed("bk", [(name, 1) for name in names])
    assert walked(open_storage("gs://bk")) == (names, [])


def test_parts_are_listed_at_the_same_time_and_only_so_many(minigcs: Controlled) -> None:
    storage = seed(minigcs, [name for run in range(60) for name in run_names(f"run-{run}", 10, 40)])
    minigcs.configure(latency=0.03, faults=[])
    names, _ = walked(storage)
    assert len(names) == 60 * 410
    stats = minigcs.stats()
    assert 12 <= stats["maxinflight"] <= walking.WALK_JOBS


def test_few_pages_are_held_for_a_caller_who_is_slow(minigcs: Controlled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "AHEAD_PAGES", 96)
    monkeypatch.setattr(walking, "WALK_JOBS", 24)
    storage = seed(minigcs, run_names("run", 300, 1000))
    walk = storage.walk()
    first = next(walk)
    assert isinstance(first, list)
    for _ in range(3):
        next(walk)
    storage.find_file("x")  # whatever else is under way has had its time when this is answered
    before = minigcs.stats()["n"]
    for _ in range(20):
        storage.find_file("x")
    walk.close()  # type: ignore[attr-defined]
    assert before < 150
    for _ in range(5):
        storage.find_file("x")
    assert minigcs.stats()["n"] <= 150 + 26


def test_a_part_that_fails_is_named_and_the_others_are_whole(minigcs: Controlled) -> None:
    names = sorted(name for run in range(10, 40) for name in run_names(f"run-{run}", 6, 200))
    storage = seed(minigcs, names)
    minigcs.configure(faults=[{"match": "startOffset=root/run-2", "status": 403, "body": "no"}])
    found, failures = walked(storage)
    assert failures
    assert {failure.path.partition("/")[0] for failure in failures} <= {"", *(f"run-{n}" for n in range(20, 30))}
    assert all(isinstance(failure.error, PermissionDeniedError) for failure in failures)
    assert [name for name in names if not name.startswith("run-2")] == [n for n in found if not n.startswith("run-2")]
    assert found == sorted(found)


def test_a_server_that_is_gone_is_not_asked_for_each_part(minigcs: Controlled) -> None:
    storage = seed(minigcs, [name for run in range(90) for name in run_names(f"run-{run:02}", 10, 100)])
    walk = storage.walk()
    next(walk)
    minigcs.configure(faults=[{"match": "/o\\?", "status": 401, "body": "{}"}])
    rest = list(walk)
    failures = [part for part in rest if isinstance(part, WalkFailure)]
    assert failures
    assert all(isinstance(failure.error, StorageError) for failure in failures)
    log = minigcs.stats(log=True)["log"]
    assert len([line for line in log if line[2] == 401]) <= walking.WALK_JOBS + 6


def test_what_cannot_be_listed_at_all_says_so_first(minigcs: Controlled) -> None:
    storage = seed(minigcs, ["a/b"])
    minigcs.configure(faults=[{"match": "/o\\?", "status": 403, "body": "no"}])
    ((_, failures),) = [walked(storage)]
    assert [failure.path for failure in failures] == [""]
    assert not isinstance(failures[0].error, UnavailableError)


@pytest.mark.parametrize("seed_number", range(4))
def test_random_trees_come_whole(seed_number: int, minigcs: Controlled) -> None:
    rng = random.Random(seed_number)
    names = set()
    for _ in range(4000):
        depth = rng.randint(1, 4)
        names.add("/".join(rng.choice("abc01-.") * rng.randint(1, 2) for _ in range(depth)))
    for _ in range(rng.randint(0, 3)):
        names.update(run_names(rng.choice(["a", "b/x", "c/0"]), rng.randint(1, 40), rng.randint(1, 150)))
    storage = seed(minigcs, names)
    assert walked(storage) == (sorted(names), [])


def test_a_walk_knows_sizes(minigcs: Controlled) -> None:
    Bucket(minigcs.endpoint, "bk")
    minigcs.seed("bk", [("r/x", 17), ("r/y/", 0)])
    (files,) = [part for part in open_storage("gs://bk").walk() if isinstance(part, list)]
    assert [(file.path, file.size_bytes) for file in files] == [("r/x", 17), ("r/y/", 0)]


@pytest.mark.timeout(60)
def test_all_are_tried_when_the_first_ones_of_unknown_size_fail(minigcs: Controlled) -> None:
    large = [f"a/{number:05}/x" for number in range(1200)]
    storage = seed(minigcs, [*large, *(f"b{number:02}/x" for number in range(40))])
    minigcs.configure(faults=[{"match": "startOffset=root/b", "status": 403, "body": "no"}])
    found, failures = walked(storage)
    assert found == large
    assert {f"b{number:02}" for number in range(39)} <= {failure.path for failure in failures}


def test_a_range_that_fails_names_a_directory_that_all_of_it_lies_in(minigcs: Controlled) -> None:
    names = [f"a/{child:03}/{number:03}" for child in range(30) for number in range(100)]
    names += [
        *(f"b{number:05}" for number in range(1000)),
        *(f"c{number:02}/.snapshot_metadata" for number in range(3)),
    ]
    storage = seed(minigcs, names)
    minigcs.configure(faults=[{"match": "startOffset=root/a/029|pageToken", "status": 403, "body": "no"}])
    found, failures = walked(storage)
    unknown = [failure.path for failure in failures]
    assert unknown
    missing = set(names) - set(found)
    assert missing
    lost = [name for name in missing if not any(not path or name.startswith(f"{path}/") for path in unknown)]
    assert lost == [], f"unknown are only {unknown}"
