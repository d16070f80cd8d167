"""`show A --diff B`, locally and on gs://."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pytest

from snapctl.save_record import BlobSum, SaveRecord, format_save_record
from tests.cli.test_cli_boundary import on_terminal
from tests.support.command import Finished
from tests.support.places import SaveDir
from tests.support.repository import DATA
from tests.support.snapshots import Write, metadata, primitive, tensor_entry, write_checkpoint

Run = Callable[..., Finished]


def floats(*values: float) -> Any:
    return np.array(values, "f4")


def save(
    write: Write,
    step: int,
    blobs: dict[str, bytes],
    entries: dict[str, Any],
    *,
    world_size: int = 1,
    record: bool = True,
) -> None:
    """A checkpoint with the checksums that snapctl records."""
    for location, data in blobs.items():
        write(f"{step}/{location}", data)
    content = metadata(entries, world_size)
    if record:
        sums = {location: BlobSum(len(data), google_crc32c.value(data)) for location, data in blobs.items()}
        head = BlobSum(len(content), google_crc32c.value(content))
        write(f"{step}/.snapctl/save.json", format_save_record(SaveRecord(time.time(), world_size, head, blobs=sums)))
    write(f"{step}/.snapshot_metadata", content)


def save_tensors(write: Write, step: int, tensors: dict[str, Any], *, record: bool = True) -> None:
    entries: dict[str, Any] = {"0/model": {"type": "dict", "keys": list(tensors)}}
    blobs = {}
    for name, array in tensors.items():
        blobs[f"0/model/{name}"] = array.tobytes()
        entries[f"0/model/{name}"] = tensor_entry(f"0/model/{name}", array.shape, array.dtype.name)
    save(write, step, blobs, entries, record=record)


@pytest.fixture
def two(save_dir: SaveDir) -> SaveDir:
    """From 10 to 20: one tensor each is added, removed, of another shape, dtype and content, and one is the same."""
    save_tensors(
        save_dir.write,
        10,
        {
            "same": floats(1, 2),
            "content": floats(1, 2),
            "shape": floats(1, 2),
            "dtype": floats(1, 2),
            "removed": floats(1),
        },
    )
    save_tensors(
        save_dir.write,
        20,
        {
            "same": floats(1, 2),
            "content": floats(1, 3),
            "shape": floats(1, 2, 3),
            "dtype": np.array([1, 2], "f8"),
            "added": floats(1),
        },
    )
    return save_dir


def test_people_see_a_table_of_what_is_different(snapctl_inside: Run, two: SaveDir) -> None:
    done = snapctl_inside("show", f"{two.url}/10", "--diff", f"{two.url}/20")
    assert (done.code, done.stderr) == (1, "")
    heads, counts, table = done.stdout.split("\n\n")
    assert [line.split()[0] for line in heads.splitlines()[1:]] == ["A", "B"]
    assert heads.splitlines()[2].endswith(f"{two.url}/20")
    assert counts == "1 added, 1 removed, 3 changed; 1 the same"
    assert table.splitlines() == [
        "CHANGE   PATH           A            B",
        "content  model/content  float32 [2]  float32 [2]",
        "shape    model/shape    float32 [2]  float32 [3]",
        "dtype    model/dtype    float32 [2]  float64 [2]",
        "added    model/added    -            float32 [1]",
        "removed  model/removed  float32 [1]  -",
    ]


def test_programs_get_a_document(snapctl_inside: Run, two: SaveDir) -> None:
    done = snapctl_inside("show", two.url, "--step", "10", "--diff", two.url, "--json")
    assert (done.code, done.stderr) == (1, "")
    found = done.json
    assert set(found) == {"a", "b", "added", "removed", "changed", "same", "not_compared"}
    assert (found["a"]["step"], found["b"]["step"], found["b"]["world_size"]) == (10, 20, 1)
    assert found["b"]["path"] == f"{two.url}/20"
    assert [entry["path"] for entry in (*found["added"], *found["removed"])] == ["model/added", "model/removed"]
    assert [(item["path"], item["changes"]) for item in found["changed"]] == [
        ("model/content", ["content"]),
        ("model/shape", ["shape"]),
        ("model/dtype", ["dtype"]),
    ]
    assert found["changed"][1]["a"]["shape"] == [2] and found["changed"][1]["b"]["shape"] == [3]
    assert (found["same"], found["not_compared"]) == (1, [])


def test_what_is_the_same_is_0(snapctl_inside: Run, two: SaveDir) -> None:
    done = snapctl_inside("show", f"{two.url}/10", "--diff", f"{two.url}/10")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "no differences; 5 the same"
    chosen = snapctl_inside("show", f"{two.url}/10", "--diff", f"{two.url}/20", "--entries", "*/same", "--json")
    assert (chosen.code, chosen.json["same"], chosen.json["changed"]) == (0, 1, [])


def test_content_without_checksums_is_said_not_to_be_compared(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    save_tensors(place.write, 10, {"w": floats(1, 2), "v": floats(1)})
    save_tensors(place.write, 20, {"w": floats(1, 3), "v": floats(1)}, record=False)
    done = snapctl_inside("show", f"{tmp_path}/10", "--diff", f"{tmp_path}/20")
    assert done.code == 0
    assert done.stdout.splitlines()[-1] == "no differences; 0 the same; content of 2 not compared"
    assert done.stderr == "warning: content not compared: model/w, model/v: no checksum was recorded in B\n"
    found = snapctl_inside("show", f"{tmp_path}/20", "--diff", f"{tmp_path}/10", "--json")
    assert (found.code, found.stderr) == (0, "")
    assert found.json["not_compared"][0] == {"path": "model/w", "reason": "no checksum was recorded in A"}


def test_what_the_bucket_keeps_stands_in_for_what_was_not_recorded(snapctl_inside: Run, bucket: Any) -> None:
    for step, last in ((10, 2), (20, 3)):
        tensors = {"w": floats(1, last), "v": floats(1)}
        save_tensors(lambda path, data: bucket.write(f"run/{path}", data), step, tensors, record=step == 10)
    done = snapctl_inside("show", f"{bucket.url}/run/10", "--diff", f"{bucket.url}/run/20", "--json")
    assert (done.code, done.json["same"], done.json["not_compared"]) == (1, 1, [])
    assert [item["path"] for item in done.json["changed"]] == ["model/w"]


def test_a_record_that_speaks_of_another_manifest_is_not_used(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    for step in (10, 20):
        save_tensors(place.write, step, {"w": floats(step)})
    write_checkpoint(lambda path, data: place.write(path, data), 20, {"w": floats(10)})
    done = snapctl_inside("show", f"{tmp_path}/10", "--diff", f"{tmp_path}/20", "--entries", "model/*")
    assert done.code == 0
    assert "saved again by something else than snapctl" in done.stderr
    assert "no checksum was recorded in B" in done.stderr


def test_values_in_the_manifest_are_compared(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    for step, text in ((10, "a b"), (20, "a\x1b[31mb")):
        entries = {
            "0/extra_state": {"type": "dict", "keys": ["step", "name", "rate"]},
            "0/extra_state/step": primitive(step),
            "0/extra_state/name": primitive(text),
            "0/extra_state/rate": primitive(0.5 if step == 10 else 1),
        }
        save(place.write, step, {}, entries)
    done = snapctl_inside("show", f"{tmp_path}/10", "--diff", f"{tmp_path}/20")
    assert done.code == 1
    assert done.stdout.splitlines()[-3:] == [
        "value   extra_state/step  int 10     int 20",
        "value   extra_state/name  str a b    str a\\x1b[31mb",
        "type    extra_state/rate  float 0.5  int 1",
    ]


def test_repeated_layers_are_one_line_with_group(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    for step in (10, 20):
        save_tensors(place.write, step, {f"layers.{number}.weight": floats(step) for number in range(12)})
    arguments = ("show", f"{tmp_path}/10", "--diff", f"{tmp_path}/20", "--group")
    assert snapctl_inside(*arguments).stdout.splitlines()[-1] == (
        "content  model/layers.#.weight ×12  float32 [1]  float32 [1]"
    )
    found = snapctl_inside(*arguments, "--json").json
    assert found["groups"] == [
        {"path": "model/layers.#.weight", "kind": "changed", "changes": ["content"], "count": 12}
    ]
    assert len(found["changed"]) == 12


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_tables_fit_their_terminal(two: SaveDir, columns: int) -> None:
    code, text = on_terminal("show", f"{two.url}/10", "--diff", f"{two.url}/20", columns=columns, env={"NO_COLOR": "1"})
    assert code == 1
    assert max(map(len, text.splitlines())) <= columns
    assert "model/content" in text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}/10", "--diff", "{}/30"], 3, "no such directory"),
        (["{}/30", "--diff", "{}/10"], 3, "no such directory"),
        (["{}/10", "--diff", "{}/40"], 3, "incomplete"),
        (["{}/10", "--diff", "{}/50"], 1, ".snapshot_metadata"),
        (["{}/10", "--diff", "{}/20", "--depth", "1"], 2, "--diff goes with none of"),
        (["{}/10", "--diff", "{}/20", "--rank", "0"], 2, "--diff goes with none of"),
        (["{}/10", "--diff", "{}/20", "--values"], 2, "--diff goes with none of"),
        (["{}/10", "--diff", ""], 2, "not a path"),
    ],
)
def test_what_makes_no_sense_or_is_not_there(
    snapctl_inside: Run, tmp_path: pathlib.Path, arguments: list[str], code: int, text: str
) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    for step in (10, 20):
        write_checkpoint(place.write, step)
    write_checkpoint(place.write, 40, complete=False)
    place.write("50/.snapshot_metadata", b"{")
    done = snapctl_inside("show", *[argument.format(tmp_path) for argument in arguments])
    assert (done.code, done.stdout) == (code, "")
    assert text in done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir() if path.is_dir()))
def test_every_real_snapshot_is_the_same_as_itself(snapctl_inside: Run, name: str) -> None:
    done = snapctl_inside("show", str(DATA / name), "--diff", str(DATA / name), "--json")
    assert done.code == 0
    assert (done.json["added"], done.json["removed"], done.json["changed"]) == ([], [], [])
