"""Files that get their names when they are whole."""

from __future__ import annotations

import errno
import os
import pathlib
import time

import pytest

from snapctl.storage.unfinished import LITTER_SECONDS, UnfinishedFile, remove_litter


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_nameless(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", no_nameless)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)


@pytest.fixture(params=[(), (without_nameless_files,), (without_links,), (without_nameless_files, without_links)])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file systems that there are."""
    for lack in request.param:
        lack(monkeypatch)


@pytest.mark.usefixtures("ways")
def test_it_is_created_where_nothing_stands_and_nowhere_else(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "f"
    with UnfinishedFile(str(target)) as file:
        file.write(b"new")
        assert not target.exists()
        file.create()
        assert file.status().st_ino == target.stat().st_ino
    assert target.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]
    with UnfinishedFile(str(target)) as file, pytest.raises(FileExistsError):
        file.write(b"other")
        file.create()
    assert target.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]


@pytest.mark.usefixtures("ways")
def test_it_takes_the_place_of_what_stands_there(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "f"
    for content in (b"first", b"second"):
        with UnfinishedFile(str(target)) as file:
            file.write(content)
            file.replace()
            assert file.status().st_ino == target.stat().st_ino
        assert target.read_bytes() == content and os.listdir(tmp_path) == ["f"]

    def refuse() -> None:
        raise ValueError("another one")

    with UnfinishedFile(str(target)) as file, pytest.raises(ValueError, match="another"):
        file.write(b"third")
        file.replace(refuse)
    assert target.read_bytes() == b"second" and os.listdir(tmp_path) == ["f"]


@pytest.mark.usefixtures("ways")
def test_one_that_is_given_up_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="enough"), UnfinishedFile(str(tmp_path / "f")) as file:
        file.write(b"x")
        raise ValueError("enough")
    assert os.listdir(tmp_path) == []


def test_litter_of_the_dead_goes_after_a_day_and_nothing_else(tmp_path: pathlib.Path) -> None:
    now = time.time()
    old, young = now - LITTER_SECONDS - 10, now - LITTER_SECONDS + 10
    for name, modified_at in {
        "f.snapctl-tmp-0123456789ab": old,
        "f.snapctl-tmp-0123456789ac": young,
        "g.snapctl-tmp-0123456789ab": old,
        "f.snapctl-tmp-notes.txt": old,
        "f": old,
    }.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (modified_at, modified_at))
    remove_litter(str(tmp_path / "f"), now)
    assert sorted(os.listdir(tmp_path)) == [
        "f",
        "f.snapctl-tmp-0123456789ac",
        "f.snapctl-tmp-notes.txt",
        "g.snapctl-tmp-0123456789ab",
    ]
    remove_litter(str(tmp_path / "f"), now, of_others=True)
    assert "g.snapctl-tmp-0123456789ab" not in os.listdir(tmp_path)
