"""A claimer in a process of its own. It reads commands from stdin and answers each with one line of JSON.

usage: claim_worker.py OWNER CLOCK_OFFSET_SECONDS SLACK_SECONDS

``race PATH PARTITION TTL``: claims at once, and says whether it got it.
``work PATHS… -- PARTITIONS…`` (JSON): evaluates what nobody has evaluated, and claims, stalls, forgets, renews,
releases and marks at random on the way; a line for each claim that it was told to hold, and one at the end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import snapctl.markers
from snapctl.errors import SnapctlError
from snapctl.evaluation.claims import release_claim_of, renew_claim_of, take_claim
from snapctl.evaluation.evals import find_marker, mark
from snapctl.markers import Claim
from snapctl.storage import open_storage


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def race(owner: str, path: str, partition: str, ttl: float) -> None:
    try:
        claim = take_claim(open_storage(path), partition, owner=owner, ttl_seconds=ttl)
        say(won=True, number=claim.number)
    except SnapctlError as error:
        say(won=False, type=type(error).__name__, message=error.message)


def work(owner: str, paths: list[str], partitions: list[str], ttl: float, slack: float) -> None:
    todo = [(path, partition) for path in paths for partition in partitions]
    dice = random.Random(owner)
    while todo:
        path, partition = dice.choice(todo)
        storage = open_storage(path) if path not in _OPEN else _OPEN[path]
        _OPEN[path] = storage
        try:
            if find_marker(storage, partition) is not None:
                todo.remove((path, partition))
                continue
            told(path, take_claim(storage, partition, owner=owner, ttl_seconds=ttl))
            fate = dice.random()
            if fate < 0.15:
                continue  # abandoned
            if fate < 0.3:
                time.sleep(ttl + slack + dice.random())  # a stall; somebody may take it over meanwhile
            elif fate < 0.45:
                time.sleep(ttl / 2)
                told(path, renew_claim_of(storage, partition, owner, ttl_seconds=ttl))
            elif fate < 0.55:
                release_claim_of(storage, partition, owner)
                say(released=True, path=path, partition=partition)
                continue
            mark(storage, partition, {"by": 1.0}, owner=owner)
        except SnapctlError as error:
            if "is claimed by" in error.message:
                time.sleep(0.02)
    say(finished=True)


_OPEN: dict[str, Any] = {}


def told(path: str, claim: Claim) -> None:
    say(held=True, path=path, partition=claim.partition, number=claim.number, owner=claim.owner)


def main() -> None:
    owner, offset, slack = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    snapctl.markers.CLAIM_SLACK_SECONDS = slack
    real = time.time
    time.time = lambda: real() + offset
    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "race":
            race(owner, command["path"], command["partition"], command["ttl"])
        else:
            work(owner, command["paths"], command["partitions"], command["ttl"], slack)


main()
