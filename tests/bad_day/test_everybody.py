"""A trainer, six evaluators, a pruner and watchers at work on one save directory, killed at random.

Some seconds here; ``-m soak`` for ``SNAPCTL_SOAK_SECONDS`` (600) on each kind of storage.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchsnapshot")

from tests.support.command import snapctl_here
from tests.support.everybody import KEEP_EVERY, KEEP_LAST, PARTITIONS, PRUNE, ROLES, Stage, evaluator
from tests.support.isolated import start_with
from tests.support.places import SaveDir
from tests.support.results import record_facts, record_row

SECONDS = float(os.environ.get("SNAPCTL_SOAK_SECONDS", "600"))

pytestmark = pytest.mark.torch


class Crowd:
    """All processes, and who was killed."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.killed: Counter[str] = Counter()
        self._members: list[tuple[Callable[..., None], Any]] = [
            (role, self._start(role, n)) for n, role in enumerate(ROLES)
        ]

    def _start(self, role: Callable[..., None], number: int) -> Any:
        process, connection = start_with(role, self.stage, number)
        connection.close()
        return process

    def kill_one(self, rng: random.Random) -> None:
        """And starts another one in its place."""
        number = rng.randrange(len(self._members))
        role, process = self._members[number]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, -signal.SIGTERM, 143), f"{role.__name__}: {process.exitcode}"
        self.killed[role.__name__] += 1
        self._members[number] = (role, self._start(role, number))

    def check_alive(self) -> None:
        for role, process in self._members:
            errors = [note for note in self.stage.notes() if note["what"] == "error"] if not process.is_alive() else []
            assert process.is_alive(), f"{role.__name__} ended with {process.exitcode}: {errors}"

    def wind_up(self, patience: float) -> None:
        """The trainer first; the evaluators when all is evaluated; then the others."""
        for part in ("trainer", "evaluator", "pruner", "watcher"):
            self.stage.stop(part)
            for role, process in self._members:
                if role.__name__ == part:
                    process.join(patience)
                    assert process.exitcode == 0, f"{part}: {process.exitcode}"

    def end(self) -> None:
        for _, process in self._members:
            process.kill()
            process.join()


def run_everybody(save_dir: SaveDir, directory: pathlib.Path, seconds: float, *, ttl: float, slack: float) -> Crowd:
    directory.mkdir()
    rng = random.Random(7)
    crowd = Crowd(Stage(save_dir.url, str(directory), ttl, slack))
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.3, 1.5))
            crowd.check_alive()
            crowd.kill_one(rng)
        crowd.wind_up(100 + seconds / 2 + 3 * (ttl + slack))  # a busy machine has a backlog of evaluations
    finally:
        crowd.end()
    return crowd


@dataclass
class Found:
    """Figures of a run in which every invariant held."""

    saved: int
    deleted: int
    evaluated: int
    taken_over: int
    commands: Counter[str]
    codes: Counter[int]


def check_invariants(save_dir: SaveDir, stage: Stage) -> Found:
    """Those of docs/reliability.md, in their order."""
    notes = stage.notes()
    # 1. nobody failed in a way that is not documented
    bad = [note for note in notes if note.get("bad") or note["what"] == "error"]
    assert not bad, f"{len(bad)}: {bad[:3]}"
    # 2. an interrupted prune is finished by the next one
    last = snapctl_here("prune", save_dir.url, *PRUNE)
    assert last.code == 0, last
    names = save_dir.names()
    held = {int(name.partition("/")[0]) for name in names}
    complete = {step for step in held if f"{step}/.snapshot_metadata" in names}
    # 3. of what was saved, all is there that the policy keeps, and the newest in any case
    saved = {note["step"] for note in notes if note["what"] == "saved"}
    kept = set(sorted(saved)[-KEEP_LAST:]) | {step for step in saved if step % KEEP_EVERY == 0}
    assert kept <= complete, kept - complete
    # 4. at most the last save, which was killed, is incomplete; nothing is half deleted
    assert {step for step in held - complete if step <= max(complete)} == set(), held - complete
    # 5. every kept checkpoint verifies, byte for byte
    verified = snapctl_here("verify", save_dir.url, "--all", "--level", "data", "--json")
    assert verified.code == 0, verified
    reports = verified.json["checkpoints"]
    assert {report["step"] for report in reports} == complete
    assert {(report["verdict"], *report["warnings"]) for report in reports} == {("sound",)}, reports
    # 6. no evaluation was lost: of all that was saved, and of all that is there
    begun = [note for note in notes if note["what"] == "begin"]
    by_task: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for note in begun:
        by_task.setdefault((note["path"], note["partition"]), []).append(note)
    for step in saved | complete:
        for partition in PARTITIONS:
            assert (f"{save_dir.url}/{step}", partition) in by_task, f"step {step} was not evaluated on {partition}"
            assert step not in complete or f"{step}/evaled_by/{partition}_DONE" in names
    # 7. none was done twice, and none begun again but by a takeover
    done = Counter((note["path"], note["partition"]) for note in notes if note["what"] == "done")
    assert not [task for task, count in done.items() if count > 1]
    taken_over = 0
    for task, beginnings in by_task.items():
        for earlier, later in itertools.pairwise(beginnings):
            taken_over += 1
            assert later["expires_at"] - stage.ttl >= earlier["expires_at"], (task, earlier, later)
    # 8. no litter
    assert not [name for name in names if "snapctl-tmp" in name]
    ran = [note for note in notes if note["what"] == "ran"]
    return Found(
        len(saved),
        len(saved - complete),
        len(by_task),
        taken_over,
        Counter(note["command"] for note in ran),
        Counter(note["code"] for note in ran),
    )


def test_a_few_seconds_of_everybody_at_once(save_dir: SaveDir, tmp_path: pathlib.Path) -> None:
    crowd = run_everybody(save_dir, tmp_path / "stage", 6, ttl=1, slack=0.5)
    found = check_invariants(save_dir, crowd.stage)
    assert found.saved > 3 and found.evaluated >= found.saved * len(PARTITIONS) and crowd.killed.total() > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_everybody_at_once(save_dir: SaveDir, tmp_path: pathlib.Path) -> None:
    crowd = run_everybody(save_dir, tmp_path / "stage", SECONDS, ttl=3, slack=10)
    found = check_invariants(save_dir, crowd.stage)
    where = "a bucket" if save_dir.bucket else "a disk"
    print(f"\n{where}: {found}, killed: {crowd.killed}")
    record_row(
        "everybody",
        "runs",
        on=where,
        seconds=round(SECONDS),
        saved=found.saved,
        deleted=found.deleted,
        evaluated=found.evaluated,
        taken_over=found.taken_over,
        commands=found.commands.total(),
        killed=", ".join(f"{role}: {count}" for role, count in sorted(crowd.killed.items())),
    )
    for command, count in found.commands.items():
        record_row("everybody", "commands", command=f"`{command}`", **{where: count})
    record_facts("everybody", partitions=len(PARTITIONS), evaluators=sum(role is evaluator for role in ROLES))
