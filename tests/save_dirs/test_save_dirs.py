"""Finding save directories below a root, and what is said of each."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapctl.checkpoints import SIGNS_OF_A_CHECKPOINT, parse_step
from snapctl.errors import InvalidPathError, SaveDirNotFoundError
from snapctl.save_dirs.finding import FoundSaveDir, find_save_dirs
from snapctl.save_dirs.summaries import SaveDirSummary, iter_summaries, path_of
from snapctl.storage import Storage, open_storage
from snapctl.storage.gcs import walking
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled

MANIFESTS = (".snapshot_metadata", ".snapshot_metadata.deleting")


def found_below(url: str) -> list[str]:
    root = open_storage(url)
    paths = [path_of(root, found)[0] for found in find_save_dirs(root)]
    return [path.removeprefix(url).lstrip("/") for path in paths if path is not None]


def write(place: SaveDir, *names: str) -> None:
    for name in names:
        place.write(name, b"{}" if name.endswith(".snapshot_metadata") else b"x")


CASES: dict[str, tuple[list[str], list[str]]] = {
    "two runs": (["a/1/.snapshot_metadata", "a/1/0/w", "b/2/.snapshot_metadata"], ["a", "b"]),
    "the root itself": (["1/.snapshot_metadata"], [""]),
    "a run beside checkpoints": (["1/.snapshot_metadata", "sub/2/.snapshot_metadata"], ["sub", ""]),
    "a run in a complete checkpoint": (["a/1/.snapshot_metadata", "a/1/x/2/.snapshot_metadata"], ["a"]),
    "a run in a checkpoint whose manifest comes later": (
        ["a/1/.snapshot_metadata", "a/1/+/2/.snapshot_metadata"],
        ["a"],
    ),
    "a run in an incomplete checkpoint": (["a/1/x/2/.snapshot_metadata", "a/3/.snapshot_metadata"], ["a"]),
    "runs named by numbers": (["a/1/2/.snapshot_metadata", "a/3/4/.snapshot_metadata"], ["a/1", "a/3"]),
    "a tree by date": (["2026/11/30/r/7/.snapshot_metadata"], ["2026/11/30/r"]),
    "half deleted": (["a/1/.snapshot_metadata.deleting", "a/1/0/w"], ["a"]),
    "never finished": (["a/1/replicated/w", "a/2/.snapctl/save.0.json"], ["a"]),
    "ranks alone say nothing": (["a/1/0/w", "a/2/0/w"], []),
    "a checkpoint without a number": (["best/.snapshot_metadata", "best/0/1/.snapshot_metadata"], []),
    "a checkpoint without number or end": (["best/sharded/w", "best/0/1/replicated/w"], []),
    "runs named like parts of a checkpoint": (
        ["sharded/1/.snapshot_metadata", "batched/1/.snapshot_metadata"],
        ["batched", "sharded"],
    ),
    "numbers that are none": (["a/01/.snapshot_metadata", "a/+2/.snapshot_metadata"], []),
    "junk": ([".git/1/x", "a/README", "lost+found/5", "0"], []),
    "an empty manifest": (["a/1/0/w", "a/2/.snapshot_metadata"], ["a"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_a_save_directory(case: str, save_dir: SaveDir) -> None:
    names, expected = CASES[case]
    write(save_dir, *names)
    assert found_below(save_dir.url) == expected


def test_an_object_name_that_is_no_path_is_passed_over_and_the_rest_found(bucket: Bucket) -> None:
    for name in (
        "a//1/.snapshot_metadata",
        "a/../1/.snapshot_metadata",
        "b/1/.snapshot_metadata",
        "/2/.snapshot_metadata",
    ):
        bucket.write(name, b"{}")
    summaries = list(iter_summaries(open_storage(bucket.url)))
    assert [s.path for s in summaries if isinstance(s, SaveDirSummary)] == [f"{bucket.url}/b"]
    assert len(summaries) >= 3


# -- a plain model ---------------------------------------------------------------------------------------------------


def model(directory: pathlib.Path) -> list[str]:
    """The same by the words of the documentation, in the plainest way."""

    def manifest_below(path: pathlib.Path) -> bool:
        return any(p.name in MANIFESTS for p in path.rglob("*"))

    def find(path: pathlib.Path) -> list[pathlib.Path]:
        children = sorted(child for child in path.iterdir() if child.is_dir())
        if any((path / name).exists() for name in MANIFESTS):
            return []
        steps = [child for child in children if parse_step(child.name) is not None]
        complete = any((step / name).exists() for step in steps for name in MANIFESTS)
        signs = any((step / sign).is_dir() for step in steps for sign in SIGNS_OF_A_CHECKPOINT)
        if complete or (signs and not any(map(manifest_below, steps))):
            return [path] + [p for child in children if child not in steps for p in find(child)]
        if any((path / sign).is_dir() for sign in SIGNS_OF_A_CHECKPOINT) and not manifest_below(path):
            return []
        return [p for child in children for p in find(child)]

    return sorted("/".join(path.relative_to(directory).parts) for path in find(directory))


PARTS = st.sampled_from(["1", "20", "3", "a", "b-c", "+", "replicated", ".snapctl", "evaled_by"])
FILES = st.sampled_from([".snapshot_metadata", ".snapshot_metadata.deleting", "w", "PINNED", "+x"])
TREES = st.lists(st.tuples(st.lists(PARTS, max_size=4), FILES), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_tree_is_searched_as_the_plain_model_says(tree: list[tuple[list[str], str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name).resolve()
        for parts, file in tree:
            (root.joinpath(*parts)).mkdir(parents=True, exist_ok=True)
            root.joinpath(*parts, file).touch()
        assert sorted(found_below(str(root))) == model(root)
        assert sorted(found_in_order_of_objects(root)) == model(root)


class _AsObjects(Storage):
    """The same tree in the order in which an object store names it: files and directories mixed."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.url = inner.url

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def walk(self):  # type: ignore[no-untyped-def]
        files = [file for part in self._inner.walk() if isinstance(part, list) for file in part if file.path[-1] != "/"]
        for file in sorted(files, key=lambda file: file.path):
            yield [file]


