"""A clock that only moves when somebody sleeps, and lets things happen on the way."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class FakeClock:
    """``clock`` and ``sleep`` for waiting code; ``at(5, act)`` lets something happen at second 5."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.started = self.now
        self.slept: list[float] = []
        self._events: list[tuple[float, int, Callable[[], Any]]] = []

    @property
    def elapsed(self) -> float:
        return self.now - self.started

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            when, _, act = heapq.heappop(self._events)
            self.now = max(self.now, when)
            act()
        self.now = until

    def at(self, seconds: float, act: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (self.started + seconds, len(self._events), act))
