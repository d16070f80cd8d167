"""Sound snapshots are never called damaged, and each damage is reported as exactly what it is."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pathlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from copy import copy
from typing import Any

import msgspec
import numpy as np
import pytest

from snapctl.errors import CheckpointNotFoundError, PreconditionError
from snapctl.manifest import parse_manifest
from snapctl.verification.data_plan import Sample
from snapctl.verification.structure_checks import check_structure
from snapctl.verification.targets import Target, find_targets
from snapctl.verification.verdicts import CheckpointReport
from snapctl.verification.verifier import Progress, Thoroughness, verify
from tests.support.random_snapshots import Snapshot, archive, full_snapshot, random_snapshot
from tests.support.snapshots import local_writer, metadata, primitive, tensor_entry, write_checkpoint

Damage = Callable[[Snapshot], tuple[str, str | None, str | None]]
"""Damages a snapshot in one place; returns the kind of the problem, its entry and its blob."""

STORED = {
    "dense": "0/model/dense",
    "slab": "batched/5ab",
    "chunk": "0/model/chunked_1",
    "shard": "sharded/model/ShardedTensor_3",
    "dtensor shard": "sharded/model/DTensor_2",
    "object": "0/model/object",
    "quantized": "0/model/quantized",
    "replicated": "replicated/model/copy",
}
"""A blob of each kind of entry."""
OWNER = {
    "dense": "0/model/dense",
    "slab": "0/model/slab_a",
    "chunk": "0/model/chunked",
    "shard": "1/model/ShardedTensor",
    "dtensor shard": "1/model/DTensor",
    "object": "0/model/object",
    "quantized": "0/model/quantized",
    "replicated": "0/model/copy",
}
"""The (first) entry that such a blob belongs to."""


def judge(root: pathlib.Path, how: Thoroughness | None = None, **selection: Any) -> list[CheckpointReport]:
    how = how or Thoroughness()
    return list(verify(find_targets(str(root), level=how.level, **selection), how))


def judge_one(snapshot: Snapshot, root: pathlib.Path, how: Thoroughness | None = None) -> CheckpointReport:
    snapshot.write(local_writer(root), "10")
    (report,) = judge(root, how)
    return report


def stored(snapshot: Snapshot, kind: str) -> dict[str, Any]:
    """The tensor entry of one kind, to be changed in place."""
    entry: dict[str, Any] = snapshot.manifest[OWNER[kind]]
    for shard in entry.get("chunks", entry.get("shards", ())):
        if shard["tensor"]["location"] == STORED[kind]:
            found: dict[str, Any] = shard["tensor"]
            return found
    return entry


# -- sound -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("level", ["structure", "size", "data"])
def test_a_snapshot_with_each_kind_of_entry_is_sound(tmp_path: pathlib.Path, level: Any, recorded: bool) -> None:
    report = judge_one(full_snapshot(recorded=recorded), tmp_path, Thoroughness(level))
    assert report.problems == ()
    assert report.verdict == ("unverifiable" if level == "data" and not recorded else "sound")
    assert report.warnings == ()
    assert report.blobs == 17


def test_a_thousand_random_sound_snapshots_are_never_called_damaged(tmp_path: pathlib.Path) -> None:
    recorded = set()
    for seed in range(1000):
        snapshot = random_snapshot(seed)
        snapshot.write(local_writer(tmp_path), str(seed))
        if snapshot.record is not None:
            recorded.add(seed)
    for level in ("structure", "size", "data"):
        reports = judge(tmp_path, Thoroughness(level), every=True)  # type: ignore[arg-type]
        assert len(reports) == 1000
        bad = [report for report in reports if report.verdict not in ("sound", "unverifiable")]
        assert [(report.step, report.problems, report.error) for report in bad] == []
        assert all(report.warnings == () for report in reports)
    for report in reports:
        if report.step in recorded:
            assert report.verdict == "sound"


def test_every_byte_of_a_blob_is_read_once(tmp_path: pathlib.Path) -> None:
    for seed in range(40):
        snapshot = random_snapshot(seed)
        report = judge_one(snapshot, tmp_path / str(seed), Thoroughness("data"))
        assert report.bytes_read == sum(map(len, snapshot.blobs.values()))


def test_the_data_of_real_snapshots_of_all_releases_is_sound(data: Callable[[str], pathlib.Path]) -> None:
    for name in ("dtensor-4ranks", "torchrec-2ranks", "yaml-0.0.2", "yaml-2022-10", "yaml-chunked-2022-08"):
        (report,) = judge(data(name), Thoroughness("data"))
        assert (report.verdict, report.problems, report.warnings) == ("unverifiable", (), ())


# -- damaged blobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORED)
def test_a_missing_blob_of_each_kind_is_reported(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    del snapshot.blobs[STORED[kind]]
    report = judge_one(snapshot, tmp_path)
    (problem,) = report.problems
    assert (problem.kind, problem.entry, problem.blob) == ("missing-blob", OWNER[kind], STORED[kind])
    assert report.verdict == "damaged"
    assert ("slab_b, 0/model/slab_c" in problem.detail) == (kind == "slab")


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in ("object", "quantized")])
@pytest.mark.parametrize("level", ["size", "data"])
def test_a_cut_blob_of_each_kind_is_reported(tmp_path: pathlib.Path, kind: str, level: Any) -> None:
    snapshot = full_snapshot(recorded=True)
    whole = len(snapshot.blobs[STORED[kind]])
    snapshot.blobs[STORED[kind]] = snapshot.blobs[STORED[kind]][:-1]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness(level)).problems
    owner = "0/model/slab_c" if kind == "slab" else OWNER[kind]
    assert (problem.kind, problem.entry, problem.blob) == ("short-blob", owner, STORED[kind])
    assert problem.detail == f"{whole - 1} of {whole} bytes"


@pytest.mark.parametrize("kind", ["object", "quantized"])
def test_a_blob_whose_length_only_it_knows_must_not_be_empty(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    snapshot.blobs[STORED[kind]] = b""
    (problem,) = judge_one(snapshot, tmp_path).problems
    assert (problem.kind, problem.entry, problem.blob) == ("short-blob", OWNER[kind], STORED[kind])


@pytest.mark.parametrize("kind", ["object", "quantized"])
def test_such_a_blob_cut_in_its_middle_cannot_be_decoded(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    snapshot.blobs[STORED[kind]] = snapshot.blobs[STORED[kind]][:-5]
    assert judge_one(snapshot, tmp_path).verdict == "sound"
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert (problem.kind, problem.entry, problem.blob) == ("undecodable", OWNER[kind], STORED[kind])


@pytest.mark.parametrize("kind", STORED)
def test_a_flipped_bit_in_each_kind_of_blob_is_reported_where_a_checksum_was_recorded(
    tmp_path: pathlib.Path, kind: str
) -> None:
    snapshot = full_snapshot(recorded=True)
    blob = bytearray(snapshot.blobs[STORED[kind]])
    blob[len(blob) // 2] ^= 0x10
    snapshot.blobs[STORED[kind]] = bytes(blob)
    assert judge_one(snapshot, tmp_path).verdict == "sound"
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data", finite=True)).problems
    assert (problem.kind, problem.entry, problem.blob) == ("checksum", OWNER[kind], STORED[kind])


@pytest.mark.parametrize("kind", STORED)
def test_a_blob_that_is_longer_than_what_was_saved_has_the_wrong_checksum(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot(recorded=True)
    snapshot.blobs[STORED[kind]] += b"more"
    for level in ("size", "data"):
        (problem,) = judge_one(snapshot, tmp_path, Thoroughness(level)).problems  # type: ignore[arg-type]
        assert (problem.kind, problem.entry, problem.blob) == ("checksum", OWNER[kind], STORED[kind])
        assert "the save recorded" in problem.detail


def test_a_flipped_bit_in_any_place_of_an_archive_that_matters_is_noticed_without_a_checksum(
    tmp_path: pathlib.Path,
) -> None:
    sound = archive()
    places = [sound.index(b"betas"), len(sound) - 10, sound.index(b"PK\1\2"), 0]
    for number, place in enumerate(places):
        snapshot = full_snapshot()
        blob = bytearray(sound)
        blob[place] ^= 0x04
        snapshot.blobs["0/model/object"] = bytes(blob)
        (problem,) = judge_one(snapshot, tmp_path / str(number), Thoroughness("data")).problems
        assert (problem.kind, problem.entry, problem.blob) == ("undecodable", "0/model/object", "0/model/object")


@pytest.mark.parametrize("axis", [-1, 2, 1])
def test_a_quantized_tensor_with_an_impossible_axis_is_reported(tmp_path: pathlib.Path, axis: int) -> None:
    snapshot = full_snapshot()
    blob = axis.to_bytes(8, "little", signed=True) + snapshot.blobs[STORED["quantized"]][8:]
    snapshot.blobs[STORED["quantized"]] = blob
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert (problem.kind, problem.entry) == ("undecodable", "0/model/quantized")


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in ("object", "quantized")])
def test_values_that_are_not_finite_are_reported_per_tensor(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    blob = np.frombuffer(snapshot.blobs[STORED[kind]], "f4").copy()
    blob[1], blob[2] = np.nan, -np.inf
    snapshot.blobs[STORED[kind]] = blob.tobytes()
    assert judge_one(snapshot, tmp_path, Thoroughness("data")).verdict == "unverifiable"
    report = judge_one(snapshot, tmp_path, Thoroughness("data", finite=True))
    (problem,) = report.problems
    owner = OWNER[kind].replace("1/", "0/")  # a sharded tensor is one, whoever holds the shard
    assert (problem.kind, problem.entry, problem.blob) == ("not-finite", owner, None)
    assert problem.detail == "1 NaN and 1 infinite of 12 elements"
    assert report.verdict == "damaged"


# -- damaged manifests -----------------------------------------------------------------------------------------------

TENSORS = [kind for kind in STORED if kind != "object"]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("location", ["../elsewhere", "/etc/passwd", "0/../../x", ""])
def test_a_location_that_leads_out_is_reported(tmp_path: pathlib.Path, kind: str, location: str) -> None:
    snapshot = full_snapshot()
    stored(snapshot, kind)["location"] = location
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert (problem.kind, problem.entry, problem.blob) == ("outside", OWNER[kind], location)


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("byte_range", [[9, 3], [-4, 8], [0, 1 << 63]])
def test_a_byte_range_that_is_none_is_reported(tmp_path: pathlib.Path, kind: str, byte_range: list[int]) -> None:
    snapshot = full_snapshot()
    stored(snapshot, kind)["byte_range"] = byte_range
    problems = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert [(problem.kind, problem.entry, problem.blob) for problem in problems] == [
        ("bad-range", OWNER[kind], STORED[kind])
    ]


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind != "quantized"])
def test_a_byte_range_of_another_length_than_the_tensor_is_reported(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    entry = stored(snapshot, kind)
    entry["byte_range"] = [0, 4 * int(np.prod(entry["shape"])) - 4]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert (problem.kind, problem.entry, problem.blob) == ("size-mismatch", OWNER[kind], STORED[kind])


@pytest.mark.parametrize("kind", ["slab", "chunk", "shard", "dtensor shard"])
@pytest.mark.parametrize(("field", "value"), [("dtype", "torch.float64"), ("shape", [2, 3])])
def test_dtype_and_shape_that_do_not_agree_with_the_rest_are_reported(
    tmp_path: pathlib.Path, kind: str, field: str, value: object
) -> None:
    snapshot = full_snapshot()
    stored(snapshot, kind)[field] = value
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert problem.kind == "size-mismatch"
    assert problem.entry is not None and problem.entry[1:] == OWNER[kind][1:]


@pytest.mark.parametrize("name", ["chunked", "ShardedTensor", "DTensor"])
@pytest.mark.parametrize("level", ["structure", "data"])
def test_a_dropped_shard_is_a_hole(tmp_path: pathlib.Path, name: str, level: Any) -> None:
    snapshot = full_snapshot()
    entry = snapshot.manifest[f"0/model/{name}"]
    del entry.get("chunks", entry.get("shards"))[1]
    report = judge_one(snapshot, tmp_path, Thoroughness(level))
    (problem,) = report.problems
    assert (problem.kind, problem.entry, problem.blob) == ("hole", f"0/model/{name}", None)
    assert "rows 1:2 of 4 are missing" in problem.detail


@pytest.mark.parametrize("name", ["chunked", "ShardedTensor", "DTensor"])
def test_a_shard_moved_onto_another_is_an_overlap(tmp_path: pathlib.Path, name: str) -> None:
    snapshot = full_snapshot()
    entry = snapshot.manifest[f"0/model/{name}"]
    entry.get("chunks", entry.get("shards"))[1]["offsets"] = [0, 0]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert (problem.kind, problem.entry) == ("overlap", f"0/model/{name}")


@pytest.mark.parametrize("start", [0, 4, 92])
def test_a_range_moved_onto_its_neighbour_in_a_slab_is_an_overlap(tmp_path: pathlib.Path, start: int) -> None:
    snapshot = full_snapshot()
    snapshot.manifest["0/model/slab_b"]["byte_range"] = [start, start + 48]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data", finite=True)).problems
    assert (problem.kind, problem.blob) == ("overlap", "batched/5ab")
    assert "slab_b" in f"{problem.entry} {problem.detail}"


def test_a_range_moved_beyond_the_end_of_its_slab_is_a_short_blob(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot()
    snapshot.manifest["0/model/slab_c"]["byte_range"] = [148, 196]
    (problem,) = judge_one(snapshot, tmp_path).problems
    assert (problem.kind, problem.entry, problem.detail) == ("short-blob", "0/model/slab_c", "144 of 196 bytes")


@pytest.mark.parametrize("other", ["0/model/dense", "0/model/object", "batched/5ab"])
def test_two_entries_in_the_same_bytes_are_an_overlap(tmp_path: pathlib.Path, other: str) -> None:
    snapshot = full_snapshot()
    snapshot.manifest["0/model/copy"]["location"] = other
    report = judge_one(snapshot, tmp_path)
    assert {(problem.kind, problem.blob) for problem in report.problems} == {("overlap", other)}


def test_entries_of_several_ranks_for_one_blob_are_no_overlap(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot()
    snapshot.manifest["1/model/copy"] = dict(snapshot.manifest["0/model/copy"])
    assert judge_one(snapshot, tmp_path, Thoroughness("data")).problems == ()


LEAVES = ["dense", "slab_b", "chunked", "ShardedTensor", "object", "quantized", "copy", "number"]


@pytest.mark.parametrize("name", [*LEAVES, "DTensor"])
def test_a_dropped_entry_is_missing(tmp_path: pathlib.Path, name: str) -> None:
    snapshot = full_snapshot()
    for rank in (0, 1) if name in ("DTensor",) else (0,):
        del snapshot.manifest[f"{rank}/model/{name}"]
    report = judge_one(snapshot, tmp_path, Thoroughness("structure"))
    (problem,) = (p for p in report.problems if p.kind == "missing-entry")
    assert (problem.entry, problem.blob) == (f"0/model/{name}", None)
    # without its first rank the tensor has a hole, too
    assert [p.kind for p in report.problems if p is not problem] == (["hole"] if name == "ShardedTensor" else [])


def test_the_entry_of_the_last_rank_of_a_sharded_tensor_is_missing(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot()
    del snapshot.manifest["1/model/ShardedTensor"]
    (problem,) = judge_one(snapshot, tmp_path).problems
    assert (problem.kind, problem.entry) == ("missing-entry", "1/model/ShardedTensor")


@pytest.mark.parametrize("name", [*LEAVES, "DTensor"])
def test_a_key_removed_from_its_container_is_reported(tmp_path: pathlib.Path, name: str) -> None:
    snapshot = full_snapshot()
    snapshot.manifest["0/model"]["keys"].remove(name)
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("structure")).problems
    assert (problem.kind, problem.entry) == ("missing-entry", f"0/model/{name}")
    assert "0/model does not name it" in problem.detail


@pytest.mark.parametrize("container", ["0/model", "0/items"])
def test_a_dropped_container_is_missing_once(tmp_path: pathlib.Path, container: str) -> None:
    snapshot = full_snapshot()
    del snapshot.manifest[container]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("structure")).problems
    assert (problem.kind, problem.entry) == ("missing-entry", container)


def test_a_dropped_nested_container_is_missing_once(tmp_path: pathlib.Path) -> None:
    manifest = {
        "0/o": {"type": "dict", "keys": ["state"]},
        "0/o/state": {"type": "dict", "keys": [0]},
        "0/o/state/0": {"type": "dict", "keys": ["step"]},
        "0/o/state/0/step": primitive(3),
    }
    assert check_structure(parse_manifest(metadata(manifest))).problems == ()
    for path in ("0/o/state", "0/o/state/0"):
        left = {key: entry for key, entry in manifest.items() if key != path}
        (problem,) = check_structure(parse_manifest(metadata(left))).problems
        assert (problem.kind, problem.entry) == ("missing-entry", path)


def test_a_gap_in_a_list_is_a_missing_entry(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot()
    del snapshot.manifest["0/items/1"]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("structure")).problems
    assert (problem.kind, problem.entry) == ("missing-entry", "0/items/1")


def test_a_key_of_every_rank_without_an_entry_is_reported_once(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot()
    del snapshot.manifest["0/model/copy"]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("structure")).problems
    assert problem.entry == "0/model/copy"
    assert "1 other rank" in problem.detail


@pytest.mark.parametrize("kind", ["ShardedTensor", "DTensor"])
def test_a_rank_without_any_entry_is_missing_where_tensors_are_sharded(tmp_path: pathlib.Path, kind: str) -> None:
    snapshot = full_snapshot()
    other = "DTensor" if kind == "ShardedTensor" else "ShardedTensor"
    for rank in (0, 1):
        del snapshot.manifest[f"{rank}/model/{other}"]
        snapshot.manifest[f"{rank}/model"]["keys"].remove(other)
    for path in [path for path in snapshot.manifest if path.startswith("1/")]:
        del snapshot.manifest[path]
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("structure")).problems
    assert (problem.kind, problem.entry) == ("missing-entry", f"1/model/{kind}")
    assert "rank 1 of 2 has no entry at all" in problem.detail


def test_a_rank_without_any_entry_is_only_warned_of_where_nothing_is_sharded(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    path = tmp_path / "10" / ".snapshot_metadata"
    path.write_bytes(path.read_bytes().replace(b'"world_size": 1', b'"world_size": 100000'))
    (report,) = judge(tmp_path)
    assert report.verdict == "sound"
    assert report.warnings == ("rank 1, 2, 3, 4, 5, … of 100000 has no entry at all",)


@pytest.mark.parametrize(("kind", "text"), [("int", "x"), ("bool", "yes"), ("float", "AAA="), ("bytes", "?")])
def test_a_primitive_that_is_none_is_undecodable(kind: str, text: str) -> None:
    manifest = {"0/a": {"type": "dict", "keys": ["x"]}, "0/a/x": {"type": kind, "serialized_value": text}}
    (problem,) = check_structure(parse_manifest(metadata(manifest))).problems
    assert (problem.kind, problem.entry) == ("undecodable", "0/a/x")


@pytest.mark.parametrize("content", [b'{"version": "0.1.0", "world', b"\0\0\0", b"[]", b'{"version": "9.0"}'])
def test_a_manifest_that_cannot_be_read_is_unreadable(tmp_path: pathlib.Path, content: bytes) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    (tmp_path / "10" / ".snapshot_metadata").write_bytes(content)
    (report,) = judge(tmp_path)
    assert report.verdict == "unreadable"
    assert [problem.kind for problem in report.problems] == ["unreadable-manifest"]


def test_ten_thousand_shards_in_three_dimensions_are_judged_at_once() -> None:
    shards = []
    for index in np.ndindex(25, 20, 20):
        tensor = tensor_entry("sharded/t_" + "_".join(map(str, index)), [2, 3, 4])
        shards.append({"offsets": [int(i) * s for i, s in zip(index, (2, 3, 4), strict=True)], "sizes": [2, 3, 4],
                       "tensor": tensor})  # fmt: skip

    def problems(held: list[Any]) -> list[str]:
        entries = {"0/m": {"type": "dict", "keys": ["t"]}, "0/m/t": {"type": "ShardedTensor", "shards": held}}
        return [problem.kind for problem in check_structure(parse_manifest(metadata(entries))).problems]

    assert problems(shards) == []
    assert problems(shards[:5000] + shards[5001:]) == ["hole"]
    moved = {**shards[5010], "offsets": [offset - 1 for offset in shards[5010]["offsets"]]}
    assert problems([*shards[:5010], moved, *shards[5011:]]) == ["overlap"]


# -- while others are at it ------------------------------------------------------------------------------------------


def verify_while(
    root: pathlib.Path, meddle: Callable[[pathlib.Path], None], how: Thoroughness
) -> list[CheckpointReport]:
    """Verifies all of a save directory; `meddle` is called for each checkpoint once that has been listed."""
    targets = find_targets(str(root), every=True, level="size")

    def meddled() -> Iterator[Target]:
        for target in targets.items:
            meddle(pathlib.Path(target.storage.url))
            yield target

    return list(verify(msgspec.structs.replace(targets, items=meddled()), how))


@pytest.mark.parametrize("level", ["size", "data"])
def test_a_checkpoint_that_is_pruned_meanwhile_is_said_to_have_vanished(tmp_path: pathlib.Path, level: Any) -> None:
    for step in (10, 20):
        write_checkpoint(local_writer(tmp_path), step)

    def prune(path: pathlib.Path) -> None:
        if path.name == "10":
            shutil.rmtree(path)

    first, second = verify_while(tmp_path, prune, Thoroughness(level))
    assert (first.verdict, first.problems) == (None, ())
    assert isinstance(first.error, CheckpointNotFoundError)
    assert "vanished" in first.error.message
    assert second.verdict in ("sound", "unverifiable")


def test_a_checkpoint_that_is_saved_again_meanwhile_is_not_called_damaged(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)

    def save_again(path: pathlib.Path) -> None:
        shutil.rmtree(path)
        write_checkpoint(local_writer(tmp_path), 10, {"weight": np.zeros(100)})

    (report,) = verify_while(tmp_path, save_again, Thoroughness("data"))
    assert (report.verdict, report.problems) == (None, ())
    assert isinstance(report.error, PreconditionError)


def test_a_blob_that_is_cut_between_listing_and_reading_is_no_damage_that_was_seen(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)

    def cut(path: pathlib.Path) -> None:
        (path / "0" / "model" / "weight").write_bytes(b"short")

    (report,) = verify_while(tmp_path, cut, Thoroughness("data"))
    assert (report.verdict, report.problems) == (None, ())


def test_blobs_that_are_newer_than_the_manifest_are_pointed_out(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    (tmp_path / "10" / "0" / "model" / "weight").write_bytes(b"short")
    os.utime(tmp_path / "10" / ".snapshot_metadata", (1.7e9, 1.7e9))
    (report,) = judge(tmp_path)
    assert report.warnings == ("1 of the damaged blobs are newer than the manifest: is it being saved again?",)


# -- links -----------------------------------------------------------------------------------------------------------


def test_links_inside_a_checkpoint_are_followed_and_those_that_lead_out_are_reported(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    model = tmp_path / "10" / "0" / "model"
    (tmp_path / "10" / "elsewhere").mkdir()
    model.rename(tmp_path / "10" / "elsewhere" / "model")
    model.symlink_to(tmp_path / "10" / "elsewhere" / "model")
    for level in ("size", "data"):
        assert judge(tmp_path, Thoroughness(level))[0].problems == ()  # type: ignore[arg-type]
    (tmp_path / "10" / "elsewhere" / "model").rename(tmp_path / "outside")
    model.unlink()
    model.symlink_to(tmp_path / "outside")
    for level in ("size", "data"):
        (problem,) = judge(tmp_path, Thoroughness(level))[0].problems  # type: ignore[arg-type]
        assert (problem.kind, problem.entry, problem.blob) == ("outside", "0/model/weight", "0/model/weight")


# -- executors and samples -------------------------------------------------------------------------------------------


class LateFirst(Executor):
    """Its first call is the last one to be done."""

    def __init__(self) -> None:
        self._first: Future[Any] | None = None
        self.order: list[int] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._first is None:
            self._first, self._call = future, functools.partial(function, *args, **kwargs)
            return future
        self.order.append(1)
        future.set_result(function(*args, **kwargs))
        if len(self.order) == 2:
            self.order.append(0)
            self._first.set_result(self._call())
        return future


def test_reports_come_in_the_order_of_the_checkpoints(tmp_path: pathlib.Path) -> None:
    for step in ("10", "20", "30"):
        full_snapshot(recorded=True).write(local_writer(tmp_path), step)
    how = Thoroughness("data")
    targets = find_targets(str(tmp_path), every=True, level="data")
    executor = LateFirst()
    found = [report.step for report in verify(targets, how, executor=executor)]
    assert executor.order == [1, 1, 0]
    assert found == [10, 20, 30]


class BreaksAtLast(Executor):
    """Its first call is never done: it breaks when the two others are."""

    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._futures.append(future)
        if len(self._futures) > 1:
            future.set_result(function(*args, **kwargs))
        if len(self._futures) == 3:
            broken = BrokenExecutor("a worker died")
            threading.Timer(0.3, self._futures[0].set_exception, [broken]).start()
        return future


def test_what_is_known_is_told_when_the_executor_breaks(tmp_path: pathlib.Path) -> None:
    for step in ("10", "20", "30"):
        full_snapshot(recorded=True).write(local_writer(tmp_path), step)
    found = []
    with pytest.raises(BrokenExecutor):
        for report in verify(
            find_targets(str(tmp_path), every=True, level="data"), Thoroughness("data"), executor=BreaksAtLast()
        ):
            found.append((report.step, report.verdict))
    assert found == [(20, "sound"), (30, "sound")]


def test_the_data_can_be_read_by_other_processes(tmp_path: pathlib.Path) -> None:
    damaged = full_snapshot(recorded=True)
    damaged.blobs["0/model/dense"] = bytes(48)
    full_snapshot(recorded=True).write(local_writer(tmp_path), "10")
    damaged.write(local_writer(tmp_path), "20")
    how = Thoroughness("data", finite=True)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        found = list(verify(find_targets(str(tmp_path), every=True, level="data"), how, executor=executor))
    assert found == judge(tmp_path, how, every=True)
    assert [report.verdict for report in found] == ["sound", "damaged"]


def test_all_samples_together_read_everything_once(tmp_path: pathlib.Path) -> None:
    snapshot = full_snapshot(recorded=True)
    snapshot.blobs["0/model/dense"] = bytes(48)
    reports = [judge_one(snapshot, tmp_path, Thoroughness("data", sample=Sample(n, 5))) for n in range(1, 6)]
    assert sum(report.bytes_read for report in reports) == sum(map(len, snapshot.blobs.values()))
    assert sorted(report.verdict or "" for report in reports) == ["damaged"] + ["sound"] * 4


def test_progress_ends_where_it_should(tmp_path: pathlib.Path) -> None:
    full_snapshot().write(local_writer(tmp_path), "10")
    full_snapshot().write(local_writer(tmp_path), "20")
    seen: list[Progress] = []
    targets = find_targets(str(tmp_path), every=True, level="data")
    list(verify(targets, Thoroughness("data"), on_progress=lambda progress: seen.append(copy(progress))))
    total = 2 * sum(map(len, full_snapshot().blobs.values()))
    assert (seen[-1].done, seen[-1].read_bytes, seen[-1].estimated_bytes) == (2, total, total)


# -- random damage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_to_the_blobs_of_a_random_snapshot_is_reported_for_that_blob(
    tmp_path: pathlib.Path, seed: int
) -> None:
    rng = random.Random(seed)
    while True:
        snapshot = random_snapshot(rng.randrange(1 << 30))
        needed = [location for location, blob in snapshot.blobs.items() if blob]
        if needed and snapshot.record is not None:
            break
    location = rng.choice(needed)
    blob = snapshot.blobs[location]
    how = rng.choice(("delete", "cut", "flip", "grow"))
    if how == "delete":
        del snapshot.blobs[location]
    elif how == "cut":
        snapshot.blobs[location] = blob[: rng.randrange(len(blob))]
    elif how == "flip":
        place = rng.randrange(len(blob))
        snapshot.blobs[location] = blob[:place] + bytes([blob[place] ^ (1 << rng.randrange(8))]) + blob[place + 1 :]
    else:
        snapshot.blobs[location] = blob + b"\0"
    (problem,) = judge_one(snapshot, tmp_path, Thoroughness("data")).problems
    assert problem.blob == location
    allowed = {"delete": {"missing-blob"}, "cut": {"short-blob", "checksum"}, "flip": {"checksum"}}
    assert problem.kind in allowed.get(how, {"checksum"})
