"""What can go wrong between a command and its storage, and the commands that it can go wrong for."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np

from tests.support.servers import Bucket, Controlled, request
from tests.support.snapshots import write_checkpoint

EVERYTHING = r"/storage/v1|/batch/"
HTML = "<!DOCTYPE html><html><head><title>Log in</title></head><body>Please log in.</body></html>"
STEPS = (10, 20, 30)


def _status(code: int, message: str, reason: str = "backendError") -> dict[str, Any]:
    error = {"code": code, "message": message, "errors": [{"reason": reason, "message": message}]}
    return {"status": code, "body": json.dumps({"error": error})}


@dataclass(frozen=True)
class Fault:
    """One way in which the storage fails."""

    name: str
    proxy: Mapping[str, Any]
    """For the fault proxy, but for which requests it hits."""
    exit_code: int
    """Of a command all of whose requests end so."""
    passes: bool
    """The next try may succeed, and one failure of it must not be noticed."""
    is_slow: bool = False


FAULTS = (
    Fault("401", _status(401, "Request had invalid authentication credentials.", "authError"), 4, False),
    Fault("403", _status(403, "sa@example.iam does not have access to the bucket.", "forbidden"), 4, False),
    Fault("404", _status(404, "The specified bucket does not exist.", "notFound"), 3, False),
    Fault("408", _status(408, "Request timeout."), 4, True),
    Fault("412", _status(412, "At least one of the pre-conditions you specified did not hold."), 4, False),
    Fault("429", _status(429, "The project exceeded the rate limit.", "rateLimitExceeded"), 4, True),
    Fault("500", _status(500, "Internal Error."), 4, True),
    Fault("502", {"status": 502, "body": "Bad Gateway", "headers": {"Content-Type": "text/plain"}}, 4, True),
    Fault("503", _status(503, "Service Unavailable."), 4, True),
    Fault("dropped", {"drop": True}, 4, True),
    Fault("lost answer", {"lose": True}, 4, True),
    Fault("hang", {"hang": 0.4, "drop": True}, 4, False, is_slow=True),
    Fault("late", {"hang": 0.35}, 4, False, is_slow=True),
    Fault("cut body", {"cut": 0.5}, 4, True),
    Fault("short body", {"short": 0.5}, 4, False),
    Fault("HTML with 200", {"status": 200, "body": HTML, "headers": {"Content-Type": "text/html"}}, 4, False),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True)
class Command:
    """A command line; ``{run}`` is the save directory, ``{tmp}`` an empty directory."""

    name: str
    arguments: Sequence[str]
    exit_code: int = 0
    """Where nothing fails."""
    created: Sequence[str] = ()
    """Patterns of objects that it may create (below the save directory)."""
    deletes: Sequence[int] = ()
    """Steps that it is to delete."""
    removed: Sequence[str] = ()
    """Objects that it is to remove."""
    output: str = ""
    """A file of ``{tmp}`` that it writes."""
    again: int = 0
    """Exit code when it is run once more after all was done."""

    @property
    def changes(self) -> bool:
        """Whether it changes anything in the storage."""
        return bool(self.created or self.deletes or self.removed)


COMMANDS = (
    Command("list", ["list", "{run}", "--long"]),
    Command("latest", ["latest", "{run}"]),
    Command("latest --best", ["latest", "{run}", "--best", "val/auc:max"]),
    Command("latest --verified", ["latest", "{run}", "--verified"]),
    Command("show", ["show", "{run}"]),
    Command("verify", ["verify", "{run}", "--all"]),
    Command("verify --level data", ["verify", "{run}", "--all", "--level", "data"]),
    Command("restore-weight", ["restore-weight", "{run}", "weight", "-o", "{tmp}/w.npy", "--force"], output="w.npy"),
    Command("wait", ["wait", "{run}", "--at-least", "20", "--evaluated-by", "val", "--timeout", "0"]),
    Command("mark-eval", ["mark-eval", "{run}/20", "test", "--metric", "auc=0.5"], created=["20/evaled_by/test_DONE"]),
    Command(
        "mark-eval, two",
        ["mark-eval", "{run}/20", "a", "b"],
        created=["20/evaled_by/a_DONE", "20/evaled_by/b_DONE"],
    ),
    Command("mark-eval --check", ["mark-eval", "{run}/30", "val", "--check"]),
    Command(
        "mark-eval --remove",
        ["mark-eval", "{run}/30", "val", "--remove"],
        removed=["30/evaled_by/val_DONE"],
    ),
    Command(
        "mark-eval --claim",
        ["mark-eval", "{run}/20", "test", "--claim", "--owner", "me"],
        created=["20/evaled_by/test_CLAIM.1", "20/evaled_by/test_CLAIM.2"],
        again=6,
    ),
    Command("pin", ["pin", "{run}/20", "--note", "kept"], created=["20/PINNED"]),
    Command("pin --remove", ["pin", "{run}/10", "--remove"], removed=["10/PINNED"]),
    Command(
        "prune",
        ["prune", "{run}", "--keep-last", "1", "--order", "step", "--yes"],
        created=["20/.snapshot_metadata.deleting"],
        deletes=[20],
    ),
)


@dataclass(frozen=True)
class Stored:
    """An object, as a listing tells of it."""

    generation: str
    crc32c: str
    size: int


@dataclass
class Scene:
    """A bucket with a save directory, behind the fault proxy."""

    bucket: Bucket
    proxy: Controlled
    original: dict[str, bytes] = field(default_factory=dict)

    @property
    def run(self) -> str:
        return f"{self.bucket.url}/run"

    def write(self, path: str, data: bytes = b"") -> None:
        """Also a `tests.support.snapshots.Write`."""
        self.original[f"run/{path}"] = data
        self.bucket.write(f"run/{path}", data)

    def fill(self) -> None:
        """Steps 10 (pinned), 20 and 30 (marked), of three tensors each."""
        for step in STEPS:
            tensors = {name: np.arange(6, dtype="f4").reshape(2, 3) + step for name in ("weight", "bias", "scale")}
            write_checkpoint(self.write, step, tensors)
        for step, auc in ((20, 0.7), (30, 0.9)):
            self.write(f"{step}/evaled_by/val_DONE", json.dumps({"metrics": {"auc": auc}}).encode())
        self.write("10/PINNED", b"{}")

    def listed(self) -> dict[str, Stored]:
        """All objects, past the proxy."""
        url = f"{self.bucket.endpoint}/storage/v1/b/{self.bucket.name}/o?prefix={quote('run/', safe='')}"
        items = json.loads(request("GET", url)).get("items", [])
        return {item["name"]: Stored(item["generation"], item["crc32c"], int(item["size"])) for item in items}

    def reset(self, *, before: Mapping[str, Stored]) -> None:
        """Puts things back as they were filled, with their times in the same order."""
        now = self.listed()
        for name in now.keys() - self.original.keys():
            self.bucket.delete(name)
        if any(now.get(name) != before.get(name) for name in self.original):
            for name, data in self.original.items():
                self.bucket.write(name, data)

    def fail(self, fault: Fault | None, *, skip: int = 0, count: int | None = None, match: str = EVERYTHING) -> None:
        """From the request after `skip` on, `count` requests fail (all of them, for None); None: nothing fails."""
        faults = [] if fault is None else [{"match": match, "skip": skip, **fault.proxy}]
        if count is not None and faults:
            faults[0]["n"] = count
        self.proxy.configure(faults=faults)
        self.proxy.reset()

    def settle(self) -> int:
        """Waits until the proxy has nothing more to do; how many requests there were since `fail`."""
        while True:
            stats = self.proxy.stats()
            if stats["inflight"] == 0:
                return int(stats["n"])
            time.sleep(0.02)


def arguments_of(command: Command, scene: Scene, tmp: pathlib.Path) -> list[str]:
    return [argument.format(run=scene.run, tmp=tmp) for argument in command.arguments]


def positions(total: int, fault: Fault, *, every: bool) -> list[int]:
    """Which requests of so many are hit first: all of them, or some; fewer where each takes its time."""
    if every:
        return list(range(total))
    some = {total // 2, total - 1} if fault.is_slow else {0, 1, total // 3, total * 2 // 3, total - 1}
    return sorted(position for position in some if 0 <= position < total)
