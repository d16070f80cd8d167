"""What is not whole is refused, and nothing is written."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tests.restore_weight.common import TABLE, left, restore, shard_entry
from tests.support.shards import Builder
from tests.support.snapshots import local_writer, tensor_entry


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([shard_entry(0, 4), shard_entry(8, 4)], "rows 4:8 of 12 are missing"),
        (
            [shard_entry(0, 8), shard_entry(6, 6)],
            "overlap: [0, 0] + [8, 4] of 0/m/t and [6, 0] + [6, 4] of 1/m/t",
        ),
        ([shard_entry(0, 6), shard_entry(6, 6, "int32")], "disagree on the dtype: float32 and int32"),
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_what_does_not_make_a_whole_tensor_is_refused_and_nothing_is_written(
    shards: list[Any], text: str, suffix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    for rank, shard in enumerate(shards):
        builder.write(f"10/s/{shard['offsets'][0]}", bytes(16 * shard["sizes"][0]))
        builder.manifest[f"{rank}/m/t"] = {"type": "ShardedTensor", "shards": [shard]}
    builder.finish(2)
    done = restore(run, "m/t", "-o", str(out / f"t.{suffix}"))
    assert (done.code, done.stdout) == (1, "")
    assert text in done.stderr
    assert done.stderr.count("error:") == 1
    assert left(out) == []


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_a_missing_or_short_blob_of_one_of_many_tensors_leaves_nothing(
    suffix: str, run: str, builder: Builder, out: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    if suffix == "pt":
        pytest.importorskip("torch")
    builder.dense("0/m/a", TABLE)
    builder.dense("0/m/b", TABLE)
    builder.finish()
    names = ["m/b"] if suffix == "npy" else ["m/*"]
    (out / f"t.{suffix}").write_bytes(b"old")
    os.truncate(tmp_path / "run/10/0/m/b", 100)
    done = restore(run, *names, "-o", str(out / f"t.{suffix}"), "--force")
    assert done.code == 1
    assert "0/m/b has 100 bytes, and it needs 192" in done.stderr
    (tmp_path / "run/10/0/m/b").unlink()
    assert restore(run, *names, "-o", str(out / f"t.{suffix}"), "--force").code == 1
    assert (out / f"t.{suffix}").read_bytes() == b"old"
    assert left(out) == [f"t.{suffix}"]


def test_a_location_that_leads_out_is_refused(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.manifest["0/m/t"] = tensor_entry("../../../etc/hostname", [1], "uint8")
    builder.finish()
    done = restore(run, "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.error["kind"]) == (1, "outside")


@pytest.mark.parametrize("location", ["half \ud800", "a\udcff", "x" * 5000, "a//b", "./0/m/t", "0/m/t/"])
def test_a_location_that_no_file_has_is_a_missing_blob(location: str, run: str, builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    builder.manifest["0/m/t"]["location"] = location
    builder.manifest["0/o"] = {"type": "object", "location": location, "serializer": "torch_save", "obj_type": "o"}
    builder.finish()
    for arguments in (["m/t", "--stats"], ["o"]):
        done = restore(run, *arguments, "--json")
        assert (done.code, done.error["kind"]) == (1, "missing-blob")


def test_an_incomplete_checkpoint_and_a_missing_step_are_not_there(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    local_writer(run)("30/0/m/t", b"half")
    for arguments in ((f"{run}/30",), (run, "--step", "30"), (run, "--step", "99")):
        done = restore(arguments[0], "m/t", "--stats", *arguments[1:])
        assert (done.code, done.stdout) == (3, "")
    assert ".snapshot_metadata is missing or empty" in restore(f"{run}/30", "m/t", "--stats").stderr
    assert restore(run, "m/t", "--stats").code == 0
