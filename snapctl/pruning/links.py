"""Symbolic links in save directories, and the checkpoints that they lead to: those must not be deleted under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from snapctl.checkpoints import Place
from snapctl.errors import StorageError
from snapctl.storage import FileIdentity, Storage

Target: TypeAlias = tuple[str, int]
"""``(URL of the save directory, step)``."""


class LinkWatch:
    """Which checkpoints of some save directories the symbolic links in all of them lead to or into.

    Links are followed to their end, and compared by device and inode. A link inside a checkpoint that leads back into
    the same one does not count: it goes with it.
    """

    def __init__(self, places: Sequence[Place], roots: Sequence[Storage] = ()) -> None:
        """
        Args:
            places: the save directories.
            roots: directories above them, whose links are followed, too.
        """
        self._places = places
        self._roots = roots
        self.warnings: list[str] = []
        """Links that nobody could follow, and directories whose links nobody could see."""

    def find_targets(self) -> dict[Target, tuple[str, ...]]:
        """Looks at all links, at any depth: for each checkpoint that one leads to, the links' paths.

        A checkpoint's directory that is another one's, too (by a bind mount), is led to by that.

        Raises:
            StorageError: a directory could not be read: what its links lead to could be deleted under them. One that
                may not be entered is passed over, with a warning.
        """
        links = list(self._iter_links(deep=True, on_denied=self._warn_of_denied))
        checkpoints = dict(self._iter_identities())
        found: dict[Target, dict[str, None]] = {}
        for targets in checkpoints.values():
            for target in targets if len(targets) > 1 else ():
                others = (f"{url}/{step}" for url, step in targets if (url, step) != target)
                found.setdefault(target, {}).update(dict.fromkeys(others))
        for storage, link in links:
            for identity in self._follow(storage, link):
                for target in checkpoints.get(identity, ()):
                    if not _is_inside(storage.url_of(link), target):
                        found.setdefault(target, {})[storage.url_of(link)] = None
        return {target: tuple(paths) for target, paths in found.items()}

    def find_link_to(self, place: Place, step: int) -> str | None:
        """The path of a link directly in one of the save directories that leads to a checkpoint now; None if none."""
        identity = place.storage.identify(str(step))
        if identity is None:
            return None
        for storage, link in self._iter_links(deep=False):
            if identity in self._follow(storage, link):
                return storage.url_of(link)
        return None

    def _iter_links(
        self, *, deep: bool, on_denied: Callable[[StorageError], None] | None = None
    ) -> Iterator[tuple[Storage, str]]:
        known: set[str] = set()
        for storage in [*(place.storage for place in self._places), *self._roots]:
            for link in storage.list_links(deep=deep, on_denied=on_denied):
                url = storage.url_of(link)
                if url not in known:  # a root holds those of its save directories, too
                    known.add(url)
                    yield storage, link

    def _warn_of_denied(self, error: StorageError) -> None:
        warning = f"{error.message}: links in it, if there are any, protect nothing"
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _iter_identities(self) -> Iterator[tuple[FileIdentity, list[Target]]]:
        found: dict[FileIdentity, list[Target]] = {}
        for place in self._places:
            for name in place.step_names:
                if name in place.linked_names:
                    continue
                try:
                    identity = place.storage.identify(name)
                except StorageError:
                    continue  # it cannot be entered: it is kept for that already
                if identity is not None:
                    found.setdefault(identity, []).append((place.storage.url, int(name)))
        yield from found.items()

    def _follow(self, storage: Storage, link: str) -> Sequence[FileIdentity]:
        try:
            return storage.identify_ancestors(link)
        except StorageError as error:
            self.warnings.append(f"{storage.url_of(link)}: cannot be followed: {error.message}")
            return ()


def _is_inside(link_url: str, target: Target) -> bool:
    save_dir, step = target
    return link_url.startswith(f"{save_dir.rstrip('/')}/{step}/")
