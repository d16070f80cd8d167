"""Failures that people had with tools like this one, at the command line: each stands for its kind."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable

import pytest

from tests.support.command import Finished
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, metadata, tensor_entry, write_checkpoint

Snapctl = Callable[..., Finished]


def fill(bucket: Bucket, *steps: int, prefix: str = "run") -> None:
    for step in steps:
        write_checkpoint(lambda path, data=b"": bucket.write(f"{prefix}/{path}", data), step)


@pytest.mark.parametrize(
    "spelling", ["gs://{b}/run", "gs://{b}/run/", "gs://{b}/run//", "gcs://{b}/run", "GS://{b}/run", "gs://{b}//run"]
)
def test_one_prefix_has_many_spellings_and_one_name(bucket: Bucket, spelling: str, snapctl: Snapctl) -> None:
    fill(bucket, 10, 20)
    done = snapctl("list", "-q", spelling.format(b=bucket.name))
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"{bucket.url}/run/10\n{bucket.url}/run/20\n"


@pytest.mark.parametrize("spelling", ["{d}", "{d}/", "{d}//", "run", "./run/.", "../{p}/run", "~/run", "file://{d}"])
def test_one_directory_has_many_spellings_and_one_name(tmp_path: pathlib.Path, spelling: str, snapctl: Snapctl) -> None:
    write_checkpoint(local_writer(tmp_path / "run"), 10)
    path = spelling.format(d=tmp_path / "run", p=tmp_path.name)
    done = snapctl("latest", path, cwd=tmp_path, env={"HOME": str(tmp_path)})
    assert (done.code, done.stdout) == (0, f"{tmp_path}/run/10\n")


@pytest.mark.parametrize("command", ["list", "latest", "show"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (401, "Anonymous caller does not have storage.objects.list access to the Google Cloud Storage bucket."),
        (403, "sa@proj.iam.gserviceaccount.com does not have storage.objects.list access to the bucket."),
        (400, "Bucket is a requester pays bucket but no user project provided."),
    ],
)
def test_refused_access_is_one_line_at_once(
    proxied: tuple[Bucket, Controlled], command: str, code: int, message: str, snapctl: Snapctl
) -> None:
    bucket, proxy = proxied
    fill(bucket, 10)
    body = json.dumps({"error": {"code": code, "message": message}})
    proxy.configure(faults=[{"match": "storage/v1", "status": code, "body": body}])
    proxy.reset()
    done = snapctl(command, f"{bucket.url}/run")
    assert (done.code, done.stdout) == (4, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"error: {bucket.url}/run: ")
    assert [line.partition(":")[0] for line in lines[1:]] == ([] if code == 403 else ["hint"])
    assert proxy.stats()["n"] == 1
    assert snapctl(command, f"{bucket.url}/run", "--json").error["exit_code"] == 4


def test_a_requester_pays_bucket_works_with_a_project(minigcs: Controlled, snapctl: Snapctl) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    fill(bucket, 10)
    fault = {"match": "storage/v1(?!.*userProject=my-project)", "status": 400, "body": "Bucket is requester pays"}
    minigcs.configure(faults=[fault])
    done = snapctl("latest", "gs://bk/run")
    assert done.code == 4 and "hint: --storage-option requester_pays=PROJECT" in done.stderr
    for command in ("latest", "list", "show"):
        done = snapctl(command, "gs://bk/run", "--storage-option", "requester_pays=my-project")
        assert done.code == 0, done.stderr


def test_the_bucket_type_is_never_asked_over_grpc(bucket: Bucket, snapctl: Snapctl) -> None:
    """gcsfs asks by default, and where that is not answered each call takes a minute."""
    fill(bucket, 10)
    done = snapctl("list", "-q", f"{bucket.url}/run", env={"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "true"}, timeout=15)
    assert (done.code, done.stdout, done.stderr) == (0, f"{bucket.url}/run/10\n", "")


def test_a_server_that_fails_for_ever_is_4_and_not_no_checkpoints(
    proxied: tuple[Bucket, Controlled], snapctl: Snapctl
) -> None:
    bucket, proxy = proxied
    fill(bucket, 10)
    proxy.configure(faults=[{"match": "storage/v1", "status": 503, "body": "x"}])
    done = snapctl("latest", f"{bucket.url}/run", "--missing-ok", timeout=15)
    assert (done.code, done.stdout) == (4, "")
    assert done.stderr == f"error: {bucket.url}/run: the server answers 503: x\n"


def test_a_missing_bucket_and_an_empty_prefix_are_told_apart(bucket: Bucket, snapctl: Snapctl) -> None:
    done = snapctl("latest", "gs://no-such-bucket-here/run")
    assert (done.code, done.stderr) == (3, "error: gs://no-such-bucket-here: no such bucket\n")
    done = snapctl("latest", f"{bucket.url}/nix")
    assert (done.code, done.stderr) == (3, f"error: {bucket.url}/nix: nothing lies under this prefix\n")
    done = snapctl("latest", bucket.url)
    assert (done.code, done.stderr) == (3, f"error: {bucket.url}: no complete checkpoint\n")


def test_a_sibling_that_shares_the_beginning_of_a_name_is_another(bucket: Bucket, snapctl: Snapctl) -> None:
    fill(bucket, 1, 10)
    fill(bucket, 5, prefix="run-old")
    fill(bucket, 7, prefix="run/1.backup")
    assert snapctl("list", "-q", f"{bucket.url}/run").stdout.splitlines() == [
        f"{bucket.url}/run/1",
        f"{bucket.url}/run/10",
    ]
    assert snapctl("list", "--json", "-l", f"{bucket.url}/run").json["checkpoints"][0]["files"] == 2


def test_a_manifest_that_is_written_while_we_look_is_not_half_of_one(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    """torchsnapshot writes in place: whoever reads early sees the beginning."""
    write = local_writer(tmp_path)
    write_checkpoint(write, 10)
    whole = metadata({f"0/w{number}": tensor_entry("0/b", [1]) for number in range(50)})
    for length in (1, len(whole) // 2, len(whole) - 2):
        write("20/.snapshot_metadata", whole[:length])
        done = snapctl("latest", str(tmp_path))
        assert (done.code, done.stdout) == (0, f"{tmp_path}/10\n") and "passed over" in done.stderr
    write("20/.snapshot_metadata", whole)
    assert snapctl("latest", str(tmp_path)).stdout == f"{tmp_path}/20\n"


def test_steps_that_appear_and_vanish_meanwhile_harm_nobody(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    import shutil

    write_checkpoint(local_writer(tmp_path), 1)
    stop = threading.Event()

    def churn() -> None:
        step = 2
        while not stop.is_set():
            write_checkpoint(local_writer(tmp_path), step)
            if step > 3:
                shutil.rmtree(tmp_path / str(step - 2), ignore_errors=True)
            step += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for command in (["list", "-l"], ["latest"], ["show"], ["list", "--json"]) * 3:
            done = snapctl(*command, str(tmp_path))
            assert done.code == 0, (command, done)
    finally:
        stop.set()
        thread.join()


def test_early_yaml_with_odd_keys_opens(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    text = b"""version: 0.0.2
world_size: 1
manifest:
  0/e: {type: dict, keys: [x/z, 3, yes]}
  0/e/x%2Fz: {type: Tensor, location: 0/e, serializer: buffer_protocol, dtype: torch.uint8, shape: [1],
    replicated: false}
  0/e/3: {type: object, location: 0/e, serializer: torch_save, obj_type: builtins.int, replicated: false}
  0/e/step: {type: int, serialized_value: '7', replicated: false}
