"""Files that are nearly right: mutations of bytes and of JSON documents, the same for the same random generator."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TOKENS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"{}", b"[]", b'""', b"\\u0000", b"\\ud800", b"\x1b[31m", b"..",
    b"/", b"%2F", b"&a", b"*a", b"!!python/object:os.system", b"? ", b"- ", b": ", b"\n", b"\xff", b"\x00", b"  ",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"1152921504606846976", b'"', b"'", b"[",
    b"{", b"}", b"]", b",", b"#", b"|", b">", b"~", b"0x" + b"f" * 40, b"1:59:59", b"2022-01-01",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**60, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5, 1e300, -0.0, "",
    " ", "x", "..", "/", "../../x", "\x00", "\ud800", "\x1b[2J", "torch.float32", "torch.bfloat16", "torch.qint8",
    "torch.complex64", "torch.nothing", "buffer_protocol", "torch_save", "per_tensor_qtensor", "per_channel_qtensor",
    "Tensor", "ShardedTensor", "ChunkedTensor", "DTensor", "object", "dict", "list", "OrderedDict", "int", "float",
    "bytes", "bool", "str", "torch.Tensor", [], {}, [0], [1, 2], [[0]], [-1], [2**60], {"type": "Tensor"}, "AAAA",
    "0/model/dense", "batched/5ab", "0", "1", "9" * 30,
)  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four small changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(7):
            case 0:
                del changed[at:end]
            case 1:
                changed[at:at] = rng.choice(TOKENS)
            case 2:
                changed[at:end] = rng.choice(TOKENS)
            case 3 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 4:
                changed[at:at] = changed[at:end] * rng.choice((1, 2, 50))
            case 5:
                del changed[at:]
            case _:
                source = rng.randrange(len(changed) + 1)
                changed[at:end] = changed[source : source + end - at]
    return bytes(changed)


def mutate_document(document: Any, rng: random.Random) -> Any:
    """A copy of a JSON document in which one to three values are others, are missing, or stand in another's place."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        holders = list(_containers(changed)) or [changed]
        holder = rng.choice(holders)
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            _put(holder, rng.choice(VALUES), rng)
            continue
        key = rng.choice(keys)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                holder[key] = copy.deepcopy(rng.choice(holders))
            case 4:
                _put(holder, copy.deepcopy(holder[key]), rng)
            case _:
                holder[key] = _near(holder[key], rng)
    return changed


def _containers(value: Any) -> Any:
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _put(holder: Any, value: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), value)
    else:
        holder[rng.choice(("0/model/new", "type", "location", "keys", "9/x", "", "\ud800", "shape"))] = value


def _near(value: Any, rng: random.Random) -> Any:
    """Something like it."""
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1, 1000))
        case str():
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(("", "x", "/", "%", "é", "\n")) + value[at + rng.randrange(2) :]
        case list():
            return rng.choice((value[:-1], value * 2, value[::-1]))
        case dict():
            return {key: value[key] for key in reversed(value)}
        case _:
            return None


def dump(document: Any) -> bytes:
    """As JSON, also with what UTF-8 cannot hold."""
    return json.dumps(document, ensure_ascii=True).encode()
