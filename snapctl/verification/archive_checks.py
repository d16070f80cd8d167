"""Whether what ``torch.save`` wrote can be read back: its zip directory, the CRC of its members, its pickle under
weights-only loading. Nothing is executed, and what would need it is said to be unchecked."""

from __future__ import annotations

import contextlib
import io
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import msgspec

from snapctl.errors import DamagedError, MissingExtraError, RefusedError, UnsupportedEntryError
from snapctl.tensors.torch_decoding import flat_bytes, import_torch, load_object
from snapctl.verification.blob_uses import BlobUse
from snapctl.verification.float_counts import count_non_finite
from snapctl.verification.verdicts import NonFinite, Problem, Unchecked, problem_of

_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ValueError, EOFError, NotImplementedError, RuntimeError, zlib.error)
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LARGE_ONE_AT_A_TIME = threading.Lock()


class ArchiveFindings(msgspec.Struct):
    """What was found of one archive."""

    problems: list[Problem] = []
    crc_problems: list[Problem] = []
    """Members whose CRC is wrong. torch can be told to write none; where a checksum of the whole blob agrees, these
    mean nothing."""
    unchecked: list[Unchecked] = []
    counts: list[tuple[str, NonFinite]] = []


class Member(msgspec.Struct, frozen=True, gc=False):
    """A member of a zip archive that is stored as it is."""

    name: str
    header_offset: int
    size_bytes: int
    crc32: int


def check_held_archive(data: memoryview, use: BlobUse, *, finite: bool) -> ArchiveFindings:
    """Judges an archive that is in memory."""
    found = ArchiveFindings()
    file = io.BytesIO(data)
    is_zip = bytes(data[:4]) == _ZIP_MAGIC
    if is_zip:
        _check_members(_members_of(file, use, found), iter([data]), use, found)
    if not found.problems:
        file.seek(0)
        _decode(file, use, found, finite=finite, is_zip=is_zip, first=bytes(data[:1]))
    return found


def check_large_archive(
    file: IO[bytes] | io.RawIOBase, blocks: Callable[[], Iterator[memoryview]], use: BlobUse, *, finite: bool
) -> ArchiveFindings:
    """Judges an archive that is too large to be held: its bytes go by once, in `blocks`.

    Args:
        file: the archive; only its directory and its pickle are read from it, but to count (`finite`), or where this
            torch cannot load without data: then it takes its own size in memory, one archive at a time.
        blocks: the bytes of the archive from the first to the last; must be gone through, whatever is found.
    """
    found = ArchiveFindings()
    head = file.read(4) or b""
    is_zip = head == _ZIP_MAGIC
    _check_members(_members_of(file, use, found) if is_zip else [], blocks(), use, found)
    if not found.problems:
        with _LARGE_ONE_AT_A_TIME:
            file.seek(0)
            _decode(file, use, found, finite=finite, is_zip=is_zip, first=head[:1], large=True)
    return found


def _members_of(file: IO[bytes] | io.RawIOBase, use: BlobUse, found: ArchiveFindings) -> list[Member]:
    """The members of an archive that torch wrote, by its directory at the end, in the order of the file."""
    try:
        with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type, unused-ignore]
            infos = archive.infolist()
    except _ZIP_ERRORS as error:
        found.problems.append(_undecodable(use, f"not a whole zip archive: {_reason(error)}"))
        return []
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            text = f"its member {info.filename} is compressed or encrypted, which torch never does"
            found.problems.append(_undecodable(use, text))
            return []
    members = [Member(info.filename, info.header_offset, info.file_size, info.CRC) for info in infos]
    return sorted(members, key=lambda member: member.header_offset)


def _check_members(members: list[Member], blocks: Iterator[memoryview], use: BlobUse, found: ArchiveFindings) -> None:
    """Compares the CRC of each member; goes through all blocks.

    Where not one is right, torch was told to write none: nobody damages every member of an archive.
    """
    wrong = []
    for member, crc in _member_sums(members, blocks):
        if crc is None:
            text = f"no member where {member.name} should begin"
            found.problems.append(_undecodable(use, f"not a whole zip archive: {text}"))
            return
        if crc != member.crc32:
            text = f"its member {member.name} has the CRC {crc:08x}, and should have {member.crc32:08x}"
            wrong.append(_undecodable(use, text))
    if len(wrong) < max(2, sum(member.size_bytes > 0 for member in members)):
        found.crc_problems += wrong[:1]


