"""list, latest and show: their answers, options, JSON and exit codes, on real and on hand-made snapshots."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.command import Finished, unprivileged
from tests.support.command import snapctl as run_snapctl
from tests.support.repository import DATA
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import Write, local_writer, metadata, primitive, tensor_entry, write_checkpoint

Snapctl = Callable[..., Finished]
REAL = sorted(path.parent.parent for path in DATA.glob("*/*/.snapshot_metadata"))


def marker(metrics: dict[str, Any], when: str = "2026-11-30T12:00:00Z") -> bytes:
    return json.dumps({"partition": "p", "finished_at": when, "metrics": metrics}).encode()


@pytest.fixture
def evaluated(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 10 to 50 with markers and metrics of several kinds, and an incomplete 60."""
    write = local_writer(tmp_path / "run")
    for step in (10, 20, 30, 40, 50):
        write_checkpoint(write, step)
    write_checkpoint(write, 60, complete=False)
    write("10/evaled_by/val_DONE", marker({"auc": 0.5, "loss": 0.0}))
    write("20/evaled_by/val_DONE", marker({"auc": 0.9, "loss": 0.2}))
    write("30/evaled_by/val_DONE", marker({"auc": 0.9, "loss": "NaN"}))
    write("40/evaled_by/val_DONE", marker({"auc": "Infinity", "val/odd": 1}))
    write("30/evaled_by/test_DONE", b"")
    write("20/PINNED", b"")
    return tmp_path / "run"


def steps(done: Finished) -> list[int]:
    return [item["step"] for item in done.json["checkpoints"]]


