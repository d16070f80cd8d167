"""Policies: their terms, on a command line and in a file."""

from __future__ import annotations

import pathlib

import pytest

from snapctl.errors import InvalidOptionError
from snapctl.metrics import MetricSpec
from snapctl.pruning.policy import (
    DeleteLimit,
    KeepBest,
    KeepEvery,
    PolicyTerms,
    make_policy,
    parse_delete_limit,
    parse_keep_best,
    parse_keep_every,
    read_policy,
)

WHOLE = """
keep-last = 3
keep-every = [1000, "100:5000"]
keep-within = "7d"
keep-hourly = 24
keep-daily = 14
keep-weekly = 8
keep-monthly = 12
keep-yearly = 5
keep-best = "val/loss:min:3"
keep-step = [0, 500]
keep-unevaluated = ["val", "test"]
keep-unscored = true
order = "step"
strict-order = true
verified = true
incomplete-older-than = "24h"
max-delete = "20%"
allow-unmatched = true
"""


def write(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return str(path)


def test_a_file_has_every_term_under_the_name_of_its_option(tmp_path: pathlib.Path) -> None:
    policy = make_policy(read_policy(write(tmp_path, WHOLE)))
    assert policy.keep_last == 3
    assert policy.keep_every == (KeepEvery(1000), KeepEvery(100, 5000))
    assert policy.keep_within_seconds == 7 * 86400
    periods = (("hourly", 24), ("daily", 14), ("weekly", 8), ("monthly", 12), ("yearly", 5))
    assert policy.keep_periods == periods
    assert policy.keep_best == (KeepBest(MetricSpec("val/loss", "min"), 3),)
    assert policy.keep_steps == (0, 500)
    assert policy.keep_unevaluated == ("val", "test")
    assert policy.keep_unscored and policy.strict_order and policy.verified and policy.allow_unmatched
    assert policy.order == "step"
    assert policy.incomplete_older_than_seconds == 86400
    assert policy.max_delete == DeleteLimit(20, is_percent=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("keep-lst = 3", "unknown key 'keep-lst'"),
        ("keep_last = 3", "unknown key 'keep_last'"),
        ("[keep]\nlast = 3", "unknown key 'keep'"),
        ('keep-last = "3"', "a whole number"),
        ("keep-last = 3.0", "a whole number"),
        ("keep-last = true", "a whole number"),
        ("keep-last = [3, true]", "a whole number"),
        ("keep-within = 7", "a text in quotes"),
        ("keep-unevaluated = 1", "a text in quotes"),
        ("keep-unscored = 1", "true or false"),
        ('verified = "yes"', "true or false"),
        ("order = true", "a text in quotes"),
        ('order = ["both"]', "a text in quotes"),
        ("max-delete = 1.5", "a text in quotes"),
        ("keep-every = 10.5", "a text in quotes"),
        ("keep-last = ", "is not TOML"),
        ("keep-last = 3\nkeep-last = 4", "is not TOML"),
        ("yes = true", "unknown key 'yes'"),
        ("dry-run = true", "unknown key 'dry-run'"),
    ],
)
def test_an_unknown_key_or_a_wrong_type_in_a_file_is_an_error(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidOptionError, match=complaint):
        read_policy(write(tmp_path, text))


def test_the_nearest_key_is_suggested(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        read_policy(write(tmp_path, "keep_daily = 3"))
    assert caught.value.hint == "did you mean keep-daily?"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"keep-last = \x00", b"a=" + b"[" * 100000])
def test_a_file_that_is_no_text_is_an_error_and_not_a_crash(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidOptionError, match="is not TOML"):
        read_policy(str(path))


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        read_policy(str(tmp_path / name))


def test_rules_of_the_file_and_of_the_command_line_both_hold() -> None:
    file = PolicyTerms(keep_last=(5,), keep_every=("100",), keep_within=("7d",), keep_best=("loss:min:1",))
    line = PolicyTerms(keep_last=(3,), keep_every=("1000",), keep_within=("1d",), keep_best=("acc:max:1",))
    policy = make_policy(line.over(file))
    assert policy.keep_last == 5, "the rule that keeps more"
    assert policy.keep_within_seconds == 7 * 86400
    assert set(policy.keep_every) == {KeepEvery(100), KeepEvery(1000)}
    assert len(policy.keep_best) == 2


def test_of_what_is_no_rule_the_command_line_has_the_last_word() -> None:
    file = PolicyTerms(keep_last=(1,), order="step", max_delete="5", incomplete_older_than="1d", verified=True)
    line = PolicyTerms(order="time", max_delete="10%")
    policy = make_policy(line.over(file))
    assert policy.order == "time"
    assert policy.max_delete == DeleteLimit(10, is_percent=True)
    assert policy.incomplete_older_than_seconds == 86400
    assert policy.verified


@pytest.mark.parametrize(
    "terms",
    [
        PolicyTerms(keep_last=(0,)),
        PolicyTerms(keep_last=(5, 0)),
        PolicyTerms(keep_daily=(0,)),
        PolicyTerms(keep_step=(-1,)),
        PolicyTerms(keep_within=("0s",)),
        PolicyTerms(keep_within=("7",)),
        PolicyTerms(keep_every=("0",)),
        PolicyTerms(keep_every=("-5",)),
        PolicyTerms(keep_every=("",)),
        PolicyTerms(keep_every=("10:",)),
        PolicyTerms(keep_every=("10:x",)),
        PolicyTerms(keep_every=("٣",)),
        PolicyTerms(keep_best=("loss:min",)),
        PolicyTerms(keep_best=("loss:min:0",)),
        PolicyTerms(keep_best=("loss:least:1",)),
        PolicyTerms(keep_best=(":min:1",)),
        PolicyTerms(keep_unevaluated=("a/b",)),
        PolicyTerms(keep_unevaluated=("",)),
        PolicyTerms(keep_unscored=True),
        PolicyTerms(order="age"),
        PolicyTerms(incomplete_older_than="59m"),
        PolicyTerms(incomplete_older_than="0"),
        PolicyTerms(max_delete="-1"),
        PolicyTerms(max_delete="101%"),
        PolicyTerms(max_delete="5 %"),
        PolicyTerms(max_delete="many"),
    ],
)
def test_terms_that_make_no_sense_are_refused(terms: PolicyTerms) -> None:
    with pytest.raises(InvalidOptionError):
        make_policy(terms)


def test_keep_every_takes_a_limit_and_says_what_it_keeps() -> None:
    rule = parse_keep_every("100:500")
    assert [step for step in (0, 50, 100, 499, 500, 600) if rule.keeps(step)] == [0, 100, 500]
    assert str(rule) == "100:500"
    assert parse_keep_every("7").keeps(0)


def test_a_metric_with_colons_and_slashes_in_its_name_is_taken_from_the_right() -> None:
    assert parse_keep_best("val/a:b/c:max:2") == KeepBest(MetricSpec("val/a:b/c", "max"), 2)


@pytest.mark.parametrize(("text", "complete", "allowed"), [("0", 9, 0), ("3", 9, 3), ("50%", 9, 4), ("0%", 9, 0)])
def test_a_percentage_is_of_the_complete_ones_rounded_down(text: str, complete: int, allowed: int) -> None:
    assert parse_delete_limit(text).allowed(complete) == allowed


def test_only_what_keeps_is_a_rule() -> None:
    limits = PolicyTerms(max_delete="5", incomplete_older_than="1d", verified=True, order="step")
    assert not make_policy(limits).has_rules
    assert make_policy(PolicyTerms(keep_step=(0,))).has_rules
    assert make_policy(PolicyTerms(keep_unevaluated=("val",))).has_rules
