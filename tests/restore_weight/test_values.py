"""Entries that are no tensors."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.restore_weight.common import TABLE, left, restore
from tests.support.shards import Builder
from tests.support.snapshots import primitive


def _values(builder: Builder) -> None:
    builder.dense("0/m/t", TABLE)
    for key, value in {"step": 7, "name": "x: y", "ok": True, "lr": 0.5}.items():
        builder.manifest[f"0/extra/{key}"] = primitive(value)
    builder.manifest["0/extra/bad"] = {"type": "float", "serialized_value": "!", "replicated": False, "readable": None}
    builder.finish()


def test_inline_values_are_printed_when_there_is_no_file_for_them(run: str, builder: Builder) -> None:
    _values(builder)
    done = restore(run, "extra/step")
    assert (done.code, done.stdout, done.stderr) == (0, "7\n", "found 0/extra/step: int\n")
    done = restore(run, "extra/step", "extra/name", "extra/ok", "lr")
    assert [line.split(": ", 1)[1].strip() for line in done.stdout.splitlines()] == ["7", "x: y", "True", "0.5"]
    done = restore(run, "extra/n*", "extra/lr", "--json")
    values = [(value["path"], value["type"], value["value"]) for value in done.json["values"]]
    assert values == [("extra/name", "str", "x: y"), ("extra/lr", "float", 0.5)]
    assert done.json["tensors"] == []
    assert restore(run, "extra/bad").code == 1


def test_a_tensor_without_a_file_for_it_is_a_wrong_command_line(run: str, builder: Builder) -> None:
    _values(builder)
    done = restore(run, "m/t")
    assert (done.code, done.stdout) == (2, "")
    assert "--output FILE, --into FILE.pt --as KEY, or --stats" in done.stderr


def test_what_a_file_has_no_room_for_is_said(run: str, builder: Builder, out: pathlib.Path) -> None:
    _values(builder)
    done = restore(run, "*", "-o", str(out / "t.safetensors"))
    assert done.code == 0
    assert "warning: left out, since they are no tensors: extra/step (int)" in done.stderr
    done = restore(run, "extra/step", "-o", str(out / "u.safetensors"))
    assert (done.code, left(out)) == (6, ["t.safetensors"])
    assert restore(run, "extra/*", "-o", str(out / "u.npy")).code == 6
    assert restore(run, "m/*", "extra/st*", "-o", str(out / "u.npy")).code == 0


@pytest.mark.torch
def test_objects_are_loaded_weights_only_and_others_refused_by_name(
    run: str, builder: Builder, out: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch")
    import datetime
    import io

    def entry(key: str, value: Any, kind: str) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        builder.write(f"10/0/o/{key}", buffer.getvalue())
        builder.manifest[f"0/o/{key}"] = {"type": "object", "location": f"0/o/{key}", "serializer": "torch_save", "obj_type": kind, "replicated": False}  # fmt: skip  # noqa: E501

    entry("good", {"a": [1, 2.5], "t": torch.ones(2)}, "builtins.dict")
    entry("bad", datetime.datetime(2026, 1, 1), "datetime.datetime")
    builder.finish()
    done = restore(run, "o/good", "--json")
    assert done.json["values"][0]["value"] == {"a": [1, 2.5], "t": "tensor([1., 1.])"}
    assert restore(run, "o/good", "-o", str(out / "o.pt")).code == 0
    assert torch.load(out / "o.pt")["a"] == [1, 2.5]
    for arguments in (["o/bad"], ["o/bad", "-o", str(out / "p.pt")], ["o/*", "-o", str(out / "p.pt")]):
        done = restore(run, *arguments)
        assert (done.code, done.stdout) == (6, "")
        assert "0/o/bad: an object of datetime.datetime that would have to be unpickled" in done.stderr
    assert left(out) == ["o.pt"]


def test_an_unknown_type_is_named_only_by_what_needs_it(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.manifest["0/m/q"] = {"type": "Quux", "location": "x"}
    builder.finish()
    done = restore(run, "m/q")
    assert (done.code, "of type Quux" in done.stderr) == (6, True)
    assert restore(run, "m/t", "-o", str(out / "t.npy")).code == 0
    done = restore(run, "m/*", "-o", str(out / "t.safetensors"))
    assert (done.code, "m/q (Quux)" in done.stderr) == (0, True)
