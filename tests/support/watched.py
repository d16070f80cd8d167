"""A storage that tells of everything that is done to it, and can be made to fail, to lose answers, or to die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from snapctl.errors import StorageError
from snapctl.storage import FileIdentity, FileInfo, Listing, ScannedDir, Storage, StorageTime
from snapctl.storage.values import DeletedFiles

CHANGES = ("write", "delete", "delete_link", "delete_empty_dirs", "sync_dir")
"""The operations that change something, or make a change durable."""


class Killed(BaseException):
    """The process died here."""


class Watch:
    """What goes on in a storage and all of its directories.

    `before` and `after` are called with an operation and its path, relative to the storage that is watched. What they
    raise is raised by the operation: before it was done, or though it was done.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda operation, path: None
        self.after: Callable[[str, str], None] = lambda operation, path: None
        self._lock = threading.RLock()
        self._is_dead = False

    def changes(self) -> list[tuple[str, str]]:
        return [entry for entry in self.log if entry[0] in CHANGES]

    def kill_at(self, number: int, *, after: bool) -> None:
        """Dies before or after the change of that number (from 1); nothing is done any more after that."""

        def die(operation: str, path: str) -> None:
            if self._is_dead or (operation in CHANGES and len(self.changes()) == number):
                self._is_dead = True
                raise Killed

        def die_if_dead(operation: str, path: str) -> None:
            if self._is_dead:
                raise Killed

        self.before = die_if_dead if after else die
        self.after = die if after else die_if_dead

    def once(self, operation: str, path: str, act: Callable[[], object], *, after: bool = False) -> None:
        """Calls something once, before or after an operation on a path."""
        done = threading.Event()

        def hook(found: str, where: str) -> None:
            if (found, where) == (operation, path) and not done.is_set():
                done.set()
                act()

        if after:
            self.after = hook
        else:
            self.before = hook

    def around(self, operation: str, path: str, act: Callable[[], object]) -> object:
        with self._lock:
            self.log.append((operation, path))
            self.before(operation, path)
        result = act()
        with self._lock:
            self.after(operation, path)
        return result


class WatchedStorage(Storage):
    """A directory of another storage under a `Watch`."""

    def __init__(self, inner: Storage, watch: Watch, base: str = "") -> None:
        self._inner = inner
        self._watch = watch
        self._base = base
        self.scheme = inner.scheme
        self.parallel_requests = inner.parallel_requests
        self.url = inner.url

    def _do(self, operation: str, path: str, act: Callable[[], object]) -> object:
        return self._watch.around(operation, f"{self._base}{path}".rstrip("/"), act)

    def child(self, name: str) -> WatchedStorage:
        return WatchedStorage(self._inner.child(name), self._watch, f"{self._base}{name}/")

    def parent(self) -> Storage | None:
        return self._inner.parent()

    def list_dir(self, path: str = "") -> Listing:
        return self._do("list_dir", path, lambda: self._inner.list_dir(path))  # type: ignore[return-value]

    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        return self._do("list_tree", path, lambda: self._inner.list_tree(path, cuts=cuts))  # type: ignore[return-value]

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        return self._inner.scan(names, wanted, totals=totals)

    def find_file(self, path: str) -> FileInfo | None:
        return self._do("find_file", path, lambda: self._inner.find_file(path))  # type: ignore[return-value]

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        return self._inner.read_range(path, start, end, version=version)

    def read(self, path: str, *, version: str = "") -> bytes:
        return self._do("read", path, lambda: self._inner.read(path, version=version))  # type: ignore[return-value]

    def write(self, path: str, data: bytes | memoryview, *, exclusive: bool = False, durable: bool = True) -> FileInfo:
        def act() -> FileInfo:
            return self._inner.write(path, data, exclusive=exclusive, durable=durable)

        return self._do("write", path, act)  # type: ignore[return-value]

    def delete(self, path: str, *, version: str = "") -> bool:
        return self._do("delete", path, lambda: self._inner.delete(path, version=version))  # type: ignore[return-value]

    def delete_files(
        self,
        files: Sequence[FileInfo],
        *,
        stop: threading.Event | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> DeletedFiles:
        total = DeletedFiles()
        for number, file in enumerate(files):
            if total.changed or (stop is not None and stop.is_set()):
                total.unfinished = len(files) - number
                break
            try:
                found = self._do("delete", file.path, lambda file=file: self._inner.delete_files([file]))
            except StorageError as error:
                found = DeletedFiles(failed=[error])
            assert isinstance(found, DeletedFiles)
            for name in ("deleted", "deleted_bytes", "gone", "changed", "failed"):
                setattr(total, name, getattr(total, name) + getattr(found, name))
        return total

    def delete_empty_dirs(self, path: str = "") -> None:
        self._do("delete_empty_dirs", path, lambda: self._inner.delete_empty_dirs(path))

    def delete_stale_dirs(self, path: str, before: float) -> bool:
        return self._inner.delete_stale_dirs(path, before)

    def find_dirs_time(self) -> float | None:
        return self._inner.find_dirs_time()

    def sync_dir(self, path: str = "") -> None:
        self._do("sync_dir", path, lambda: self._inner.sync_dir(path))

    def server_now(self) -> float:
        return self._inner.server_now()

    def read_clock(self, *, may_write: bool) -> StorageTime:
        return self._inner.read_clock(may_write=may_write)

    def list_links(
        self, path: str = "", *, deep: bool, on_denied: Callable[[StorageError], None] | None = None
    ) -> list[str]:
        def act() -> list[str]:
            return self._inner.list_links(path, deep=deep, on_denied=on_denied)

        return self._do("list_links", path, act)  # type: ignore[return-value]

    def identify(self, path: str = "") -> FileIdentity | None:
        return self._inner.identify(path)

    def identify_ancestors(self, path: str) -> list[FileIdentity]:
        return self._inner.identify_ancestors(path)

    def delete_link(self, name: str) -> bool:
        return self._do("delete_link", name, lambda: self._inner.delete_link(name))  # type: ignore[return-value]
