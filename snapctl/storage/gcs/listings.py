"""Listings of GCS: in parallel where names say where they can be cut, and in few requests."""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import math
from collections import deque
from collections.abc import Iterator, Sequence

from snapctl.errors import (
    StorageError,
)
from snapctl.storage.base import check_relative_path, not_found
from snapctl.storage.gcs.batches import is_text, join_parts
from snapctl.storage.gcs.connection import GcsConnection
from snapctl.storage.gcs.errors import translate_gcs_error
from snapctl.storage.gcs.objects import Item
from snapctl.storage.running import run_parallel
from snapctl.storage.values import FileInfo, ListedTree, Listing, ScannedDir

LIST_JOBS = 16
MIN_LISTED_FILES = 4
"""From so many files of a directory on, a listing is tried, and goes on while each page holds as many of them."""
PAGE_ITEMS = 1000
TREE_PAGES = 4
"""The pages of a part of `GcsStorage.list_trees`, by estimate: more are held longer, fewer are less often full."""
MAX_SINGLE_LOOKS = 100
"""More files than that are not asked for one by one, if a listing can tell."""


class GcsListings(GcsConnection):
    """What is there."""

    def list_dir(self, path: str = "") -> Listing:
        base = self._prefix + (check_relative_path(path) + "/" if path else "")

        async def work() -> Listing:
            files: list[FileInfo] = []
            dirs: set[str] = set()
            any_object = False
            async for page in self._pages(base, delimiter="/"):
                any_object = any_object or bool(page.items or page.prefixes)
                files += [self._info(item, self._prefix) for item in page.items if item.name != base]
                dirs.update(prefix[len(base) : -1] for prefix in page.prefixes)
            if not any_object and base:
                raise not_found(self.url_of(path))
            dirs.discard("")  # a doubled slash in an object's name
            return Listing(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(dirs)))

        return self._run(work(), path, listing=True)

    def list_tree(self, path: str = "", *, cuts: Sequence[str] = ()) -> list[FileInfo]:
        base = self._prefix + (check_relative_path(path) + "/" if path else "")

        async def part(start: str, end: str) -> list[FileInfo]:
            pages = self._pages(base, startOffset=start or None, endOffset=end or None)
            return [self._info(item, self._prefix) async for page in pages for item in page.items]

        async def work() -> list[FileInfo]:
            marks = sorted({base + name for name in join_parts(cuts, LIST_JOBS) if is_text(name)})
            found: list[FileInfo] = []
            start = ""
            if not marks:
                first = await self._page(base)
                found = [self._info(item, self._prefix) for item in first.items]
                if not first.nextPageToken:
                    return sorted(found, key=lambda file: file.path)
                start = first.items[-1].name + "\0" if first.items else ""
                marks = [mark for mark in await self._cut_points(base) if mark > start]
            for infos in await asyncio.gather(*(part(*cut) for cut in zip([start, *marks], [*marks, ""], strict=True))):
                found += infos
            return sorted(found, key=lambda file: file.path)

        return self._run(work(), path, listing=True)

    async def _cut_points(self, base: str) -> list[str]:
        """Where a listing can be cut so that its parts can be had at the same time: at the sub-directories, if there
        are enough, and otherwise inside the largest name space, the hexadecimal one of ``batched/``."""
        first = await self._page(base, delimiter="/")
        if first.nextPageToken or len(first.prefixes) < 2:
            return [base + "batched/" + digit for digit in "02468ace"] + [base + "c"]
        marks = sorted({*first.prefixes, *(base + "batched/" + digit for digit in "48c")})
        return marks[:: -(-len(marks) // LIST_JOBS)]

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        ordered = sorted(names, key=lambda name: name + "/")
        size = max(1, -(-len(ordered) // LIST_JOBS))
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]

        async def work() -> list[dict[str, ScannedDir]]:
            return await asyncio.gather(*(self._scan_part(part, wanted, totals=totals) for part in parts))

        found: dict[str, ScannedDir] = {}
        if ordered:
            for part in self._run(work(), "", listing=True):
                found.update(part)
        yield from (found[name] for name in names)

    async def _scan_part(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool) -> dict[str, ScannedDir]:
        """Flat listings from the first to the last of the names (sorted).

        Without totals, a page that ends among blobs is not simply continued: the next one begins at the next wanted
        name, so that a checkpoint of a million blobs costs a few requests and not a thousand.
        """
        found = {name: ScannedDir(name) for name in names}
        if totals:
            for entry in found.values():
                entry.file_count = entry.size_bytes = 0
        end = self._prefix + names[-1] + "0"  # "0" is the character after "/"
        start: str | None = self._prefix + names[0] + "/"
        token: str | None = None
        position = 0  # of the first name that may still get something
        while start is not None:
            page = await self._page(self._prefix, startOffset=start, endOffset=end, pageToken=token)
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner and name in found:
                    self._take(found[name], item, inner, wanted)
            token = page.nextPageToken or None
            if token is None:
                return found
            if not totals and page.items:
                jump, position = self._jump(page.items[-1].name, names, position, wanted)
                if jump is None:
                    return found
                if jump > page.items[-1].name + "\0":
                    start, token = jump, None
        return found

    def _take(self, entry: ScannedDir, item: Item, inner: str, wanted: Sequence[str]) -> None:
        if entry.file_count is not None and entry.size_bytes is not None and not inner.endswith("/"):
            entry.file_count += 1
            entry.size_bytes += int(item.size)
        directory, slash, base = inner.rpartition("/")
        if (directory + slash if slash else inner) in wanted and base:
            entry.files.append(self._info(item, f"{self._prefix}{entry.name}/"))

    def _jump(self, last: str, names: Sequence[str], position: int, wanted: Sequence[str]) -> tuple[str | None, int]:
        """Where the next wanted object name after `last` may be; None if there is none."""
        for index in range(position, len(names)):
            base = f"{self._prefix}{names[index]}/"
            for mark in sorted(wanted):
                target = base + mark
                if last < target:
                    return target, index
                if mark.endswith("/") and last.startswith(target):
                    return last + "\0", index
        return None, len(names)

    def list_trees(self, names: Sequence[str]) -> Iterator[ListedTree]:
        """In flat listings of several children each, cut so that their pages are full, several at once.

        The first page tells how many files a child has. So much is held at a time: what is listed by `LIST_JOBS`
        requests of `TREE_PAGES` pages each.
        """
        ordered = sorted(names, key=lambda name: name + "/")
        if not ordered:
            return
        try:
            first = self._run(self._list_children(ordered, pages=1), "", listing=True)
        except StorageError as error:
            yield from (ListedTree(name, error=error) for name in ordered)
            return
        yield from first
        rest = ordered[len(first) :]
        each = sum(len(tree.files) for tree in first) / max(1, len(first))
        pages = min(TREE_PAGES, max(1, math.ceil(len(rest) * each / PAGE_ITEMS / LIST_JOBS)))
        size = max(1, int(pages * PAGE_ITEMS / max(each, 1)))
        parts = [rest[start : start + size] for start in range(0, len(rest), size)]
        running: deque[tuple[list[str], concurrent.futures.Future[list[ListedTree]]]] = deque()
        try:
            for part in [*parts, *([None] * LIST_JOBS)]:
                if part is not None:
                    work = self._list_children(part)
                    running.append((part, asyncio.run_coroutine_threadsafe(work, self._fs.loop)))
                if running and (part is None or len(running) == LIST_JOBS):
                    yield from self._finished_part(*running.popleft())
        finally:
            for _, future in running:
                future.cancel()

    def _finished_part(
        self, names: Sequence[str], future: concurrent.futures.Future[list[ListedTree]]
    ) -> Iterator[ListedTree]:
        try:
            yield from future.result()
        except Exception as error:  # what gcsfs raises, and whatever lies under it
            translated = translate_gcs_error(error, self.url, bucket=self._bucket, listing=True)
            yield from (ListedTree(name, error=translated) for name in names)

    async def _list_children(self, names: Sequence[str], *, pages: int | None = None) -> list[ListedTree]:
        """Flat listings from the first to the last of the names (sorted); what lies between them is passed over.

        Args:
            pages: end after so many, with the children that are whole by then (at least one).
        """
        found = {name: ListedTree(name) for name in names}
        marks = [name + "/" for name in names]
        end = self._prefix + names[-1] + "0"  # "0" is the character after "/"
        start: str | None = self._prefix + marks[0]
        token: str | None = None
        number = 0
        while start is not None:
            page = await self._page(self._prefix, startOffset=start, endOffset=end, pageToken=token)
            number += 1
            inner = ""
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner and name in found:
                    found[name].files.append(self._info(item, f"{self._prefix}{name}/"))
            token = page.nextPageToken or None
            if token is None:
                break
            if not page.items:
                continue
            last = page.items[-1].name[len(self._prefix) :]
            following = bisect.bisect_right(marks, last)
            is_inside = following > 0 and last.startswith(marks[following - 1])
            if pages is not None and number >= pages and following - is_inside > 0:
                return [found[name] for name in names[: following - is_inside]]
            if not is_inside:
                start, token = (self._prefix + marks[following], None) if following < len(marks) else (None, None)
        return list(found.values())

    def find_file(self, path: str) -> FileInfo | None:
        item = self._run(self._look(self._key(path)), path)
        return None if item is None else self._info(item, self._prefix)

    def find_files(self, paths: Sequence[str]) -> dict[str, FileInfo]:
        """In one listing for each directory that many of them share, unless it is too full of others."""
        by_directory: dict[str, list[str]] = {}
        for path in dict.fromkeys(paths):
            by_directory.setdefault(check_relative_path(path).rpartition("/")[0], []).append(path)
        listed = [sorted(group) for group in by_directory.values() if len(group) >= MIN_LISTED_FILES]
        found: dict[str, FileInfo] = {}
        single = [path for group in by_directory.values() if len(group) < MIN_LISTED_FILES for path in group]
        for files, left in run_parallel(self._list_some, listed, jobs=LIST_JOBS):
            found.update(files)
            single += left
        found.update(super().find_files(single))
        return found

    def _list_some(self, paths: Sequence[str]) -> tuple[dict[str, FileInfo], Sequence[str]]:
        """What a listing from the first to the last of some files (sorted) finds, and those that it gave up on."""
        wanted = set(paths)
        last = self._prefix + paths[-1] + "\0"

        async def work() -> tuple[dict[str, FileInfo], Sequence[str]]:
            found: dict[str, FileInfo] = {}
            position, pages = 0, 0
            while position < len(paths):
                page = await self._page(self._prefix, startOffset=self._prefix + paths[position], endOffset=last)
                infos = [self._info(item, self._prefix) for item in page.items]
                found.update({info.path: info for info in infos if info.path in wanted})
                pages += 1
                if not page.nextPageToken:
                    return found, ()
                position = bisect.bisect_right(paths, infos[-1].path) if infos else position
                if not infos or position < pages * MIN_LISTED_FILES:
                    break
            return found, paths[position:]

        return self._run(work(), "", listing=True)

    def find_each(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None]:
        if len(names) <= MAX_SINGLE_LOOKS:
            return super().find_each(names, path)
        try:
            listed = self._run(self._find_by_glob(names, check_relative_path(path)), "", listing=True)
        except StorageError as error:
            return dict.fromkeys(names, error)
        return super().find_each(names, path) if listed is None else listed

    async def _find_by_glob(self, names: Sequence[str], path: str) -> dict[str, FileInfo | StorageError | None] | None:
        """All of them from one listing with a glob; None if that takes so many pages that single looks are better.

        A page may come with few names, or with none, and a server that knows no globs lists everything.
        """
        found: dict[str, FileInfo | StorageError | None] = dict.fromkeys(names)
        glob = "**/" + "".join("?" if character in "*?[]{}\\" else character for character in path)
        pages = 0
        async for page in self._pages(self._prefix, matchGlob=glob):
            for item in page.items:
                name, _, inner = item.name[len(self._prefix) :].partition("/")
                if inner == path and name in found:
                    found[name] = self._info(item, f"{self._prefix}{name}/")
            pages += 1
            if page.nextPageToken and pages > 1 + len(names) // MAX_SINGLE_LOOKS:
                return None
        return found
