"""Which entry a name on the command line means."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.restore_weight.common import TABLE, left, load_npy, restore, write_two_ranks
from tests.support.shards import Builder
from tests.support.snapshots import encode, local_writer, tensor_entry


@pytest.mark.parametrize("name", ["rows", "cols", "only1"])
@pytest.mark.parametrize("prefix", ["0/m/", "1/m/", "m/", ""])
def test_a_sharded_table_is_whole_from_the_path_of_any_rank(
    name: str, prefix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    write_two_ranks(builder)
    done = restore(run, f"{prefix}{name}.weight", "-o", str(out / "t.npy"))
    assert done.code == 0
    assert np.array_equal(load_npy(out / "t.npy"), TABLE)
    assert f"m/{name}.weight: float32 [12, 4]" in done.stderr


def test_several_hits_are_candidates_and_none_is_picked(run: str, builder: Builder, out: pathlib.Path) -> None:
    write_two_ranks(builder)
    done = restore(run, "weight", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.stdout) == (3, "")
    assert sorted(done.error["candidates"]) == ["m/cols.weight", "m/only1.weight", "m/rows.weight"]
    assert left(out) == []


def test_no_hit_tells_the_nearest_names(run: str, builder: Builder) -> None:
    write_two_ranks(builder)
    done = restore(run, "row.weight", "--stats")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: row.weight: no such entry\nhint: the nearest names are: m/rows.weight")


def test_ranks_that_hold_different_tensors_need_to_be_told_apart(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.dense("1/m/t", TABLE + 1)
    builder.dense("0/m/same", TABLE)
    builder.dense("1/m/same", TABLE)
    builder.finish(2)
    done = restore(run, "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.error["candidates"]) == (3, ["0/m/t", "1/m/t"])
    assert "--rank" in done.error["hint"]
    assert restore(run, "m/*", "-o", str(out / "t.safetensors")).code == 3
    assert left(out) == []
    for arguments in (["m/t", "--rank", "1"], ["1/m/t"]):
        assert restore(run, *arguments, "-o", str(out / "t.npy"), "--force").code == 0
        assert np.array_equal(load_npy(out / "t.npy"), TABLE + 1)
    done = restore(run, "m/same", "-o", str(out / "t.npy"), "--force")
    assert done.code == 0
    assert "m/same: 2 ranks hold one each; comparing them" in done.stderr
    assert restore(run, "m/*", "--rank", "0", "-o", str(out / "t.safetensors")).code == 0


NAMES = [
    "layers[0].w",
    "[bold]x[/bold]",
    "a[/b",
    ":smile:",
    "a/b",
    "50%",
    "a%2Fb",
    "sp ace",
    "ü",
    "-1",
    "00",
    "*",
    "\x1b[2J",
]


def test_odd_names_are_found_and_printed_literally(tmp_path: pathlib.Path, out: pathlib.Path) -> None:
    root = tmp_path / "run[lr=0.1][/red]"
    builder = Builder(local_writer(root))
    for number, key in enumerate(NAMES):
        builder.write(f"10/b/{number}", np.full(2, number, "f4").tobytes())
        builder.manifest[f"0/m/{encode(key)}"] = tensor_entry(f"b/{number}", [2])
    builder.finish()
    for number, key in enumerate(NAMES):
        done = restore(f"{root}/10", f"m/{encode(key)}", "-o", str(out / "t.npy"), "--force")
        assert done.code == 0, done.stderr
        assert load_npy(out / "t.npy").tolist() == [number, number]
        shown = encode(key).replace("\x1b", "\\x1b")
        assert f"found 0/m/{shown}: float32 [2]\n" in done.stderr
    done = restore(f"{root}/10", "m/[bold]y[/bold]", "--stats")
    assert done.code == 3
    assert "error: m/[bold]y[/bold]: no such entry" in done.stderr
    done = restore(f"{root}/10", "0/m/*", "-o", str(out / "star.safetensors"), "--strip-prefix", "m/")
    assert "found 0/m/*: float32 [2]" in done.stderr  # the name of a tensor comes before a glob
    done = restore(f"{root}/10", "0/m/?*", "-o", str(out / "all.safetensors"), "--strip-prefix", "m/")
    assert done.code == 0, done.stderr
    assert set(load_file(out / "all.safetensors")) == set(NAMES)


def test_what_no_utf_8_can_hold_is_escaped_or_refused(tmp_path: pathlib.Path, out: pathlib.Path) -> None:
    root = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    builder = Builder(local_writer(root))
    builder.dense("0/m/whole", TABLE)
    builder.manifest["0/m/half \ud800"] = builder.manifest["0/m/whole"]
    builder.finish()
    done = restore(root, "m/*", "-o", str(out / "t.safetensors"))
    assert (done.code, left(out)) == (6, [])
    assert "a name in a .safetensors file must be UTF-8: m/half \\ud800" in done.stderr
    assert restore(root, "m/whole", "-o", str(out / "t.safetensors")).code == 0
    with safe_open(out / "t.safetensors", "np") as file:
        assert file.metadata()["source"].endswith("/run\\udcff/10")


def test_keys_that_read_alike_once_decoded_keep_the_spelling_of_the_manifest(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    builder.manifest["0/m/a%2Fb"] = tensor_entry("x", [2])
    builder.manifest["0/m/a/b"] = tensor_entry("y", [2])
    builder.write("10/x", np.zeros(2, "f4").tobytes())
    builder.write("10/y", np.ones(2, "f4").tobytes())
    builder.finish()
    assert restore(run, "m/a*", "-o", str(out / "t.safetensors")).code == 0
    assert {name: array[0] for name, array in load_file(out / "t.safetensors").items()} == {"m/a%2Fb": 0, "m/a/b": 1}
