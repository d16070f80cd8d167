"""What only torch can decode: ``torch.save`` (weights-only) and quantized tensors; torch tensors as numpy arrays.

torch is imported by the functions that need it, and by nothing else.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from snapctl.errors import DamagedError, MissingExtraError, SnapctlError, UnpicklingError, UnsupportedEntryError
from snapctl.manifest import DTYPE_SIZES
from snapctl.tensors.dtypes import QUANTIZED_DTYPES, numpy_dtype

if TYPE_CHECKING:
    import torch


MAX_EXPANDED_BYTES = 64 << 20
"""``torch.save`` stores a tensor whose elements are all the same place in memory (expanded) as that place. No room is
made for one that becomes larger than this and than its blob."""


def import_torch(what: str) -> Any:
    """The torch module.

    Raises:
        MissingExtraError: it is not installed; `what` says what needs it.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(f"torch, which {what} needs,", extra="torch") from error
    return torch


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name (without ``torch.``).

    Raises:
        MissingExtraError, UnsupportedEntryError: no torch, or this one has no such dtype.
    """
    found: torch.dtype | None = getattr(import_torch(f"the dtype {name}"), name, None)
    if found is None or f"torch.{name}" not in DTYPE_SIZES:
        raise UnsupportedEntryError(f"this torch has no dtype {name}")
    return found


def load_object(
    file: IO[bytes] | io.RawIOBase, *, entry: str, blob: str, obj_type: str | None = None, allow_pickle: bool = False
) -> Any:
    """What ``torch.save`` wrote, with PyTorch's weights-only loading: nothing else is ever unpickled.

    Args:
        file: seekable.
        obj_type: the class that the manifest names, for the message of a refusal.
        allow_pickle: unpickle anything, which runs whatever code the file says.

    Raises:
        UnpicklingError: it holds something that would have to be unpickled.
        DamagedError: it is no such file (``undecodable``).
        MissingExtraError: torch is not installed.
    """
    numerics = import_torch(f"{entry} (torch_save)")
    _refuse_compressed(file, entry=entry, blob=blob)
    if allow_pickle:
        return _unpickle(numerics, file, entry=entry, blob=blob)
    try:
        with _quiet():
            return numerics.load(file, map_location="cpu", weights_only=True)
    except SnapctlError:
        raise
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError,
            IndexError, struct.error) as error:  # fmt: skip
        kind = f"an object of {obj_type}" if obj_type else "an object"
        refusal = f"{entry}: {kind} that would have to be unpickled, which can run code"
        unsafe = _unsafe_globals(numerics, file)
        if unsafe:
            raise UnpicklingError(f"{refusal}: {', '.join(unsafe[:5])}") from error
        if isinstance(error, pickle.UnpicklingError) and _is_whole(file):
            raise UnpicklingError(refusal) from error  # weights-only loading knows some of pickle's instructions only
        raise DamagedError(
            f"{entry}: {blob} cannot be decoded as torch_save: {_reason(error)}",
            kind="undecodable",
            entry=entry,
            blob=blob,
        ) from error


def _refuse_compressed(file: IO[bytes] | io.RawIOBase, *, entry: str, blob: str) -> None:
    """``torch.save`` compresses nothing; what is compressed can become a thousand times as large."""
    try:
        with zipfile.ZipFile(file) as archive:
            is_larger = any(member.file_size > member.compress_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError, EOFError, struct.error):
        is_larger = False  # the old format, or none at all
    file.seek(0)
    if is_larger:
        raise DamagedError(
            f"{entry}: {blob} is compressed, which torch_save never does", kind="undecodable", entry=entry, blob=blob
        )


def _reason(error: BaseException) -> str:
    """What is wrong, without torch's advice on how to load it in spite of that."""
    text = str(error)
    _, found, after = text.partition("WeightsUnpickler error:")
    lines = [line for line in (after if found else text).splitlines() if line.strip()]
    words = " ".join(lines[0].split())[:160] if lines and not lines[0].startswith("Check the doc") else ""
    return words or type(error).__name__


def _is_whole(file: IO[bytes] | io.RawIOBase) -> bool:
    """Whether the archive and its pickle can be read to the end; nothing in it is run."""
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            opcodes = [opcode.name for name in names for opcode, _, _ in pickletools.genops(archive.read(name))]
    except SnapctlError:
        raise
    except Exception:  # noqa: BLE001 - broken in whatever way
        return False
    return bool(opcodes) and opcodes[-1] == "STOP"


