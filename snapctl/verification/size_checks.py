"""Whether the blobs are there in full length, judged from a listing: ``verify --level size``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from snapctl.manifest import MANIFEST_NAME
from snapctl.markers import DELETING_NAME, MARKER_DIR, PIN_NAME
from snapctl.save_record import BlobSum
from snapctl.storage import FileInfo
from snapctl.storage.local_paths import TEMPORARY_MARK
from snapctl.verification.blob_uses import BlobUse
from snapctl.verification.verdicts import Problem

_OWN = (MANIFEST_NAME, DELETING_NAME, PIN_NAME)
_OWN_DIRECTORIES = (f"{MARKER_DIR}/", ".snapctl/")
_SHOWN = 5


def find_size_problems(uses: Mapping[str, Sequence[BlobUse]], files: Mapping[str, FileInfo]) -> list[Problem]:
    """Blobs that are missing, or shorter than what is needed of them: one problem for each blob.

    Args:
        uses: by location.
        files: of the checkpoint's directory, by path.
    """
    problems = []
    for location, held in uses.items():
        needed = max(use.needed_bytes for use in held)
        file = files.get(location)
        if file is None:
            detail = "is not there" + _also(held)
            problems.append(Problem("missing-blob", held[0].entry, location, detail))
        elif file.size_bytes < needed:
            beyond = [use for use in held if use.needed_bytes > file.size_bytes]
            least = "" if all(use.end is not None for use in beyond) else "at least "
            detail = f"{file.size_bytes} of {least}{needed} bytes" + _also(beyond)
            problems.append(Problem("short-blob", beyond[0].entry, location, detail))
    return problems


def _also(held: Sequence[BlobUse]) -> str:
    """The other entries that a problem of a blob touches."""
    others = list(dict.fromkeys(use.entry for use in held if use.entry != held[0].entry))
    if not others:
        return ""
    more = f", … ({len(others)} in all)" if len(others) > _SHOWN else ""
    return f"; also needed by {', '.join(others[:_SHOWN])}{more}"


def find_sum_problems(
    uses: Mapping[str, Sequence[BlobUse]], files: Mapping[str, FileInfo], recorded: Mapping[str, BlobSum]
) -> Iterator[Problem]:
    """Blobs of which the storage says another length or CRC32C than the save recorded.

    Those that are missing or too short are left to `find_size_problems`.
    """
    for location, held in uses.items():
        file, expected = files.get(location), recorded.get(location)
        if file is None or expected is None or file.size_bytes < max(use.needed_bytes for use in held):
            continue
        if file.size_bytes != expected.size_bytes:
            detail = f"has {file.size_bytes} bytes, and the save recorded {expected.size_bytes}" + _also(held)
            yield Problem("checksum", held[0].entry, location, detail)
        elif file.crc32c is not None and file.crc32c != expected.crc32c:
            yield checksum_problem(held, file.crc32c, expected.crc32c)


def checksum_problem(held: Sequence[BlobUse], found: int, expected: int, *, by: str = "the save recorded") -> Problem:
    """The problem of a blob whose CRC32C is another one than it should be."""
    detail = f"CRC32C {found:08x}, and {by} {expected:08x}" + _also(held)
    return Problem("checksum", held[0].entry, held[0].location, detail)


def find_unneeded_files(files: Iterable[FileInfo], mentioned: set[str]) -> list[FileInfo]:
    """Files that neither the manifest speaks of nor snapctl adds to a checkpoint."""
    return [
        file
        for file in files
        if file.path not in mentioned
        and file.path not in _OWN
        and not file.path.startswith(_OWN_DIRECTORIES)
        and not file.path.endswith("/")
        and TEMPORARY_MARK not in file.path
    ]
