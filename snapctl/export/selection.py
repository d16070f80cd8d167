"""From what a user typed to the tensors and values that are meant, ready to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from snapctl.entry_names import EntryIndex, differing_ranks, find_entries
from snapctl.errors import EntryNotFoundError, InvalidOptionError, ManifestError, UnsupportedEntryError
from snapctl.manifest import LogicalEntry, ObjectEntry, PrimitiveEntry, decode_path
from snapctl.tensors.layout import TensorLayout, is_tensor_entry
from snapctl.tensors.reader import TensorReader
from snapctl.tensors.weights import choose_layouts

Kinds = Literal["tensors", "values", "all"]

_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Selection:
    """What some names stand for, each once, in the order of the names and of the manifest."""

    tensors: tuple[tuple[LogicalEntry, TensorLayout], ...]
    values: tuple[LogicalEntry, ...]
    """Primitives and objects."""
    is_one: bool
    """One name that is no glob: then it is the thing itself that is asked for, not a collection of one."""


def select(
    reader: TensorReader,
    index: EntryIndex,
    names: Sequence[str],
    *,
    rank: int | None = None,
    kinds: Kinds = "all",
    on_compare: Callable[[Sequence[LogicalEntry]], None] | None = None,
) -> Selection:
    """The entries of some names, with the layouts of the tensors.

    Args:
        rank: as `find_entries`.
        kinds: ``tensors``: a name that is no glob must be a tensor, and of a glob other things may differ between the
            ranks. ``values``: nothing may be a tensor.
        on_compare: as `choose_layouts`.

    Raises:
        EntryNotFoundError: no entry, or several, or different ones on different ranks.
        DamagedError: the parts of a tensor contradict each other.
        UnsupportedEntryError: no tensor where one was wanted; or an entry of a type that is not known.
        InvalidOptionError: a tensor where none was wanted.
    """
    chosen: dict[tuple[str, str], LogicalEntry] = {}
    is_glob = False
    for name in names:
        match = find_entries(index, name, rank=rank)
        is_glob = is_glob or match.is_glob
        for entries in match.ambiguous:
            if kinds != "tensors" or any(_is_tensor(entry) for entry in entries):
                raise differing_ranks(name, entries)
            chosen.update({(entry.path, entry.entries[0][0]): entry for entry in entries})
        for entry in match.entries:
            if kinds == "tensors" and not match.is_glob and not _is_tensor(entry):
                raise UnsupportedEntryError(
                    f"{entry.entries[0][0]}: is of type {entry.type}, not a tensor",
                    hint="without --output its value is printed; a .pt file can hold it",
                )
            chosen[entry.path, entry.entries[0][0]] = entry
    tensors = [entry for entry in chosen.values() if _is_tensor(entry)]
    if kinds == "values" and tensors:
        raise InvalidOptionError(
            f"{tensors[0].path}: is a tensor", hint="add --output FILE, --into FILE.pt --as KEY, or --stats"
        )
    layouts = choose_layouts(reader, index, tensors, on_compare=on_compare)
    values = [entry for entry in chosen.values() if not _is_tensor(entry)]
    return Selection(tuple(zip(tensors, layouts, strict=True)), tuple(values), len(names) == 1 and not is_glob)


def read_value(reader: TensorReader, entry: LogicalEntry) -> Any:
    """The value of a primitive or, weights-only, of an object.

    Raises:
        EntryNotFoundError: several ranks hold different objects.
        RefusedError: it would have to be unpickled. UnsupportedEntryError: a type that is not known.
        DamagedError, ManifestError, MissingExtraError, StorageError: it cannot be read.
    """
    path, source = entry.entries[0]
    if isinstance(source, PrimitiveEntry):
        try:
            return source.value
        except ManifestError as error:
            raise ManifestError(f"{path}: {error.message}", kind=error.kind) from error
    if not isinstance(source, ObjectEntry):
        raise UnsupportedEntryError(f"{path}: is of type {entry.type}, which this snapctl does not know")
    for other_path, other in entry.entries[1:]:
        if not isinstance(other, ObjectEntry) or other.location == source.location:
            continue
        if not _same_bytes(reader, (path, source), (other_path, other)):
            raise differing_ranks(entry.path, [entry])
    return reader.read_object(path, source)


def _same_bytes(reader: TensorReader, one: tuple[str, ObjectEntry], other: tuple[str, ObjectEntry]) -> bool:
    return all(a == b for a, b in zip(_pieces(reader, *one), _pieces(reader, *other), strict=True))


def _pieces(reader: TensorReader, path: str, entry: ObjectEntry) -> Iterator[bytes]:
    """A blob in pieces, the last of which is empty: blobs of different lengths differ before either ends."""
    with reader.open_object(path, entry) as file:
        while True:
            piece = file.read(_COMPARED_BYTES)
            yield b"" if piece is None else piece
            if not piece:
                return


def _is_tensor(entry: LogicalEntry) -> bool:
    return is_tensor_entry(entry.entries[0][1])


def file_names(entries: Sequence[LogicalEntry], strip_prefix: str | None = None) -> list[str]:
    """The names of entries in a file: their paths with the keys decoded, without a prefix.

    Where decoding would make two alike (``a/b`` is one key or two), all keep the manifest's spelling.

    Raises:
        InvalidOptionError: no name begins with the prefix, or without it names are empty or alike.
        EntryNotFoundError: entries of several ranks would have the same name.
    """
    names = [decode_path(entry.path) for entry in entries]
    if len(set(names)) < len(names):
        names = [entry.path for entry in entries]
        if len(set(names)) < len(names):
            twice = next(entry for entry in entries if names.count(entry.path) > 1)
            raise EntryNotFoundError(
                f"{twice.path}: is asked for of several ranks, and a file holds one of a name",
                candidates=tuple(entry.entries[0][0] for entry in entries if entry.path == twice.path),
            )
    if not strip_prefix:
        return names
    if not any(name.startswith(strip_prefix) for name in names):
        raise InvalidOptionError(f"--strip-prefix: no name begins with {strip_prefix!r}: {names[0]}")
    stripped = [name.removeprefix(strip_prefix) for name in names]
    if "" in stripped or len(set(stripped)) < len(stripped):
        raise InvalidOptionError(f"--strip-prefix: without {strip_prefix!r} names are empty or alike")
    return stripped
