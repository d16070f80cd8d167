"""Many requests at once, within a time."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from snapctl.errors import (
    StorageError,
)

Item = TypeVar("Item")
Result = TypeVar("Result")

_GIVE_UP_AT: contextvars.ContextVar[float | None] = contextvars.ContextVar("_GIVE_UP_AT", default=None)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Within it, a request over the network that is not answered in time is given up, with an `UnavailableError`.

    It reaches into `run_parallel`. Calls of the operating system cannot be given up, nor those of fsspec's other file
    systems.
    """
    if seconds is None:
        yield
        return
    outer = _GIVE_UP_AT.get()
    mine = time.monotonic() + seconds
    token = _GIVE_UP_AT.set(mine if outer is None else min(outer, mine))
    try:
        yield
    finally:
        _GIVE_UP_AT.reset(token)


def seconds_left() -> float | None:
    """What is left of the innermost `time_limit`, zero at least; None where there is none."""
    give_up_at = _GIVE_UP_AT.get()
    return None if give_up_at is None else max(0.0, give_up_at - time.monotonic())


def run_parallel(func: Callable[[Item], Result], items: Iterable[Item], *, jobs: int) -> list[Result]:
    """Calls `func` for each item, several at once; results in the order of the items.

    The first exception cancels what has not begun and is raised; so does an interrupt. Context variables hold in all.
    """
    todo = list(items)
    if len(todo) <= 1 or jobs <= 1:
        return [func(item) for item in todo]
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # 4 ms that a local `latest` does not need

    pool = ThreadPoolExecutor(min(jobs, len(todo)), thread_name_prefix="snapctl-io")
    try:
        futures = [pool.submit(contextvars.copy_context().run, func, item) for item in todo]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def collect_errors(func: Callable[[Item], Result]) -> Callable[[Item], Result | StorageError]:
    """`func`, but a `StorageError` is returned instead of raised: one failure must not end the others."""

    def call(item: Item) -> Result | StorageError:
        try:
            return func(item)
        except StorageError as error:
            return error

    return call
