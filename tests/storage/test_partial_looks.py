"""When a part of a checkpoint cannot be looked at, or vanishes meanwhile, the rest of it is told all the same, and the
failure is said: a newer checkpoint never turns invisible."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

import snapctl as library
from snapctl.checkpoints import find_checkpoints, look_at_checkpoint, open_save_dir
from snapctl.errors import UnavailableError
from snapctl.markers import parse_marker
from snapctl.metrics import parse_metric_spec, rank_by_metric
from snapctl.storage import open_storage
from tests.support.command import Finished, unprivileged
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, metadata, tensor_entry, write_checkpoint

Snapctl = Callable[..., Finished]
AUC = json.dumps({"metrics": {"auc": 0.9}}).encode()


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 10, 20 and 30, all marked by val, 20 and 30 with a metric."""
    write = local_writer(tmp_path / "run")
    for step in (10, 20, 30):
        write_checkpoint(write, step, markers=["val"])
    for step in (20, 30):
        write(f"{step}/evaled_by/val_DONE", AUC)
    return tmp_path / "run"


def closed(path: pathlib.Path) -> None:
    path.chmod(0)


def test_the_library_never_hides_a_checkpoint_that_may_not_be_entered(run: pathlib.Path) -> None:
    closed(run / "30")
    script = """
        import sys, warnings, snapctl
        warnings.simplefilter("always")
        try:
            print(snapctl.get_checkpoints(sys.argv[1]))
        except PermissionError as error:
            print(error)
        with warnings.catch_warnings(record=True) as seen:
            print(snapctl.get_checkpoint(sys.argv[1]))
        print(seen[0].message)
    """
    command = [*unprivileged(), sys.executable, "-c", textwrap.dedent(script), str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    denied = f"{run}/30/.snapshot_metadata: Permission denied"
    assert done.stdout.splitlines() == [f"{run}/30: Permission denied", f"{run}/20", f"passed over: {denied}"], done


def test_show_of_a_save_directory_is_5_when_a_newer_one_could_not_be_looked_at(
    run: pathlib.Path, snapctl: Snapctl
) -> None:
    closed(run / "30")
    done = snapctl("show", str(run), "--json", before=unprivileged())
    assert (done.code, done.json["step"]) == (5, 20)
    assert "Permission denied" in done.json["warnings"][0]


def test_a_step_behind_a_link_that_may_not_be_followed_is_unreadable(run: pathlib.Path, snapctl: Snapctl) -> None:
    write_checkpoint(local_writer(run.parent / "closed"), 40)
    (run / "40").symlink_to(run.parent / "closed" / "40")
    (run / "50").symlink_to(run.parent / "nowhere")
    closed(run.parent / "closed")
    done = snapctl("list", str(run), "--json", before=unprivileged())
    states = {item["step"]: item["state"] for item in done.json["checkpoints"]}
    assert (done.code, states) == (5, {10: "complete", 20: "complete", 30: "complete", 40: "unreadable"})
    assert snapctl("latest", str(run), before=unprivileged()).code == 5


@pytest.mark.parametrize("totals", [False, True])
def test_what_vanishes_inside_a_checkpoint_does_not_take_it_along(run: pathlib.Path, totals: bool) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for name in ("tmp/deep", "evaled_by"):
                (run / "10" / name).mkdir(parents=True, exist_ok=True)
            for name in ("tmp", "evaled_by"):
                shutil.rmtree(run / "10" / name, ignore_errors=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(1500):
            found = [c.step for c in find_checkpoints(open_save_dir(str(run)), totals=totals, details=False)]
            assert found == [10, 20, 30]
    finally:
        stop.set()
        thread.join()


def test_a_claim_that_vanished_takes_no_metrics_along(run: pathlib.Path, snapctl: Snapctl) -> None:
    (run / "30/evaled_by/z_CLAIM.1").symlink_to("/nowhere")
    found = snapctl("latest", str(run), "--json")
    assert (found.code, found.json["metrics"]) == (0, {"val": {"auc": 0.9}})
    assert snapctl("latest", str(run), "--best", "val/auc:max", "--print", "step").stdout == "30\n"


def test_a_marker_that_may_not_be_read_is_said_and_marks_all_the_same(run: pathlib.Path, snapctl: Snapctl) -> None:
    closed(run / "30/evaled_by/val_DONE")
    denied = f"{run}/30/evaled_by/val_DONE: Permission denied"
    listed = snapctl("list", str(run), "--json", before=unprivileged())
    assert listed.code == 5 and listed.json["warnings"] == [denied]
    assert [item["state"] for item in listed.json["checkpoints"]] == ["complete"] * 3
    latest = snapctl("latest", str(run), "--evaluated-by", "val", before=unprivileged())
    assert (latest.code, latest.stdout) == (5, f"{run}/30\n") and denied in latest.stderr
    shown = snapctl("show", str(run), "--json", before=unprivileged())
    assert (shown.code, shown.json["state"], shown.json["evaluated_by"]) == (5, "complete", ["val"])
    pruned = snapctl("prune", str(run), "--keep-last", "1", "-n", "--json", before=unprivileged())
    assert pruned.code == 5
    kept = {row["step"]: row["reasons"] for row in pruned.json["keep"]}
    assert f"could not be looked at: {denied}" in kept[30]


def test_sizes_that_cannot_be_counted_change_no_state(run: pathlib.Path, snapctl: Snapctl) -> None:
    closed(run / "20/0")
    done = snapctl("list", "--long", "--json", str(run), before=unprivileged())
    items = {item["step"]: item for item in done.json["checkpoints"]}
    assert done.code == 5 and items[20]["state"] == "complete"
    assert (items[20]["size_bytes"], items[20]["files"]) == (None, None) and items[10]["files"] == 3


def test_an_older_one_that_may_not_be_looked_at_matters_only_to_comparisons(
    run: pathlib.Path, snapctl: Snapctl
) -> None:
    closed(run / "10")
    assert snapctl("latest", str(run), "--evaluated-by", "val", before=unprivileged()).code == 0
    assert snapctl("latest", str(run), "--best", "auc:max", before=unprivileged()).code == 5


def test_what_is_no_file_marks_nothing_and_odd_names_are_no_partitions(run: pathlib.Path) -> None:
    marks = run / "10/evaled_by"
    (marks / "dangling_DONE").symlink_to("/nowhere")
    os.mkfifo(marks / "fifo_DONE")
    for name in ("._val_DONE", ".hidden_DONE", "two\nlines_DONE"):
        (marks / name).touch()
    (marks / "linked_DONE").symlink_to(marks / "val_DONE")
    assert look_at_checkpoint(open_storage(str(run / "10"))).evaluated_by == ("linked", "val")


@pytest.mark.parametrize(
    ("content", "metrics", "has_problem"),
    [
        (b'{"metrics": {"a": 1' + b"0" * 400 + b', "b": 2}}', {"b": 2.0}, True),
        (b'{"finished_at": 1700000000, "metrics": {"b": 1}}', {"b": 1.0}, True),
        (b'{"metrics": {"a": NaN, "b": 1.5}}', {"a": "nan", "b": 1.5}, False),
        (b'{"metrics": {"a": "high", "b": 1}}', {"b": 1.0}, True),
        (b'{"metrics": [1]}', {}, False),
        (b"[1]", {}, True),
        (b"\xff\xfe", {}, True),
        (b"[" * 100_000, {}, True),
    ],
)
def test_of_a_marker_as_much_is_taken_as_makes_sense(
    content: bytes, metrics: dict[str, object], has_problem: bool
) -> None:
    marker = parse_marker("val", content)
    assert {name: "nan" if value != value else value for name, value in marker.metrics.items()} == metrics
    assert (marker.problem is not None) == has_problem


def test_a_slash_in_a_metric_means_a_partition_for_all_or_for_none(tmp_path: pathlib.Path) -> None:
    write = local_writer(tmp_path)
    for step in (10, 20):
        write_checkpoint(write, step)
    write("10/evaled_by/val_DONE", b'{"metrics": {"auc": 0.8}}')
    write("20/evaled_by/val_DONE", b'{"metrics": {"loss": 1}}')
    write("20/evaled_by/test_DONE", b'{"metrics": {"val/auc": 0.99}}')
    found = list(find_checkpoints(open_save_dir(str(tmp_path))))
    assert [c.step for c in rank_by_metric(found, parse_metric_spec("val/auc:max"))] == [10]
    assert [c.step for c in rank_by_metric(found, parse_metric_spec("test/val/auc:max"))] == [20]


@pytest.mark.parametrize(
    "content",
    [b"version: !!bool x", b"a: !!int ''", b"a: !!timestamp foo", b"a: !!float x", b"a: !!binary '!'", b"? [x]\n: y"],
)
def test_yaml_that_its_constructors_choke_on_is_passed_over(
    run: pathlib.Path, content: bytes, snapctl: Snapctl
) -> None:
    (run / "30/.snapshot_metadata").write_bytes(content)
    done = snapctl("latest", str(run), "--print", "step")
    assert (done.code, done.stdout) == (0, "20\n")


def test_numbers_that_no_storage_holds_are_shown_or_refused(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    write = local_writer(tmp_path)
    write("10/.snapshot_metadata", metadata({"0/huge": tensor_entry("0/h", [2**62] * 20)}))
    for options in ([], ["--json"], ["--depth", "1"]):
        assert snapctl("show", str(tmp_path), *options).code == 0
    for entries in ({"0/x": tensor_entry("0/x", [10**400])}, {"0/x": tensor_entry("0/x", [2] * 300)}):
        write("10/.snapshot_metadata", metadata(entries))
        assert snapctl("show", str(tmp_path)).code == 1
    write("10/.snapshot_metadata", metadata({f"{'1' * 5000}/x": tensor_entry("0/x", [2])}))
    for options in ([], ["--json"], ["--depth", "1"]):
        assert snapctl("show", str(tmp_path), *options).code == 0
    negative = {"0/n": tensor_entry("0/n", [-5]), "0/r": tensor_entry("0/r", [1], byte_range=[100, 4])}
    write("10/.snapshot_metadata", metadata(negative))
    assert snapctl("show", str(tmp_path), "--json").json["size_bytes"] is None
    for world_size in (0, -1, 10**30):
        write("10/.snapshot_metadata", metadata({}, world_size=world_size))
        assert snapctl("show", str(tmp_path)).code == 1


def test_dead_claims_are_not_shown(run: pathlib.Path, snapctl: Snapctl) -> None:
    claims = {"released_CLAIM.1": 0, "val_CLAIM.3": 3600, "live_CLAIM.1": 3600}
    for name, ttl in claims.items():
        body = json.dumps({"owner": "bob", "nonce": "n", "ttl": ttl}).encode()
        (run / "30/evaled_by" / name).write_bytes(body)
    shown = snapctl("show", str(run), "--json").json
    assert [claim["partition"] for claim in shown["claims"]] == ["live"]


def test_an_absolute_path_needs_no_current_directory(run: pathlib.Path) -> None:
    gone = run.parent / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "$0" -m snapctl latest "$1"'
    for path, code in ((str(run), 0), ("relative", 2)):
        done = subprocess.run(["sh", "-c", script, sys.executable, path], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        gone.mkdir(exist_ok=True)


def test_a_half_deleted_checkpoint_is_explained(run: pathlib.Path, snapctl: Snapctl) -> None:
    (run / "30/.snapshot_metadata").rename(run / "30/.snapshot_metadata.deleting")
    done = snapctl("show", f"{run}/30")
    assert done.code == 3 and "(being deleted, or left half deleted)" in done.stderr


# -- gs:// -----------------------------------------------------------------------------------------------------------


def fill(bucket: Bucket, count: int) -> None:
    for step in range(1, count + 1):
        write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), step)


@pytest.mark.parametrize("match", ["alt=media", "/o/run"])
def test_many_objects_that_fail_are_not_asked_for_one_after_another(
    proxied: tuple[Bucket, Controlled], match: str
) -> None:
    bucket, proxy = proxied
    fill(bucket, 40)
    proxy.configure(faults=[{"match": match, "status": 503, "body": "x"}])
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        library.get_checkpoint(f"{bucket.url}/run")
    assert time.monotonic() - began < 25, "two or three objects, and not forty"


def test_one_marker_that_fails_hides_no_other(proxied: tuple[Bucket, Controlled], snapctl: Snapctl) -> None:
    bucket, proxy = proxied
    fill(bucket, 2)
    bucket.write("run/2/evaled_by/val_DONE", AUC)
    bucket.write("run/2/evaled_by/test_DONE", AUC)
    body = json.dumps({"error": {"code": 403, "message": "no objects.get"}})
    proxy.configure(faults=[{"match": "val_DONE.*alt=media", "status": 403, "body": body}])
    done = snapctl("latest", f"{bucket.url}/run", "--json")
    assert (done.code, done.json["metrics"]) == (5, {"test": {"auc": 0.9}})
    assert done.json["evaluated_by"] == ["test", "val"] and "no objects.get" in done.json["warnings"][0]


def test_a_login_page_in_place_of_a_manifest_is_an_error_of_the_storage(
    proxied: tuple[Bucket, Controlled], snapctl: Snapctl
) -> None:
    bucket, proxy = proxied
    fill(bucket, 2)
    page = {"status": 200, "body": "<html>log in</html>", "headers": {"Content-Type": "text/html"}}
    proxy.configure(faults=[{"match": "alt=media", **page}])
    done = snapctl("latest", f"{bucket.url}/run")
    assert (done.code, done.stdout) == (4, "") and "a web page" in done.stderr


def test_a_wrong_paying_project_is_not_said_to_be_missing(minigcs: Controlled, snapctl: Snapctl) -> None:
    bucket = Bucket(minigcs.endpoint, "bk")
    fill(bucket, 1)
    body = json.dumps({"error": {"code": 400, "message": "User project specified in the request is not valid."}})
    minigcs.configure(faults=[{"match": "storage/v1", "status": 400, "body": body}])
    done = snapctl("latest", "gs://bk/run", "--storage-option", "requester_pays=wrong")
    assert done.code == 4 and "User project specified" in done.stderr and "hint" not in done.stderr


def test_opening_gcs_leaves_the_environment_and_the_log_levels_alone() -> None:
    script = """
        import logging, os
        before = dict(os.environ)
        import snapctl
        snapctl.infer_fs("gs://b/x")
        print(before == dict(os.environ), logging.getLogger("gcsfs").level, logging.getLogger("google.auth").level)
    """
    env = {**os.environ, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0", "0"], done.stderr


def test_a_private_https_endpoint_gets_credentials(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key.json"
    key.write_text('{"type": "authorized_user", "client_id": "x", "client_secret": "y", "refresh_token": "z"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    from snapctl.storage.gcs import open_file_system

    for options in ({}, {"endpoint_url": "https://storage-private.example"}, {"endpoint_url": "http://proxy.example"}):
        assert open_file_system(options).credentials.method == "google_default"
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    assert open_file_system({"endpoint_url": "http://127.0.0.1:9"}).credentials.credentials is None


def test_values_of_options_are_not_shown_in_errors(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    secret = tmp_path / "dir-hunter2"
    secret.mkdir()
    for command in (
        ["latest", "gs://b/x", "--storage-option", f"token={secret}"],
        ["latest", "zip://x", "--storage-option", "fo=/secret-hunter2"],
    ):
        done = snapctl(*command)
        assert done.code in (2, 4) and "hunter2" not in done.stdout + done.stderr


def test_sizes_that_a_listing_does_not_tell_are_asked_for(run: pathlib.Path, snapctl: Snapctl) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        found = snapctl("list", f"http://127.0.0.1:{port}", "--json").json["checkpoints"]
        assert [(item["step"], item["state"]) for item in found] == [(s, "complete") for s in (10, 20, 30)]
    finally:
        server.kill()
        server.wait()
