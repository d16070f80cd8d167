"""Object stores."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np

from tests.restore_weight.common import TABLE, left, load_npy, restore
from tests.support.repository import ROOT
from tests.support.servers import Bucket, Controlled
from tests.support.shards import Builder, grid


def test_one_tensor_on_gcs_is_the_manifest_and_one_ranged_get(
    proxied: tuple[Bucket, Controlled], out: pathlib.Path
) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    for name in "atz":
        builder.dense(f"0/m/{name}", TABLE, slab=True)
    builder.finish()
    proxy.reset()
    done = restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.json["bytes_read"], done.json["path"]) == (0, 192, f"{bucket.url}/10")
    media = [(entry[1], entry[3]) for entry in proxy.stats(log=True)["log"] if "alt=media" in entry[1]]
    assert [span for _, span in media] == [None, "bytes=192-383"]
    assert proxy.stats()["n"] == 4
    assert np.array_equal(load_npy(out / "t.npy"), TABLE)


def test_a_storage_that_says_no_is_4_and_leaves_nothing(proxied: tuple[Bucket, Controlled], out: pathlib.Path) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: grid((12, 4), (6, 1))})
    builder.finish()
    proxy.configure(faults=[{"match": "t_6_0.*alt=media", "status": 403, "body": '{"error": {"message": "no"}}'}])
    done = restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy"))
    assert (done.code, done.stdout) == (4, "")
    assert "permission denied" in done.stderr
    assert left(out) == []


def test_an_answer_that_was_cut_is_no_damage(proxied: tuple[Bucket, Controlled], out: pathlib.Path) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.dense("0/m/t", TABLE)
    builder.finish()
    proxy.configure(faults=[{"match": "alt=media", "skip": 1, "status": 200, "body": "short!"}])
    done = restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy"), "--json")
    assert (done.code, done.error["type"]) == (4, "StorageError")
    assert "6 bytes of 192 from offset 0, and it had 192 when it was looked up" in done.error["message"]
    assert left(out) == []


def test_a_hiccup_is_survived(proxied: tuple[Bucket, Controlled], out: pathlib.Path) -> None:
    bucket, proxy = proxied
    builder = Builder(bucket.write)
    builder.sharded("m/t", TABLE, {0: grid((12, 4), (6, 1))})
    builder.finish()
    proxy.configure(
        faults=[{"match": "t_.*alt=media", "status": 503, "n": 3}, {"match": "t_0_0.*alt=media", "drop": True, "n": 1}]
    )
    assert restore(f"{bucket.url}/10", "m/t", "-o", str(out / "t.npy")).code == 0
    assert np.array_equal(load_npy(out / "t.npy"), TABLE)


def test_a_table_of_all_kinds_of_shardings_over_memory_storage_is_no_special_case(out: pathlib.Path) -> None:
    code = (
        "import sys, numpy as np\nfrom tests.support.shards import Builder, grid\nimport fsspec, snapctl\n"
        "fs = fsspec.filesystem('memory')\n"
        "b = Builder(lambda path, data: fs.pipe_file('/run/' + path, data))\n"
        "t = np.arange(60.).reshape(10, 6)\n"
        "b.sharded('m/t', t, {0: grid((10, 6), (3, 2))[::2], 1: grid((10, 6), (3, 2))[1::2]}); b.finish(2)\n"
        "assert np.array_equal(snapctl.read_tensor('memory://run', 'm/t', rows=(2, 9)), t[2:9])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
