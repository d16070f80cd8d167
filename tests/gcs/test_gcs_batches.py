"""Batches and ranges, as GCS wants them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.storage import cuts_of
from snapctl.storage.gcs.batches import PartAnswer, format_deletions, join_parts, parse_answers, spread

KEYS = [("run/1/0/a b", "17"), ("run/1/[x]?#%ü\n", "18"), ("run/1//c", "")]


def test_each_call_of_a_batch_has_its_condition_and_the_paying_project() -> None:
    body = format_deletions("bk", KEYS, parameters={"userProject": "my proj"}, boundary="bbb").decode()
    parts = body.split("--bbb")
    assert parts[0] == "" and parts[-1] == "--\r\n" and len(parts) == 5
    requests = [part.split("\r\n\r\n")[1] for part in parts[1:-1]]
    assert requests == [
        f"DELETE /storage/v1/b/bk/o/run%2F1%2F{rest}userProject=my+proj HTTP/1.1"
        for rest in (
            "0%2Fa%20b?ifGenerationMatch=17&",
            "%5Bx%5D%3F%23%25%C3%BC%0A?ifGenerationMatch=18&",
            "%2Fc?",
        )
    ]
    for number, part in enumerate(parts[1:-1], start=1):
        head = part.split("\r\n\r\n")[0].split("\r\n")
        assert head == ["", "Content-Type: application/http", f"Content-ID: <snapctl+{number}>"]


def part(number: int | None, status: str, body: str = "") -> str:
    named = "" if number is None else f"Content-ID: <response-snapctl+{number}>\r\n"
    return (
        f"--x y\r\nContent-Type: application/http\r\n{named}\r\nHTTP/1.1 {status}\r\n"
        f"Content-Type: application/json; charset=UTF-8\r\nContent-Length: {len(body)}\r\n\r\n{body}\r\n"
    )


def parsed(*parts: str, count: int) -> list[PartAnswer]:
    return parse_answers('multipart/mixed; boundary="x y"', ("".join(parts) + "--x y--").encode(), count)


def test_answers_are_matched_by_their_number_whatever_their_order() -> None:
    error = '{"error": {"code": 403, "message": "no\\n  permission", "errors": []}}'
    found = parsed(part(3, "204 No Content"), part(1, "404 Not Found", "{}"), part(2, "403 Forbidden", error), count=3)
    assert [answer.status for answer in found] == [404, 403, 204]
    assert found[1].message == "no permission"


def test_answers_without_a_number_are_taken_in_order_and_a_missing_one_is_said() -> None:
    found = parsed(part(None, "204 No Content"), part(None, "412 Precondition Failed", "not json"), count=3)
    assert [answer.status for answer in found] == [204, 412, 0]


def test_a_number_that_nobody_asked_for_is_no_answer() -> None:
    assert parsed(part(7, "204 No Content"), count=1)[0].status == 0


def test_a_status_in_the_text_of_an_error_is_not_taken_for_the_answer() -> None:
    body = '{"error": {"message": "HTTP/1.1 204"}}'
    assert parsed(part(1, "500 Oops", body), count=1)[0].status == 500


def test_what_is_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="not the answer to a batch"):
        parse_answers("text/html", b"<html>", 1)


@given(st.integers(0, 60_000), st.integers(1, 16))
def test_ranges_cover_everything_and_cost_at_most_a_page_too_many(names: int, jobs: int) -> None:
    paths = [f"{number:06d}" for number in range(names)]
    cuts = join_parts(cuts_of(paths), jobs)
    assert len(cuts) < jobs or (jobs == 1 and not cuts)
    assert list(cuts) == sorted(set(cuts))
    edges = [0, *(int(cut) for cut in cuts), names]
    pages = sum(-(-(end - start) // 1000) for start, end in itertools.pairwise(edges))
    assert pages <= max(1, -(-names // 995)) + 1


@given(st.integers(0, 600), st.integers(1, 16))
def test_spreading_changes_only_the_order(count: int, jobs: int) -> None:
    parts = list(range(count))
    assert sorted(spread(parts, jobs)) == parts


def test_what_is_under_way_together_lies_far_apart() -> None:
    assert spread(list(range(8)), 2) == [0, 4, 1, 5, 2, 6, 3, 7]
