"""Putting a tensor into a state dict that lies in a ``.pt`` file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapctl.entry_names import nearest_names
from snapctl.errors import DamagedError, EntryNotFoundError, InvalidPathError, NotFoundError, RefusedError
from snapctl.export.writing import write_pt
from snapctl.output_file import NewFile, check_output_path
from snapctl.storage.local_paths import translate_os_error
from snapctl.tensors.torch_decoding import import_torch, load_object

if TYPE_CHECKING:
    import torch


def load_state_dict(path: str) -> tuple[str, dict[str, Any]]:
    """A state dict from a file, with the absolute path that it is to be written back to.

    Raises:
        NotFoundError: there is no such file.
        InvalidPathError: it is not a file that torch can load, or holds no dict.
        RefusedError: it holds something that would have to be unpickled.
        MissingExtraError: torch is not installed.
        StorageError: it cannot be read.
    """
    full = check_output_path(path, force=True)
    try:
        with open(full, "rb") as file:
            state = load_object(file, entry=path, blob="it")
    except FileNotFoundError as error:
        raise NotFoundError(f"{full}: no such file") from error
    except DamagedError as error:
        raise InvalidPathError(error.message) from error
    except OSError as error:
        raise translate_os_error(error, full) from error
    if not isinstance(state, dict):
        raise InvalidPathError(f"{full}: holds a {type(state).__name__}, not a state dict")
    return full, state


def check_place(path: str, state: dict[str, Any], key: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Whether a tensor fits where it is to go.

    Raises:
        EntryNotFoundError: the state dict has no such key; the candidates are the nearest ones.
        RefusedError: what is there is no dense tensor, or of another shape or dtype.
    """
    if key not in state:
        nearest = nearest_names(key, [name for name in state if isinstance(name, str)])
        hint = f"the nearest keys are: {', '.join(nearest)}" if nearest else None
        raise EntryNotFoundError(f"{path}: no such key: {key}", candidates=nearest, hint=hint)
    held = state[key]
    if not isinstance(held, import_torch("a .pt file").Tensor):
        raise RefusedError(f"{path}: {key} is a {type(held).__name__}, not a tensor")
    layout = str(held.layout).removeprefix("torch.")
    if layout != "strided":
        raise RefusedError(f"{path}: {key} is a tensor of layout {layout}, and the tensor is dense")
    held_dtype = str(held.dtype).removeprefix("torch.")
    if tuple(held.shape) != shape or held_dtype != dtype:
        hint = f"--dtype {held_dtype} converts" if tuple(held.shape) == shape else None
        raise RefusedError(
            f"{path}: {key} is {held_dtype} {list(held.shape)}, and the tensor is {dtype} {list(shape)}", hint=hint
        )


def put_tensor(path: str, state: dict[str, Any], key: str, tensor: torch.Tensor) -> int:
    """Replaces a tensor's values in a state dict and writes the file anew: whole, or not at all.

    What shares memory with it (tied weights) changes along with it.

    Args:
        path, state: as `load_state_dict` returned them.

    Returns:
        The size of the file in bytes.

    Raises:
        StorageError: it could not be written; the old file is as it was.
    """
    if not _write_in_place(state[key].detach(), tensor):
        state[key] = tensor
    with NewFile(path) as file:
        write_pt(state, file)
        file.commit()
        return file.size_bytes


def _write_in_place(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    """False where it cannot be: a tensor without memory (meta), or one whose elements share theirs (expanded)."""
    if held.device.type == "meta":
        return False
    try:
        held.copy_(tensor)
    except RuntimeError:
        return False
    return True
