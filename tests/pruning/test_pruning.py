"""Save directories are looked at as far as a plan needs it, and pruned: on real disks."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest

from snapctl.errors import InvalidOptionError, InvalidPathError, SaveDirNotFoundError, StorageError
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.pruner import CLOCK_SLACK_SECONDS, Prepared, carry_out, prepare
from snapctl.pruning.retention import Plan
from tests.support.plans import deleted, kept, reasons
from tests.support.saves import (
    LocalSaveDir,
    check_sound,
    fill,
    prepare_watched,
    prune_watched,
    steps_that_look_complete,
)
from tests.support.snapshots import metadata, write_checkpoint
from tests.support.watched import Watch, WatchedStorage

MANIFEST = ".snapshot_metadata"
DAY = 86400.0


@pytest.fixture
def local(tmp_path: pathlib.Path) -> LocalSaveDir:
    return LocalSaveDir(tmp_path / "run")


def prepared_for(*save_dirs: LocalSaveDir, dry_run: bool = True, now: float | None = None, **terms: object) -> Prepared:
    policy = make_policy(PolicyTerms(**{"keep_last": (1,), **terms}))  # type: ignore[arg-type]
    return prepare([each.url for each in save_dirs], policy, dry_run=dry_run, now=now)[0]


def plan_for(*save_dirs: LocalSaveDir, dry_run: bool = True, now: float | None = None, **terms: object) -> Plan:
    return prepared_for(*save_dirs, dry_run=dry_run, now=now, **terms).plan


# -- what is in a save directory -------------------------------------------------------------------------------------


def test_only_canonical_numbers_are_steps_and_everything_else_is_left(local: LocalSaveDir) -> None:
    fill(local, 9, 10, 100)
    for name in ("best", "0100", "+7", "1_000", "100.backup", "foo-5", "٣"):
        write_checkpoint(local.write, 5, name=name)
    for name in ("README.md", ".DS_Store", "events.out.tfevents.1", "7"):
        local.write(name, b"x")
    before = [name for name in local.names() if not name.startswith(("9/", "10/"))]
    prepared = prepared_for(local, dry_run=False)
    assert deleted(prepared.plan) == [9, 10]
    carry_out(prepared)
    assert local.names() == before


def test_a_prefix_is_not_taken_for_a_directory(local: LocalSaveDir) -> None:
    fill(local, 1, 10, 100, 1000)
    fill(LocalSaveDir(local.root.parent / "run-old"), 1, 10)
    carry_out(prepared_for(local, dry_run=False, keep_step=(10, 100)))
    assert steps_that_look_complete(local) == [10, 100, 1000]
    assert steps_that_look_complete(LocalSaveDir(local.root.parent / "run-old")) == [1, 10]


def test_the_save_that_is_running_is_neither_counted_nor_touched(local: LocalSaveDir) -> None:
    fill(local, 10, 20, 30)
    write_checkpoint(local.write, 60, complete=False)
    write_checkpoint(local.write, 5, complete=False)
    local.age("5", 5 * DAY)
    prepared = prepared_for(local, dry_run=False, keep_last=(2,))
    assert deleted(prepared.plan) == [10]
    carry_out(prepared)
    assert sorted(os.listdir(local.root), key=int) == ["5", "20", "30", "60"]
    carry_out(prepared_for(local, dry_run=False, keep_last=(2,), incomplete_older_than="1d"))
    assert sorted(os.listdir(local.root), key=int) == ["20", "30", "60"]


def test_an_empty_save_directory_has_an_empty_plan(local: LocalSaveDir) -> None:
    assert plan_for(local).rows == ()


def test_the_wrong_kind_of_path_and_a_missing_one_are_refused_before_anything_is_planned(local: LocalSaveDir) -> None:
    fill(local, 1, 2)
    policy = make_policy(PolicyTerms(keep_last=(1,)))
    with pytest.raises(InvalidPathError, match="is a checkpoint"):
        prepare([local.url, f"{local.url}/1"], policy, dry_run=False)
    with pytest.raises(SaveDirNotFoundError):
        prepare([local.url, f"{local.url}-absent"], policy, dry_run=False)


def test_a_directory_given_twice_is_pruned_once(local: LocalSaveDir) -> None:
    fill(local, 1, 2)
    os.symlink(local.root, local.root.parent / "alias")
    policy = make_policy(PolicyTerms(keep_last=(1,)))
    paths = [local.url, f"{local.url}//", str(local.root.parent / "alias"), f"file://{local.url}"]
    assert len(prepare(paths, policy, dry_run=True)) == 1


def test_real_snapshots_of_every_generation_are_parsed_and_deleted(
    data: Callable[[str], pathlib.Path], local: LocalSaveDir
) -> None:
    names = ["dtensor-4ranks/1", "torchrec-2ranks/100", "yaml-0.0.2/5", "yaml-2022-10/5", "yaml-chunked-2022-08/5"]
    for number, name in enumerate(names):
        root, step = name.split("/")
        os.rename(data(root) / step, local.root / str(number))
        _touch_manifest_last(local, number)
    fill(local, 99)
    prepared = prepared_for(local, dry_run=False, verified=True)
    assert deleted(prepared.plan) == [0, 1, 2, 3, 4]
    carry_out(prepared)
    assert os.listdir(local.root) == ["99"]


def _touch_manifest_last(local: LocalSaveDir, step: int) -> None:
    now = time.time()
    for path in (local.root / str(step)).rglob("*"):
        os.utime(path, (now - 60, now - 60))
    os.utime(local.root / str(step) / MANIFEST, (now - 30, now - 30))


# -- what is looked at -----------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing(local: LocalSaveDir) -> None:
    fill(local, 1, 2)
    before = [(path, os.stat(path).st_mtime_ns) for path in sorted(local.root.rglob("*"))]
    prepared = prepared_for(local, dry_run=True)
    assert [(path, os.stat(path).st_mtime_ns) for path in sorted(local.root.rglob("*"))] == before
    assert prepared.clock.slack_seconds == CLOCK_SLACK_SECONDS, "it knows the machine's clock alone"
    assert prepared_for(local, dry_run=False).clock.slack_seconds == 0.0
    assert sorted(os.listdir(local.root)) == ["1", "2"]


def test_only_the_manifests_that_matter_are_read(local: LocalSaveDir) -> None:
    from snapctl.checkpoints import classify
    from snapctl.pruning.pruner import prepare_places
    from snapctl.storage import open_storage

    fill(local, *range(0, 100, 10))
    watch = Watch()
    place = classify(WatchedStorage(open_storage(local.url), watch))
    prepare_places([place], make_policy(PolicyTerms(keep_every=("10",))), dry_run=True)
    read = [path for operation, path in watch.log if operation == "read"]
    assert read == [f"90/{MANIFEST}"]
    assert not [entry for entry in watch.log if entry[0] == "list_tree"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"version": "0.1.0", "world_', "neither JSON nor YAML"),
        (b"   ", "holds nothing"),
        (b'{"version": "9.0", "world_size": 1, "manifest": {}}', "is of version '9.0'"),
        (b"[1, 2]", "is not a mapping"),
    ],
)
def test_a_newest_one_that_does_not_parse_takes_no_slot_and_stays(
    local: LocalSaveDir, content: bytes, complaint: str
) -> None:
    fill(local, 10, 20, 30)
    local.write(f"30/{MANIFEST}", content)
    local.write(f"10/{MANIFEST}", content)
    prepared = prepared_for(local, dry_run=False)
    assert kept(prepared.plan) == [10, 20, 30], "a naive prune keeps the broken one alone"
    assert complaint in reasons(prepared.plan, 30)
    assert complaint in reasons(prepared.plan, 10)


def test_a_cut_off_manifest_goes_with_the_remains_and_one_of_a_version_to_come_never(local: LocalSaveDir) -> None:
    fill(local, 10, 20, 30)
    local.write(f"10/{MANIFEST}", b'{"version": "0.1.0", "wor')
    local.write(f"20/{MANIFEST}", b'{"version": "9.0", "world_size": 1, "manifest": {}}')
    local.age("10", 3 * DAY)
    local.age("20", 3 * DAY)
    prepared = prepared_for(local, dry_run=False, incomplete_older_than="1d")
    assert deleted(prepared.plan) == [10]
    carry_out(prepared)
    assert steps_that_look_complete(local) == [20, 30]


def test_verified_passes_over_what_lacks_a_blob_and_what_is_short(local: LocalSaveDir) -> None:
    fill(local, 10, 20, 30, 40)
    local.delete("40/0/model/weight")
    local.write("30/0/model/weight", b"short")
    local.age("30/0/model/weight", 60)
    prepared = prepared_for(local, verified=True)
    assert kept(prepared.plan) == [20, 40]
    assert "the newest (verified, by step, verified, by time)" in reasons(prepared.plan, 20)
    assert deleted(plan_for(local)) == [10, 20, 30], "without it the broken one is kept alone"


def test_what_vanishes_while_it_is_looked_at_is_no_error(local: LocalSaveDir) -> None:
    from snapctl.checkpoints import classify
    from snapctl.pruning.pruner import prepare_places
    from snapctl.storage import open_storage

    fill(local, 10, 20, 30)
    watch = Watch()
    place = classify(WatchedStorage(open_storage(local.url), watch))
    watch.once("read", f"10/{MANIFEST}", lambda: local.delete("10"))
    (prepared,) = prepare_places([place], make_policy(PolicyTerms(keep_last=(1,))), dry_run=False)
    assert deleted(prepared.plan) == [20]
    assert prepared.plan.not_looked_at == ()


def write_recorded(local: LocalSaveDir, step: int, saved: str) -> None:
    """A checkpoint whose save recorded its time."""
    manifest = metadata({"0/w": {"type": "list"}})
    crc = google_crc32c.Checksum(manifest).digest()
    record = {
        "format_version": 1,
        "saved_at": f"{saved}T00:00:00Z",
        "world_size": 1,
        "manifest": {"size_bytes": len(manifest), "crc32c": base64.b64encode(crc).decode()},
    }
    local.write(f"{step}/.snapctl/save.json", json.dumps(record).encode())
    local.write(f"{step}/{MANIFEST}", manifest)


def test_a_manifest_that_vanishes_before_its_record_is_compared_with_it_is_no_error(local: LocalSaveDir) -> None:
    for step in (10, 20, 30):
        write_recorded(local, step, "2024-05-01")
    watch = Watch()
    watch.once("read", f"10/{MANIFEST}", lambda: local.delete(f"10/{MANIFEST}"))
    prepared = prepare_watched(local, watch, keep_last=(1,))
    assert deleted(prepared.plan) == [20]
    assert prepared.plan.not_looked_at == (), "another prune is at it, or it is being saved again"


def test_what_vanishes_while_it_is_verified_is_no_error(local: LocalSaveDir) -> None:
    for step in (10, 20, 30):
        write_recorded(local, step, "2024-05-01")
    watch = Watch()
    watch.once("list_tree", "10", lambda: local.delete("10/.snapctl/save.json"), after=True)
    prepared = prepare_watched(local, watch, keep_last=(1,), verified=True)
    assert prepared.plan.not_looked_at == ()


def test_a_record_of_its_time_counts_and_survives_copying(local: LocalSaveDir) -> None:
    for step, saved in ((1, "2024-05-03"), (2, "2024-05-02"), (3, "2024-05-01")):
        write_recorded(local, step, saved)
    plan = plan_for(local)
    assert kept(plan) == [1, 3], "the newest by its recorded time, and by step"
    assert plan.warnings


# -- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.0, 1_500_000_000.0, time.time() + 3600], ids=["epoch", "2017", "in an hour"])
def test_a_time_that_cannot_be_is_unknown_and_costs_no_newest_step_its_life(local: LocalSaveDir, at: float) -> None:
    fill(local, 10, 20, 30, 40)
    os.utime(local.root / "10" / MANIFEST, (at, at))
    os.utime(local.root / "30" / MANIFEST, (at, at))
    for name in local.names():
        if name.startswith(("10/0", "30/0")):
            os.utime(local.root / name, (at - 1 if at else 0, at - 1 if at else 0))
    plan = plan_for(local)
    assert kept(plan) == [10, 30, 40]
    assert reasons(plan, 30) == "nobody knows when it was written"


def test_a_reused_directory_keeps_the_newest_of_both_runs_and_warns(local: LocalSaveDir) -> None:
    fill(local, 1000, 2000, 3000)
    for step in (1000, 2000, 3000):
        local.age(str(step), 90 * DAY - step)
    fill(local, 10, 20)
    plan = plan_for(local)
    assert kept(plan) == [20, 3000], "a naive prune by step deletes the run that is going on"
    assert len(plan.warnings) == 1


def test_another_now_is_only_for_rehearsals(local: LocalSaveDir) -> None:
    fill(local, 10, 20)
    with pytest.raises(InvalidOptionError, match="--dry-run"):
        plan_for(local, dry_run=False, now=time.time())
    write_checkpoint(local.write, 5, complete=False)
    soon, later = time.time() + 3600, time.time() + 3 * DAY
    os.utime(local.root / "5" / "0" / "model" / "weight", (time.time() - 60, time.time() - 60))
    assert deleted(plan_for(local, now=soon, incomplete_older_than="1d")) == [10]
    assert deleted(plan_for(local, now=later, incomplete_older_than="1d")) == [5, 10]


def test_a_dry_run_takes_claims_for_live_five_minutes_longer(local: LocalSaveDir) -> None:
    fill(local, 10, 20)
    body = json.dumps({"owner": "me", "nonce": "n", "ttl": 60}).encode()
    local.write("10/evaled_by/val_CLAIM.1", body)
    local.age("10/evaled_by/val_CLAIM.1", 60 + 10 + CLOCK_SLACK_SECONDS / 2)
    assert deleted(plan_for(local, dry_run=True)) == []
    assert deleted(plan_for(local, dry_run=False)) == [10]
    local.age("10/evaled_by/val_CLAIM.1", CLOCK_SLACK_SECONDS)
    assert deleted(plan_for(local, dry_run=True)) == [10]


# -- always kept -----------------------------------------------------------------------------------------------------


def test_pins_live_claims_and_running_saves_are_found(local: LocalSaveDir) -> None:
    fill(local, 10, 20, 30, 40, 50)
    local.write("10/PINNED")
    local.write("20/PINNED", json.dumps({"note": "for the paper"}).encode())
    local.write("30/evaled_by/val_CLAIM.1", b"not even JSON")
    local.age("40", 3 * DAY)
    local.write("40/batched/new", b"x")
    plan = plan_for(local, dry_run=False)
    assert deleted(plan) == [], "a naive prune deletes four"
    assert reasons(plan, 10) == "pinned"
    assert reasons(plan, 20) == "pinned: for the paper"
    assert reasons(plan, 30).startswith("claimed for val by unknown until ")
    assert reasons(plan, 40) == "being saved again: batched/new is younger than the manifest"


def test_the_highest_claim_of_a_partition_rules(local: LocalSaveDir) -> None:
    fill(local, 10, 20, 30)
    for number, ttl in ((9, 7200), (10, 0)):
        local.write(f"10/evaled_by/val_CLAIM.{number}", json.dumps({"owner": "a", "nonce": "n", "ttl": ttl}).encode())
    for number, ttl in ((9, 0), (10, 7200)):
        local.write(f"20/evaled_by/val_CLAIM.{number}", json.dumps({"owner": "a", "nonce": "n", "ttl": ttl}).encode())
    assert deleted(plan_for(local, dry_run=False)) == [10]


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(local: LocalSaveDir) -> LocalSaveDir:
    fill(local, 10, 20, 30, 40)
    return local


def links_to_10(local: LocalSaveDir) -> list[Callable[[], None]]:
    root, outside = local.root, local.root.parent / "outside"
    outside.mkdir()
    return [
        lambda: os.symlink("10", root / "best"),
        lambda: os.symlink(root / "10", root / "best"),
        lambda: os.symlink("10/0/model/weight", root / "best.bin"),
        lambda: os.symlink("10/0", root / "rank0"),
        lambda: os.symlink("10", root / "999"),
        lambda: (os.symlink("hop", root / "best"), os.symlink("10", root / "hop")),
        lambda: (os.symlink(root, outside / "run"), os.symlink(outside / "run" / "10", root / "best")),
        lambda: (os.makedirs(root / "picks" / "a"), os.symlink("../../10", root / "picks" / "a" / "best")),
        lambda: os.symlink("../../../10/0/model/weight", root / "30" / "0" / "model" / "shared"),
        lambda: os.symlink(f"../{root.name}/./20/../10", root / "best"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_what_a_link_leads_to_or_into_is_kept(linked: LocalSaveDir, number: int) -> None:
    assert 10 in deleted(plan_for(linked))
    links_to_10(linked)[number]()
    plan = plan_for(linked)
    assert 10 not in deleted(plan), "a naive prune leaves a dangling link"
    assert "leads to it" in reasons(plan, 10)


def test_a_link_in_another_save_directory_of_the_command_counts(linked: LocalSaveDir) -> None:
    other = LocalSaveDir(linked.root.parent / "other")
    fill(other, 1)
    os.symlink(linked.root / "10", other.root / "start-from")
    assert 10 in deleted(plan_for(linked))
    assert 10 not in deleted(plan_for(linked, other))
    assert 10 not in deleted(prepare_all(other, linked)[1])


def prepare_all(*save_dirs: LocalSaveDir) -> list[Plan]:
    policy = make_policy(PolicyTerms(keep_last=(1,)))
    return [each.plan for each in prepare([s.url for s in save_dirs], policy, dry_run=True)]


def test_a_link_inside_a_checkpoint_does_not_keep_that_checkpoint_itself(linked: LocalSaveDir) -> None:
    os.symlink("../model/weight", linked.root / "10" / "0" / "model" / "again")
    os.symlink("..", linked.root / "10" / "up")
    for step in (10, 20, 30, 40):
        os.utime(linked.root / str(step) / MANIFEST)
    assert 10 in deleted(plan_for(linked))


def test_links_that_lead_nowhere_or_elsewhere_or_round_in_circles_keep_nothing(linked: LocalSaveDir) -> None:
    os.symlink("absent", linked.root / "dangling")
    os.symlink("loop", linked.root / "loop")
    os.symlink("/etc", linked.root / "etc")
    os.symlink(".", linked.root / "self")
    os.symlink("..", linked.root / "parent")
    assert deleted(plan_for(linked)) == [10, 20, 30]


def test_a_directory_whose_links_cannot_be_read_stops_everything(linked: LocalSaveDir) -> None:
    watch = Watch()

    def fail(operation: str, path: str) -> None:
        if operation == "list_links":
            raise StorageError("input/output error")

    watch.before = fail
    with pytest.raises(StorageError):
        prepare_watched(linked, watch, keep_last=(1,))


def test_the_same_directory_under_another_mount_is_the_same(linked: LocalSaveDir, tmp_path: pathlib.Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "--bind", str(linked.root), str(mount)], capture_output=True).returncode != 0:
        pytest.skip("no mounts here")
    try:
        os.symlink(mount / "10", linked.root / "best")
        assert 10 not in deleted(plan_for(linked)), "a naive prune compares names"
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_one_directory_under_two_steps_is_not_deleted_under_the_one_that_is_kept(linked: LocalSaveDir) -> None:
    (linked.root / "50").mkdir()
    mounted = subprocess.run(["mount", "--bind", str(linked.root / "10"), str(linked.root / "50")], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no mounts here")
    try:
        plan = plan_for(linked)
        assert deleted(plan) == [20, 30]
        assert f"{linked.url}/50 leads to it" in reasons(plan, 10)
    finally:
        subprocess.run(["umount", str(linked.root / "50")], check=True)


def test_a_step_that_is_a_link_counts_by_its_name(linked: LocalSaveDir) -> None:
    elsewhere = LocalSaveDir(linked.root.parent / "elsewhere")
    fill(elsewhere, 5)
    os.symlink(elsewhere.root / "5", linked.root / "50")
    plan = plan_for(linked, order="step", keep_last=(2,))
    assert kept(plan) == [40, 50]


# -- bits of everyday trouble ----------------------------------------------------------------------------------------


def test_odd_names_inside_a_checkpoint_are_deleted_literally(local: LocalSaveDir) -> None:
    write_checkpoint(local.write, 1, {"[a-z]*?": np.zeros(1), "%2F": np.zeros(1), "ü\n": np.zeros(1), " ": np.zeros(1)})
    (local.root / "1" / "0" / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    os.makedirs(local.root / "1" / "0" / "empty" / "deeper")
    os.utime(local.root / "1" / MANIFEST)
    fill(local, 2)
    carry_out(prepared_for(local, dry_run=False))
    assert os.listdir(local.root) == ["2"]


def test_a_fifo_and_a_socket_in_a_checkpoint_do_not_block_it(local: LocalSaveDir) -> None:
    fill(local, 1)
    os.mkfifo(local.root / "1" / "0" / "pipe")
    os.utime(local.root / "1" / MANIFEST)
    fill(local, 2)
    carry_out(prepared_for(local, dry_run=False))
    assert os.listdir(local.root) == ["2"]


def test_many_checkpoints_go_several_at_a_time_and_all_are_sound_that_stay(local: LocalSaveDir) -> None:
    fill(local, *range(0, 400, 10))
    result = carry_out(prepared_for(local, dry_run=False, keep_every=("100",)))
    assert result.deleted == 35
    assert steps_that_look_complete(local) == [0, 100, 200, 300, 390]
    check_sound(local)


def test_directories_that_dead_ones_left_empty_go_after_an_hour(local: LocalSaveDir) -> None:
    fill(local, 30)
    now = time.time()
    for name, age in {"1": 7200, "2": 60, "3/0": 7200, "4/0/deep": 7200, "notes": 7200}.items():
        (local.root / name).mkdir(parents=True)
        for path in (local.root / name, *(p for p in (local.root / name).parents if p != local.root)):
            if path.is_relative_to(local.root):
                os.utime(path, (now - age, now - age))
    os.utime(local.root / "4" / "0", (now, now))
    (local.root / "5" / "0").mkdir(parents=True)
    (local.root / "5" / "0" / "blob").write_bytes(b"x")
    for path in (local.root / "5" / "0" / "blob", local.root / "5" / "0", local.root / "5"):
        os.utime(path, (now - 7200, now - 7200))
    prune_watched(local, Watch(), keep_last=[1])
    assert sorted(os.listdir(local.root)) == ["2", "30", "4", "5", "notes"]
