"""``snapctl mark-eval``: exit codes and the two streams."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

import pytest

from tests.support.command import Finished
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, write_checkpoint

Run = Callable[..., Finished]


@pytest.fixture
def snapctl(snapctl_inside: Run) -> Run:
    return snapctl_inside


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 10 and 20 complete, 20 marked by an older job, 30 incomplete."""
    write = local_writer(tmp_path)
    write_checkpoint(write, 10)
    write_checkpoint(write, 20, markers=("val",))
    write_checkpoint(write, 30, complete=False)
    return tmp_path


def test_marks_partitions_with_their_metrics(snapctl: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    args = (
        "mark-eval",
        save_dir.url,
        "--step",
        "10",
        "val",
        "test",
        "--metric",
        "val/loss=0.5",
        "--metric",
        "test/x=nan",
    )
    done = snapctl(*args)
    assert (done.code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split(": evaluated ")[0] for line in lines] == ["val", "test"]
    assert lines[0].endswith("Z, loss=0.5")
    assert lines[1].endswith("Z, x=NaN")
    assert json.loads(save_dir.read("10/evaled_by/val_DONE"))["metrics"] == {"loss": 0.5}
    again = snapctl(*args, "--json")
    assert (again.code, again.stderr) == (0, "")
    assert again.json["step"] == 10
    assert again.json["path"] == f"{save_dir.url}/10"
    assert again.json["partitions"][1] == {
        "partition": "test",
        "done": True,
        "finished_at": json.loads(save_dir.read("10/evaled_by/test_DONE"))["finished_at"],
        "metrics": {"x": "NaN"},
        "claimed_by": None,
        "claim_expires_at": None,
    }


def test_marking_twice_is_no_error_and_keeps_the_first_time(snapctl: Run, run_dir: pathlib.Path) -> None:
    assert snapctl("mark-eval", f"{run_dir}/10", "val").code == 0
    before = (run_dir / "10/evaled_by/val_DONE").read_bytes()
    assert snapctl("mark-eval", f"{run_dir}/10", "val", "val").code == 0
    assert (run_dir / "10/evaled_by/val_DONE").read_bytes() == before


def test_an_empty_marker_of_an_older_job_means_the_same(snapctl: Run, run_dir: pathlib.Path) -> None:
    assert snapctl("mark-eval", f"{run_dir}/20", "val", "--check").code == 0
    assert snapctl("mark-eval", f"{run_dir}/20", "val").code == 0
    assert (run_dir / "20/evaled_by/val_DONE").read_bytes() == b""


def test_the_latest_is_never_meant(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("mark-eval", str(run_dir), "val")
    assert (done.code, done.stdout) == (2, "")
    assert "is a save directory" in done.stderr
    assert "--step N" in done.stderr


@pytest.mark.parametrize("step", ["30", "999"])
@pytest.mark.parametrize("more", [(), ("--claim",), ("--check",)])
def test_what_is_not_there_or_incomplete_is_refused_and_stays_as_it_is(
    snapctl: Run, run_dir: pathlib.Path, step: str, more: tuple[str, ...]
) -> None:
    before = sorted(run_dir.rglob("*"))
    for where in ([f"{run_dir}/{step}"], [str(run_dir), "--step", step]):
        done = snapctl("mark-eval", *where, "val", *more)
        assert (done.code, done.stdout) == (3, "")
        assert len(done.stderr.splitlines()) <= 2
    assert sorted(run_dir.rglob("*")) == before


def test_no_ghost_step_is_made_in_a_bucket(snapctl: Run, bucket: Bucket) -> None:
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    before = bucket.names()
    for step, message in (("999", "nothing lies under this prefix"), ("10/", "")):
        done = snapctl("mark-eval", f"{bucket.url}/run/{step}", "val")
        assert done.code == (3 if message else 0)
        assert message in done.stderr
    assert bucket.names() == [*before, "run/10/evaled_by/val_DONE"]
    assert snapctl("mark-eval", "gs://no-such-bucket-here/run/10", "val").code == 3


@pytest.mark.parametrize("partition", ["a/b", "../../x", "", ".", "..", ".hidden", "x\ny", "x" * 201])
def test_a_partition_that_would_lead_elsewhere_is_a_usage_error(
    snapctl: Run, run_dir: pathlib.Path, partition: str
) -> None:
    done = snapctl("mark-eval", f"{run_dir}/10", "ok", partition)
    assert (done.code, done.stdout) == (2, "")
    assert "\n" not in done.stderr.rstrip("\n")
    assert not (run_dir / "10/evaled_by").exists()


def test_odd_names_are_marked_literally(snapctl: Run, run_dir: pathlib.Path) -> None:
    names = ["val_DONE", "p 1", "ü", "-x", "[a]*?", "%2F"]
    assert snapctl("mark-eval", f"{run_dir}/10", "--", *names).code == 0
    assert sorted(os.listdir(run_dir / "10/evaled_by")) == sorted(f"{name}_DONE" for name in names)
    assert snapctl("mark-eval", f"{run_dir}/10", "--check", "--", *names).code == 0


def test_check_writes_nothing_and_says_no_when_one_is_missing(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "20/evaled_by/test_DONE").mkdir()
    for name in ("train_done", "test_DONE.tmp"):
        (run_dir / f"20/evaled_by/{name}").touch()
    before = sorted(run_dir.rglob("*"))
    done = snapctl("mark-eval", f"{run_dir}/20", "val", "test", "train", "--check")
    assert done.code == 1
    assert [line.partition(" 2")[0] for line in done.stdout.splitlines()] == [
        "val: evaluated",
        "test: not evaluated",
        "train: not evaluated",
    ]
    answer = snapctl("mark-eval", f"{run_dir}/20", "val", "test", "--check", "--json")
    assert (answer.code, [item["done"] for item in answer.json["partitions"]]) == (1, [True, False])
    assert snapctl("mark-eval", f"{run_dir}/20", "val", "--check").code == 0
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_who_may_only_read_can_check_and_not_mark(snapctl: Run) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(local_writer(directory), 20, markers=("val",))
        pathlib.Path(directory, "20/evaled_by/test_CLAIM.1").touch()
        os.chmod(directory, 0o755)
        write_checkpoint(local_writer(directory), 10)
        for more in (("--claim",), ()):  # so that all is imported: Python itself may lie where only root can read
            assert snapctl("mark-eval", f"{directory}/10", "train", *more).code == 0
        assert snapctl("pin", f"{directory}/10").code == 0
        os.seteuid(65534)
        try:
            checked = snapctl("mark-eval", f"{directory}/20", "val", "test", "--check", "--json")
            refused = [snapctl("mark-eval", f"{directory}/20", "train", *more) for more in ((), ("--claim",))]
            pinned = snapctl("pin", f"{directory}/20")
        finally:
            os.seteuid(0)
    assert checked.code == 1
    assert checked.json["partitions"][1]["claim_expires_at"] is not None
    for done in (*refused, pinned):
        assert (done.code, done.stdout) == (4, "")
        assert "Permission denied" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_remove_takes_marks_away_and_what_is_not_there_is_fine(snapctl: Run, run_dir: pathlib.Path) -> None:
    done = snapctl("mark-eval", f"{run_dir}/20", "val", "test", "--remove")
    assert (done.code, done.stdout) == (0, "val: removed\ntest: was not evaluated\n")
    assert not (run_dir / "20/evaled_by/val_DONE").exists()
    assert snapctl("mark-eval", f"{run_dir}/999", "val", "--remove").code == 3


def test_metrics_are_seen_by_list_and_chosen_by_latest(snapctl: Run, run_dir: pathlib.Path) -> None:
    snapctl("mark-eval", f"{run_dir}/10", "val", "--metric", "acc=0.9")
    snapctl("mark-eval", f"{run_dir}/20", "val", "--metric", "acc=0.8")
    assert snapctl("latest", str(run_dir), "--best", "acc:max").stdout == f"{run_dir}/10\n"
    listed = snapctl("list", str(run_dir), "--json").json["checkpoints"]
    assert [item["metrics"] for item in listed] == [{"val": {"acc": 0.9}}, {"val": {"acc": 0.8}}]


def test_one_partition_that_cannot_be_written_does_not_keep_the_others(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "10/evaled_by/b_DONE").mkdir(parents=True)
    done = snapctl("mark-eval", f"{run_dir}/10", "a", "b", "c")
    assert done.code == 5
    assert "something else is in its place" in done.stderr
    assert [line.split(":")[1] for line in done.stdout.splitlines()][1] == " not evaluated"
    assert snapctl("mark-eval", f"{run_dir}/10", "b").code == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("val", "--claim", "--check"),
        ("val", "--remove", "--renew", "--owner", "a"),
        ("val", "--check", "--metric", "a=1"),
        ("val", "--claim", "--metric", "a=1"),
        ("val", "--ttl", "1h"),
        ("val", "--check", "--owner", "a"),
        ("val", "--renew"),
        ("val", "--release"),
        ("val", "--claim", "--owner", ""),
        ("val", "test", "--claim"),
        ("val", "--claim", "--ttl", "0"),
        ("val", "--claim", "--ttl", "8d"),
        ("val", "--claim", "--ttl", "90"),
        ("val", "--metric", "a"),
        ("val", "--metric", "a=b"),
        ("val", "test", "--metric", "a=1"),
        ("val", "--step", "-1"),
        (),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(snapctl: Run, run_dir: pathlib.Path, arguments: tuple[str, ...]) -> None:
    done = snapctl("mark-eval", f"{run_dir}/10", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert not (run_dir / "10/evaled_by").exists()


def test_a_claim_prints_its_owner_and_refuses_the_next(snapctl: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    where = f"{save_dir.url}/10"
    first = snapctl("mark-eval", where, "val", "--claim", "--ttl", "1h")
    owner = first.stdout.strip()
    assert (first.code, len(owner)) == (0, 16)
    assert first.stderr.startswith("val: claimed until ")
    second = snapctl("mark-eval", where, "val", "--claim", "--json")
    assert (second.code, second.stdout, second.error["exit_code"]) == (6, "", 6)
    assert second.error["claimed_by"] == owner
    checked = snapctl("mark-eval", where, "val", "--check", "--json")
    item = checked.json["partitions"][0]
    assert (checked.code, item["done"], item["claimed_by"]) == (1, False, owner)
    assert item["claim_expires_at"] == second.error["claim_expires_at"]
    renewed = snapctl("mark-eval", where, "val", "--renew", "--owner", owner, "--ttl", "7d", "--json")
    assert (renewed.code, renewed.json["partitions"][0]["claimed_by"]) == (0, owner)
    assert renewed.json["partitions"][0]["claim_expires_at"] > item["claim_expires_at"]
    assert snapctl("mark-eval", where, "val", "--release", "--owner", "other").code == 6
    assert snapctl("mark-eval", where, "val", "--release", "--owner", owner).code == 0
    assert snapctl("mark-eval", where, "val", "--renew", "--owner", owner).code == 6
    third = snapctl("mark-eval", where, "val", "--claim", "--owner", "ann")
    assert (third.code, third.stdout) == (0, "ann\n")
    assert snapctl("mark-eval", where, "val", "--owner", owner).code == 6
    assert snapctl("mark-eval", where, "val", "--owner", "ann", "--metric", "loss=1").code == 0
    assert snapctl("mark-eval", where, "val", "--claim").code == 6
    assert snapctl("mark-eval", where, "val").code == 0


def test_a_claim_on_what_is_being_deleted_is_taken_back(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "10/.snapshot_metadata.deleting").touch()
    assert snapctl("mark-eval", f"{run_dir}/10", "val", "--claim").code == 6
    assert not (run_dir / "10/evaled_by").exists()


def test_where_nothing_may_be_written_the_storage_has_failed(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "10/evaled_by").write_bytes(b"a file")
    for more in ((), ("--claim",)):
        done = snapctl("mark-eval", f"{run_dir}/10", "val", *more)
        assert (done.code, done.stdout) == (4, "")
        assert len(done.stderr.splitlines()) == 1


def test_no_credentials_end_it_at_once(snapctl: Run, proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    for status in (401, 403):
        proxy.configure(faults=[{"match": "/upload/", "status": status, "body": "{}"}])
        started = time.monotonic()
        for more in ((), ("--claim",)):
            assert snapctl("mark-eval", f"{bucket.url}/run/10", "val", *more).code == 4
        assert time.monotonic() - started < 20
    assert [name for name in bucket.names() if "evaled_by" in name] == []


def test_a_marker_that_cannot_be_understood_is_said_and_counts(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "20/evaled_by/val_DONE").write_bytes(b"\x00garbage")
    done = snapctl("mark-eval", f"{run_dir}/20", "val", "--check", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert "is not what snapctl writes" in done.json["warnings"][0]
