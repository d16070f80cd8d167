"""What only local directories have: links, FIFOs, permissions, full disks, odd names."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from snapctl.errors import (
    InvalidPathError,
    NoSpaceError,
    PermissionDeniedError,
    RefusedError,
    StorageError,
    StorageNotFoundError,
)
from snapctl.storage import LocalStorage, open_storage, split_url
from snapctl.storage.local_paths import absolute_path, temporary_name
from tests.support.command import unprivileged
from tests.support.snapshots import local_writer


def test_a_blob_is_never_read_through_a_link_that_leads_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    root = tmp_path / "10"
    (root / "0").mkdir(parents=True)
    (root / "0" / "direct").symlink_to(tmp_path / "secret")
    (root / "outside").symlink_to(tmp_path)
    (root / "0" / "inside").symlink_to(root / "0" / "blob")
    (root / "0" / "blob").write_bytes(b"blob")
    store = open_storage(str(root))
    for path in ("0/direct", "outside/secret"):
        with pytest.raises(InvalidPathError, match="leads out of"):
            store.read_range(path, 0, 6)
    assert store.read_range("0/inside", 0, 4) == b"blob"


def test_a_checkpoint_behind_a_link_is_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "blob").write_bytes(b"blob")
    (tmp_path / "10").symlink_to(tmp_path / "real")
    assert open_storage(str(tmp_path / "10")).read_range("blob", 0, 4) == b"blob"


def test_a_fifo_or_a_device_is_refused_and_never_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    store = open_storage(str(tmp_path))
    for look in (lambda: store.read("fifo"), lambda: store.read_range("fifo", 0, 1)):
        with pytest.raises(StorageError, match="not a regular file"):
            look()
    found = store.find_file("fifo")
    assert found is not None and found.size_bytes == 0


def test_links_are_listed_and_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "deep" / "f").write_bytes(b"x")
    root = tmp_path / "run"
    root.mkdir()
    (root / "20").symlink_to(tmp_path / "other")
    (root / "30").symlink_to(tmp_path / "nowhere")
    (root / "40").symlink_to(root / "40")
    store = open_storage(str(root))
    listing = store.list_dir()
    assert listing.dirs == ("20",) and listing.linked_dirs == {"20"}
    assert [(file.path, file.is_link) for file in store.list_tree()] == [("20", True), ("30", True), ("40", True)]
    assert store.delete("20") is True
    assert (tmp_path / "other" / "deep" / "f").exists()


def test_emptied_directories_go_and_others_stay(tmp_path: pathlib.Path) -> None:
    for path in ("10/a/b", "10/c", "10/full"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "10" / "full" / "f").write_bytes(b"x")
    store = open_storage(str(tmp_path))
    store.delete_empty_dirs("10")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["10", "10/full", "10/full/f"]


def test_a_write_never_makes_the_directory_itself(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StorageNotFoundError):
        open_storage(str(tmp_path / "gone")).write("evaled_by/val_DONE", b"")
    assert list(tmp_path.iterdir()) == []


class Emptied(LocalStorage):
    """A directory in which somebody removes, once, what is empty just before a file is created in it."""

    was_emptied = False

    def _make_parents(self, path: str, *, durable: bool = True) -> None:
        super()._make_parents(path, durable=durable)
        if not self.was_emptied:
            self.was_emptied = True
            self.delete_empty_dirs()


def test_a_save_survives_that_its_empty_directories_are_removed_by_a_deletion(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "10"
    root.mkdir()
    Emptied(str(root)).write_blob("0/model/weight", b"new")
    assert (root / "0" / "model" / "weight").read_bytes() == b"new"
    Emptied(str(root)).write(".snapctl/save.json", b"{}")
    assert (root / ".snapctl" / "save.json").read_bytes() == b"{}"


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path: pathlib.Path) -> None:
    script = """
        import resource, signal, sys
        from snapctl.errors import NoSpaceError
        from snapctl.storage import open_storage
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for exclusive in (False, True):
            try:
                open_storage(sys.argv[1]).write("new" if exclusive else "f", b"x" * 5000, exclusive=exclusive)
            except NoSpaceError as error:
                print(error)
    """
    (tmp_path / "f").write_bytes(b"old")
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{tmp_path}/f: File too large", f"{tmp_path}/new: File too large"], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"
    assert issubclass(NoSpaceError, OSError)


def test_permission_denied_is_told_from_not_there(tmp_path: pathlib.Path) -> None:
    script = """
        import sys
        from snapctl.storage import open_storage
        store = open_storage(sys.argv[1])
        for look in (
            lambda: store.read("f"), lambda: store.list_dir("closed"), lambda: store.find_file("closed/f"),
            lambda: store.child("fixed").write("new", b""), lambda: store.child("fixed").delete("f"),
            lambda: store.list_tree(),
        ):
            try:
                print("no error", look())
            except Exception as error:
                print(type(error).__name__)
        print(next(iter(store.scan(["closed"], ["f"]))).error)
    """
    root = tmp_path / "run"
    for name in ("f", "closed/f", "fixed/f"):
        local_writer(root)(name, b"x")
    for name, mode in (("f", 0), ("closed", 0), ("fixed", 0o555)):
        (root / name).chmod(mode)
    command = [*unprivileged(), sys.executable, "-c", textwrap.dedent(script), str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["PermissionDeniedError"] * 6 + [f"{root}/closed: Permission denied"], (
        done.stdout + done.stderr
    )
    assert issubclass(PermissionDeniedError, PermissionError)
    for name in ("closed", "fixed"):
        (root / name).chmod(0o755)


def test_names_that_are_not_utf8_survive(tmp_path: pathlib.Path) -> None:
    store = open_storage(str(tmp_path))
    name = os.fsdecode(b"bad-\xff-name")
    store.write(f"d/{name}", b"x")
    assert (tmp_path / "d" / name).read_bytes() == b"x"
    assert [file.path for file in store.list_tree()] == [f"d/{name}"]


def test_a_temporary_name_fits_into_the_file_system() -> None:
    for base in ("x", "y" * 255, "ü" * 127):
        name = os.path.basename(temporary_name(f"/d/{base}"))
        assert len(os.fsencode(name)) <= 255
        assert ".snapctl-tmp-" in name


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("x", "{cwd}/x"),
        ("./x/", "{cwd}/x"),
        ("x//y///", "{cwd}/x/y"),
        ("/a/./b/../c", "/a/c"),
        ("~/x", "{home}/x"),
        ("~", "{home}"),
        ("~other", "{cwd}/~other"),
        ("/", "/"),
        ("file:///a/b/", "/a/b"),
        ("FILE://x", "{cwd}/x"),
        ("file://x%20y", "{cwd}/x%20y"),
        ("run[1]", "{cwd}/run[1]"),
    ],
)
def test_every_spelling_of_a_local_path_gives_one_form(
    path: str, expected: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_storage(path).url == expected.format(cwd=tmp_path, home="/home/somebody")


def test_dots_behind_a_link_lead_where_the_system_goes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "sub")
    assert absolute_path(f"{tmp_path}/link/../x") == f"{tmp_path}/real/x"
    assert absolute_path(f"{tmp_path}/link/x") == f"{tmp_path}/link/x", "a link itself is kept"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("GS://b/p", ("gs", "b/p")),
        ("gcs://b//p/", ("gs", "b/p")),
        ("gs://b", ("gs", "b")),
        ("memory://x/y", ("memory", "x/y")),
        ("gs:/b", ("file", "gs:/b")),
        ("S3://b/[x]?*#%", ("s3", "b/[x]?*#%")),
    ],
)
def test_urls_are_split_literally(url: str, expected: tuple[str, str]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize("path", ["", "a\0b", "simplecache::gs://b/p", "nope://x"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidPathError):
        open_storage(path)


def test_local_storage_is_what_a_plain_path_opens(tmp_path: pathlib.Path) -> None:
    assert isinstance(open_storage(tmp_path), LocalStorage)


def test_nothing_is_written_or_deleted_through_a_link_that_leads_out(tmp_path: pathlib.Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "10"
    for directory in (outside / "empty", root / "inside"):
        directory.mkdir(parents=True)
    (outside / "kept").write_bytes(b"kept")
    (root / "evaled_by").symlink_to(outside)
    (root / "alias").symlink_to(root / "inside")
    store = open_storage(str(root))
    for act in (
        lambda: store.write("evaled_by/new", b""),
        lambda: store.write("evaled_by/new", b"", exclusive=True),
        lambda: store.write("evaled_by/new", b"", exclusive=True, durable=False),
        lambda: store.write_blob("evaled_by/kept", b""),
        lambda: store.delete("evaled_by/kept"),
    ):
        with pytest.raises(RefusedError, match="leads out of"):
            act()
    store.delete_empty_dirs("evaled_by")
    assert sorted(os.listdir(outside)) == ["empty", "kept"] and (outside / "kept").read_bytes() == b"kept"
    store.write("alias/new", b"")
    assert (root / "inside" / "new").exists()
