"""Everybody at once over one save directory: each role is a function for a process of its own, which may be killed.

All of them write down what they did, a JSON line each, and go on until a file tells them to stop.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import snapctl
import snapctl.markers
from snapctl.errors import CheckpointNotFoundError, SnapctlError
from tests.support.command import Finished, snapctl_here

PARTITIONS = ("val", "test")
STEP = 10
KEEP_LAST = 3
KEEP_EVERY = 200
PRUNE = ["--keep-last", str(KEEP_LAST), "--keep-every", str(KEEP_EVERY), "--yes", "--json"]
for _partition in PARTITIONS:
    PRUNE += ["--keep-unevaluated", _partition]


@dataclass(frozen=True)
class Stage:
    """What all of them know; can be pickled."""

    save_dir: str
    directory: str
    """For logs and stop files."""
    ttl: float
    slack: float
    """Instead of `snapctl.markers.CLAIM_SLACK_SECONDS`."""

    def is_over(self, part: str) -> bool:
        return os.path.exists(f"{self.directory}/stop-{part}")

    def stop(self, part: str) -> None:
        pathlib.Path(f"{self.directory}/stop-{part}").touch()

    def note(self, role: str, what: str, **facts: Any) -> None:
        """A line that stays whole, whoever is killed."""
        line = json.dumps({"at": time.time(), "role": role, "what": what, **facts}) + "\n"
        with open(f"{self.directory}/log", "ab", buffering=0) as file:
            file.write(line.encode())

    def notes(self) -> list[dict[str, Any]]:
        lines = pathlib.Path(f"{self.directory}/log").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def _role(stage: Stage, role: str, seed: int) -> Iterator[random.Random]:
    """What none of them may ever do is to fail in a way that nobody documented."""
    snapctl.markers.CLAIM_SLACK_SECONDS = stage.slack
    try:
        yield random.Random(f"{role} {seed} {os.getpid()}")
    except Exception:
        stage.note(role, "error", text=traceback.format_exc())
        raise


def _command(stage: Stage, role: str, allowed: Sequence[int], *arguments: str) -> Finished:
    done = snapctl_here(*arguments)
    facts: dict[str, Any] = {"command": arguments[0], "code": done.code}
    if done.code == 143 and "Traceback" not in done.stderr:  # somebody killed this process, and it ends now
        os._exit(143)  # as the console script does: threads may wait for the network
    if done.code not in allowed or "Traceback" in done.stderr:
        facts |= {"bad": True, "arguments": arguments, "stdout": done.stdout[-2000:], "stderr": done.stderr[-4000:]}
    stage.note(role, "ran", **facts)
    return done


# -- the roles -------------------------------------------------------------------------------------------------------


def trainer(ready: Any, stage: Stage, seed: int) -> None:
    """Saves a step after the other, from the newest complete one on."""
    import torch
    import torchsnapshot

    with _role(stage, "trainer", seed) as rng:
        torch.set_num_threads(1)
        tensors = {f"t{number}": torch.zeros(2_000 + number, dtype=torch.int32) for number in range(3)}
        trained = snapctl.Snapshot(stage.save_dir, {"model": torchsnapshot.StateDict(**tensors)})
        newest = max(map(snapctl.step_from_checkpoint, snapctl.get_checkpoints(stage.save_dir)), default=0)
        while not stage.is_over("trainer"):
            newest += STEP
            for tensor in tensors.values():
                tensor.fill_(newest)
            trained.step = newest
            began = time.monotonic()
            trained.save(newest).wait()
            stage.note("trainer", "saved", step=newest, seconds=time.monotonic() - began)
            time.sleep(rng.uniform(0.4, 1.2))


def evaluator(ready: Any, stage: Stage, seed: int) -> None:
    """Claims and marks what nobody has evaluated; every other one through the command line."""
    with _role(stage, "evaluator", seed) as rng:
        once = _evaluate_by_command if seed % 2 else _evaluate_by_library
        while True:
            was_over = stage.is_over("evaluator")
            left = 0
            for path in snapctl.get_checkpoints(stage.save_dir):
                for partition in rng.sample(PARTITIONS, len(PARTITIONS)):
                    left += once(stage, path, partition, rng)
            if was_over and not left:
                return
            time.sleep(0.1)


def _evaluate_by_library(stage: Stage, path: str, partition: str, rng: random.Random) -> bool:
    """Whether it was not evaluated yet when it was looked at."""
    try:
        if snapctl.is_done_eval(path, partition):
            return False
        claim = snapctl.claim_eval(path, partition, ttl=stage.ttl)
        stage.note("evaluator", "begin", path=path, partition=partition, expires_at=claim.expires_at)
        time.sleep(rng.uniform(0.01, 0.06))
        snapctl.mark_done_eval(path, partition, metrics={"loss": rng.random()}, owner=claim.owner)
        stage.note("evaluator", "done", path=path, partition=partition)
    except (snapctl.ClaimRefusedError, CheckpointNotFoundError):
        pass
    except SnapctlError as error:
        if "is being deleted" not in str(error):
            raise
    return True


def _evaluate_by_command(stage: Stage, path: str, partition: str, rng: random.Random) -> bool:
    owner = f"{os.getpid()}-{rng.randrange(1 << 30)}"
    if _command(stage, "evaluator", (0, 1, 3), "mark-eval", path, partition, "--check").code == 0:
        return False
    claim = ["mark-eval", path, partition, "--claim", "--owner", owner, "--ttl", f"{stage.ttl:.0f}s", "--json"]
    claimed = _command(stage, "evaluator", (0, 3, 6), *claim)
    if claimed.code != 0:
        return True
    expires_at = datetime.datetime.fromisoformat(
        claimed.json["partitions"][0]["claim_expires_at"].replace("Z", "+00:00")
    )
    stage.note("evaluator", "begin", path=path, partition=partition, expires_at=expires_at.timestamp())
    time.sleep(rng.uniform(0.01, 0.06))
    mark = ["mark-eval", path, partition, "--owner", owner, "--metric", f"loss={rng.random()}"]
    if _command(stage, "evaluator", (0, 3, 6), *mark).code == 0:
        stage.note("evaluator", "done", path=path, partition=partition)
    return True


def pruner(ready: Any, stage: Stage, seed: int) -> None:
    """Prunes every few seconds."""
    with _role(stage, "pruner", seed) as rng:
        while not stage.is_over("pruner"):
            stage.note("pruner", "pruning")
            done = _command(stage, "pruner", (0, 3), "prune", stage.save_dir, *PRUNE)
            rows = done.json["delete"] if done.stdout else []
            steps = [row["step"] for row in rows if row["deleted"]]
            stage.note("pruner", "pruned", steps=steps)
            time.sleep(rng.uniform(1.0, 3.0))


def watcher(ready: Any, stage: Stage, seed: int) -> None:
    """Lists, looks for the latest, shows and verifies, one after the other."""
    with _role(stage, "watcher", seed) as rng:
        save_dir = stage.save_dir
        while not stage.is_over("watcher"):
            _command(stage, "watcher", (0, 3), "list", save_dir, "--json", "--long", "--all")
            _command(stage, "watcher", (0, 3), "list", save_dir, "--not-evaluated-by", "val")
            _command(stage, "watcher", (0, 3), "latest", save_dir)
            _command(stage, "watcher", (0, 3), "latest", save_dir, "--verified", "--json")
            _command(stage, "watcher", (0, 1, 3), "latest", save_dir, "--best", "val/loss:min", "--json")
            _command(stage, "watcher", (0, 3), "show", save_dir)
            _command(stage, "watcher", (0, 3), "verify", save_dir, "--level", "data")
            _command(stage, "watcher", (0, 3), "verify", save_dir, "--all", "--json")
            _command(stage, "watcher", (0, 3, 124), "wait", save_dir, "--at-least", "10", "--timeout", "0")
            time.sleep(rng.uniform(0.0, 0.2))


ROLES: tuple[Callable[[Any, Stage, int], None], ...] = (
    trainer, *[evaluator] * 6, pruner, watcher, watcher,
)  # fmt: skip
