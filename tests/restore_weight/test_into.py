"""Putting a tensor into a state dict."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.restore_weight.common import TABLE, left, restore
from tests.support.shards import Builder


@pytest.mark.torch
def test_a_tensor_is_put_into_a_state_dict_in_place_of_what_is_there(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE)
    builder.finish()
    tied = torch.zeros(12, 4)
    torch.save({"emb.weight": tied, "head.weight": tied, "b": torch.ones(2), "n": 3}, out / "s.pt")
    (out / "s.pt").chmod(0o640)
    done = restore(run, "m/t", "--into", str(out / "s.pt"), "--as", "emb.weight", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.json["tensors"][0]["output"] == str(out / "s.pt")
    state = torch.load(out / "s.pt")
    assert torch.equal(state["emb.weight"], torch.from_numpy(TABLE))
    assert torch.equal(state["head.weight"], state["emb.weight"])  # they were one, and still are
    assert (state["b"].tolist(), state["n"]) == ([1, 1], 3)
    assert os.stat(out / "s.pt").st_mode & 0o777 == 0o640
    assert left(out) == ["s.pt"]


@pytest.mark.torch
def test_what_does_not_fit_into_the_state_dict_leaves_it_as_it_was(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE)
    builder.dense("0/m/u", TABLE)
    builder.finish()
    state = {"w": torch.zeros(12, 4), "half": torch.zeros(12, 4).half(), "short": torch.zeros(3, 4), "n": 3}
    torch.save(state, out / "s.pt")
    before = (out / "s.pt").read_bytes()
    into = ["--into", str(out / "s.pt"), "--as"]
    for arguments, code, text in (
        (["m/t", *into, "short"], 6, "short is float32 [3, 4], and the tensor is float32 [12, 4]"),
        (["m/t", *into, "half"], 6, "hint: --dtype float16 converts"),
        (["m/t", *into, "n"], 6, "n is a int, not a tensor"),
        (["m/t", *into, "x"], 3, "no such key: x"),
        (["m/t", "m/u", *into, "w"], 2, "--into takes one tensor"),
        (["m/t", "--into", str(out / "none.pt"), "--as", "w"], 3, "no such file"),
    ):
        done = restore(run, *arguments)
        assert (done.code, done.stdout) == (code, ""), done.stderr
        assert text in done.stderr
    (out / "junk.pt").write_bytes(b"junk")
    assert restore(run, "m/t", "--into", str(out / "junk.pt"), "--as", "w").code == 2
    assert (out / "s.pt").read_bytes() == before
    assert left(out) == ["junk.pt", "s.pt"]
    assert restore(run, "m/t", *into, "half", "--dtype", "float16").code == 0
    assert torch.equal(torch.load(out / "s.pt")["half"], torch.from_numpy(TABLE).half())


@pytest.mark.torch
def test_what_is_there_without_memory_or_with_shared_memory_is_replaced_and_what_is_not_dense_refused(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    builder.dense("0/m/t", TABLE)
    builder.finish()
    state = {
        "meta": torch.empty(12, 4, device="meta"),
        "expanded": torch.zeros(1, 4).expand(12, 4),
        "turned": torch.zeros(4, 12).t(),
        "sparse": torch.zeros(12, 4).to_sparse(),
    }
    torch.save(state, out / "s.pt")
    for key in ("meta", "expanded", "turned"):
        done = restore(run, "m/t", "--into", str(out / "s.pt"), "--as", key)
        assert done.code == 0
        assert torch.equal(torch.load(out / "s.pt")[key], torch.from_numpy(TABLE)), key
    done = restore(run, "m/t", "--into", str(out / "s.pt"), "--as", "sparse")
    assert (done.code, done.stdout) == (6, "")
    assert "sparse is a tensor of layout sparse_coo, and the tensor is dense" in done.stderr
