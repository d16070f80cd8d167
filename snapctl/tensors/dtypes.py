"""The dtypes of torch in numpy: which is which, moving bits, converting values. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from snapctl.errors import UnsupportedEntryError
from snapctl.manifest import DTYPE_SIZES

_EXTENSION_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
QUANTIZED_DTYPES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
"""Quantized dtypes and the integers that they are stored as."""

TORCH_ONLY_DTYPES = (*QUANTIZED_DTYPES, "complex32")
"""Dtypes that numpy lacks; in another dtype their values can be had all the same."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a torch dtype (without ``torch.``); of ml_dtypes for bfloat16 and float8.

    Raises:
        UnsupportedEntryError: numpy has none (complex32, quantized dtypes), or nobody knows it.
    """
    if name in _EXTENSION_DTYPES:
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)
        if kind is not None:
            extended: np.dtype[Any] = np.dtype(kind)
            return extended
    elif f"torch.{name}" in DTYPE_SIZES and name != "complex32" and name not in QUANTIZED_DTYPES:
        native: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        return native
    raise UnsupportedEntryError(f"numpy has no dtype for {name}", hint=_hint_without_numpy(name))


def _hint_without_numpy(name: str) -> str | None:
    if name in QUANTIZED_DTYPES:
        return "write a .pt file, or give --dtype float32 for the values that it stands for"
    return "write a .pt file, or give --dtype complex64" if name == "complex32" else None


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements as unsigned integers (complex128: as pairs of bits that numpy copies as they are).

    Copies between views of this kind move bits, never values: no NaN is made quiet, no number rounded.
    """
    return array.view(np.dtype(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else np.dtype("V16"))


def convert(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The values in another dtype, rounded as numpy rounds; infinite where they are too large.

    Raises:
        UnsupportedEntryError: complex values in a dtype without an imaginary part.
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise UnsupportedEntryError(f"{array.dtype.name} values do not fit into {dtype.name}: it has no imaginary part")
    with np.errstate(all="ignore"):
        return array.astype(dtype)
