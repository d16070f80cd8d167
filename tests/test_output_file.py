"""A file appears whole or not at all, and nothing else is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from snapctl import output_file
from snapctl.errors import InvalidPathError, NoSpaceError, OutputExistsError, PermissionDeniedError, StorageError
from snapctl.output_file import NewFile, check_output_path


def test_it_has_its_name_only_once_it_is_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.bin"
    with NewFile(str(path)) as file:
        file.write(b"abc")
        assert not path.exists()
        file.write(memoryview(b"def"))
        file.commit()
    assert path.read_bytes() == b"abcdef"
    assert file.size_bytes == 6
    assert os.listdir(tmp_path) == ["a.bin"]


def test_without_a_commit_nothing_is_there_and_the_old_file_is_as_it_was(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with NewFile(str(path)) as file:
        file.write(b"new")
    with pytest.raises(KeyboardInterrupt), NewFile(str(path)) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_the_permissions_of_a_file_that_is_replaced_are_kept_and_a_new_one_has_the_usual(
    tmp_path: pathlib.Path,
) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        for name in ("old", "new"):
            with NewFile(str(tmp_path / name)) as file:
                file.commit()
    finally:
        os.umask(before)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_large_files_are_flushed_on_the_way(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_file, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(output_file, "MAX_UNFLUSHED_BYTES", 5000)
    data = os.urandom(100_000)
    with NewFile(str(tmp_path / "a")) as file:
        for start in range(0, len(data), 700):
            file.write(data[start : start + 700])
        file.commit()
    assert (tmp_path / "a").read_bytes() == data
    with NewFile(str(tmp_path / "b")) as file:
        file.write(data)
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_said_with_the_name_that_the_user_knows(tmp_path: pathlib.Path) -> None:
    code = (
        "import resource, signal, sys\nfrom snapctl.output_file import NewFile\n"
        "from snapctl.errors import NoSpaceError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with NewFile(sys.argv[1]) as file: file.write(bytes(10000)); file.commit()\n"
        "except NoSpaceError as error: print(error)"
    )
    path = tmp_path / "a.bin"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: File too large\n"
    assert os.listdir(tmp_path) == []
    assert issubclass(NoSpaceError, StorageError)


def test_a_terminated_writer_leaves_nothing(tmp_path: pathlib.Path) -> None:
    code = (
        "import signal, sys, time\nfrom snapctl.output_file import NewFile\n"
        "def stop(*_): raise SystemExit(9)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "with NewFile(sys.argv[1]) as file:\n    file.write(b'x'); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert process.wait(10) == 9
        assert time.monotonic() - started < 2
    assert os.listdir(tmp_path) == []


# -- looking first ---------------------------------------------------------------------------------------------------


def test_an_existing_file_is_kept_unless_it_may_be_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"")
    with pytest.raises(OutputExistsError, match="exists already") as caught:
        check_output_path(str(path), force=False)
    assert caught.value.hint == "--force replaces it"
    assert check_output_path(str(path), force=True) == str(path)


def test_a_link_is_followed_so_that_it_stays_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.npy").symlink_to(tmp_path / "real" / "a.npy")
    full = check_output_path(str(tmp_path / "link.npy"), force=False)
    assert full == str(tmp_path / "real" / "a.npy")


def test_relative_and_home_paths_are_made_absolute(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("a.pt", "./a.pt", "~/a.pt", f"file://{tmp_path}/a.pt"):
        assert check_output_path(path, force=False) == str(tmp_path / "a.pt")


@pytest.mark.parametrize("path", ["gs://b/a.npy", "memory://a.npy"])
def test_a_url_is_no_output(path: str) -> None:
    with pytest.raises(InvalidPathError, match="must be a local file"):
        check_output_path(path, force=False)


def test_what_is_no_file_is_no_output(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, text in ((tmp_path, "is a directory"), (tmp_path / "pipe", "not a regular file"), ("/dev/null", "not a")):
        with pytest.raises(InvalidPathError, match=text):
            check_output_path(str(path), force=True)


def test_a_missing_parent_is_named_with_how_to_make_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StorageError, match="no/such: no such directory") as caught:
        check_output_path(str(tmp_path / "no/such/a.npy"), force=False)
    assert caught.value.hint == f"mkdir -p {tmp_path}/no/such"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        check_output_path(str(tmp_path / "file/a.npy"), force=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_directory_that_may_not_be_written_to_is_refused_before_anything_is_read(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:-2]:
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionDeniedError, match=f"{tmp_path}: permission denied"):
            check_output_path(str(tmp_path / "a"), force=False)
    finally:
        os.seteuid(0)
    assert issubclass(PermissionDeniedError, StorageError)
