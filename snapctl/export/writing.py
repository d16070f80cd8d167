"""Tensors into files that other programs read: ``.safetensors``, ``.npy`` and ``.pt``.

The first two are written as the tensors are read, in bounded memory, and without torch where the tensors are raw;
``.pt`` is written by torch, and holds what it writes in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from snapctl.errors import InvalidOptionError, UnsupportedEntryError
from snapctl.manifest import DTYPE_SIZES
from snapctl.output_file import NewFile, Sink
from snapctl.tensors.dtypes import QUANTIZED_DTYPES, TORCH_ONLY_DTYPES, convert, numpy_dtype
from snapctl.tensors.layout import TensorLayout
from snapctl.tensors.reader import MIN_COPIED_BYTES, Rows, TensorReader, region_of_rows
from snapctl.tensors.tiling import Region
from snapctl.tensors.torch_decoding import dequantize, import_torch, torch_dtype, values_of

MAX_HEADER_BYTES = 100_000_000
"""What readers of safetensors accept."""

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor on its way into a file."""

    name: str
    """In the file."""
    layout: TensorLayout
    """With dtype and shape."""
    region: Region
    dtype: str
    """In the file, without ``torch.``; where it is not the layout's, values are converted."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region[1]

    @property
    def size_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * DTYPE_SIZES.get(f"torch.{self.dtype}", 0)


def make_item(reader: TensorReader, name: str, layout: TensorLayout, rows: Rows | None, dtype: str | None) -> Item:
    """An item; what only the blobs know of the tensor is learned from them.

    Raises:
        InvalidOptionError: there are no such rows.
        DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `TensorReader.learn`.
    """
    known = reader.learn(layout)
    source = known.dtype or ""
    if dtype is not None and "complex" in source and "complex" not in dtype:
        raise UnsupportedEntryError(f"{layout.entry}: {source} does not fit into {dtype}: it has no imaginary part")
    return Item(name, known, region_of_rows(known, rows), dtype or source)


def parse_dtype(text: str) -> str:
    """A dtype to convert to, without ``torch.``.

    Raises:
        InvalidOptionError: there is none of that name, or only quantized values have it.
    """
    name = text.removeprefix("torch.")
    if f"torch.{name}" not in DTYPE_SIZES or name in QUANTIZED_DTYPES:
        known = ", ".join(dtype[6:] for dtype in DTYPE_SIZES if dtype[6:] not in QUANTIZED_DTYPES)
        raise InvalidOptionError(f"no dtype {text!r} to convert to", hint=f"one of {known}")
    return name


def check_items(items: Sequence[Item], file_format: str) -> None:
    """Whether a format can hold tensors, before anything is read or written.

    Raises:
        UnsupportedEntryError: a dtype has no place in it, or the number of tensors; the message names the first.
    """
    if file_format == "npy" and len(items) != 1:
        raise UnsupportedEntryError(f"a .npy file holds one tensor, not {len(items)}", hint="write .safetensors")
    for item in items:
        if file_format == "npy":
            _check_npy(item)
        elif file_format == "safetensors":
            _check_safetensors(item)


def _check_npy(item: Item) -> None:
    if numpy_dtype_of(item).kind == "V" or item.dtype.startswith(("bfloat16", "float8")):
        raise UnsupportedEntryError(
            f"{item.layout.entry}: .npy has no {item.dtype}", hint="--dtype float32 converts; .safetensors keeps it"
        )


def _check_safetensors(item: Item) -> None:
    if item.dtype not in _SAFETENSORS_DTYPES:
        wider = "complex64" if "complex" in item.dtype else "float32"
        raise UnsupportedEntryError(
            f"{item.layout.entry}: .safetensors has no {item.dtype}", hint=f"--dtype {wider} converts; .pt keeps it"
        )
    if item.name == "__metadata__":
        raise UnsupportedEntryError("a tensor cannot be named __metadata__ in a .safetensors file")
    if _in_utf8(item.name) != item.name:
        raise UnsupportedEntryError(f"{item.layout.entry}: a name in a .safetensors file must be UTF-8: {item.name}")


def numpy_dtype_of(item: Item) -> np.dtype[Any]:
    """The dtype of an item's elements in a file.

    Raises:
        UnsupportedEntryError: numpy has none.
    """
    try:
        return numpy_dtype(item.dtype)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{item.layout.entry}: {error.message}", hint=error.hint) from error


# -- streaming -------------------------------------------------------------------------------------------------------


def write_safetensors(reader: TensorReader, items: Sequence[Item], sink: Sink, metadata: Mapping[str, str]) -> None:
    """Writes a ``.safetensors`` file.

    Source: the format's documentation: eight bytes with the length of a JSON header (padded so that the data is
    aligned), the header, then the tensors without a gap. The widest elements come first, so that all are aligned.

    Raises:
        UnsupportedEntryError: the header would be larger than readers accept; or as `check_items`.
        DamagedError, RefusedError, MissingExtraError, StorageError: as `TensorReader.iter_blocks`.
    """
    check_items(items, "safetensors")
    ordered = sorted(items, key=lambda item: -DTYPE_SIZES[f"torch.{item.dtype}"])
    header: dict[str, Any] = {"__metadata__": {key: _in_utf8(text) for key, text in metadata.items()}}
    position = 0
    for item in ordered:
        header[item.name] = {
            "dtype": _SAFETENSORS_DTYPES[item.dtype],
            "shape": item.shape,
            "data_offsets": (position, position + item.size_bytes),
        }
        position += item.size_bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedEntryError(f"{len(items)} tensors make a header of {len(text)} bytes: too many for one file")
    sink.write(len(text).to_bytes(8, "little") + text)
    _write_elements(reader, ordered, sink)


def _in_utf8(text: str) -> str:
    """A text with escapes for what UTF-8 cannot hold: half a surrogate pair, a byte of a path that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_npy(reader: TensorReader, item: Item, sink: Sink) -> None:
    """Writes a ``.npy`` file.

    Raises:
        UnsupportedEntryError: as `check_items`.
        DamagedError, RefusedError, MissingExtraError, StorageError: as `TensorReader.iter_blocks`.
    """
    check_items([item], "npy")
    header = {
        "descr": np.lib.format.dtype_to_descr(numpy_dtype_of(item)),
        "fortran_order": False,
        "shape": item.shape,
    }
    np.lib.format.write_array_header_1_0(cast("Any", sink), header)
    _write_elements(reader, [item], sink)