def _unpickle(numerics: Any, file: IO[bytes] | io.RawIOBase, *, entry: str, blob: str) -> Any:
    try:
        with _quiet():
            return numerics.load(file, map_location="cpu", weights_only=False)
    except SnapctlError:
        raise
    except Exception as error:  # whatever the code in it raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise DamagedError(
            f"{entry}: {blob} cannot be unpickled: {reason}", kind="undecodable", entry=entry, blob=blob
        ) from error


def load_tensor(file: IO[bytes] | io.RawIOBase, *, entry: str, blob: str) -> torch.Tensor:
    """A tensor that ``torch.save`` wrote: plain, detached, on the CPU, in no larger a storage than it needs.

    Raises:
        UnsupportedEntryError: it is no tensor, or not a strided one.
        DamagedError, MissingExtraError, RefusedError: as `load_object`.
    """
    numerics = import_torch(f"{entry} (torch_save)")
    found = load_object(file, entry=entry, blob=blob)
    if not isinstance(found, numerics.Tensor):
        raise DamagedError(
            f"{entry}: {blob} holds a {type(found).__name__}, not a tensor", kind="undecodable", entry=entry, blob=blob
        )
    if found.layout is not numerics.strided or found.is_nested or found.is_meta:
        raise UnsupportedEntryError(f"{entry}: a tensor of layout {found.layout}, not a dense one")
    plain = found.detach()
    size_bytes = plain.numel() * plain.element_size()
    if size_bytes > max(MAX_EXPANDED_BYTES, file.seek(0, io.SEEK_END)):
        raise UnsupportedEntryError(f"{entry}: {blob} holds an expanded tensor, which would take {size_bytes} bytes")
    if plain.untyped_storage().nbytes() > size_bytes:
        plain = plain.clone()  # a view: its storage came along
    tensor: torch.Tensor = plain
    return tensor


def _unsafe_globals(numerics: Any, file: IO[bytes] | io.RawIOBase) -> list[str]:
    """What its pickle would import beyond the weights-only list; empty if it cannot be told."""
    try:
        file.seek(0)
        with _quiet():
            return list(numerics.serialization.get_unsafe_globals_in_checkpoint(file))
    except SnapctlError:
        raise
    except Exception:  # noqa: BLE001 - it is broken in whatever way: then it is not a matter of safety
        return []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def decode_quantized(data: memoryview, shape: tuple[int, ...], dtype: str, serializer: str, *, entry: str,
                     blob: str) -> torch.Tensor:  # fmt: skip
    """A quantized tensor from the bytes of its blob.

    Source: ``per_tensor_qtensor``: elements, scale as double, zero point as int64; ``per_channel_qtensor``: axis as
    int64, elements, scales as doubles, zero points as int64s; all little-endian.

    Raises:
        DamagedError: the bytes do not make such a tensor.
    """
    numerics = import_torch(f"{entry} ({serializer})")
    kind = QUANTIZED_DTYPES.get(dtype)
    if kind is None:
        raise DamagedError(f"{entry}: {serializer} of {dtype}", kind="undecodable", entry=entry, blob=blob)
    count = math.prod(shape)
    size = count * np.dtype(kind).itemsize

    def damaged(text: str) -> DamagedError:
        return DamagedError(f"{entry}: {blob}: {text}", kind="undecodable", entry=entry, blob=blob)

    def elements(start: int) -> Any:
        return numerics.from_numpy(np.frombuffer(data, kind, count, start).reshape(shape).copy())

    def check_zero_points(found: Sequence[int]) -> None:
        """torch makes tensors of zero points that it refuses to compute with."""
        limits = np.iinfo(kind)
        for zero_point in found:
            if not limits.min <= zero_point <= limits.max:
                raise damaged(f"its zero point is {zero_point}, which no {kind} is")

    if serializer == "per_tensor_qtensor":
        if len(data) != size + 16:
            raise damaged(f"{len(data)} bytes, and per_tensor_qtensor takes {size + 16}")
        scale, zero_point = struct.unpack_from("<dq", data, size)
        check_zero_points([zero_point])
        return _per_tensor(numerics, elements(0), scale, zero_point)
    if len(data) < 8:
        raise damaged(f"{len(data)} bytes, too few for a per_channel_qtensor")
    (axis,) = struct.unpack_from("<q", data, 0)
    if not 0 <= axis < len(shape):
        raise damaged(f"its axis is {axis}, and it has {len(shape)} dimensions")
    channels = shape[axis]
    if len(data) != 8 + size + 16 * channels:
        raise damaged(f"{len(data)} bytes, and per_channel_qtensor takes {8 + size + 16 * channels}")
    scales = numerics.from_numpy(np.frombuffer(data, "<f8", channels, 8 + size).copy())
    zero_points = np.frombuffer(data, "<i8", channels, 8 + size + 8 * channels).copy()
    check_zero_points(zero_points.tolist())
    with _quiet():
        tensor: torch.Tensor = numerics._make_per_channel_quantized_tensor(
            elements(8), scales, numerics.from_numpy(zero_points), axis
        )
    return tensor


