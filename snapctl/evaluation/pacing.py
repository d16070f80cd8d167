"""When to look again, and when to stop looking: intervals, a deadline that is kept, and failures on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapctl.errors import (
    BucketNotFoundError,
    CredentialsError,
    PermissionDeniedError,
    StorageError,
)
from snapctl.storage import time_limit

GRACE_SECONDS = 0.8
"""So long after the deadline a look that is under way may still take; or twice as long as the longest so far."""
_MOST_WARNINGS = 1000


def _ignore(message: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to look, for how long, and by which clock."""

    timeout_seconds: float | None = 1800.0
    """0: look once; None: for ever."""
    interval_seconds: float = 30.0
    """From the beginning of a look to the beginning of the next."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    warn: Callable[[str], None] = _ignore
    """Is told what went wrong and is tried again."""
    note: Callable[[str], None] = _ignore
    """Is told what is waited for."""


class Rounds:
    """The rounds of one wait: ``for _ in rounds: with rounds.looking(): …``, which ends after the last look.

    A look begins at the deadline, and none later; one that is under way then is given up soon after.
    """

    def __init__(self, pace: Pace) -> None:
        self.failure: StorageError | None = None
        """Why the last look failed; None if it did not."""
        self.began = 0.0
        """When the round began, by the clock."""
        self.is_first = True
        self._pace = pace
        self._longest_look = 0.0
        self._said: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """The time counts from now on."""
        timeout = self._pace.timeout_seconds
        self._deadline = None if timeout is None else self._pace.clock() + timeout
        self.is_last = False

    @property
    def is_past_deadline(self) -> bool:
        return self._deadline is not None and self._pace.clock() >= self._deadline

    def __iter__(self) -> Iterator[None]:
        pace = self._pace
        while True:
            self.began = pace.clock()
            self.is_last = self.is_past_deadline
            self.failure = None
            yield
            self.is_first = False
            if self.is_last or (self.failure is not None and self.is_past_deadline):
                return
            now = pace.clock()
            wake_up_at = max(self.began + pace.interval_seconds, now + pace.interval_seconds / 10)
            if self._deadline is not None:
                wake_up_at = min(wake_up_at, self._deadline)
            if wake_up_at > now:
                pace.sleep(wake_up_at - now)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """One look at the storage: what may succeed later is said once and kept in `failure`; the rest is raised.

        Raises:
            PermissionDeniedError, CredentialsError, BucketNotFoundError: waiting will not help.
        """
        began = self._pace.clock()
        try:
            with time_limit(self._seconds_for_a_look(began)):
                yield
        except (PermissionDeniedError, CredentialsError, BucketNotFoundError):
            raise
        except StorageError as error:
            self.failure = error
            self.say_once(f"{error.message} (trying again)", about=type(error).__name__)
        else:
            self._longest_look = max(self._longest_look, self._pace.clock() - began)

    def _seconds_for_a_look(self, began: float) -> float | None:
        if self._deadline is None or self._pace.timeout_seconds == 0:
            return None
        return max(self._deadline - began, 0.0) + max(GRACE_SECONDS, 2 * self._longest_look)

    def say_once(self, message: str, *, about: str | None = None) -> None:
        """Warns, but never twice about the same (or, where that is not given, with the same words)."""
        key = about or message
        if key not in self._said and len(self._said) < _MOST_WARNINGS:
            self._said.add(key)
            self._pace.warn(message)
