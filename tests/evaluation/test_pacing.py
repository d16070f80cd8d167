"""When to look, and when to stop: with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.errors import BucketNotFoundError, CredentialsError, PermissionDeniedError, UnavailableError
from snapctl.evaluation.pacing import Pace, Rounds
from snapctl.storage.running import seconds_left
from tests.support.clock import FakeClock


def pace(fake: FakeClock, timeout: float | None, interval: float, warnings: list[str] | None = None) -> Pace:
    return Pace(timeout, interval, fake.clock, fake.sleep, warn=(warnings if warnings is not None else []).append)


def look_times(timeout: float | None, interval: float, *, look_seconds: float = 0.0, count: int = 1000) -> list[float]:
    fake = FakeClock()
    times = []
    for _ in Rounds(pace(fake, timeout, interval)):
        times.append(fake.elapsed)
        fake.advance(look_seconds)
        if len(times) == count:
            break
    return times


def test_it_looks_at_once_then_every_interval_and_once_more_at_the_deadline() -> None:
    assert look_times(100, 30) == [0, 30, 60, 90, 100]


def test_a_timeout_below_the_interval_is_kept() -> None:
    assert look_times(3, 10) == [0, 3]


def test_a_timeout_of_nothing_looks_once() -> None:
    assert look_times(0, 10) == [0]


def test_no_timeout_goes_on() -> None:
    assert look_times(None, 30, count=4) == [0, 30, 60, 90]


def test_the_deadline_on_an_interval_is_looked_at_once() -> None:
    assert look_times(60, 30) == [0, 30, 60]


def test_an_interval_is_from_beginning_to_beginning() -> None:
    assert look_times(100, 30, look_seconds=5) == [0, 30, 60, 90, 100]


def test_looks_that_take_longer_than_the_interval_leave_a_pause() -> None:
    assert look_times(None, 10, look_seconds=15, count=3) == [0, 16, 32]


def test_a_look_that_began_before_the_deadline_and_ends_after_it_is_not_the_last() -> None:
    assert look_times(100, 30, look_seconds=25) == [0, 30, 60, 90, 115]


@given(st.integers(0, 500), st.integers(1, 100), st.floats(0, 20))
def test_the_last_look_begins_at_the_deadline_or_after_a_look_across_it(
    timeout: int, interval: int, look_seconds: float
) -> None:
    times = look_times(timeout, interval, look_seconds=look_seconds)
    assert times[0] == 0
    assert timeout <= times[-1] <= timeout + look_seconds + interval / 10 + 1e-6
    assert all(earlier < timeout for earlier in times[:-1])


def test_the_time_can_begin_anew() -> None:
    fake = FakeClock()
    rounds = Rounds(pace(fake, 50, 20))
    times = []
    for _ in rounds:
        times.append(fake.elapsed)
        if len(times) == 3:
            fake.advance(500)
            rounds.restart()
    assert times == [0, 20, 40, 542, 562, 582, 590]


def test_what_may_succeed_later_is_said_once_and_is_the_failure_of_its_round() -> None:
    fake = FakeClock()
    warnings: list[str] = []
    rounds = Rounds(pace(fake, 100, 30, warnings))
    failures = []
    for number, _ in enumerate(rounds):
        with rounds.looking():
            if number in (0, 1, 3):
                raise UnavailableError(f"gs://b/{number}: 503")
        failures.append(rounds.failure is not None)
    assert failures == [True, True, False, True, False]
    assert warnings == ["gs://b/0: 503 (trying again)"]
    assert rounds.failure is None


def test_what_waiting_does_not_help_ends_it_at_once() -> None:
    for error in (PermissionDeniedError("x"), CredentialsError("x"), BucketNotFoundError("x")):
        rounds = Rounds(pace(FakeClock(), 100, 30))
        with pytest.raises(type(error)):
            for _ in rounds:
                with rounds.looking():
                    raise error


def test_a_failed_look_across_the_deadline_is_the_last() -> None:
    fake = FakeClock()
    rounds = Rounds(pace(fake, 10, 8))
    times = []
    for _ in rounds:
        times.append(fake.elapsed)
        with rounds.looking():
            fake.advance(12)
            raise UnavailableError("hangs")
    assert times == [0]
    assert rounds.failure is not None


def test_a_look_is_given_up_soon_after_the_deadline_or_when_looks_take_longer_after_twice_that() -> None:
    fake = FakeClock()
    rounds = Rounds(pace(fake, 10, 4))
    limits = []
    for number, _ in enumerate(rounds):
        with rounds.looking():
            limits.append(seconds_left())
            fake.advance(2 if number == 1 else 0)
    assert [round(limit or 0, 1) for limit in limits] == [10.8, 6.8, 6.0, 4.0]  # at 0, 4, 8 and 10 seconds
    assert seconds_left() is None


@pytest.mark.parametrize("timeout", [0, None])
def test_a_single_look_and_an_endless_wait_are_not_cut(timeout: float | None) -> None:
    rounds = Rounds(pace(FakeClock(), timeout, 4))
    for _ in rounds:
        with rounds.looking():
            assert seconds_left() is None
        break
