"""What the benchmarks share: whole processes timed in turns, so that a busy machine slows both sides alike."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """One side of a comparison."""

    seconds: float
    """The median."""
    peak_bytes: int
    """The largest resident size of any round."""


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[float, int]:
    """Seconds and peak resident bytes of one process, its output thrown away.

    Raises:
        RuntimeError: it failed.
    """
    variables = {**os.environ, **(env or {})}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with open(os.devnull, "wb") as null:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=null, stderr=subprocess.PIPE, env=variables)
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command}: exit {process.returncode}: {errors.decode(errors='replace')[-2000:]}")
    return seconds, usage.ru_maxrss * 1024


def in_turns(
    ours: Sequence[str], theirs: Sequence[str], *, rounds: int, env: Mapping[str, str] | None = None
) -> tuple[Timing, Timing]:
    """Both commands in turns, after one unmeasured round of each."""
    run(ours, env)
    run(theirs, env)
    results: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    for _ in range(rounds):
        results[0].append(run(ours, env))
        results[1].append(run(theirs, env))
    return _timing(results[0]), _timing(results[1])


def _timing(rounds: Sequence[tuple[float, int]]) -> Timing:
    return Timing(statistics.median(seconds for seconds, _ in rounds), max(peak for _, peak in rounds))


def report(what: str, value: float, limit: float, *, unit: str = "×", at_least: bool = False) -> bool:
    """Prints one figure beside its limit; whether it is kept."""
    kept = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{'ok  ' if kept else 'MISS'}  {what}: {value:.2f}{unit} (wanted {sign} {limit:g}{unit})")
    return kept


def python(code: str) -> list[str]:
    """A command that runs a piece of Python."""
    return [sys.executable, "-c", code]


def peak_of_self() -> int:
    """The peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
