"""Where the save directories below a directory are, from one walk over everything.

A directory is a save directory if a child with a number for a name has a manifest, or had one; and one whose saves have
never been finished if such a child looks like a checkpoint and no manifest lies below any of them. What lies in a
checkpoint, complete or not, is part of it. Nothing is held but what the open directories need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from snapctl.checkpoints import SIGNS_OF_A_CHECKPOINT, WANTED, parse_step
from snapctl.errors import StorageError
from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME
from snapctl.storage import FileInfo, ScannedDir, Storage, WalkFailure

_FILES = frozenset(name for name in WANTED if not name.endswith("/"))
_DIRS = frozenset(name[:-1] for name in WANTED if name.endswith("/"))
_FIRST_LETTERS = frozenset(name[0] for name in WANTED)


class FoundSaveDir(msgspec.Struct, frozen=True):
    """A save directory, and what the walk has seen of its checkpoints."""

    path: str
    """Relative to where the search began; empty for that very directory."""
    entries: tuple[ScannedDir, ...]
    """Its checkpoints, ascending by step; of their files path and size alone are sure (see `Storage.walk`). Of those
    behind a symbolic link the totals are None: they lie elsewhere."""
    linked_names: frozenset[str] = frozenset()
    error: StorageError | None = None
    """It could not be listed to its end: there may be more."""

    @property
    def has_complete(self) -> bool:
        """Whether one of its checkpoints has a manifest, or had one."""
        return any(_has_manifest(entry) for entry in self.entries)


class UnreadableDir(msgspec.Struct, frozen=True):
    """A directory that could not be listed: nobody knows what lies below it."""

    path: str
    error: StorageError


Found: TypeAlias = FoundSaveDir | UnreadableDir


def find_save_dirs(storage: Storage) -> Iterator[Found]:
    """The save directories below a directory, itself included, in the order of the walk.

    Each comes as soon as it is certain that it is one: where a child of a directory above has a number for a name (a
    tree by date), that is when that directory has been listed. Symbolic links to directories are not followed, but in
    a save directory one with a number for a name counts as a checkpoint.

    Raises:
        StorageError: the directory itself could not be listed at all.
    """
    finder = _Finder(storage)
    for part in storage.walk():
        if isinstance(part, WalkFailure):
            if not part.path and not finder.has_begun:
                raise part.error
            finder.add_failure(part)
        else:
            finder.add_files(part)
        yield from finder.take()
    finder.finish()
    yield from finder.take()


def _has_manifest(entry: ScannedDir) -> bool:
    return any(file.path in (MANIFEST_NAME, DELETING_NAME) for file in entry.files)


class _Dir:
    """A directory through which the walk goes."""

    __slots__ = (
        "entry", "error", "files", "has_manifest", "has_sign", "held", "inner_error", "links", "manifest_below", "name",
        "out", "path", "size_bytes", "steps",
    )  # fmt: skip

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        """With a slash at the end; empty for where the search began."""
        self.entry = ScannedDir(name) if parse_step(name) is not None and path else None
        """Of a directory with a number for a name."""
        self.files = 0
        self.size_bytes = 0
        self.has_manifest = False
        self.has_sign = False
        self.manifest_below = False
        self.error: StorageError | None = None
        self.inner_error: StorageError | None = None
        """Of some directory below."""
        self.steps: list[_Dir] = []
        self.links: list[str] = []
        self.out: list[Found] = []
        """Found below, and none of it in a child with a number for a name."""
        self.held: list[Found] = []
        """Found in such children: parts of checkpoints, if this turns out to be a save directory."""

    @property
    def relative_path(self) -> str:
        """Without the slash; but for the directory of no name, which an object ``/x`` lies in."""
        return self.path[:-1] or self.path


class _Finder:
    """Follows a walk with a stack of the directories that are open."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stack = [_Dir("", "")]
        self._directory = ""
        self._checkpoint: _Dir | None = None
        """The open directory that has a manifest: all below is part of it."""
        self._ready: list[Found] = []
        self.has_begun = False

    def take(self) -> list[Found]:
        """What has become certain since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def add_files(self, files: Iterable[FileInfo]) -> None:
        self.has_begun = True
        for file in files:
            path = file.path
            checkpoint = self._checkpoint
            if checkpoint is not None and path.startswith(checkpoint.path):
                if path[-1] != "/":
                    checkpoint.files += 1
                    checkpoint.size_bytes += file.size_bytes
                    inner = path[len(checkpoint.path) :]
                    if inner[0] in _FIRST_LETTERS:
                        _keep_if_wanted(checkpoint, file, inner)
                continue
            directory, _, name = path.rpartition("/")
            if not name and file.is_link:
                directory, _, name = directory.rpartition("/")
            if directory != self._directory:
                self._move_to(directory, path)
            if file.is_link and path[-1] == "/":
                if parse_step(name) is not None:
                    self._stack[-1].links.append(name)
            elif name:
                self._add_file(file, name)

    def _add_file(self, file: FileInfo, name: str) -> None:
        node = self._stack[-1]
        node.files += 1
        node.size_bytes += file.size_bytes
        if name in (MANIFEST_NAME, DELETING_NAME):
            node.has_manifest = True
            self._checkpoint = node
        if node.entry is not None:
            _keep_if_wanted(node, file, name)
        elif node.name in _DIRS and len(self._stack) > 1:
            _keep_if_wanted(self._stack[-2], file, f"{node.name}/{name}")

    def add_failure(self, failure: WalkFailure) -> None:
        """A directory, or what is left of it, stays unknown."""
        self.has_begun = True
        checkpoint = self._checkpoint
        if checkpoint is not None and f"{failure.path}/".startswith(checkpoint.path):
            checkpoint.inner_error = checkpoint.inner_error or failure.error
            return
        self._move_to(failure.path, failure.path)
        node = self._stack[-1]
        node.error = node.error or failure.error

    def finish(self) -> None:
        """The walk is over."""
        while len(self._stack) > 1:
            self._close()
        self._ready += self._resolve(self._stack[0])

    def _move_to(self, directory: str, position: str) -> None:
        """Closes what has been left behind, and opens the way to a directory."""
        while (path := self._stack[-1].path) and directory != path[:-1] and not directory.startswith(path):
            self._close()
        self._flush(position)
        base = self._stack[-1].path
        rest = directory[len(base) :]
        for name in rest.split("/") if directory and len(directory) >= len(base) else ():
            base += f"{name}/"
            self._stack.append(_Dir(name, base))
        self._directory = directory

    def _close(self) -> None:
        node = self._stack.pop()
        parent = self._stack[-1]
        if node is self._checkpoint:
            self._checkpoint = None
        found = self._resolve(node)
        parent.files += node.files
        parent.size_bytes += node.size_bytes
        parent.manifest_below = parent.manifest_below or node.has_manifest or node.manifest_below
        parent.inner_error = parent.inner_error or node.error or node.inner_error
        if node.name in SIGNS_OF_A_CHECKPOINT:
            parent.has_sign = True
        if node.entry is None:
            parent.out += found
            return
        node.entry.file_count, node.entry.size_bytes = node.files, node.size_bytes
        if node.error is not None and not node.has_manifest:
            node.entry.error = node.error
        node.entry.totals_error = node.error or node.inner_error
        node.steps, node.out, node.held = [], [], []
        parent.steps.append(node)
        parent.held += found

    def _resolve(self, node: _Dir) -> list[Found]:
        """What has been found in a directory, now that all of it is known."""
        if node.has_manifest:
            return []  # what lies in a checkpoint is part of it
        linked = self._look_behind_links(node)
        complete = any(step.has_manifest for step in node.steps) or any(map(_has_manifest, linked))
        begun = any(step.has_sign for step in node.steps) and not any(step.manifest_below for step in node.steps)
        if complete or begun:
            entries = [*(step.entry for step in node.steps if step.entry is not None), *linked]
            entries.sort(key=lambda entry: int(entry.name))
            names = frozenset(entry.name for entry in linked)
            return [*node.out, FoundSaveDir(node.relative_path, tuple(entries), names, node.error)]
        found = [*node.held, *node.out]
        if node.has_sign and not node.manifest_below:  # a checkpoint that was never finished
            found = [item for item in found if isinstance(item, UnreadableDir)]
        if node.error is not None:
            found.append(UnreadableDir(node.relative_path, node.error))
        return found

    def _look_behind_links(self, node: _Dir) -> list[ScannedDir]:
        if not node.links:
            return []
        place = self._storage.child(node.path[:-1]) if node.path else self._storage
        return list(place.scan(sorted(node.links, key=int), WANTED))

    def _flush(self, position: str) -> None:
        """Lets go what no directory above can take back: none of them is, or lies in, a checkpoint."""
        for node, inner in zip(self._stack, [*self._stack[1:], None], strict=True):
            if node.has_manifest or position <= node.path + DELETING_NAME:
                return  # its manifest may still come
            self._ready += [item for item in node.out if _is_certain(item)]
            node.out = [item for item in node.out if not _is_certain(item)]
            if inner is not None and inner.entry is not None:
                return


def _is_certain(found: Found) -> bool:
    """Whether it stays what it is if a directory above turns out to be a checkpoint that was never finished: with a
    manifest below that is none."""
    return isinstance(found, UnreadableDir) or found.has_complete


def _keep_if_wanted(node: _Dir, file: FileInfo, inner: str) -> None:
    directory, slash, name = inner.rpartition("/")
    if node.entry is not None and ((directory in _DIRS and name) if slash else inner in _FILES):
        node.entry.files.append(msgspec.structs.replace(file, path=inner))
