"""Whether a checkpoint whose manifest has been read is whole, as far as a listing tells: ``verify --level size``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from snapctl.checkpoints import read_blob_sums
from snapctl.errors import InvalidPathError
from snapctl.manifest import MANIFEST_NAME, Manifest
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum
from snapctl.storage import FileInfo, Storage, cuts_of
from snapctl.verification.blob_uses import BlobUse, find_unneeded_bytes, mentioned_locations
from snapctl.verification.size_checks import find_size_problems, find_sum_problems, find_unneeded_files
from snapctl.verification.structure_checks import Structure, check_structure
from snapctl.verification.verdicts import Problem, Unchecked

NEWER_SECONDS = 60.0
"""Copies are written in any order; a save that began after the last one is later than this."""
_SHOWN = 5


class Wholeness(msgspec.Struct, frozen=True):
    """What was found without reading a blob."""

    uses: Mapping[str, list[BlobUse]]
    """By location: the stretches of blobs that are needed."""
    files: Mapping[str, FileInfo]
    """The files of the checkpoint, by path."""
    recorded: Mapping[str, BlobSum] | None
    """The checksums that the save recorded; None if there are none, or they are void."""
    problems: tuple[Problem, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    warnings: tuple[str, ...] = ()


def check_whole(storage: Storage, manifest: Manifest, files: Iterable[FileInfo] | None = None) -> Wholeness:
    """Judges a manifest, and its blobs from one listing.

    Args:
        storage: the checkpoint's directory.
        files: its listing, if it is at hand.

    Raises:
        StorageError: it could not be listed, or its save record could not be read.
    """
    structure = check_structure(manifest)
    by_path = {file.path: file for file in (list_checkpoint(storage, manifest) if files is None else files)}
    outside = _follow_links(storage, structure, by_path)
    uses = {location: held for location, held in structure.uses.items() if location not in outside}
    recorded, warnings = read_blob_sums(storage, by_path.get(SAVE_RECORD_PATH), by_path.get(MANIFEST_NAME))
    problems = [*structure.problems, *outside.values(), *find_size_problems(uses, by_path)]
    if recorded is not None:
        problems += find_sum_problems(uses, by_path, recorded)
    warnings += structure.warnings
    warnings += find_unneeded_bytes(uses, {path: file.size_bytes for path, file in by_path.items()})[:_SHOWN]
    unneeded = find_unneeded_files(by_path.values(), mentioned_locations(manifest))
    if unneeded:
        warnings.append(_describe_files(unneeded))
    if problems:
        warnings += _say_if_newer(problems, by_path)
    return Wholeness(uses, by_path, recorded, tuple(problems), structure.unchecked, tuple(warnings))


def list_checkpoint(storage: Storage, manifest: Manifest | None = None) -> list[FileInfo]:
    """All files of a checkpoint's directory; faster for a large one on an object store if the manifest is known."""
    return storage.list_tree(cuts=cuts_of(sorted(manifest.blob_locations())) if manifest is not None else ())


def find_flaw(storage: Storage, manifest: Manifest) -> str | None:
    """Why a checkpoint is not whole, in a line; None if it is.

    Raises:
        StorageError: as `check_whole`.
    """
    return describe_problems(check_whole(storage, manifest).problems)


def describe_problems(problems: Iterable[Problem]) -> str | None:
    """Problems in a line; None if there are none."""
    found = list(problems)
    if not found:
        return None
    first = found[0]
    where = ": ".join(part for part in (first.entry, first.blob if first.blob != first.entry else None) if part)
    more = f" (and {len(found) - 1} more problems)" if len(found) > 1 else ""
    return f"{first.kind}: {where}: {first.detail}{more}"


def _follow_links(storage: Storage, structure: Structure, files: dict[str, FileInfo]) -> dict[str, Problem]:
    """Looks at blobs that are symbolic links, or lie below one, of which a listing does not tell enough.

    Adds what it finds to `files`, and returns a problem for each location that leads out of the checkpoint.
    """
    links = {path for path, file in files.items() if file.is_link}
    if not links:
        return {}
    outside: dict[str, Problem] = {}
    for location, held in structure.uses.items():
        parts = location.split("/")
        if not any("/".join(parts[:depth]) in links for depth in range(1, len(parts) + 1)):
            continue
        try:
            found = storage.find_file(location)
            if found is not None:
                storage.read_range(location, 0, 0)  # opens it, which is refused for what lies outside
                files[location] = found
        except InvalidPathError as error:
            outside[location] = Problem("outside", held[0].entry, location, error.message)
    return outside


def _describe_files(files: list[FileInfo]) -> str:
    names = ", ".join(file.path for file in files[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
    size = sum(file.size_bytes for file in files)
    return f"no entry needs {len(files)} of its files ({size} bytes): {names}"


def _say_if_newer(problems: Iterable[Problem], files: Mapping[str, FileInfo]) -> list[str]:
    manifest = files.get(MANIFEST_NAME)
    if manifest is None or not manifest.modified_at:
        return []
    blobs = {p.blob for p in problems if p.kind in ("short-blob", "checksum") and p.blob is not None}
    newest = manifest.modified_at + NEWER_SECONDS
    newer = [blob for blob in blobs if blob in files and files[blob].modified_at > newest]
    if not newer:
        return []
    return [f"{len(newer)} of the damaged blobs are newer than the manifest: is it being saved again?"]
