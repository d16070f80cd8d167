"""Everything below a prefix in the order of its names: in full pages, several at once, and few of them held.

The pages of one listing come one after another. So the range of names is cut into parts, at directories, as soon as it
turns out to be long; parts are listed at the same time, and handed out in order.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from snapctl.errors import CredentialsError, PermissionDeniedError, StorageError
from snapctl.storage.gcs.connection import GcsConnection
from snapctl.storage.gcs.errors import translate_gcs_error
from snapctl.storage.gcs.objects import Item, Page
from snapctl.storage.values import FileInfo, WalkFailure

WALK_JOBS = 48
"""Parts that are listed at a time: to make and to read an answer of 1,000 names takes as long as some round trips."""
PROBES = 8
"""So many children are listed at a time, each for itself, as long as nobody knows how large they are."""
CUT_AFTER_PAGES = 8
"""A part that is longer is cut, and a shorter one if nothing else is left to begin. Cutting costs a request or two, and
an unfilled page in each of its parts."""
MAX_PART_PAGES = 4
"""Children are put together into parts of at most so many pages, by estimate."""
AHEAD_PAGES = 384
"""So many pages (some 200 kB each) are held at a time, more only for the part whose turn it is. Enough for all parts
that are being listed at their largest: with fewer, only the first one would go on."""
PAGE_ITEMS = 1000
_SPARE = 0.05
"""Of a page: a part that is a little larger than was thought does not need one more."""
MAX_DESCENT = 8
"""Directories that are looked into, one in the other, for a place where a part can be cut."""
MAX_FAILED_PARTS = 3
"""After so many in a row, none of which got an answer, the rest is not tried."""

WALK_FIELDS = "nextPageToken,prefixes,items(name,size)"
"""No more: most of a walk is the server writing, and everybody reading, what is said of each object."""

Ask: TypeAlias = Callable[..., Coroutine[Any, Any, Page]]


class _Family:
    """Parts that were cut at the children of one directory: how large these are is learnt from the first of them."""

    def __init__(self, objects: int, children: int) -> None:
        self.objects = objects
        self.children = children
        """None seen yet: nobody knows."""
        self.waiting = 0
        """Children in parts that have not begun."""
        self.running = 0
        """Parts that are being listed."""
        self.is_large = False
        """One of them fills more than a page."""

    @property
    def is_probed(self) -> bool:
        """It must first be seen how large those are that have begun."""
        return not self.children and not self.is_large and self.running >= PROBES

    def pages_of(self, children: int) -> float:
        """How many pages so many children fill, about; infinitely many if nobody knows."""
        return children * max(self.objects / self.children, 1e-3) / PAGE_ITEMS if self.children else float("inf")

    @property
    def wanted_children(self) -> int:
        """How many children make a part that is worth its requests: a full page at least."""
        if not self.children:
            return 1
        pages = min(max(int(self.pages_of(self.waiting) / WALK_JOBS), 1), MAX_PART_PAGES)
        return max(1, int((pages - _SPARE) / self.pages_of(1)))


class _Part:
    """A range of names."""

    def __init__(self, start: str, end: str, level: str, family: _Family | None = None) -> None:
        self.start = start
        self.end = end
        """The first name that is not in it; empty for none."""
        self.level = level
        """The directory (with its slash) that all of it lies in."""
        self.family = family
        """It can be put together with neighbours of the same family."""
        self.siblings = family
        """How large it may be is learnt from these."""
        self.children = 1
        self.cut_at = CUT_AFTER_PAGES
        """It is cut after this page, if there are more."""
        self.may_be_cut = True
        """Whether it has not turned out lately that there is no directory to cut it at."""
        self.pages: deque[list[Item]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.is_done = False
        self.error: BaseException | None = None
        self.last = ""
        """The last name that was listed."""


class _Piece(NamedTuple):
    """What is next."""

    pages: list[list[Item]]
    failed: _Part | None = None


class _Walk:
    """Lists the parts. All of it runs on the loop of gcsfs."""

    def __init__(self, ask: Ask, prefix: str) -> None:
        self._ask = ask
        self._prefix = prefix
        first = _Part(prefix, "", prefix)
        first.cut_at = 1
        self._parts: deque[_Part] = deque([first])
        self._waiting = 1
        """Parts that have not begun."""
        self._held = 0
        self._running = 0
        self._failed_in_a_row = 0
        self._is_over = False
        self._changed: asyncio.Event | None = None
        self._room: asyncio.Event | None = None

    async def next(self) -> _Piece | None:
        """The next pages in order, or a part that failed; None at the end."""
        if self._changed is None or self._room is None:
            self._changed, self._room = asyncio.Event(), asyncio.Event()
        while self._parts:
            self._begin_parts()
            head = self._parts[0]
            if head.pages:
                pages = list(head.pages)
                head.pages.clear()
                self._held -= len(pages)
                self._room.set()
                return _Piece(pages)
            if head.is_done:
                self._parts.popleft()
                self._room.set()  # whoever is first now may go on
                if head.error is not None:
                    return _Piece([], head)
                continue
            self._changed.clear()
            await self._changed.wait()
        return None

    def cancel(self) -> None:
        """Ends all requests."""
        self._is_over = True
        for part in self._parts:
            if part.task is not None:
                part.task.cancel()

    def _begin_parts(self) -> None:
        index = 0
        while not self._is_over and self._running < WALK_JOBS and index < len(self._parts):
            part = self._parts[index]
            index += 1
            family = part.family
            if part.task is not None or part.is_done or (family is not None and family.is_probed):
                continue
            if family is not None:
                family.running += 1
            self._put_together(index)
            self._waiting -= 1
            self._running += 1
            part.task = asyncio.ensure_future(self._list(part))

    def _put_together(self, index: int) -> None:
        """Lets a part that is to begin take over those behind it (from `index` on), up to a sensible length."""
        part = self._parts[index - 1]
        family = part.family
        if family is None:
            return
        wanted = family.wanted_children
        while part.children < wanted and index < len(self._parts):
            following = self._parts[index]
            if following.family is not family or following.task is not None or following.start != part.end:
                break
            part.end, part.level = following.end, following.level[: following.level.rfind("/", 0, -1) + 1]
            part.children += following.children
            del self._parts[index]
            self._waiting -= 1
        family.waiting -= part.children

    async def _list(self, part: _Part) -> None:
        try:
            await self._list_pages(part)
            self._failed_in_a_row = 0
        except Exception as error:
            part.error = error
            if not isinstance(translate_gcs_error(error, "", bucket=""), PermissionDeniedError):
                self._failed_in_a_row += 1
            if self._failed_in_a_row >= MAX_FAILED_PARTS or _is_final(error):
                self._give_up(error)
        finally:
            part.is_done = True
            self._running -= 1
            if part.family is not None:
                part.family.running -= 1
            self._begin_parts()
            assert self._changed is not None
            self._changed.set()

    async def _list_pages(self, part: _Part) -> None:
        assert self._changed is not None and self._room is not None
        token: str | None = None
        number, objects = 0, 0
        while True:
            while self._held >= AHEAD_PAGES and part is not self._parts[0]:
                self._room.clear()
                await self._room.wait()
            page = await self._ask(
                self._prefix, startOffset=part.start or None, endOffset=part.end or None, pageToken=token
            )
            self._failed_in_a_row = 0
            number += 1
            if page.items:
                objects += len(page.items)
                part.last = page.items[-1].name
                part.pages.append(page.items)
                self._held += 1
                self._changed.set()
            token = page.nextPageToken or None
            if token is None:
                break
            if part.family is not None and not part.family.is_large:
                part.family.is_large = True
                self._begin_parts()
            if page.items and (number >= part.cut_at or (part.may_be_cut and self._is_worth_cutting(part, number))):
                rest = await self._cut(part, page.items)
                if rest:
                    self._insert(rest, behind=part)
                    break
                part.cut_at, part.may_be_cut = number + CUT_AFTER_PAGES, False
        if part.family is not None:
            part.family.objects += objects
            part.family.children += part.children

    def _is_worth_cutting(self, part: _Part, number: int) -> bool:
        """Whether most have nothing left to do while this part still has some pages behind the one of this number."""
        if self._running > WALK_JOBS // 4 or self._waiting:
            return False
        return part.siblings is not None and part.siblings.pages_of(part.children) >= number + 2

    def _insert(self, parts: Sequence[_Part], *, behind: _Part) -> None:
        where = self._parts.index(behind) + 1
        self._parts.rotate(-where)
        self._parts.extendleft(reversed(parts))
        self._parts.rotate(where)
        self._waiting += len(parts)

    async def _cut(self, part: _Part, items: Sequence[Item]) -> list[_Part]:
        """What is left of a part, in parts: the rest of the child it is in, and each child behind that. Empty if there
        is no directory to cut at."""
        level, last = part.level, part.last
        while not last.startswith(level):  # it stands beside the child that the part was named after
            level = level[: level.rfind("/", 0, -1) + 1]
        for _ in range(MAX_DESCENT):
            page = await self._ask(level, delimiter="/", startOffset=last + "\0", endOffset=part.end or None)
            marks = [name for name in page.prefixes if name > last]
            if marks:
                return self._parts_of(part, level, marks, items, has_more=bool(page.nextPageToken))
            if page.nextPageToken:  # files, and behind them nobody knows
                return []
            child, slash, _ = last[len(level) :].partition("/")
            if not slash:
                return []
            level += child + "/"
        return []

    def _parts_of(
        self, part: _Part, level: str, marks: Sequence[str], items: Sequence[Item], *, has_more: bool
    ) -> list[_Part]:
        seen = {item.name[len(level) :].partition("/")[0] for item in items if item.name.startswith(level)}
        family = _Family(len(items), len(seen)) if len(seen) > 1 else _Family(0, 0)
        child, slash, _ = part.last[len(level) :].partition("/")
        parts = [_Part(part.last + "\0", marks[0], level + child + slash if slash else level)]
        for start, end in zip(marks, [*marks[1:], part.end], strict=True):
            parts.append(_Part(start, end, start, family))
        tail = parts[-1]
        tail.level, tail.family = level, None  # behind the last child there may be files
        family.waiting = len(marks) - 1
        if has_more:  # more children than one page names: the last one goes with those that are still unknown
            tail.cut_at, tail.siblings = 1, None
        return parts

    def _give_up(self, error: BaseException) -> None:
        """Nothing more is begun: all that has not been, fails like this."""
        for part in self._parts:
            if part.task is None and not part.is_done:
                part.is_done, part.error = True, error
        self._waiting = 0


def _is_final(error: BaseException) -> bool:
    return isinstance(translate_gcs_error(error, "", bucket=""), CredentialsError)


class GcsWalking(GcsConnection):
    """`Storage.walk`."""

    def walk(self) -> Iterator[list[FileInfo] | WalkFailure]:
        """In the order of names, in about a request for each 1,000 objects; see `Storage.walk`."""
        walk = _Walk(functools.partial(self._page, fields=WALK_FIELDS), self._prefix)
        skip = len(self._prefix)
        try:
            while True:
                piece = self._run(walk.next(), "", listing=True)
                if piece is None:
                    return
                for items in piece.pages:
                    yield [FileInfo(item.name[skip:], int(item.size), 0.0) for item in items if len(item.name) > skip]
                if piece.failed is not None:
                    yield from self._failures(piece.failed)
        finally:
            self._fs.loop.call_soon_threadsafe(walk.cancel)

    def _failures(self, part: _Part) -> Iterator[WalkFailure]:
        """The directory that the part lies in; before that the child of it that is only half listed."""
        assert part.error is not None
        level = part.level
        child, slash, _ = part.last[len(level) :].partition("/")
        for path in ([level + child] if slash and part.last.startswith(level) else []) + [level[:-1]]:
            relative = path[len(self._prefix) :]
            yield WalkFailure(relative, self._translated(part.error, relative))

    def _translated(self, error: BaseException, path: str) -> StorageError:
        url, pays = self.url_of(path), bool(self._fs.requester_pays)
        return translate_gcs_error(error, url, bucket=self._bucket, listing=True, pays=pays)
