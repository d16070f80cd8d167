"""Options, JSON, statistics."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np
import pytest

from tests.restore_weight.common import TABLE, left, load_npy, restore, write_simple, write_two_ranks
from tests.support.shards import Builder, random_array
from tests.support.snapshots import primitive, tensor_entry


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "x.npy", "--stats"],
        ["-o", "x.npy", "--into", "y.pt", "--as", "k"],
        ["--into", "y.pt"],
        ["--as", "k"],
        ["--stats", "--force"],
        ["--stats", "--format", "npy"],
        ["--stats", "--strip-prefix", "m/"],
        ["-o", "x.bin"],
        ["-o", "-"],
        ["-o", "-", "--format", "zip"],
        ["-o", "-", "--format", "npy", "--json"],
        ["-o", "x.npy", "--rows", "5"],
        ["-o", "x.npy", "--rows", "a:b"],
        ["-o", "x.npy", "--rows", "-3:4"],
        ["-o", "x.npy", "--dtype", "float5"],
        ["-o", "x.npy", "--dtype", "qint8"],
        ["-o", "x.npy", "--rank", "-1"],
        ["-o", "x.npy", "--rank", "1"],
        ["-o", "x.npy", "--rows", "0:13"],
        ["-o", "x.npy", "--rows", "5:4"],
        ["-o", "x.npy", "--rows", "0:" + "9" * 5000],
        ["-o", "x/", "--format", "npy"],
        ["-o", "x/.", "--format", "npy"],
        ["-o", "x.safetensors", "--strip-prefix", "other/"],
        ["-o", "x.safetensors", "--strip-prefix", "m/t"],
    ],
)
def test_what_makes_no_sense_is_2_and_writes_nothing(
    arguments: list[str], run: str, builder: Builder, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    monkeypatch.chdir(out)
    done = restore(run, "m/t", *arguments)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert left(out) == []


def test_no_name_is_2(run: str, builder: Builder) -> None:
    write_simple(builder)
    assert restore(run).code == 2


def test_rows_are_read_alone(run: str, builder: Builder, out: pathlib.Path) -> None:
    write_two_ranks(builder)
    for text, expected in (("2:5", TABLE[2:5]), (":3", TABLE[:3]), ("10:", TABLE[10:]), ("4:4", TABLE[4:4])):
        for name in ("rows", "cols"):
            done = restore(run, f"m/{name}.weight", "-o", str(out / "t.npy"), "--rows", text, "--force", "--json")
            assert done.code == 0
            assert np.array_equal(load_npy(out / "t.npy"), expected)
            assert (done.json["bytes_read"], done.json["tensors"][0]["shape"]) == (expected.nbytes, [*expected.shape])


def test_the_json_document_has_the_facts(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", random_array((5, 3), "bfloat16"))
    builder.finish()
    done = restore(run, "m/t", "-o", str(out / "t.npy"), "--dtype", "float32", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.json == {
        "path": f"{run}/10",
        "step": 10,
        "tensors": [
            {
                "path": "m/t",
                "entry": "0/m/t",
                "name": "m/t",
                "dtype": "float32",
                "shape": [5, 3],
                "size_bytes": 60,
                "output": str(out / "t.npy"),
                "stats": None,
            }
        ],
        "bytes_read": 30,
    }


def test_statistics_instead_of_a_file(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", np.array([[1, np.nan, -2], [np.inf, 4, 5]], ml_dtypes.bfloat16))
    builder.dense("0/m/i", np.array([1, 2, 2**62]))
    builder.finish()
    done = restore(run, "m/t", "--stats", "--json")
    assert done.json["tensors"][0]["stats"] == {
        "count": 6,
        "min": -2.0,
        "max": 5.0,
        "mean": 2.0,
        "nan": 1,
        "inf": 1,
        "first": [1.0, "NaN", -2.0, "Infinity", 4.0],
    }
    assert restore(run, "m/i", "--stats", "--json").json["tensors"][0]["stats"]["max"] == 2**62
    done = restore(run, "m/*", "--stats")
    assert done.code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["PATH", "DTYPE", "SHAPE", "MIN", "MAX", "MEAN", "NAN", "INF", "FIRST"]
    assert lines[1].split()[:2] == ["m/t", "bfloat16"]
    assert "4611686018427387904" in lines[2]


def test_statistics_are_of_the_values_as_they_would_be_written(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", np.array([70000, 1, -0.5], "f4"))
    builder.finish()
    found = restore(run, "m/t", "--stats", "--dtype", "float16", "--json").json["tensors"][0]
    assert (found["dtype"], found["stats"]["inf"], found["stats"]["max"]) == ("float16", 1, 1.0)
    found = restore(run, "m/t", "--stats", "--dtype", "int8", "--rows", "1:", "--json").json["tensors"][0]
    assert (found["dtype"], found["stats"]["first"]) == ("int8", [1, 0])


def test_what_has_no_statistics_is_said(run: str, builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    builder.manifest["0/m/n"] = primitive(3)
    builder.finish()
    done = restore(run, "m/*", "--stats")
    assert done.code == 0 and "warning: left out, since they are no tensors: m/n (int)" in done.stderr
    assert restore(run, "m/*", "--stats", "--json").json["warnings"] == [
        "left out, since they are no tensors: m/n (int)"
    ]
    done = restore(run, "*n", "--stats")
    assert (done.code, done.stdout) == (6, "")


def test_raw_tensors_need_no_torch_and_others_say_how_to_get_it(
    run: str, builder: Builder, out: pathlib.Path, no_torch: dict[str, str]
) -> None:
    builder.dense("0/m/t", random_array((4, 4), "bfloat16"))
    builder.dense("0/m/c", TABLE)
    builder.manifest["0/m/c"] |= {"serializer": "torch_save"}
    builder.manifest["0/m/q"] = tensor_entry("0/m/t", [2], "qint8", serializer="per_tensor_qtensor")
    builder.finish()
    assert restore(run, "m/t", "-o", str(out / "t.safetensors"), env=no_torch).code == 0
    assert restore(run, "m/t", "-o", str(out / "t.npy"), "--dtype", "float32", env=no_torch).code == 0
    assert restore(run, "m/t", "--stats", env=no_torch).code == 0
    for arguments in (["m/t", "-o", str(out / "t.pt")], ["m/c", "-o", str(out / "c.npy")], ["m/q", "--stats"]):
        done = restore(run, *arguments, env=no_torch)
        assert (done.code, done.stdout) == (6, "")
        assert done.stderr.endswith("hint: pip install 'snapctl[torch]'\n")
    assert left(out) == ["t.npy", "t.safetensors"]
