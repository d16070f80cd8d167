"""Whether the blobs that a manifest needs are all there, in full length, judged from one listing.

Nothing is read: a blob of the right length with the wrong bytes passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from snapctl.manifest import Manifest, ObjectEntry, TensorEntry
from snapctl.storage import FileInfo, Storage, cuts_of


class BlobGap(msgspec.Struct, frozen=True):
    """A blob that is missing or too short for what the manifest says."""

    location: str
    needed_bytes: int
    """At least; 1 where only the blob itself knows how long it is."""
    found_bytes: int | None
    """None: it is not there."""

    def __str__(self) -> str:
        if self.found_bytes is None:
            return f"{self.location}: is missing"
        return f"{self.location}: {self.found_bytes} bytes, {self.needed_bytes} needed"


def needed_bytes(manifest: Manifest) -> dict[str, int]:
    """By location, how long each blob must be at least. Blobs of which no byte is needed are left out."""
    needed: dict[str, int] = {}
    for _, stored in manifest.iter_blobs():
        end = _needed_end(stored)
        if end > needed.get(stored.location, 0):
            needed[stored.location] = end
    return needed


def _needed_end(stored: TensorEntry | ObjectEntry) -> int:
    if isinstance(stored, ObjectEntry):
        return 1
    if stored.byte_range is not None:
        start, end = stored.byte_range
        return end if end > start else 0
    size = stored.size_bytes
    return 1 if size is None else size


def find_blob_gaps(manifest: Manifest, files: Iterable[FileInfo]) -> list[BlobGap]:
    """The blobs that are missing or too short, sorted by location.

    Args:
        files: the listing of the checkpoint's directory.
    """
    sizes: Mapping[str, int] = {file.path: file.size_bytes for file in files}
    return [
        BlobGap(location, needed, sizes.get(location))
        for location, needed in sorted(needed_bytes(manifest).items())
        if sizes.get(location, 0) < needed
    ]


def list_checkpoint(storage: Storage, manifest: Manifest | None = None) -> list[FileInfo]:
    """All files of a checkpoint's directory; faster for a large one on an object store if the manifest is known."""
    return storage.list_tree(cuts=cuts_of(sorted(manifest.blob_locations())) if manifest is not None else ())


def check_blobs(storage: Storage, manifest: Manifest) -> list[BlobGap]:
    """`find_blob_gaps` of a checkpoint's directory, from one listing.

    Raises:
        StorageError: it could not be listed.
    """
    return find_blob_gaps(manifest, list_checkpoint(storage, manifest))