def _per_tensor(numerics: Any, integers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    with _quiet():
        tensor: torch.Tensor = numerics._make_per_tensor_quantized_tensor(integers, scale, zero_point)
    return tensor


def join_quantized(
    parts: Sequence[tuple[torch.Tensor, tuple[tuple[int, ...], tuple[int, ...]]]],
    region: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    *,
    entry: str,
) -> torch.Tensor:
    """A quantized tensor out of whole parts of it, with the places of these; with one scale, where there are several.

    Raises:
        UnsupportedEntryError: the parts are quantized each in its own way, or only some rows of one are wanted.
    """
    numerics = import_torch(entry)
    integers = numerics.empty(region[1], dtype=getattr(numerics, QUANTIZED_DTYPES[dtype]))
    scales = set()
    for tensor, (offsets, sizes) in parts:
        if tensor.qscheme() != numerics.per_tensor_affine or tuple(tensor.shape) != sizes:
            raise UnsupportedEntryError(f"{entry}: a quantized tensor in several parts, each with scales of its own")
        scales.add((tensor.q_scale(), tensor.q_zero_point()))
        place = tuple(slice(o - r, o - r + size) for o, r, size in zip(offsets, region[0], sizes, strict=True))
        integers[place] = tensor.int_repr()
    if len(scales) > 1:
        raise UnsupportedEntryError(f"{entry}: a quantized tensor in parts of different scales")
    scale, zero_point = scales.pop() if scales else (1.0, 0)
    return _per_tensor(numerics, integers, scale, zero_point)


def torch_to_numpy(tensor: torch.Tensor, *, entry: str) -> np.ndarray[Any, Any]:
    """The elements of a dense tensor, bit by bit, in row-major order; shares memory with it where it can.

    Raises:
        UnsupportedEntryError: numpy has no such dtype (quantized, complex32).
    """
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        target = numpy_dtype(name)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry}: {error.message}", hint=error.hint) from error
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), target)
    flat: np.ndarray[Any, Any] = flat_bytes(tensor).numpy()
    return flat.view(target).reshape(tuple(tensor.shape))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of a dense tensor that has some, in row-major order; shares memory where it can."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # the strides of dimensions of one element may be anything, and a view of bytes does not like that
    return plain.as_strided((plain.numel(),), (1,)).view(import_torch("a tensor").uint8)


def numpy_to_torch(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """A torch tensor of a dtype (without ``torch.``) over the memory of a contiguous array of that width."""
    numerics = import_torch(dtype)
    target = torch_dtype(dtype)
    if array.size == 0:
        tensor: torch.Tensor = numerics.empty(array.shape, dtype=target)
    else:
        tensor = numerics.from_numpy(array.reshape(-1).view(np.uint8)).view(target).reshape(array.shape)
    return tensor


def torch_elements(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A writable array over the memory of a dense tensor on the CPU, of any strides, to move bits into.

    Its dtype has the tensor's width; where numpy has no dtype for it, it is an integer.
    """
    numerics = import_torch("a tensor")
    plain = tensor.detach()
    try:
        array: np.ndarray[Any, Any] = plain.numpy()
    except TypeError:
        widths = {1: numerics.uint8, 2: numerics.int16, 4: numerics.int32, 8: numerics.int64}
        array = plain.view(widths[plain.element_size()]).numpy()
    return array


def values_of(tensor: torch.Tensor, *, entry: str) -> np.ndarray[Any, Any]:
    """The values of a tensor of a dtype that numpy lacks: dequantized (raises as `dequantize`), or as complex64."""
    plain = dequantize(tensor, entry=entry) if tensor.is_quantized else tensor.to(import_torch(entry).complex64)
    return torch_to_numpy(plain, entry=entry)


def dequantize(tensor: torch.Tensor, *, entry: str) -> torch.Tensor:
    """The values that a quantized tensor stands for, as float32.

    Raises:
        DamagedError: its scales or zero points are none (an archive of ``torch.save`` may say anything).
    """
    try:
        with _quiet():
            return tensor.dequantize()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:160]
        raise DamagedError(f"{entry}: cannot be dequantized: {text}", kind="undecodable", entry=entry) from error
