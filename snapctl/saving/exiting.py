"""Background work that is finished before the interpreter exits, or said to be lost."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

logger = logging.getLogger(__package__)

PATIENCE_SECONDS = 1.0

_work: dict[int, tuple[object, threading.Thread, str]] = {}
_lock = threading.Lock()


def register(item: object, thread: threading.Thread, what: str) -> None:
    """Background work, done by a daemon thread, that matters."""
    with _lock:
        _work[id(item)] = (item, thread, what)


def unregister(item: object) -> None:
    """It is over."""
    with _lock:
        _work.pop(id(item), None)


def unfinished() -> list[object]:
    """What is registered and not over."""
    with _lock:
        return [item for item, _, _ in _work.values()]


def _finish() -> None:
    """Waits for all of it; an interrupt gives it up."""
    started = time.monotonic()
    with _lock:
        left = list(_work.values())
    try:
        for _, thread, what in left:
            thread.join(PATIENCE_SECONDS)
            if thread.is_alive():
                logger.warning("waiting for %s before exiting", what)
                thread.join()
    except BaseException:
        with _lock:
            lost = [what for _, _, what in _work.values()]
        for what in lost:
            logger.error("%s is lost: interrupted %.0f s after the end", what, time.monotonic() - started)  # noqa: TRY400
        raise


def _forget() -> None:
    """In a forked child: the threads are the parent's."""
    _work.clear()


# Threads and executors cannot be used any more when atexit runs its functions; this is run before they are shut down.
getattr(threading, "_register_atexit", atexit.register)(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
