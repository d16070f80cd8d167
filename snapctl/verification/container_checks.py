"""Whether the containers of a manifest and their entries agree, and whether a rank is missing. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from snapctl.manifest import (
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    Manifest,
    OrderedDictEntry,
    ShardedTensorEntry,
    encode_key,
    split_rank,
)
from snapctl.verification.verdicts import Problem

_SHOWN = 5


def find_container_problems(manifest: Manifest) -> list[Problem]:
    """Keys without an entry, entries that their container does not name, and containers that are not there.

    A key's entry stands on the container's own rank or, if it is replicated or a DTensor, on any other.
    """
    entries = manifest.entries
    named: set[str] = set()
    unmet: list[tuple[str, str]] = []
    for path, entry in entries.items():
        if isinstance(entry, DictEntry | OrderedDictEntry):
            for key in entry.keys:
                child = f"{path}/{encode_key(key)}"
                named.add(child)
                if child not in entries:
                    unmet.append((child, path))
    adrift, orphans, items = _look_at_parents(entries, named)
    for path, indices in items.items():
        unmet += [
            (f"{path}/{index}", path)
            for index in itertools.islice((i for i in range(max(indices)) if i not in indices), 1000)
        ]
    problems = list(_without_entry(entries, unmet))
    reported = {child for child, _ in unmet}
    for parent, children in orphans.items():
        if parent not in reported:
            problems.append(
                Problem("missing-entry", parent, None, f"has no entry, and {_text(children)} belong(s) into it")
            )
    return problems + adrift


def _look_at_parents(
    entries: Mapping[str, Entry], named: set[str]
) -> tuple[list[Problem], dict[str, list[str]], dict[str, set[int]]]:
    """Entries that their container does not know, children of containers that are not there, items of each list."""
    adrift: list[Problem] = []
    orphans: dict[str, list[str]] = {}
    items: dict[str, set[int]] = {}
    for path in entries:
        parent, _, key = path.rpartition("/")
        if path in named or not parent or _is_rank(parent):
            continue
        container = entries.get(parent)
        if container is None:
            orphans.setdefault(parent, []).append(path)
        elif isinstance(container, ListEntry) and _is_index(key):
            items.setdefault(parent, set()).add(int(key))
        else:
            what = "does not name it" if _is_container(container) else f"is of type {container.type_name}, no container"
            adrift.append(Problem("missing-entry", path, None, f"has an entry, and {parent} {what}"))
    return adrift, orphans, items


def _is_container(entry: Entry) -> bool:
    return isinstance(entry, ListEntry | DictEntry | OrderedDictEntry)


def _is_rank(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def _is_index(key: str) -> bool:
    return _is_rank(key) and str(int(key)) == key and len(key) < 10


def _without_entry(entries: Mapping[str, Entry], unmet: list[tuple[str, str]]) -> Iterator[Problem]:
    """One problem for each logical path that has no entry where it should, however many ranks name it."""
    if not unmet:
        return
    shared = {
        split_rank(path)[1]
        for path, entry in entries.items()
        if isinstance(entry, DTensorEntry) or getattr(entry, "replicated", False)
    }
    lacking: dict[str, list[tuple[str, str]]] = {}
    for child, container in unmet:
        logical = split_rank(child)[1]
        if logical not in shared:
            lacking.setdefault(logical, []).append((child, container))
    for held in lacking.values():
        child = held[0][0]
        others = f" (and {len(held) - 1} other ranks)" if len(held) > 1 else ""
        yield Problem("missing-entry", child, None, f"has no entry, and {held[0][1]} names it{others}")


# -- ranks -----------------------------------------------------------------------------------------------------------


def find_missing_ranks(manifest: Manifest) -> tuple[list[Problem], list[str]]:
    """Ranks without any entry: a problem where a tensor is sharded over them, otherwise only a warning.

    Every rank lists the ShardedTensors that it has a part in, with an empty list if it holds none of their shards; a
    rank without any state saves nothing at all.
    """
    ranks: set[int] = set()
    sharded: str | None = None
    meshed: dict[int, str] = {}
    for path, entry in manifest.entries.items():
        rank = split_rank(path)[0]
        if rank is not None:
            ranks.add(rank)
        if isinstance(entry, ShardedTensorEntry):
            sharded = sharded or path
        elif isinstance(entry, DTensorEntry):
            for member in _mesh_ranks(entry.mesh):
                meshed.setdefault(member, path)
    warnings = []
    beyond = sorted(rank for rank in ranks if rank >= manifest.world_size)
    if beyond:
        warnings.append(f"rank {_text(beyond)} has entries, and the world size is {manifest.world_size}")
    absent = list(itertools.islice((r for r in range(manifest.world_size) if r not in ranks), _SHOWN + 1))
    if not absent:
        return [], warnings
    tensor = sharded or next((meshed[rank] for rank in absent if rank in meshed), None)
    if tensor is None:
        if ranks:
            warnings.append(f"rank {_text(absent)} of {manifest.world_size} has no entry at all")
        return [], warnings
    path = f"{absent[0]}/{split_rank(tensor)[1]}"
    detail = (
        f"rank {_text(absent)} of {manifest.world_size} has no entry at all, and {tensor} is sharded over the ranks"
    )
    return [Problem("missing-entry", path, None, detail)], warnings


def _mesh_ranks(mesh: object) -> Iterator[int]:
    todo = [mesh]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo += item
        elif isinstance(item, int):
            yield item


def _text(items: list[str] | list[int]) -> str:
    return ", ".join(map(str, items[:_SHOWN])) + (", …" if len(items) > _SHOWN else "")
