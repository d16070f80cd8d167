"""A function in a process of its own, forked from one that has loaded everything, with limits that hold."""

from __future__ import annotations

import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.ranks import _CONTEXT

_PASSED_ON = ("STORAGE_EMULATOR_HOST", "TORCHSNAPSHOT_DISABLE_BATCHING")


@dataclass(frozen=True)
class Isolated:
    """How it went."""

    value: Any
    error: str
    """A traceback, or what killed it; empty if it returned."""
    grown_bytes: int
    """By how much its memory grew, at its peak."""
    seconds: float


def start_with(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Starts ``function(connection, *args)``; returns the process (of `multiprocessing`) and our end of the connection.

    It starts in some 20 ms.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_call, args=(function, (theirs, *args), _environment()))
    process.start()
    theirs.close()
    return process, ours


def run_isolated(
    function: Callable[..., Any], *args: Any, memory_bytes: int | None = None, seconds: float = 60
) -> Isolated:
    """Calls a function of a module with arguments that can be pickled.

    Args:
        memory_bytes: how much address space it may take beyond what the process has at its start: more is a
            `MemoryError`, or its end.
        seconds: killed after so long.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call_limited, args=(function, args, _environment(), memory_bytes, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return Isolated(None, f"was still running after {seconds} s", 0, seconds)
        try:
            found: Isolated = receiver.recv()
        except EOFError:
            process.join(10)
            return Isolated(None, f"ended with {process.exitcode}", 0, 0.0)
        return found
    finally:
        process.kill()
        process.join()
        receiver.close()


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _call(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.pop("STORAGE_EMULATOR_HOST", None)
    os.environ.update(environment)
    function(*args)


def _call_limited(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    memory_bytes: int | None,
    sender: Any,
) -> None:
    before = _kilobytes("VmRSS") << 10
    if memory_bytes is not None:
        limit = (_kilobytes("VmSize") << 10) + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    value, error = None, ""
    started = time.perf_counter()
    try:
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
        os.environ.update(environment)
        value = function(*args)
    except BaseException:  # whatever it is belongs into the report
        error = traceback.format_exc()
    seconds = time.perf_counter() - started
    sender.send(Isolated(value, error, (_kilobytes("VmHWM") << 10) - before, seconds))


def _kilobytes(name: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))