for _name in list(Storage.__abstractmethods__):
    setattr(_AsObjects, _name, None)
_AsObjects.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def found_in_order_of_objects(root: pathlib.Path) -> list[str]:
    return [
        found.path for found in find_save_dirs(_AsObjects(open_storage(str(root)))) if isinstance(found, FoundSaveDir)
    ]


# -- what is said of each --------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_list(save_dir: SaveDir, snapctl_inside) -> None:  # type: ignore[no-untyped-def]
    for step in (5, 10, 100):
        write(save_dir, f"r/{step}/.snapshot_metadata", f"r/{step}/0/a/b", f"r/{step}/batched/c")
    write(save_dir, "r/200/0/a", "r/200/replicated/b", "r/5/PINNED", "r/10/evaled_by/val_DONE", "r/5/evaled_by/t_DONE")
    write(save_dir, "r/200/evaled_by/val_DONE", "r/notes.txt", "r/logs/1.txt", "r/5/evaled_by/val_DONE")
    (found,) = iter_summaries(open_storage(save_dir.url))
    assert isinstance(found, SaveDirSummary)
    listed = snapctl_inside("list", "--all", "--long", "--json", f"{save_dir.url}/r").json["checkpoints"]
    assert found.counts == {"complete": 3, "incomplete": 1, "unreadable": 0}
    assert sum(found.size_bytes.values()) == sum(item["size_bytes"] for item in listed)
    assert found.files == sum(item["files"] for item in listed)
    assert found.newest is not None
    assert (found.newest.step, found.pinned, found.newest_evaluated_step) == (100, 1, 10)
    assert [(p.partition, p.checkpoints, p.newest_step) for p in found.evaluations] == [("t", 1, 5), ("val", 2, 10)]


