"""Save directories to prune, on the disk and in a bucket, behind one face."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Protocol

from snapctl.checkpoints import Place, classify, read_manifest
from snapctl.errors import CheckpointNotFoundError, ManifestError
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.pruner import Prepared, Pruned, carry_out, prepare_places
from snapctl.storage import Storage, open_storage
from snapctl.verification.wholeness import check_whole, list_checkpoint
from tests.support.servers import Bucket
from tests.support.snapshots import Write, write_checkpoint
from tests.support.watched import Watch, WatchedStorage


class SaveDir(Protocol):
    """A save directory that a test fills and looks at without snapctl."""

    url: str

    def write(self, path: str, data: bytes = b"") -> None: ...
    def delete(self, path: str) -> None: ...
    def read(self, path: str) -> bytes: ...
    def names(self) -> list[str]: ...
    def age(self, path: str, seconds: float) -> None: ...


class LocalSaveDir:
    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self.url = str(root)

    def write(self, path: str, data: bytes = b"") -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def delete(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def names(self) -> list[str]:
        """All files, and directories that are left empty with a slash."""
        return sorted(
            str(path.relative_to(self.root)) + ("/" if path.is_dir() and not path.is_symlink() else "")
            for path in self.root.rglob("*")
            if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
        )

    def age(self, path: str, seconds: float) -> None:
        """Makes a file, or all below a directory, older."""
        target = self.root / path
        for each in [target, *target.rglob("*")] if target.is_dir() else [target]:
            found = os.stat(each, follow_symlinks=False)
            times = (found.st_atime - seconds, found.st_mtime - seconds)
            os.utime(each, times, follow_symlinks=False)


class GcsSaveDir:
    def __init__(self, bucket: Bucket, prefix: str = "run") -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.url = f"{bucket.url}/{prefix}"

    def write(self, path: str, data: bytes = b"") -> None:
        self.bucket.write(f"{self.prefix}/{path}", data)

    def delete(self, path: str) -> None:
        below = self.bucket.names(f"{self.prefix}/{path}/")
        for name in below or [f"{self.prefix}/{path}"]:
            self.bucket.delete(name)

    def read(self, path: str) -> bytes:
        return self.bucket.read(f"{self.prefix}/{path}")

    def names(self) -> list[str]:
        return [name[len(self.prefix) + 1 :] for name in self.bucket.names(f"{self.prefix}/")]

    def age(self, path: str, seconds: float) -> None:
        raise NotImplementedError("a server tells the times")


def fill(save_dir: SaveDir, *steps: int, markers: tuple[str, ...] = ()) -> None:
    """Ordinary complete checkpoints, the blobs before the manifest, as a save writes them."""
    write: Write = save_dir.write
    for step in steps:
        write_checkpoint(write, step, markers=markers)


def watched_place(save_dir: SaveDir, watch: Watch) -> Place:
    storage: Storage = open_storage(save_dir.url)
    return classify(WatchedStorage(storage, watch))


def prepare_watched(save_dir: SaveDir, watch: Watch, **terms: object) -> Prepared:
    """The plan for a save directory under a watch."""
    policy = make_policy(PolicyTerms(**terms))  # type: ignore[arg-type]
    (prepared,) = prepare_places([watched_place(save_dir, watch)], policy, dry_run=False)
    return prepared


def prune_watched(save_dir: SaveDir, watch: Watch, **terms: object) -> Pruned:
    """Plans and carries out."""
    return carry_out(prepare_watched(save_dir, watch, **terms))


def steps_that_look_complete(save_dir: SaveDir) -> list[int]:
    return sorted(
        int(name.partition("/")[0])
        for name in save_dir.names()
        if name.endswith("/.snapshot_metadata") and name[0] != "."
    )


def check_sound(save_dir: SaveDir) -> None:
    """Whatever looks complete has all of its blobs."""
    for step in steps_that_look_complete(save_dir):
        storage = open_storage(save_dir.url).child(str(step))
        try:
            manifest = read_manifest(storage)
            gaps = check_whole(storage, manifest, list_checkpoint(storage, manifest)).problems
        except (CheckpointNotFoundError, ManifestError):
            continue
        assert not gaps, f"step {step} looks complete, and is not: {gaps[0]}"


def write_claim(save_dir: SaveDir, step: int, partition: str = "val", *, number: int = 1, ttl: float = 7200) -> None:
    body = json.dumps({"owner": "evaluator", "nonce": "n", "ttl": ttl}).encode()
    save_dir.write(f"{step}/evaled_by/{partition}_CLAIM.{number}", body)
