"""Claims by many processes at once, whose clocks are hours apart, some of which stall or are killed."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from snapctl.markers import Claim, claim_of_path, parse_claim
from snapctl.storage import Storage, open_storage
from tests.support.places import SaveDir
from tests.support.repository import SUPPORT
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, write_checkpoint

WORKER = SUPPORT / "claim_worker.py"
HOURS = (0, 5, -7, 11, -2, 48, -30, 1)


class Worker:
    """A claimer in a process of its own, and what it said."""

    def __init__(self, number: int, slack: float) -> None:
        self.owner = f"worker-{number}"
        offset = HOURS[number % len(HOURS)] * 3600
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), self.owner, str(offset), str(slack)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.owner} ended with {self.process.wait()}"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def receive_rest(self) -> list[dict[str, Any]]:
        """All lines of one that was killed; the last may be cut."""
        assert self.process.stdout is not None
        return [json.loads(line) for line in self.process.stdout if line.endswith("\n")]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


@contextmanager
def workers(count: int, *, slack: float = 10.0) -> Iterator[list[Worker]]:
    crew = [Worker(number, slack) for number in range(count)]
    try:
        for worker in crew:
            assert worker.receive() == {"ready": True}
        yield crew
    finally:
        for worker in crew:
            worker.end()


def run_rounds(url: str, count: int, rounds: int) -> None:
    with workers(count) as crew:
        for number in range(rounds):
            for worker in crew:
                worker.send(do="race", path=f"{url}/10", partition=f"p{number}", ttl=3600)
            answers = [worker.receive() for worker in crew]
            assert sum(answer["won"] for answer in answers) == 1, (number, answers)
            refused = {answer["type"] for answer in answers if not answer["won"]}
            assert refused == {"ClaimRefusedError"}, (number, answers)


def test_of_sixteen_processes_one_gets_the_claim_in_each_of_many_rounds(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    run_rounds(str(tmp_path), 16, 200)


def test_of_many_processes_one_gets_the_claim_though_answers_are_lost(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": "/upload/", "lose": True, "p": 0.2}])
    run_rounds(f"{bucket.url}/run", 5, 8)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_soak_hundreds_of_rounds_of_sixteen_processes_on_disk(tmp_path: pathlib.Path) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    run_rounds(str(tmp_path), 16, 2000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_hundreds_of_rounds_of_sixteen_processes_on_gcs(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    run_rounds(f"{bucket.url}/run", 16, 300)
    proxy.configure(faults=[{"match": "/upload/", "lose": True, "p": 0.2}])
    write_checkpoint(lambda path, data=b"": bucket.write(f"run2/{path}", data), 10)
    run_rounds(f"{bucket.url}/run2", 16, 50)


# -- stalls, deaths and takeovers ------------------------------------------------------------------------------------


def all_claims(storage: Storage) -> dict[str, dict[int, Claim]]:
    found: dict[str, dict[int, Claim]] = {}
    for file in storage.list_dir("evaled_by").files:
        named = claim_of_path(file.path)
        if named is not None:
            claim = parse_claim(named[0], named[1], storage.read(file.path), file.modified_at)
            found.setdefault(named[0], {})[named[1]] = claim
    return found


def check_holders(storage: Storage, told: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Fails if two were told that they hold the same partition at the same time; returns holders and takeovers."""
    holders = takeovers = 0
    for partition, claims in all_claims(storage).items():
        numbers = sorted(
            item["number"] for item in told if item["path"] == storage.url and item["partition"] == partition
        )
        assert len(numbers) == len(set(numbers))
        holders += len(numbers)
        held = [claims[number] for number in numbers]
        for first, second in itertools.pairwise(held):
            if first.owner == second.owner:
                continue
            between = [claims[n] for n in range(first.number + 1, second.number) if n in claims]
            released = any(claim.owner == first.owner and claim.ttl_seconds == 0 for claim in between)
            assert released or second.created_at >= first.expires_at, (storage.url, partition, first, second)
            takeovers += not released
    return holders, takeovers


def run_chaos(save_dir: SaveDir, *, count: int, steps: int, ttl: float, slack: float) -> tuple[int, int]:
    """Many evaluate the same partitions, stop for longer than the ttl, are killed and replaced; until all is marked."""
    partitions = ["val", "test", "train"]
    for step in range(steps):
        write_checkpoint(save_dir.write, step)
    paths = [f"{save_dir.url}/{step}" for step in range(steps)]
    told: list[dict[str, Any]] = []
    dice = random.Random(1)
    with workers(count, slack=slack) as crew:
        for worker in crew:
            worker.send(do="work", paths=paths, partitions=partitions, ttl=ttl)
        for victim in dice.sample(crew[1:], count // 3):
            time.sleep(0.3)
            os.kill(victim.process.pid, signal.SIGSTOP)
        time.sleep(ttl + slack + 0.5)
        for worker in crew:
            os.kill(worker.process.pid, signal.SIGCONT)
        for victim in dice.sample(crew[1:], count // 3):
            time.sleep(0.2)
            victim.process.kill()
        for worker in crew:
            lines = (
                worker.receive_rest() if worker.process.poll() is not None else iter(worker.receive, {"finished": True})
            )
            told += [line for line in lines if line.get("held")]
    for path in paths:
        names = {file.path for file in open_storage(path).list_dir("evaled_by").files}
        assert names >= {f"evaled_by/{partition}_DONE" for partition in partitions}
    counts = [check_holders(open_storage(path), told) for path in paths]
    return sum(holders for holders, _ in counts), sum(takeovers for _, takeovers in counts)


def test_every_abandoned_claim_is_taken_over_and_never_do_two_hold_one(tmp_path: pathlib.Path) -> None:
    save_dir = SaveDir(str(tmp_path), root=tmp_path)
    holders, takeovers = run_chaos(save_dir, count=6, steps=6, ttl=0.6, slack=0.3)
    assert holders >= 18
    assert takeovers >= 1


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_soak_sixteen_evaluators_that_stall_and_die(save_dir: SaveDir, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    holders, takeovers = run_chaos(save_dir, count=16, steps=100, ttl=2.0, slack=10.0)
    with capsys.disabled():
        print(f"\n{save_dir.url}: {holders} holders, {takeovers} takeovers, {time.monotonic() - started:.0f} s")
    assert holders >= 300
    assert takeovers >= 10