"""
    write = local_writer(tmp_path)
    write("30/0/e", b"x")
    write("30/.snapshot_metadata", text)
    shown = snapctl("show", str(tmp_path), "--json").json
    assert [(entry["path"], entry["type"], entry["value"]) for entry in shown["entries"]] == [
        ("e", "dict", None),
        ("e/x%2Fz", "Tensor", None),
        ("e/3", "object", None),
        ("e/step", "int", 7),
    ]


def test_what_show_prints_can_be_pasted_back(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    keys = ["a%2Fb", "50%25", "a%252Fb", "x.y.z", "sp ace", "", "0", "00", "-1", "ü", "[0]", "st*r"]
    entries = {f"0/m/{key}": tensor_entry("0/b", [1]) for key in keys}
    local_writer(tmp_path)("10/.snapshot_metadata", metadata(entries))
    for entry in snapctl("show", str(tmp_path), "--json").json["entries"]:
        again = snapctl("show", str(tmp_path), "--json", f"--entries={entry['path']}").json["entries"]
        assert entry["path"] in [other["path"] for other in again]


def test_json_is_one_document_whatever_happens(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    write = local_writer(tmp_path / "run")
    write_checkpoint(write, 10)
    write("20/.snapshot_metadata", b"broken: [")
    (tmp_path / "empty").mkdir()
    good = [["list", "run"], ["latest", "run"], ["show", "run"], ["list", "empty"], ["latest", "empty", "--missing-ok"]]
    bad = [
        ["latest", "empty"],
        ["list", "none"],
        ["show", "run/20"],
        ["list", "run/10"],
        ["show", "run", "--step", "x"],
    ]
    for command in good:
        done = snapctl(*command, "--json", cwd=tmp_path)
        assert done.code == 0 and done.stderr == ""
        assert done.stdout.count("\n") == 1
        _ = done.json
    for command in bad:
        done = snapctl(*command, "--json", cwd=tmp_path)
        assert done.code != 0 and done.stdout == ""
        assert done.error["exit_code"] == done.code
    assert "passed over" in snapctl("latest", "run", "--json", cwd=tmp_path).json["warnings"][0]