def _member_sums(members: list[Member], blocks: Iterator[memoryview]) -> Iterator[tuple[Member, int | None]]:
    """The CRC of each member, as the bytes go by; None where there is no member."""
    index, position = 0, 0
    header, start, crc = bytearray(), -1, 0
    for block in blocks:
        end = position + len(block)
        while index < len(members):
            member = members[index]
            if start < 0:
                first = member.header_offset + len(header) - position
                header += block[max(0, first) : max(0, member.header_offset + _LOCAL_HEADER.size - position)]
                if len(header) < _LOCAL_HEADER.size:
                    break
                magic, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
                if magic != _ZIP_MAGIC:
                    yield member, None
                    index, header = index + 1, bytearray()
                    continue
                start, crc = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes, 0
            stop = start + member.size_bytes
            crc = zlib.crc32(block[max(0, start - position) : max(0, stop - position)], crc)
            if stop > end:
                break
            yield member, crc
            index, header, start = index + 1, bytearray(), -1
        position = end
    for member in members[index:]:
        yield member, None


def _decode(
    file: IO[bytes] | io.RawIOBase,
    use: BlobUse,
    found: ArchiveFindings,
    *,
    finite: bool,
    is_zip: bool,
    first: bytes,
    large: bool = False,
) -> None:
    if use.obj_type is not None and use.serializer != "torch_save":
        return  # said to be unchecked already
    try:
        value = _load(file, use, without_data=large and is_zip and not finite)
    except MissingExtraError:
        if is_zip:
            found.unchecked.append(Unchecked(use.entry, "not decoded: torch is not installed"))
        elif first == _PICKLE_MAGIC:
            found.unchecked.append(Unchecked(use.entry, "not decoded: torch is not installed, and it is no archive"))
        else:
            found.problems.append(_undecodable(use, "neither a zip archive nor a pickle"))
        return
    except RefusedError as error:
        found.unchecked.append(Unchecked(use.entry, error.message.removeprefix(f"{use.entry}: ")))
        return
    except DamagedError as error:
        found.problems.append(problem_of(error))
        return
    if use.obj_type is None:
        _check_tensor(value, use, found)
    if finite and not found.problems:
        for tensor in _tensors_in(value):
            with contextlib.suppress(UnsupportedEntryError):
                found.counts.append((use.tensor, _count(tensor)))


def _load(file: IO[bytes] | io.RawIOBase, use: BlobUse, *, without_data: bool) -> Any:
    if without_data:
        fake = _load_fake(file)
        if fake is not None:
            return fake
        file.seek(0)
    return load_object(file, entry=use.entry, blob=use.location, obj_type=use.obj_type)


def _load_fake(file: IO[bytes] | io.RawIOBase) -> Any:
    """What ``torch.load`` makes of it with tensors that have no data; None if this torch cannot, or it is damaged."""
    try:
        torch = import_torch("a torch_save blob")
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, loading it for real tells
        return None


def _check_tensor(value: Any, use: BlobUse, found: ArchiveFindings) -> None:
    torch = import_torch(use.entry)
    if not isinstance(value, torch.Tensor):
        found.problems.append(_undecodable(use, f"holds a {type(value).__name__}, not a tensor"))
        return
    if use.dtype is None:
        if use.shape and tuple(value.shape) != use.shape:  # a shard of 0.0.x: its sizes are known
            text = f"holds {list(value.shape)}, and the manifest says {list(use.shape)}"
            found.problems.append(Problem("size-mismatch", use.entry, use.location, text))
        return
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != use.dtype or tuple(value.shape) != use.shape:
        text = f"holds {dtype} {list(value.shape)}, and the manifest says {use.dtype} {list(use.shape)}"
        found.problems.append(Problem("size-mismatch", use.entry, use.location, text))


def _tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in what was loaded, in lists, tuples and dicts of any depth."""
    torch = import_torch("a torch_save blob")
    todo = [value]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            todo += item.values() if isinstance(item, dict) else item


def _count(tensor: Any) -> NonFinite:
    """Quantized and sparse ones, and those without data, are left out."""
    torch = import_torch("a tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return NonFinite(elements=tensor.numel())
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise UnsupportedEntryError("not a dense tensor")
    if tensor.numel() == 0:
        return NonFinite()
    return count_non_finite(flat_bytes(tensor).numpy(), dtype)


def _undecodable(use: BlobUse, text: str) -> Problem:
    return Problem("undecodable", use.entry, use.location, text)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
