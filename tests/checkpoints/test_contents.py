"""What a listing boils down to."""

from __future__ import annotations

import pytest

from snapctl.pruning.contents import digest, is_own_file, is_saved_file
from tests.support.plans import NOW, file


def test_files_and_bytes_are_counted_without_folder_objects_and_links_have_no_size() -> None:
    found = digest([file("", size=0), file("0/", size=0), file("0/a", size=5), file("0/l", size=100, is_link=True)])
    assert (found.files, found.size_bytes) == (2, 5)


def test_nothing_has_no_times() -> None:
    found = digest([file("0/", size=0)])
    assert (found.files, found.newest_at, found.oldest_at, found.newest_saved_at) == (0, None, None, None)


def test_the_longest_hold_is_told_but_not_that_of_the_announcement() -> None:
    held = [file("0/a", held_until=NOW), file("0/b", held_until=float("inf"))]
    announced = file(".snapshot_metadata.deleting", held_until=float("inf"))
    assert digest([*held, announced]).held == "0/b"
    assert digest([announced]).held is None


def test_special_files_count_only_at_the_top() -> None:
    found = digest([file("0/PINNED"), file("0/.snapshot_metadata.deleting")])
    assert not found.pinned and found.deleting is None
    assert found.inner_checkpoint == "0/.snapshot_metadata.deleting"
    assert digest([file("PINNED")]).pinned


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("evaled_by/val_DONE", True),
        (".snapctl/save.json", True),
        ("PINNED", True),
        (".snapshot_metadata.deleting", True),
        ("0/w.snapctl-tmp-0123456789ab", True),
        ("0/w", False),
        ("0/.snapctl/w", False),
        ("batched/x.snapctl-tmp-", False),
        ("evaled_by_me/x", False),
    ],
)
def test_what_snapctl_and_evaluators_add_is_known(path: str, own: bool) -> None:
    assert is_own_file(path) == own


def test_the_manifest_itself_is_no_file_of_a_save() -> None:
    assert not is_saved_file(".snapshot_metadata")
    assert not is_saved_file(".snapshot_metadata.deleting")
    assert is_saved_file(".snapshot_metadata.snapctl-tmp-0123456789ab"), "a manifest that is being written"