def _write_elements(reader: TensorReader, items: Sequence[Item], sink: Sink) -> None:
    """The elements of items, one after another, each row-major."""
    streamed: list[Item] = []
    for item in items:
        if item.layout.dtype in TORCH_ONLY_DTYPES:
            _stream(reader, streamed, sink)
            streamed = []
            values = values_of(reader.read_torch(item.layout, rows_of(item)), entry=item.layout.entry)
            _write_array(values, numpy_dtype_of(item), sink)
            continue
        if isinstance(sink, NewFile) and item.dtype == item.layout.dtype and item.size_bytes >= MIN_COPIED_BYTES:
            _stream(reader, streamed, sink)
            streamed = []
            if reader.copy_raw(item.layout, item.region, sink):
                continue
        streamed.append(item)
    _stream(reader, streamed, sink)


def _stream(reader: TensorReader, items: Sequence[Item], sink: Sink) -> None:
    dtypes = [numpy_dtype_of(item) for item in items]
    for block in reader.iter_blocks((item.layout, item.region) for item in items):
        _write_array(block.array, dtypes[block.index], sink)


def _write_array(array: np.ndarray[Any, Any], dtype: np.dtype[Any], sink: Sink) -> None:
    if array.size:
        converted = np.ascontiguousarray(convert(array, dtype))
        sink.write(converted.reshape(-1).view(np.uint8).data)


def rows_of(item: Item) -> Rows | None:
    """The rows of an item's region, as `TensorReader.read` takes them; None for a scalar."""
    offsets, sizes = item.region
    return (offsets[0], offsets[0] + sizes[0]) if sizes else None


# -- torch -----------------------------------------------------------------------------------------------------------


def read_torch_items(reader: TensorReader, items: Sequence[Item]) -> list[Any]:
    """Items as torch tensors, each with a storage of just its size.

    Raises:
        DamagedError, UnsupportedEntryError, RefusedError, MissingExtraError, StorageError: as `TensorReader.read`.
    """
    raw = [number for number, item in enumerate(items) if item.layout.is_raw]
    together = reader.read_torch_raw([(items[number].layout, items[number].region) for number in raw])
    found = dict(zip(raw, together, strict=True))
    tensors = []
    for number, item in enumerate(items):
        tensor = found.pop(number) if number in found else reader.read_torch(item.layout, rows_of(item))
        if item.dtype != item.layout.dtype:
            plain = dequantize(tensor, entry=item.layout.entry) if tensor.is_quantized else tensor
            tensor = plain.to(torch_dtype(item.dtype))
        tensors.append(tensor)
    return tensors


def write_pt(value: Any, sink: Sink) -> None:
    """``torch.save`` of a value; an error of the sink comes out as it was raised.

    Raises:
        MissingExtraError: torch is not installed.
    """
    numerics = import_torch("a .pt file")
    guarded = _Guarded(sink)
    try:
        numerics.save(value, guarded)
    except BaseException:
        if guarded.error is not None:
            raise guarded.error from None
        raise


class _Guarded:
    """Remembers what a sink raised: torch's archive writer turns it into an error of its own."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        try:
            return self._sink.write(data if isinstance(data, bytes) else memoryview(data))
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing is held back."""
