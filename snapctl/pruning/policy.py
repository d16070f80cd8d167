"""What a retention policy says, and how it is written: on a command line or in a TOML file.

Pure, but for `read_policy`. A policy file has the names of the options::

    keep-last = 3
    keep-every = ["1000", "100:5000"]
    keep-within = "7d"
    keep-daily = 14
    keep-best = "val/loss:min:3"
    keep-unevaluated = ["val", "test"]
    max-delete = "20%"
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from snapctl.durations import parse_duration
from snapctl.errors import InvalidOptionError
from snapctl.markers import check_partition
from snapctl.metrics import MetricSpec, parse_metric_spec
from snapctl.pruning.periods import PERIODS, Period

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Order: TypeAlias = Literal["both", "step", "time"]

ORDERS: tuple[Order, ...] = ("both", "step", "time")
SHORTEST_INCOMPLETE_AGE_SECONDS = 3600.0


class KeepEvery(msgspec.Struct, frozen=True):
    """Multiples of a step, up to and including another one; 0 is a multiple."""

    every: int
    until: int | None = None

    def __str__(self) -> str:
        return str(self.every) if self.until is None else f"{self.every}:{self.until}"

    def keeps(self, step: int) -> bool:
        return step % self.every == 0 and (self.until is None or step <= self.until)


class KeepBest(msgspec.Struct, frozen=True):
    """The best few by a metric."""

    metric: MetricSpec
    count: int

    def __str__(self) -> str:
        return f"{self.metric}:{self.count}"


class DeleteLimit(msgspec.Struct, frozen=True):
    """How many checkpoints of a save directory may go at a time."""

    number: int
    is_percent: bool = False
    """`number` is a percentage of the complete checkpoints."""

    def __str__(self) -> str:
        return f"{self.number}%" if self.is_percent else str(self.number)

    def allowed(self, complete: int) -> int:
        """How many may go where there are so many complete ones."""
        return complete * self.number // 100 if self.is_percent else self.number


class Policy(msgspec.Struct, frozen=True):
    """Rules, each of which keeps by itself, and how they are applied."""

    keep_last: int | None = None
    keep_every: tuple[KeepEvery, ...] = ()
    keep_within_seconds: float | None = None
    keep_periods: tuple[tuple[Period, int], ...] = ()
    """The newest in each of so many periods."""
    keep_best: tuple[KeepBest, ...] = ()
    keep_steps: tuple[int, ...] = ()
    keep_unevaluated: tuple[str, ...] = ()
    """Partitions: what one of them has not marked yet is kept."""
    keep_unscored: bool = False
    """Keep what has no finite value of a metric of `keep_best`."""
    order: Order = "both"
    strict_order: bool = False
    verified: bool = False
    """Only checkpoints whose blobs are all there count."""
    incomplete_older_than_seconds: float | None = None
    max_delete: DeleteLimit | None = None
    allow_unmatched: bool = False

    @property
    def has_rules(self) -> bool:
        """Whether anything in it keeps checkpoints."""
        return any(
            (
                self.keep_last,
                self.keep_every,
                self.keep_within_seconds,
                self.keep_periods,
                self.keep_best,
                self.keep_steps,
                self.keep_unevaluated,
            )
        )

    def check(self) -> Policy:
        """The policy itself.

        Raises:
            InvalidOptionError: its parts do not go together.
        """
        if self.keep_unscored and not self.keep_best:
            raise InvalidOptionError("keep-unscored goes with keep-best, which says by which metric")
        return self


class PolicyTerms(msgspec.Struct, frozen=True):
    """The terms of a policy as they were written, under the names of the options; empty or None: not said."""

    keep_last: tuple[int, ...] = ()
    keep_every: tuple[str, ...] = ()
    keep_within: tuple[str, ...] = ()
    keep_hourly: tuple[int, ...] = ()
    keep_daily: tuple[int, ...] = ()
    keep_weekly: tuple[int, ...] = ()
    keep_monthly: tuple[int, ...] = ()
    keep_yearly: tuple[int, ...] = ()
    keep_best: tuple[str, ...] = ()
    keep_step: tuple[int, ...] = ()
    keep_unevaluated: tuple[str, ...] = ()
    keep_unscored: bool | None = None
    order: str | None = None
    strict_order: bool | None = None
    verified: bool | None = None
    incomplete_older_than: str | None = None
    max_delete: str | None = None
    allow_unmatched: bool | None = None

    def over(self, other: PolicyTerms) -> PolicyTerms:
        """Both together: rules of either, and of the rest what these terms say, else what the others say."""
        merged = {}
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            merged[name] = theirs + mine if isinstance(mine, tuple) else theirs if mine is None else mine
        return PolicyTerms(**merged)


_INTEGERS = frozenset({"keep_last", "keep_step", *(f"keep_{period}" for period in PERIODS)})
_FLAGS = frozenset({"keep_unscored", "strict_order", "verified", "allow_unmatched"})
_SCALARS = frozenset({"order", "incomplete_older_than", "max_delete"})
_NUMBERS_OR_TEXTS = frozenset({"keep_every", "max_delete"})
_KEYS = tuple(name.replace("_", "-") for name in PolicyTerms.__struct_fields__)


# -- from terms ------------------------------------------------------------------------------------------------------


def make_policy(terms: PolicyTerms) -> Policy:
    """The policy that the terms say. Of a rule that was given several times the one that keeps most counts.

    Raises:
        InvalidOptionError: a term makes no sense.
    """
    older_than = terms.incomplete_older_than
    return Policy(
        keep_last=_largest(terms.keep_last, "keep-last"),
        keep_every=tuple(map(parse_keep_every, _distinct(terms.keep_every))),
        keep_within_seconds=max((parse_duration(text, name="keep-within") for text in terms.keep_within), default=None),
        keep_periods=tuple(
            (period, count)
            for period in PERIODS
            if (count := _largest(getattr(terms, f"keep_{period}"), f"keep-{period}")) is not None
        ),
        keep_best=tuple(map(parse_keep_best, _distinct(terms.keep_best))),
        keep_steps=tuple(_checked_number(step, "keep-step", least=0) for step in _distinct(terms.keep_step)),
        keep_unevaluated=tuple(map(check_partition, _distinct(terms.keep_unevaluated))),
        keep_unscored=bool(terms.keep_unscored),
        order=_checked_order(terms.order),
        strict_order=bool(terms.strict_order),
        verified=bool(terms.verified),
        incomplete_older_than_seconds=None if older_than is None else parse_incomplete_age(older_than),
        max_delete=None if terms.max_delete is None else parse_delete_limit(terms.max_delete),
        allow_unmatched=bool(terms.allow_unmatched),
    ).check()


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _largest(numbers: tuple[int, ...], name: str) -> int | None:
    return max((_checked_number(number, name, least=1) for number in numbers), default=None)


def _checked_number(number: int, name: str, *, least: int) -> int:
    if number < least:
        raise InvalidOptionError(f"{name} is a whole number of at least {least}, not {number}")
    return number


def _checked_order(text: str | None) -> Order:
    for order in ORDERS:
        if text in (order, None):
            return order
    raise InvalidOptionError(f"order is both, step or time, not {text!r}")


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None


def parse_keep_every(text: str) -> KeepEvery:
    """``K`` or ``K:UNTIL``.

    Raises:
        InvalidOptionError: it is neither, or K is 0.
    """
    every, colon, until = text.partition(":")
    step, last = _parse_number(every), _parse_number(until)
    if not step or (colon and last is None):
        raise InvalidOptionError(f"keep-every takes K or K:UNTIL, whole numbers, K at least 1, not {text!r}")
    return KeepEvery(step, last)


def parse_keep_best(text: str) -> KeepBest:
    """``[PARTITION/]METRIC:max|min:N``.

    Raises:
        InvalidOptionError: it is not that, or N is 0.
    """
    metric, colon, number = text.rpartition(":")
    count = _parse_number(number)
    if not colon or not count:
        raise InvalidOptionError(f"keep-best takes [PARTITION/]METRIC:max|min:N with N at least 1, not {text!r}")
    return KeepBest(parse_metric_spec(metric), count)


def parse_delete_limit(text: str) -> DeleteLimit:
    """``N`` or ``P%``.

    Raises:
        InvalidOptionError: it is neither, or more than 100%.
    """
    number = _parse_number(text.removesuffix("%"))
    is_percent = text.endswith("%")
    if number is None or (is_percent and number > 100):
        raise InvalidOptionError(f"max-delete takes a number N or a percentage P% of at most 100%, not {text!r}")
    return DeleteLimit(number, is_percent)


def parse_incomplete_age(text: str) -> float:
    """A duration of at least an hour.

    Raises:
        InvalidOptionError: it is none, or shorter.
    """
    seconds = parse_duration(text, name="incomplete-older-than")
    if seconds < SHORTEST_INCOMPLETE_AGE_SECONDS:
        raise InvalidOptionError(f"incomplete-older-than is at least 1h (a slow save looks dead), not {text!r}")
    return seconds


# -- from a file -----------------------------------------------------------------------------------------------------


def read_policy(path: str) -> PolicyTerms:
    """The terms in a TOML file.

    Raises:
        InvalidOptionError: it cannot be read, is no TOML, has an unknown key, or a value of the wrong type.
    """
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidOptionError(f"{path}: the policy cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError
        raise InvalidOptionError(f"{path}: is not TOML: {error}") from error
    return parse_terms(document, source=path)


def parse_terms(document: Mapping[str, Any], *, source: str) -> PolicyTerms:
    """The terms of a parsed policy file.

    Raises:
        InvalidOptionError: it has an unknown key, or a value of the wrong type.
    """
    terms: dict[str, Any] = {}
    for key, value in document.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key.replace("_", "-"), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(_KEYS)}"
            raise InvalidOptionError(f"{source}: unknown key {key!r}", hint=hint)
        name = key.replace("-", "_")
        if name in _FLAGS:
            terms[name] = _typed(value, bool, key, source)
        elif name in _SCALARS:
            terms[name] = _term(name, value, key, source)
        else:
            items = value if isinstance(value, list) else [value]
            terms[name] = tuple(_term(name, item, key, source) for item in items)
    return PolicyTerms(**terms)


def _term(name: str, value: object, key: str, source: str) -> int | str:
    if name in _INTEGERS:
        return int(_typed(value, int, key, source))
    if name in _NUMBERS_OR_TEXTS and type(value) is int:
        return str(value)
    return str(_typed(value, str, key, source))


def _typed(value: object, kind: type[Any], key: str, source: str) -> Any:
    if type(value) is not kind:
        wanted = {bool: "true or false", int: "a whole number", str: "a text in quotes"}[kind]
        raise InvalidOptionError(f"{source}: {key} takes {wanted}, not {value!r}")
    return value
