"""What a save does to a step's directory besides its blobs."""

from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapctl.errors import NoSpaceError, SaveError, StorageError, UnavailableError
from snapctl.save_record import (
    SAVE_RECORD_PATH,
    BlobSum,
    RankTimings,
    RestoreTimings,
    SaveRecord,
    format_save_record,
    parse_save_record,
)
from snapctl.saving.commit import (
    announce,
    blob_sum,
    check_alone,
    check_visible,
    clear_step,
    commit,
    delete_blobs,
    encode_manifest,
    merge_blobs,
    plan_old_blobs,
    withdraw,
)
from snapctl.storage import FileInfo, LocalStorage


def make_files(root: pathlib.Path, *paths: str) -> LocalStorage:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())
    return LocalStorage(str(root))


def files_in(root: pathlib.Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


# -- clearing --------------------------------------------------------------------------------------------------------


def test_clearing_makes_a_step_incomplete_and_unevaluated_and_keeps_its_pin_and_blobs(tmp_path: pathlib.Path) -> None:
    kept = {"PINNED", "0/m/w", "batched/x", "notes.txt", "evaled_by/notes.txt"}
    gone = {
        ".snapshot_metadata",
        ".snapshot_metadata.deleting",
        "evaled_by/val_DONE",
        "evaled_by/val_CLAIM.3",
        ".snapctl/save.json",
        ".snapctl/save.1.json",
    }
    storage = make_files(tmp_path / "1", *kept, *gone)
    assert {file.path for file in clear_step(storage)} == kept
    assert files_in(tmp_path / "1") == kept


def test_the_manifest_goes_before_anything_else(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = make_files(tmp_path / "1", ".snapshot_metadata", "evaled_by/val_DONE", ".snapctl/save.json")
    order: list[str] = []
    delete = LocalStorage.delete
    monkeypatch.setattr(
        LocalStorage, "delete", lambda self, path, **options: (order.append(path), delete(self, path, **options))[1]
    )
    clear_step(storage)
    assert order[0] == ".snapshot_metadata" and len(order) == 3


def test_clearing_a_step_that_is_not_there_makes_its_directory(tmp_path: pathlib.Path) -> None:
    assert clear_step(LocalStorage(str(tmp_path / "a/b/1"))) == []
    assert (tmp_path / "a/b/1").is_dir()


@pytest.mark.parametrize("target", ["checkpoint", "nothing"])
def test_a_step_that_is_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: pathlib.Path, target: str) -> None:
    kept = {".snapshot_metadata", "0/m/w", "evaled_by/val_DONE", ".snapctl/save.json"}
    make_files(tmp_path / "checkpoint", *kept)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/1").symlink_to(tmp_path / target)
    assert clear_step(LocalStorage(str(tmp_path / "run/1"))) == []
    assert (tmp_path / "run/1").is_dir() and not (tmp_path / "run/1").is_symlink()
    assert files_in(tmp_path / "checkpoint") == kept and not (tmp_path / "nothing").exists()


def test_links_to_directories_inside_a_step_are_not_written_through(tmp_path: pathlib.Path) -> None:
    make_files(tmp_path / "other", "0/m/w")
    storage = make_files(tmp_path / "1", ".snapshot_metadata", "batched/x")
    (tmp_path / "1/0").symlink_to(tmp_path / "other/0")
    (tmp_path / "1/batched/y").symlink_to("x")
    assert {file.path for file in clear_step(storage)} == {"batched/x", "batched/y"}
    assert not (tmp_path / "1/0").is_symlink() and files_in(tmp_path / "other") == {"0/m/w"}


def test_old_blobs_in_the_way_of_new_ones_go_at_once(tmp_path: pathlib.Path) -> None:
    kept = {"0/m/a", "0/m/b/c", "notes/x", "7/.snapshot_metadata", "7/0/m/w"}
    storage = make_files(tmp_path / "1", *kept, "0/m/was_tensor", "0/m/was_dict/x/y")
    (tmp_path / "1/0/m/empty/e").mkdir(parents=True)
    new = ["0/m/a", "0/m/was_tensor/x/y", "0/m/was_dict", "0/m/empty", "notes/x/y", "7/0/m/w/x"]
    assert {file.path for file in clear_step(storage, new)} == kept
    assert files_in(tmp_path / "1") == kept
    for path in new[:4]:
        storage.write_blob(path, b"")


# -- who saves -------------------------------------------------------------------------------------------------------


def test_a_save_that_another_one_has_overtaken_is_told(tmp_path: pathlib.Path) -> None:
    storage = LocalStorage(str(tmp_path / "1"))
    clear_step(storage)
    first = announce(storage)
    check_alone(storage, first)
    clear_step(storage)
    with pytest.raises(SaveError, match=r"another save into .*/1 has begun meanwhile"):
        check_alone(storage, first)
    second = announce(storage)
    with pytest.raises(SaveError, match="another save"):
        check_alone(storage, first)
    withdraw(storage, first)
    check_alone(storage, second)
    withdraw(storage, second)
    assert files_in(tmp_path / "1") == set()


# -- the manifest's bytes --------------------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_a_manifest_is_json_and_yaml_and_says_the_same_as_both(key: str, value: str) -> None:
    yaml = pytest.importorskip("yaml")
    document = {"version": "0.1.0", "manifest": {key[:300]: {"keys": [value, 1, True]}}}
    data = encode_manifest(document)
    assert json.loads(data) == document
    for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        assert yaml.load(data.decode(), Loader=loader) == document


def test_a_lone_surrogate_is_kept_as_an_escape() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Metadata:
        version: str

    data = encode_manifest(Metadata("a\ud800b"))
    assert json.loads(data) == {"version": "a\ud800b"}
    assert b"\\ud800" in data


# -- merging and looking ---------------------------------------------------------------------------------------------


def test_blobs_of_all_ranks_are_merged() -> None:
    a, b = BlobSum(1, 2), BlobSum(3, 4)
    assert merge_blobs([{"x": a}, {"y": b, "x": a}]) == {"x": a, "y": b}


def test_two_ranks_with_different_bytes_for_one_location_are_told() -> None:
    with pytest.raises(SaveError, match="ranks 0 and 2 both wrote x") as caught:
        merge_blobs([{"x": BlobSum(1, 2)}, {}, {"x": BlobSum(1, 3)}])
    assert caught.value.ranks == (0, 2)


def test_a_blob_that_rank_0_cannot_see_is_told(tmp_path: pathlib.Path) -> None:
    storage = make_files(tmp_path, "0/x")
    check_visible(storage, [{"0/x": BlobSum(3, 0)}])
    with pytest.raises(SaveError, match="rank 1 wrote 1/x, 3 bytes, which for rank 0 is not there"):
        check_visible(storage, [{"0/x": BlobSum(3, 0)}, {"1/x": BlobSum(3, 0)}])
    with pytest.raises(SaveError, match="3 bytes long"):
        check_visible(storage, [{"0/x": BlobSum(4, 0)}])


# -- the commit ------------------------------------------------------------------------------------------------------


def record(manifest: bytes) -> SaveRecord:
    return SaveRecord(1.8e9, 1, blob_sum(manifest), (RankTimings(0, 0.5, 2.0, 100),), {"0/x": BlobSum(1, 2)})


def test_the_record_is_written_before_the_manifest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = LocalStorage.write

    def note(self: LocalStorage, path: str, data: bytes, **options: bool) -> FileInfo:
        order.append(path)
        return write(self, path, data, **options)

    monkeypatch.setattr(LocalStorage, "write", note)
    commit(LocalStorage(str(tmp_path)), b"{}", record(b"{}"))
    assert order == [SAVE_RECORD_PATH, ".snapshot_metadata"]
    found = json.loads((tmp_path / SAVE_RECORD_PATH).read_bytes())
    assert found["ranks"] == [
        {"rank": 0, "blocked_seconds": 0.5, "durable_seconds": 2.0, "bytes": 100, "bytes_per_second": 50.0}
    ]
    assert parse_save_record((tmp_path / SAVE_RECORD_PATH).read_bytes(), with_blobs=True) == record(b"{}")


def test_a_record_tells_of_the_restore_before_it() -> None:
    held = replace(record(b"{}"), restored=RestoreTimings(1.7e9, None, 2, 3.25, 10))
    data = format_save_record(held)
    assert json.loads(data)["restored"] == {
        "restored_at": "2023-11-14T22:13:20.000Z",
        "step": None,
        "world_size": 2,
        "restored_seconds": 3.25,
        "bytes": 10,
    }
    assert parse_save_record(data, with_blobs=True) == held
    assert "restored" not in json.loads(format_save_record(record(b"{}")))
    for odd in (b"yesterday ", b'2023-11-14T22:13:20Z", "step": "one", "x": "'):
        assert parse_save_record(data.replace(b"2023-11-14T", odd), with_blobs=True) == record(b"{}")


class Flaky(LocalStorage):
    """A storage whose answer to the writing of a manifest is lost, or which fails to write it."""

    def __init__(self, path: str, error: StorageError, *, written: bool, blind: bool = False) -> None:
        super().__init__(path)
        self._error = error
        self._written = written
        self._blind = blind

    def write(self, path: str, data: bytes | memoryview, *, exclusive: bool = False, durable: bool = True) -> FileInfo:
        if path != ".snapshot_metadata":
            return super().write(path, data, exclusive=exclusive, durable=durable)
        if self._written:
            super().write(path, data)
        raise self._error

    def find_file(self, path: str) -> FileInfo | None:
        if self._blind:
            raise UnavailableError("gone")
        return super().find_file(path)


def test_a_manifest_whose_answer_was_lost_is_looked_for(tmp_path: pathlib.Path) -> None:
    commit(Flaky(str(tmp_path), UnavailableError("no answer"), written=True), b"{}", record(b"{}"))


@pytest.mark.parametrize("blind", [False, True])
def test_a_manifest_that_may_still_arrive_is_unknown(blind: bool, tmp_path: pathlib.Path) -> None:
    with pytest.raises(SaveError) as caught:
        commit(Flaky(str(tmp_path), UnavailableError("no answer"), written=False, blind=blind), b"{}", record(b"{}"))
    assert caught.value.unknown


def test_a_manifest_that_was_refused_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NoSpaceError):
        commit(Flaky(str(tmp_path), NoSpaceError("full"), written=False), b"{}", record(b"{}"))
    assert files_in(tmp_path) == set()  # nor is a record of what was not saved