# -- real snapshots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "gs"])
@pytest.mark.parametrize("save_dir", REAL, ids=lambda path: path.name)
def test_the_three_commands_answer_for_every_real_snapshot(
    save_dir: pathlib.Path, where: str, snapctl: Snapctl, request: pytest.FixtureRequest
) -> None:
    url = str(save_dir)
    if where == "gs":
        bucket: Bucket = request.getfixturevalue("bucket")
        bucket.upload(save_dir, "run")
        url = f"{bucket.url}/run"
    (step,) = (path.name for path in save_dir.iterdir() if path.name.isdecimal())
    listed = snapctl("list", url, "--long", "--json").json
    (found,) = listed["checkpoints"]
    assert listed["save_dir"] == url
    files = [path for path in (save_dir / step).rglob("*") if path.is_file()]
    assert (found["step"], found["path"], found["state"]) == (int(step), f"{url}/{step}", "complete")
    assert (found["files"], found["size_bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    latest = snapctl("latest", url)
    assert (latest.code, latest.stdout, latest.stderr) == (0, f"{url}/{step}\n", "")
    shown = snapctl("show", f"{url}/{step}", "--json").json
    assert (shown["step"], shown["state"], shown["path"]) == (int(step), "complete", f"{url}/{step}")
    by_path = {entry["path"]: entry for entry in shown["entries"]}
    expected = save_dir / "expected.json"
    for name, facts in json.loads(expected.read_text()).items() if expected.exists() else ():
        path = name if name in by_path else name.partition("/")[2]
        if shown["version"] != "0.0.1":
            assert (by_path[path]["dtype"], by_path[path]["shape"]) == (facts["dtype"], facts["shape"])
    assert snapctl("show", url).stdout == snapctl("show", f"{url}/{step}").stdout


def test_show_tells_what_a_torchrec_snapshot_holds(snapctl: Snapctl) -> None:
    shown = snapctl("show", str(DATA / "torchrec-2ranks"), "--json").json
    assert (shown["version"], shown["world_size"], shown["blobs"], shown["size_bytes"]) == ("0.1.0", 2, 2, 6184)
    assert shown["extra_state"] == {"step": 100, "walltime": 12.5}
    table = {entry["path"]: entry for entry in shown["entries"]}["model/ebc.embedding_bags.t_tw.weight"]
    assert table == {
        "path": "model/ebc.embedding_bags.t_tw.weight", "type": "ShardedTensor", "dtype": "float32", "shape": [50, 4],
        "size_bytes": 800, "ranks": [1], "replicated": False, "shards": 1, "value": None,
    }  # fmt: skip


# -- list ------------------------------------------------------------------------------------------------------------


def test_list_shows_a_table_in_the_order_of_steps(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    done = snapctl("list", str(evaluated))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["STEP", "STATE", "CREATED", "EVALUATED"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30", "40", "50"]
    assert "complete, pinned" in lines[2] and lines[3].endswith("test, val") and lines[5].endswith("-")
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [10, 20, 30, 40, 50]),
        (["--all"], [10, 20, 30, 40, 50, 60]),
        (["-a", "--reverse"], [60, 50, 40, 30, 20, 10]),
        (["--limit", "2"], [40, 50]),
        (["--limit", "2", "--reverse"], [50, 40]),
        (["--limit", "99"], [10, 20, 30, 40, 50]),
        (["--evaluated-by", "val"], [10, 20, 30, 40]),
        (["--evaluated-by", "val", "--evaluated-by", "test"], [30]),
        (["--not-evaluated-by", "val"], [50]),
        (["--evaluated-by", "val", "--not-evaluated-by", "test", "--limit", "1"], [40]),
        (["--evaluated-by", "nobody"], []),
    ],
)
def test_list_filters(evaluated: pathlib.Path, options: list[str], expected: list[int], snapctl: Snapctl) -> None:
    done = snapctl("list", str(evaluated), "--json", *options)
    assert (done.code, steps(done)) == (0, expected)
    quiet = snapctl("list", str(evaluated), "-q", *options)
    assert quiet.stdout.splitlines() == [f"{evaluated}/{step}" for step in expected]


def test_list_long_adds_sizes_and_metrics(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    done = snapctl("list", "-l", str(evaluated))
    assert done.stdout.splitlines()[0].split()[-5:] == ["SIZE", "FILES", "SPACING", "SAVE", "METRICS"]
    assert "val/auc=0.9, val/loss=NaN" in done.stdout
    items = {item["step"]: item for item in snapctl("list", "-l", "--json", str(evaluated)).json["checkpoints"]}
    assert items[30]["metrics"] == {"val": {"auc": 0.9, "loss": "NaN"}}
    assert items[40]["metrics"] == {"val": {"auc": "Infinity", "val/odd": 1.0}}
    files = [path for path in (evaluated / "10").rglob("*") if path.is_file()]
    assert items[10]["files"] == len(files) == 3
    assert items[10]["size_bytes"] == sum(path.stat().st_size for path in files)
    short = snapctl("list", "--json", str(evaluated)).json["checkpoints"][0]
    assert (short["size_bytes"], short["files"], short["pinned"]) == (None, None, False)
    assert short["created_at"].endswith("Z")


def test_an_empty_list_is_0(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    done = snapctl("list", str(tmp_path))
    assert (done.code, done.stdout) == (0, "")
    assert snapctl("list", str(tmp_path), "--json").json == {"save_dir": str(tmp_path), "checkpoints": []}


def test_list_names_the_parent_of_a_checkpoint(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    done = snapctl("list", f"{evaluated}/10")
    assert (done.code, done.stdout) == (2, "")
    assert f"hint: its save directory is {evaluated}" in done.stderr


def restricted(*arguments: str) -> Finished:
    """The command without root's power to pass over permissions."""
    return run_snapctl(*arguments, before=unprivileged())


def test_a_step_that_may_not_be_entered_is_unreadable_and_makes_5(evaluated: pathlib.Path) -> None:
    (evaluated / "40").chmod(0)
    done = restricted("list", str(evaluated))
    assert done.code == 5
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]][3] == ["40", "unreadable"]
    assert done.stderr == f"warning: {evaluated}/40: Permission denied\n"
    quiet = restricted("list", "-q", str(evaluated))
    assert quiet.code == 5 and f"{evaluated}/40" not in quiet.stdout.splitlines()
    assert restricted("list", str(evaluated), "--json").json["checkpoints"][3]["state"] == "unreadable"


def test_a_save_directory_that_may_not_be_listed_is_4(evaluated: pathlib.Path) -> None:
    evaluated.chmod(0)
    for command in ("list", "latest", "show"):
        done = restricted(command, str(evaluated))
        assert (done.code, done.stdout) == (4, "")
        assert done.stderr == f"error: {evaluated}: Permission denied\n"


# -- latest ----------------------------------------------------------------------------------------------------------


def test_latest_prints_a_bare_path_or_a_step(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    assert snapctl("latest", str(evaluated)).stdout == f"{evaluated}/50\n"
    assert snapctl("latest", str(evaluated), "--print", "step").stdout == "50\n"
    assert snapctl("latest", str(evaluated), "--print", "path", "--print0").stdout == f"{evaluated}/50\0"
    found = snapctl("latest", str(evaluated), "--json", "--evaluated-by", "test").json
    assert found["step"] == 30 and found["evaluated_by"] == ["test", "val"]
    assert set(found) == {"step", "path", "created_at", "evaluated_by", "metrics"}


@pytest.mark.parametrize(
    ("options", "step"),
    [
        (["--evaluated-by", "val"], 40),
        (["--not-evaluated-by", "val"], 50),
        (["--best", "auc:max"], 30),
        (["--best", "val/auc:max"], 30),
        (["--best", "auc:min"], 10),
        (["--best", "loss:min"], 10),
        (["--best", "loss:max"], 20),
        (["--best", "val/val/odd:max"], 40),
        (["--best", "auc:max", "--not-evaluated-by", "test"], 20),
    ],
)
def test_latest_by_markers_and_metrics(
    evaluated: pathlib.Path, options: list[str], step: int, snapctl: Snapctl
) -> None:
    done = snapctl("latest", str(evaluated), "--print", "step", *options)
    assert (done.code, done.stdout) == (0, f"{step}\n"), done.stderr


@pytest.mark.parametrize("options", [["--evaluated-by", "nobody"], ["--best", "nix:max"], ["--best", "test/auc:max"]])
def test_latest_is_1_when_none_fits(evaluated: pathlib.Path, options: list[str], snapctl: Snapctl) -> None:
    for extra in ([], ["--missing-ok"]):
        done = snapctl("latest", str(evaluated), *options, *extra)
        assert (done.code, done.stdout) == (1, "")
        assert "none of 5 complete checkpoints fits" in done.stderr


def test_latest_wants_the_partition_of_a_metric_that_several_carry(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    (evaluated / "50/evaled_by").mkdir()
    (evaluated / "50/evaled_by/test_DONE").write_bytes(marker({"auc": 0.1}))
    done = snapctl("latest", str(evaluated), "--best", "auc:max")
    assert done.code == 2 and "test/auc or val/auc" in done.stderr
    assert snapctl("latest", str(evaluated), "--best", "test/auc:max", "--print", "step").stdout == "50\n"


def test_latest_and_its_age(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    assert snapctl("latest", str(evaluated), "--max-age", "2h").code == 0
    then = time.time() - 3 * 3600
    os.utime(evaluated / "50/.snapshot_metadata", (then, then))
    done = snapctl("latest", str(evaluated), "--max-age", "2h")
    assert (
        (done.code, done.stdout) == (1, f"{evaluated}/50\n")
        and "is 3h" in done.stderr
        and "old, more than 2h" in done.stderr
    )
    os.utime(evaluated / "50/.snapshot_metadata", (1, 1))
    done = snapctl("latest", str(evaluated), "--max-age", "2h", "--json")
    assert done.code == 1 and done.json["created_at"] is None and "nobody knows" in done.json["warnings"][0]


def test_latest_where_there_is_none(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    for path in (tmp_path, tmp_path / "nix"):
        done = snapctl("latest", str(path))
        assert (done.code, done.stdout) == (3, "")
        assert snapctl("latest", str(path), "--json").error["exit_code"] == 3
        done = snapctl("latest", str(path), "--missing-ok")
        assert (done.code, done.stdout, done.stderr) == (0, "", "")
        assert snapctl("latest", str(path), "--missing-ok", "--json").stdout == "null\n"


def test_latest_passes_over_what_cannot_be_parsed(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    (evaluated / "50/.snapshot_metadata").write_bytes(b'{"half')
    done = snapctl("latest", str(evaluated))
    assert (done.code, done.stdout) == (0, f"{evaluated}/40\n")
    assert done.stderr.startswith(f"warning: passed over: {evaluated}/50/.snapshot_metadata")
    for step in (10, 20, 30, 40):
        (evaluated / f"{step}/.snapshot_metadata").write_bytes(b'{"half')
    for extra in ([], ["--missing-ok"]):
        done = snapctl("latest", str(evaluated), *extra)
        assert (done.code, done.stdout) == (1, "") and "neither JSON nor YAML" in done.stderr


def test_latest_is_5_when_a_newer_one_could_not_be_looked_at(evaluated: pathlib.Path) -> None:
    (evaluated / "50/.snapshot_metadata").chmod(0)
    (evaluated / "40").chmod(0)
    done = restricted("latest", str(evaluated))
    assert (done.code, done.stdout) == (5, f"{evaluated}/30\n")
    assert len(done.stderr.splitlines()) == 2
    assert restricted("latest", str(evaluated), "--evaluated-by", "val").code == 5
    for step in (10, 20, 30):
        (evaluated / str(step)).chmod(0)
    done = restricted("latest", str(evaluated), "--missing-ok")
    assert (done.code, done.stdout) == (4, "")


def test_latest_on_gcs_is_5_or_4_when_the_storage_refuses(proxied: tuple[Bucket, Controlled], snapctl: Snapctl) -> None:
    bucket, proxy = proxied
    for step in (10, 20):
        write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), step)
    body = json.dumps({"error": {"code": 403, "message": "no objects.get"}})
    proxy.configure(faults=[{"match": "o/run%2F20%2F", "status": 403, "body": body}])
    done = snapctl("latest", f"{bucket.url}/run")
    assert (done.code, done.stdout) == (5, f"{bucket.url}/run/10\n") and "no objects.get" in done.stderr
    proxy.configure(faults=[{"match": "o/run%2F", "status": 403, "body": body}])
    done = snapctl("latest", f"{bucket.url}/run")
    assert (done.code, done.stdout) == (4, "")


# -- show ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def layered(tmp_path: pathlib.Path) -> pathlib.Path:
    write: Write = local_writer(tmp_path / "run")
    entries: dict[str, Any] = {"0/model": {"type": "dict", "keys": []}}
    for layer in range(12):
        for name, shape in (("weight", [4, 4]), ("bias", [4])):
            entries[f"0/model/layers.{layer}.{name}"] = tensor_entry("0/b", shape)
    entries["0/model/head"] = tensor_entry("replicated/h", [2], "bfloat16", replicated=True)
    entries["1/model/own"] = tensor_entry("1/own", [3], "int64")
    for rank in (0, 1):
        entries[f"{rank}/extra_state/step"] = primitive(7)
        entries[f"{rank}/extra_state/walltime"] = primitive(float("inf"))
        entries[f"{rank}/extra_state/rank"] = primitive(rank)
    entries["0/opt/schedule"] = {
        "type": "object", "location": "0/o", "serializer": "torch_save", "obj_type": "x.Y", "replicated": False,
    }  # fmt: skip
    write("10/0/o", b"x" * 100)
    write("10/.snapshot_metadata", metadata(entries, world_size=2))
    return tmp_path / "run"


def entry_paths(done: Finished) -> list[str]:
    return [entry["path"] for entry in done.json["entries"]]


def test_show_groups_layers(layered: pathlib.Path, snapctl: Snapctl) -> None:
    done = snapctl("show", str(layered), "--group")
    assert "model/layers.#.weight ×12" in done.stdout and "model/layers.#.bias ×12" in done.stdout
    groups = {item["path"]: item for item in snapctl("show", str(layered), "--group", "--json").json["entries"]}
    assert groups["model/layers.#.weight"]["count"] == 12
    assert groups["model/layers.#.weight"]["size_bytes"] == 12 * 64
    assert groups["model/head"]["count"] == 1


def test_show_rolls_up_by_depth(layered: pathlib.Path, snapctl: Snapctl) -> None:
    rolled = {item["path"]: item for item in snapctl("show", str(layered), "--depth", "1", "--json").json["entries"]}
    assert set(rolled) == {"model", "extra_state", "opt"}
    assert rolled["model"]["count"] == 26 and rolled["model"]["dtypes"] == ["bfloat16", "float32", "int64"]
    assert rolled["model"]["size_bytes"] == 12 * (64 + 16) + 4 + 24
    assert snapctl("show", str(layered), "--depth", "1", "--group").code == 2


def test_show_selects_entries_and_ranks(layered: pathlib.Path, snapctl: Snapctl) -> None:
    select = ["show", str(layered), "--json"]
    assert entry_paths(snapctl(*select, "--entries", "model/h*")) == ["model/head"]
    assert entry_paths(snapctl(*select, "--entries", "*.3.bias", "--entries", "model/own")) == [
        "model/layers.3.bias",
        "model/own",
    ]
    on_rank_1 = entry_paths(snapctl(*select, "--rank", "1"))
    assert "model/own" in on_rank_1 and "model/head" in on_rank_1 and "model/layers.0.bias" not in on_rank_1
    assert entry_paths(snapctl(*select, "--entries", "nix")) == []
    done = snapctl("show", str(layered), "--rank", "2")
    assert done.code == 2 and "2 ranks saved" in done.stderr


def test_show_has_totals_and_values(layered: pathlib.Path, snapctl: Snapctl) -> None:
    shown = snapctl("show", str(layered), "--json").json
    assert shown["extra_state"] == {"step": 7, "walltime": "Infinity", "rank": 0}
    assert shown["size_bytes"] == 12 * (64 + 16) + 4 + 24 + 100
    assert shown["dtype_bytes"] == {"float32": 960, "object": 100, "int64": 24, "bfloat16": 4}
    values = [(e["ranks"], e["value"]) for e in shown["entries"] if e["path"] == "extra_state/rank"]
    assert values == [([0], 0), ([1], 1)]
    assert "VALUE" not in snapctl("show", str(layered)).stdout
    assert "Infinity" in snapctl("show", str(layered), "--values", "--entries", "extra_state/*").stdout


def test_show_takes_a_step_and_names_what_is_wrong(evaluated: pathlib.Path, snapctl: Snapctl) -> None:
    assert snapctl("show", str(evaluated), "--step", "10", "--json").json["step"] == 10
    assert snapctl("show", str(evaluated), "--json").json["step"] == 50
    done = snapctl("show", str(evaluated), "--step", "11")
    assert done.code == 3 and "no step 11" in done.stderr and "there are: 10, 20, 30" in done.stderr
    done = snapctl("show", f"{evaluated}/60")
    assert done.code == 3 and f"{evaluated}/60: .snapshot_metadata is missing or empty" in done.stderr
    (evaluated / "50/.snapshot_metadata").write_bytes(b"{")
    done = snapctl("show", f"{evaluated}/50", "--json")
    assert (done.code, done.error["type"], done.error["kind"]) == (1, "ManifestError", "unparsable")
    assert snapctl("show", f"{evaluated}/nix").code == 3
    shutil.copytree(evaluated / "10", evaluated / "best")
    assert snapctl("show", f"{evaluated}/best", "--json").json["step"] is None


def test_show_never_unpickles(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    import pickle

    flag = tmp_path / "flag"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {flag}",))

    write = local_writer(tmp_path / "run")
    write("10/0/o", pickle.dumps(Bomb()))
    entry = {"type": "object", "location": "0/o", "serializer": "torch_save", "obj_type": "x.Bomb", "replicated": False}
    write("10/.snapshot_metadata", metadata({"0/o": entry}))
    assert snapctl("show", str(tmp_path / "run"), "--values").code == 0
    assert not flag.exists()


def test_show_of_shapes_that_cannot_be_is_only_shown(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    entries = {
        "0/huge": tensor_entry("0/h", [1 << 60, 1 << 60]),
        "0/negative": tensor_entry("0/n", [-5, 3]),
        "0/reversed": tensor_entry("0/r", [2], byte_range=[10, 2]),
        "0/outside": tensor_entry("../../etc/passwd", [2]),
    }
    local_writer(tmp_path)("10/.snapshot_metadata", metadata(entries))
    done = snapctl("show", str(tmp_path))
    assert done.code == 0 and "huge" in done.stdout
    assert snapctl("show", str(tmp_path), "--json").json["entries"][1]["shape"] == [-5, 3]


# -- cost ------------------------------------------------------------------------------------------------------------

FORBIDDEN = {"torch", "gcsfs", "fsspec", "rich", "numpy", "yaml", "pydantic", "torchsnapshot", "ml_dtypes"}


@pytest.mark.parametrize("command", [["latest"], ["list"], ["show"], ["list", "--json"], ["--help"]])
def test_local_commands_load_nothing_that_they_do_not_need(command: list[str]) -> None:
    arguments = command if command == ["--help"] else [*command, str(DATA / "torchrec-2ranks")]
    code = (
        "import sys\nfrom snapctl.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "snapctl" in loaded and not loaded & FORBIDDEN


def test_importing_snapctl_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import snapctl; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & (FORBIDDEN | {"msgspec", "typer"})


def test_a_thousand_checkpoints_cost_few_requests(minigcs: Controlled, snapctl: Snapctl) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    names = [(f"run/{step}/0/w{blob:02}", 100) for step in range(1000) for blob in range(50)]
    minigcs.seed("bk", [*names, *((f"run/{step}/.snapshot_metadata", 2) for step in range(999))])
    bucket.write("run/999/.snapshot_metadata", metadata({}))
    for command, limit in ((["list"], 80), (["list", "--long"], 80), (["latest"], 8), (["show"], 8)):
        minigcs.reset()
        done = snapctl(*command, "gs://bk/run", "--json")
        assert done.code == 0
        assert minigcs.stats()["n"] <= limit, command
    assert len(snapctl("list", "gs://bk/run", "--json").json["checkpoints"]) == 1000