def test_links_are_not_followed_but_count_as_checkpoints(tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    write(place, "run/1/.snapshot_metadata", "run/1/0/w", "run/2/.snapshot_metadata")
    (tmp_path / "run" / "3").symlink_to("1")
    (tmp_path / "run" / "again").symlink_to("..")
    (tmp_path / "run" / "4").symlink_to("..")
    (tmp_path / "run" / "5").symlink_to("nowhere")
    (tmp_path / "latest").symlink_to("run")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "1").symlink_to("../run/1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "7").symlink_to("../run")
    found = {s.path.rpartition("/")[2]: s for s in iter_summaries(open_storage(str(tmp_path)))}
    assert sorted(found) == ["best", "run"]
    run, best = found["run"], found["best"]
    assert isinstance(run, SaveDirSummary)
    assert isinstance(best, SaveDirSummary)
    assert run.counts == {"complete": 3, "incomplete": 1, "unreadable": 0}
    assert run.newest is not None
    assert run.newest.step == 3
    assert sum(run.size_bytes.values()) == 2 + 1 + 2
    assert best.counts["complete"] == 1
    assert sum(best.size_bytes.values()) == 0


def test_a_root_that_is_a_link_is_followed(tmp_path: pathlib.Path) -> None:
    write(SaveDir("", root=tmp_path), "real/run/1/.snapshot_metadata")
    (tmp_path / "link").symlink_to("real")
    assert found_below(str(tmp_path / "link")) == ["run"]


@pytest.mark.parametrize("names", [["1/.snapshot_metadata"], ["1/replicated/w"], ["1/0/w", "2/.snapshot_metadata"]])
def test_a_root_that_is_a_checkpoint_is_refused(names: list[str], save_dir: SaveDir) -> None:
    write(save_dir, *names)
    with pytest.raises(InvalidPathError, match="is a checkpoint"):
        list(iter_summaries(open_storage(f"{save_dir.url}/1")))


def test_a_root_that_is_not_there_is_said(save_dir: SaveDir) -> None:
    write(save_dir, "x")
    with pytest.raises(SaveDirNotFoundError):
        list(iter_summaries(open_storage(f"{save_dir.url}/nowhere")))


def test_an_empty_root_has_none(tmp_path: pathlib.Path) -> None:
    assert list(iter_summaries(open_storage(str(tmp_path)))) == []


def test_a_line_comes_before_the_rest_is_listed(minigcs: Controlled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "WALK_JOBS", 16)
    Bucket(minigcs.endpoint, "bk")
    blobs = [".snapshot_metadata", *(f"0/w{number}" for number in range(52))]
    names = [f"r{run:02}/{step}/{name}" for run in range(60) for step in range(20) for name in blobs]
    minigcs.seed("bk", [(name, 2) for name in names])
    minigcs.configure(latency=0.02, faults=[])
    minigcs.reset()
    summaries = iter_summaries(open_storage("gs://bk"))
    next(summaries)
    at_first = minigcs.stats()["n"]
    assert len(list(summaries)) == 59
    assert at_first < 0.6 * minigcs.stats()["n"]


def test_only_the_newest_has_its_record_read(minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    for step in range(20):
        bucket.write(f"r/{step}/.snapshot_metadata", b"{}")
        bucket.write(f"r/{step}/.snapctl/save.json", json.dumps({"format_version": 9}).encode())
    minigcs.reset()
    (found,) = iter_summaries(open_storage("gs://bk"))
    assert isinstance(found, SaveDirSummary)
    assert ["r/19/.snapctl/save.json" in warning for warning in found.warnings] == [True]
    assert minigcs.stats()["n"] <= 6


def test_any_other_file_system_is_walked_over_directory_by_directory() -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for name in ("a/1/.snapshot_metadata", "a/1/0/w", "x/b/2/.snapshot_metadata", "x/b/3/sharded/w", "notes"):
        files.pipe_file(f"/fleet-test/{name}", b"{}")
    try:
        found = list(iter_summaries(open_storage("memory://fleet-test")))
    finally:
        files.rm("/fleet-test", recursive=True)
    assert [s.path for s in found] == ["memory://fleet-test/a", "memory://fleet-test/x/b"]
    assert isinstance(found[1], SaveDirSummary)
    assert found[1].counts == {"complete": 1, "incomplete": 1, "unreadable": 0}


def test_a_directory_that_vanishes_while_it_is_looked_at_is_passed_over(tmp_path: pathlib.Path) -> None:
    write(SaveDir("", root=tmp_path), "a/1/.snapshot_metadata", "b/1/.snapshot_metadata", "c/1/.snapshot_metadata")
    storage = open_storage(str(tmp_path))
    walk = storage.walk()
    next(walk)
    shutil.rmtree(tmp_path / "b")
    names = [file.path for part in walk if isinstance(part, list) for file in part]
    assert "a/1/.snapshot_metadata" in names
    assert "c/1/.snapshot_metadata" in names
    assert not [name for name in names if name.startswith("b")]
