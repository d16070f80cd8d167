"""`verify` and `latest --verified` as their users run them."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import pytest

from snapctl.save_record import SaveRecord, format_save_record
from tests.support.command import Finished, unprivileged
from tests.support.random_snapshots import full_snapshot, summed
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, metadata, primitive, tensor_entry, write_checkpoint

Run = Callable[..., Finished]


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """10 and 20 are sound, 30 has lost a blob, 40 is being written."""
    root = tmp_path / "run"
    for step in (10, 20, 30):
        write_checkpoint(local_writer(root), step)
    (root / "30" / "0" / "model" / "weight").unlink()
    write_checkpoint(local_writer(root), 40, complete=False)
    return root


def test_a_save_directory_alone_is_its_newest_complete_checkpoint(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("verify", str(run_dir))
    assert (done.code, done.stderr) == (1, "")
    assert done.stdout == (
        "STEP  VERDICT  LEVEL  BLOBS  PROBLEMS\n"
        "  30  damaged  size       1         1\n"
        "\n"
        "STEP  PROBLEM       ENTRY           BLOB            DETAIL\n"
        "  30  missing-blob  0/model/weight  0/model/weight  is not there\n"
    )


def test_the_newest_one_is_meant_also_if_its_manifest_cannot_be_read(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "40" / ".snapshot_metadata").write_bytes(b"{")
    done = snapctl("verify", str(run_dir), "--json")
    assert done.code == 1
    (report,) = done.json["checkpoints"]
    assert (report["step"], report["verdict"]) == (40, "unreadable")
    assert report["problems"][0]["kind"] == "unreadable-manifest"


def test_the_document_has_the_keys_of_the_contract(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("verify", str(run_dir / "30"), "--json")
    assert (done.code, done.stderr) == (1, "")
    assert done.json == {
        "checkpoints": [
            {
                "step": 30,
                "path": str(run_dir / "30"),
                "verdict": "damaged",
                "level": "size",
                "blobs": 1,
                "bytes_read": 0,
                "problems": [
                    {
                        "kind": "missing-blob",
                        "entry": "0/model/weight",
                        "blob": "0/model/weight",
                        "detail": "is not there",
                    }
                ],
                "unchecked": [],
                "warnings": [],
                "error": None,
            }
        ]
    }


def test_all_judges_every_complete_checkpoint_in_order(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("verify", str(run_dir), "--all", "--json")
    assert done.code == 1
    assert [(c["step"], c["verdict"]) for c in done.json["checkpoints"]] == [
        (10, "sound"),
        (20, "sound"),
        (30, "damaged"),
    ]


def test_steps_can_be_named(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("verify", str(run_dir), "--step", "20", "--step", "10", "--level", "structure", "--json")
    assert done.code == 0
    assert [(c["step"], c["level"]) for c in done.json["checkpoints"]] == [(10, "structure"), (20, "structure")]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}", "--step", "50"], 3, "no step 50"),
        (["{}", "--step", "40"], 3, "incomplete"),
        (["{}/40"], 3, "incomplete"),
        (["{}/nowhere"], 3, "no such directory"),
        (["{}/10", "--all"], 2, "is a checkpoint"),
        (["{}/10", "--step", "10"], 2, "is a checkpoint"),
        (["{}", "--all", "--step", "10"], 2, "exclude"),
        (["{}", "--finite"], 2, "--finite"),
        (["{}", "--sample", "1/7"], 2, "--sample"),
        (["{}", "--sample", "8/7", "--level", "data"], 2, "N/T"),
        (["{}", "--level", "bytes"], 2, "bytes"),
        (["{}", "--jobs", "0"], 2, "jobs"),
    ],
)
def test_what_makes_no_sense_or_is_not_there(
    snapctl: Run, run_dir: pathlib.Path, arguments: list[str], code: int, text: str
) -> None:
    done = snapctl("verify", *[argument.format(run_dir) for argument in arguments])
    assert (done.code, done.stdout) == (code, "")
    assert text in done.stderr


def test_a_save_directory_without_a_complete_checkpoint_is_3(snapctl: Run, tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 40, complete=False)
    for arguments in ([], ["--all"], ["--all", "--level", "structure"]):
        done = snapctl("verify", str(tmp_path), *arguments)
        assert (done.code, done.stdout) == (3, "")
        assert "no complete checkpoint" in done.stderr


def test_the_truncated_bfloat16_pair_is_damaged(snapctl: Run, data: Callable[[str], pathlib.Path]) -> None:
    done = snapctl("verify", str(data("truncated-bfloat16")), "--json")
    assert done.code == 1
    (report,) = done.json["checkpoints"]
    assert report["verdict"] == "damaged"
    assert [(p["kind"], p["blob"], p["detail"]) for p in report["problems"]] == [
        ("short-blob", "0/a/v", "4 of 6 bytes"),
        ("short-blob", "0/a/big", "6004 of 6006 bytes"),
    ]


@pytest.mark.parametrize("level", ["size", "data"])
def test_scalars_and_tensors_without_elements_need_no_blob(snapctl: Run, tmp_path: pathlib.Path, level: str) -> None:
    write = local_writer(tmp_path)
    write("10/0/m/s", bytes(4))
    write("10/0/m/z0", b"")
    write("10/sharded/m/t_0_0", bytes(32))
    table = {"offsets": [0, 0], "sizes": [2, 4], "tensor": tensor_entry("sharded/m/t_0_0", [2, 4])}
    empty = {"offsets": [2, 0], "sizes": [0, 4], "tensor": tensor_entry("sharded/m/t_2_0", [0, 4])}
    entries = {
        "0/m": {"type": "dict", "keys": ["s", "z0", "z1", "zb", "t"]},
        "0/m/s": tensor_entry("0/m/s", []),
        "0/m/z0": tensor_entry("0/m/z0", [0]),
        "0/m/z1": tensor_entry("0/m/z1", [0, 3], "int64"),
        "0/m/zb": tensor_entry("0/m/s", [0, 5], byte_range=[4, 4]),
        "0/m/t": {"type": "ShardedTensor", "shards": [table]},
        "1/m": {"type": "dict", "keys": ["t"]},
        "1/m/t": {"type": "ShardedTensor", "shards": [empty]},
    }
    write("10/.snapshot_metadata", metadata(entries, world_size=2))
    done = snapctl("verify", str(tmp_path), "--level", level, "--json")
    assert done.code == 0
    assert done.json["checkpoints"][0]["blobs"] == 2


def test_files_that_no_entry_needs_are_a_warning(snapctl: Run, tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    write_checkpoint(write, 10, markers=["val"])
    for name in ("PINNED", ".snapctl/save.0.json", "0/model/weight.snapctl-tmp-1a", ".snapshot_metadata.deleting"):
        write(f"10/{name}", b"")
    assert snapctl("verify", str(tmp_path)).stderr == ""
    write("10/0/model/orphan", b"12345")
    done = snapctl("verify", str(tmp_path))
    assert done.code == 0
    assert done.stderr == f"warning: {tmp_path}/10: no entry needs 1 of its files (5 bytes): 0/model/orphan\n"


def test_entries_of_unknown_types_are_said_to_be_unchecked(snapctl: Run, tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    write("10/0/m/x", b"123")
    entries = {
        "0/m": {"type": "dict", "keys": ["x", "n"]},
        "0/m/x": {"type": "NovelTensor", "parts": [{"location": "0/m/x"}]},
        "0/m/n": primitive(1),
    }
    write("10/.snapshot_metadata", metadata(entries))
    done = snapctl("verify", str(tmp_path), "--level", "data")
    assert done.code == 0
    assert "sound" in done.stdout
    assert done.stderr == f"warning: {tmp_path}/10: unchecked: 0/m/x: of the unknown type 'NovelTensor'\n"


def test_a_checkpoint_without_recorded_checksums_is_unverifiable_and_that_is_said(
    snapctl: Run, run_dir: pathlib.Path
) -> None:
    done = snapctl("verify", str(run_dir / "10"), "--level", "data")
    assert done.code == 0
    assert "unverifiable" in done.stdout
    assert done.stderr == "unverifiable: 1 passed, and had no recorded checksums to compare with\n"


def test_names_are_shown_as_they_are(snapctl: Run, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "run[lr=0.1][/red]"
    entries = {"0/m": {"type": "dict", "keys": ["[bold]x[/bold]", "a\x1b[31m"]}}
    local_writer(root)("10/.snapshot_metadata", metadata(entries))
    done = snapctl("verify", str(root))
    assert done.code == 1
    assert "0/m/[bold]x[%2Fbold]" in done.stdout
    assert "0/m/a\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout


# -- what cannot be looked at ----------------------------------------------------------------------------------------


def test_a_blob_that_may_not_be_read_is_not_called_damaged(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "20" / "0" / "model" / "weight").chmod(0)
    done = snapctl("verify", str(run_dir), "--step", "10", "--step", "20", "--level", "data", before=unprivileged())
    assert done.code == 5
    assert "not checked" in done.stdout
    assert "Permission denied" in done.stderr
    assert "damaged" not in done.stdout
    alone = snapctl("verify", str(run_dir / "20"), "--level", "data", "--json", before=unprivileged())
    assert alone.code == 4
    assert alone.error["type"] == "PermissionDeniedError"
    assert alone.json["checkpoints"][0]["verdict"] is None
    assert "Permission denied" in alone.json["checkpoints"][0]["error"]


@pytest.mark.parametrize("level", ["structure", "size", "data"])
def test_a_checkpoint_that_may_not_be_entered_does_not_end_it(snapctl: Run, run_dir: pathlib.Path, level: str) -> None:
    (run_dir / "10").chmod(0)
    try:
        done = snapctl("verify", str(run_dir), "--all", "--level", level, "--json", before=unprivileged())
    finally:
        (run_dir / "10").chmod(0o755)
    found = {c["step"]: c["verdict"] for c in done.json["checkpoints"]}
    good = "unverifiable" if level == "data" else "sound"
    assert found == {10: None, 20: good, 30: "sound" if level == "structure" else "damaged"}
    assert done.code == (5 if level == "structure" else 1)


def test_none_could_be_checked(snapctl: Run, run_dir: pathlib.Path) -> None:
    shutil.rmtree(run_dir / "30")
    for step in (10, 20):
        (run_dir / str(step) / ".snapshot_metadata").chmod(0)
    done = snapctl("verify", str(run_dir), "--all", before=unprivileged())
    assert done.code == 4
    assert done.stdout.count("not checked") == 2
    assert "error: " in done.stderr


# -- latest --verified -----------------------------------------------------------------------------------------------


def test_latest_verified_passes_over_what_is_not_whole(snapctl: Run, run_dir: pathlib.Path) -> None:
    assert snapctl("latest", str(run_dir)).stdout == f"{run_dir}/30\n"
    done = snapctl("latest", str(run_dir), "--verified")
    assert (done.code, done.stdout) == (0, f"{run_dir}/20\n")
    assert done.stderr == (f"warning: passed over: {run_dir}/30: missing-blob: 0/model/weight: is not there\n")


def test_latest_verified_is_1_where_none_is_whole(snapctl: Run, run_dir: pathlib.Path) -> None:
    for step in (10, 20):
        (run_dir / str(step) / "0" / "model" / "weight").write_bytes(b"short")
    done = snapctl("latest", str(run_dir), "--verified", "--missing-ok", "--json")
    assert (done.code, done.stdout) == (1, "")
    assert "none of the complete checkpoints passes" in done.error["message"]


def test_latest_verified_goes_with_a_filter(snapctl: Run, run_dir: pathlib.Path) -> None:
    for step in (10, 30):
        local_writer(run_dir)(f"{step}/evaled_by/val_DONE", b"")
    done = snapctl("latest", str(run_dir), "--verified", "--evaluated-by", "val", "--print", "step")
    assert (done.code, done.stdout) == (0, "10\n")


def test_latest_verified_says_what_it_could_not_look_at(snapctl: Run, run_dir: pathlib.Path) -> None:
    shutil.rmtree(run_dir / "30")
    (run_dir / "20" / "0").chmod(0)
    try:
        done = snapctl("latest", str(run_dir), "--verified", before=unprivileged())
    finally:
        (run_dir / "20" / "0").chmod(0o755)
    assert (done.code, done.stdout) == (5, f"{run_dir}/10\n")
    assert "could not be looked at" in done.stderr


# -- gs:// -----------------------------------------------------------------------------------------------------------


def test_every_level_on_gcs(snapctl: Run, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    full_snapshot(recorded=True).write(lambda path, data: bucket.write(f"run/{path}", data), "10")
    for level in ("structure", "size", "data"):
        proxy.reset()
        done = snapctl("verify", f"{bucket.url}/run", "--level", level, "--json")
        (report,) = done.json["checkpoints"]
        assert (done.code, report["verdict"], report["problems"]) == (0, "sound", [])
        reads = [line for line in proxy.stats(log=True)["log"] if "alt=media" in line[1]]
        assert len(reads) == {"structure": 1, "size": 2, "data": 2 + 17}[level]  # the manifest, the record, the blobs
        assert report["path"] == f"{bucket.url}/run/10"


def test_recorded_checksums_are_compared_with_those_of_gcs_without_reading_a_blob(
    snapctl: Run, proxied: tuple[Bucket, Controlled]
) -> None:
    bucket, proxy = proxied
    snapshot = full_snapshot(recorded=True)
    snapshot.blobs["0/model/dense"] = bytes(48)
    snapshot.write(lambda path, data: bucket.write(f"run/{path}", data), "10")
    done = snapctl("verify", f"{bucket.url}/run", "--json")
    assert done.code == 1
    (problem,) = done.json["checkpoints"][0]["problems"]
    assert (problem["kind"], problem["blob"]) == ("checksum", "0/model/dense")
    assert not [line for line in proxy.stats(log=True)["log"] if "alt=media" in line[1] and "dense" in line[1]]
    again = snapctl("verify", f"{bucket.url}/run", "--level", "data", "--json")
    assert len(again.json["checkpoints"][0]["problems"]) == 1


def test_a_refused_blob_on_gcs_is_not_called_damaged(snapctl: Run, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    for step in (10, 20):
        write_checkpoint(lambda path, data: bucket.write(f"run/{path}", data), step)
    proxy.configure(faults=[{"match": "20%2F0%2Fmodel%2Fweight", "status": 403}])
    done = snapctl("verify", f"{bucket.url}/run", "--all", "--level", "data", "--json")
    assert done.code == 5
    assert [c["verdict"] for c in done.json["checkpoints"]] == ["unverifiable", None]
    assert "permission denied" in done.json["checkpoints"][1]["error"]


def test_a_named_step_that_vanishes_does_not_end_the_others(snapctl: Run, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    for step in (10, 20):
        write_checkpoint(lambda path, data: bucket.write(f"run/{path}", data), step)
    proxy.configure(faults=[{"match": "20%2F.snapshot_metadata.*alt=media", "status": 404}])
    done = snapctl("verify", f"{bucket.url}/run", "--step", "10", "--step", "20", "--json")
    assert done.code == 5
    assert [(c["step"], c["verdict"]) for c in done.json["checkpoints"]] == [(10, "sound"), (20, None)]
    alone = snapctl("verify", f"{bucket.url}/run", "--step", "20", "--json")
    assert (alone.code, alone.stdout) == (3, "")


def test_many_checkpoints_on_gcs_cost_their_manifests_and_a_few_listings(snapctl: Run, minigcs: Controlled) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    entries = {f"0/model/w{number}": tensor_entry(f"0/model/w{number}", [10, 10]) for number in range(50)}
    content = metadata({"0/model": {"type": "dict", "keys": [f"w{number}" for number in range(50)]}, **entries})
    steps = range(10, 1610, 10)
    minigcs.seed("bk", [(f"run/{step}/{name}", 400) for step in steps for name in entries])
    minigcs.seed("bk", [("run/100.backup/junk", 1), ("run/best/x", 5), ("run-other/10/x", 5)])
    for step in steps:
        bucket.write(f"run/{step}/.snapshot_metadata", content)
    bucket.delete("run/700/0/model/w7")
    minigcs.reset()
    done = snapctl("verify", "gs://bk/run", "--all", "--json")
    assert done.code == 1
    checkpoints = done.json["checkpoints"]
    assert [c["step"] for c in checkpoints] == list(steps)
    assert [c["step"] for c in checkpoints if c["verdict"] != "sound"] == [700]
    assert minigcs.stats()["n"] <= 160 + 3 + 9 + 8 + 1  # and one look whether 700 is still there


def test_a_saved_again_manifest_voids_the_record(snapctl: Run, tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    write_checkpoint(write, 10)
    record = SaveRecord(1.7e9, 1, summed(b"another manifest"), blobs={"0/model/weight": summed(b"other")})
    write("10/.snapctl/save.json", format_save_record(record))
    done = snapctl("verify", str(tmp_path), "--level", "data", "--json")
    assert done.code == 0
    (report,) = done.json["checkpoints"]
    assert report["verdict"] == "unverifiable"
    assert "saved again" in report["warnings"][0]
