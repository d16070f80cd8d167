"""The real snapshots of tests/data, locally and on gs://."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.conftest import DATA
from tests.restore_weight.common import left, restore
from tests.support.servers import Bucket
from tests.support.shards import Builder
from tests.support.snapshots import tensor_entry


def _check_folder(url: str, expected: dict[str, Any], out: pathlib.Path, *more: str) -> None:
    done = restore(url, *expected, "-o", str(out / "all.safetensors"), "--json", *more)
    assert (done.code, done.stderr) == (0, "")
    loaded = load_file(out / "all.safetensors")
    by_path = {tensor["path"]: tensor for tensor in done.json["tensors"]}
    for path, facts in expected.items():
        array, said = loaded[path], by_path[path]
        assert (array.dtype.name, list(array.shape)) == (facts["dtype"], facts["shape"])
        assert hashlib.sha256(array.tobytes()).hexdigest() == facts["sha256"]
        assert (said["dtype"], said["shape"], said["size_bytes"]) == (facts["dtype"], facts["shape"], array.nbytes)


def _expected(folder: str, rank: int = 0) -> dict[str, Any]:
    found = json.loads((DATA / folder / "expected.json").read_bytes())
    return {
        path.removeprefix(f"{rank}/"): facts
        for path, facts in found.items()
        if path[0] not in "01" or path[0] == str(rank)
    }


FOLDERS = ["torchrec-2ranks", "dtensor-4ranks", "yaml-2022-10", "yaml-chunked-2022-08", "yaml-0.0.2"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_real_snapshot_is_restored_with_its_hashes(folder: str, out: pathlib.Path) -> None:
    if folder.startswith("yaml-0.0") or folder == "yaml-2022-10":
        pytest.importorskip("torch")
    _check_folder(str(DATA / folder), _expected(folder), out)


@pytest.mark.parametrize("folder", FOLDERS)
def test_and_on_gcs(folder: str, out: pathlib.Path, bucket: Bucket) -> None:
    if folder.startswith("yaml-0.0") or folder == "yaml-2022-10":
        pytest.importorskip("torch")
    bucket.upload(DATA / folder, folder)
    _check_folder(f"{bucket.url}/{folder}", _expected(folder), out)


def test_each_rank_of_a_real_snapshot_can_be_asked(out: pathlib.Path) -> None:
    _check_folder(str(DATA / "torchrec-2ranks/100"), _expected("torchrec-2ranks", 1), out, "--rank", "1")


def test_a_whole_model_leaves_torchsnapshot_with_the_keys_of_its_state_dict(out: pathlib.Path) -> None:
    path = out / "model.safetensors"
    done = restore(str(DATA / "torchrec-2ranks"), "model/*", "-o", str(path), "--strip-prefix", "model/")
    assert (done.code, done.stdout) == (0, "")
    expected = {key.removeprefix("model/"): facts for key, facts in _expected("torchrec-2ranks").items()}
    loaded = load_file(path)
    assert set(loaded) == set(expected)
    for key, facts in expected.items():
        assert hashlib.sha256(loaded[key].tobytes()).hexdigest() == facts["sha256"]
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "step": "100", "source": str(DATA / "torchrec-2ranks/100")}
    assert left(out) == ["model.safetensors"]


@pytest.mark.torch
def test_it_is_loaded_by_torch_with_equal_tensors(out: pathlib.Path, run: str, builder: Builder) -> None:
    torch = pytest.importorskip("torch")
    import safetensors.torch

    values = {
        dtype: torch.arange(7).to(getattr(torch, dtype)) for dtype in ("bfloat16", "float8_e5m2", "bool", "int16")
    }
    for dtype, value in values.items():
        builder.write(f"10/0/m/{dtype}", value.view(torch.uint8).numpy().tobytes())
        builder.manifest[f"0/m/{dtype}"] = tensor_entry(f"0/m/{dtype}", [7], dtype)
    builder.finish()
    assert restore(run, "m/*", "-o", str(out / "m.safetensors"), "--strip-prefix", "m/").code == 0
    loaded = safetensors.torch.load_file(out / "m.safetensors")
    assert {
        dtype: torch.equal(loaded[dtype].view(torch.uint8), v.view(torch.uint8)) for dtype, v in values.items()
    } == (dict.fromkeys(values, True))


def test_the_truncated_snapshot_is_refused_with_what_is_missing_and_nothing_is_written(out: pathlib.Path) -> None:
    for name, text in (("v", "4 bytes, and it needs 6"), ("big", "6004 bytes, and it needs 6006")):
        done = restore(str(DATA / "truncated-bfloat16/7"), f"a/{name}", "-o", str(out / "a.safetensors"))
        assert (done.code, done.stdout) == (1, "")
        assert f"error: 0/a/{name}: 0/a/{name} has {text}\n" in done.stderr
    assert left(out) == []