# -- old blobs -------------------------------------------------------------------------------------------------------


def info(path: str) -> FileInfo:
    return FileInfo(path, 1, 0.0)


def planned(paths: list[str], kept: set[str] = frozenset()) -> set[str]:  # type: ignore[assignment]
    return {file.path for file in plan_old_blobs([info(path) for path in paths], kept)}


def test_old_blobs_are_what_torchsnapshot_writes_and_the_new_manifest_does_not_need() -> None:
    blobs = ["0/m/w", "17/m/w", "batched/x", "replicated/m/w", "sharded/t_0_0", "replicated_sharded/t_0"]
    others = ["PINNED", "notes.txt", "logs/0/x", "00/x", "+1/x", "evaled_by/notes", ".snapctl/save.json", "0/"]
    assert planned(blobs + others) == set(blobs)
    assert planned(blobs + others, {"0/m/w", "batched/x"}) == set(blobs) - {"0/m/w", "batched/x"}


def test_unfinished_files_are_old_wherever_they_lie() -> None:
    assert planned([".snapshot_metadata.snapctl-tmp-1234", "evaled_by/x.snapctl-tmp-1"]) == {
        ".snapshot_metadata.snapctl-tmp-1234",
        "evaled_by/x.snapctl-tmp-1",
    }


def test_checkpoints_of_a_run_that_is_named_by_a_number_are_no_old_blobs() -> None:
    assert planned(["0/m/w", "5/.snapshot_metadata", "5/0/m/w", "7/100/.snapshot_metadata", "7/100/0/x"]) == {"0/m/w"}


def test_deleting_old_blobs_spares_what_has_been_written_since(tmp_path: pathlib.Path) -> None:
    storage = make_files(tmp_path, "0/m/a", "1/c", "2/d")
    old = storage.list_tree()
    (tmp_path / "2/d").write_bytes(b"written since")
    deleted = delete_blobs(storage, old)
    assert files_in(tmp_path) == {"2/d"}
    assert not (tmp_path / "0").exists() and not (tmp_path / "1").exists()
    assert deleted.changed == ["2/d"] and not deleted.failed
