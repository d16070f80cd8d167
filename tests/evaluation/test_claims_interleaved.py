"""The claim protocol with every step of several claimers interleaved at random, over a storage with a clock of its own.

A claimer may stand still between any two requests for longer than any ttl; deleters announce and withdraw; answers
get lost. Whoever was told that he holds a claim must be the only one until its time is up.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from snapctl.errors import PreconditionError, RefusedError, StorageError, StorageNotFoundError, UnavailableError
from snapctl.evaluation.claims import ClaimRefusedError, release_claim_of, renew_claim_of, take_claim
from snapctl.evaluation.evals import mark
from snapctl.markers import Claim
from snapctl.storage import FileInfo, Listing, ScannedDir, Storage

TTL = 60.0


@dataclass
class World:
    """The files of one checkpoint, and the storage's clock."""

    dice: random.Random
    now: float = 1_800_000_000.0
    files: dict[str, tuple[bytes, FileInfo]] = field(default_factory=dict)
    writes: int = 0
    turn: Callable[[], None] = lambda: None
    """Lets another claimer go on; called before every request."""

    def put(self, path: str, data: bytes) -> FileInfo:
        self.writes += 1
        info = FileInfo(path, len(data), self.now, str(self.writes))
        self.files[path] = (data, info)
        return info


class StepwiseStorage(Storage):
    """The checkpoint's directory, one request at a time."""

    scheme = "model"
    parallel_requests = 1

    def __init__(self, world: World, prefix: str = "") -> None:
        self.world = world
        self.prefix = prefix
        self.url = f"model://run/10/{prefix}".rstrip("/")

    def child(self, name: str) -> Storage:
        return StepwiseStorage(self.world, f"{self.prefix}{name}/")

    def parent(self) -> Storage | None:
        return None

    def list_dir(self, path: str = "") -> Listing:
        self.world.turn()
        base = f"{path}/" if path else ""
        below = [info for name, (_, info) in self.world.files.items() if name.startswith(base)]
        if not below:
            raise StorageNotFoundError(path)
        return Listing(
            tuple(info for info in below if "/" not in info.path[len(base) :]),
            tuple({info.path[len(base) :].partition("/")[0] for info in below if "/" in info.path[len(base) :]}),
        )

    def list_tree(self, path: str = "") -> list[FileInfo]:
        raise AssertionError("not needed")

    def scan(self, names: Sequence[str], wanted: Sequence[str], *, totals: bool = False) -> Iterator[ScannedDir]:
        raise AssertionError("not needed")

    def find_file(self, path: str) -> FileInfo | None:
        self.world.turn()
        found = self.world.files.get(path)
        return found[1] if found else None

    def read_range(self, path: str, start: int, end: int, *, version: str = "") -> bytes:
        raise AssertionError("not needed")

    def read(self, path: str, *, version: str = "") -> bytes:
        self.world.turn()
        found = self.world.files.get(path)
        if found is None or (version and found[1].version != version):
            raise StorageNotFoundError(path)
        return found[0]

    def write(self, path: str, data: bytes | memoryview, *, exclusive: bool = False, version: str = "") -> FileInfo:
        self.world.turn()
        old = self.world.files.get(path)
        if (exclusive and old) or (version and (old is None or old[1].version != version)):
            raise PreconditionError(path)
        found = self.world.put(path, bytes(data))
        self.world.turn()
        if self.world.dice.random() < 0.15:
            raise UnavailableError("the answer was lost")
        return found

    def delete(self, path: str, *, version: str = "") -> bool:
        self.world.turn()
        old = self.world.files.get(path)
        if old is None:
            return False
        if version and old[1].version != version:
            raise PreconditionError(path)
        del self.world.files[path]
        return True

    def now(self, *, may_write: bool) -> float:
        return self.server_now()

    def server_now(self) -> float:
        self.world.turn()
        return float(int(self.world.now))  # a Date header: whole seconds, rounded down


@dataclass
class Hold:
    """What a claimer may believe: from the moment it was told until the claim's time is up, or it let go."""

    owner: str
    start: float
    end: float


class Scheduler:
    """Runs one thread at a time; at each request the dice decide who goes on, and how much time passes.

    The same seed gives the same history.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.baton = threading.Condition()
        self.waiting: set[str] = set()
        self.running: str | None = None
        self.stalls = world.dice.choice([0.01, 0.03, 0.1])
        self.alive = 0
        world.turn = self.turn

    def run(self, actors: Sequence[Callable[[], None]]) -> None:
        self.alive = len(actors)
        errors: list[BaseException] = []

        def body(actor: Callable[[], None]) -> None:
            try:
                self.turn()
                actor()
            except BaseException as error:
                errors.append(error)
            finally:
                with self.baton:
                    self.alive -= 1
                    self.running = None
                    self._choose()

        threads = [
            threading.Thread(target=body, args=(actor,), name=f"actor-{number}", daemon=True)
            for number, actor in enumerate(actors)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)

    def turn(self) -> None:
        me = threading.current_thread().name
        with self.baton:
            self.waiting.add(me)
            self.running = None
            self._choose()
            while self.running != me:
                self.baton.wait()
            self.waiting.remove(me)
            stands_still = self.world.dice.random() < self.stalls
            self.world.now += self.world.dice.choice([9.5, TTL - 1, TTL, TTL + 11] if stands_still else [0, 0.1, 0.7])

    def _choose(self) -> None:
        if self.running is None and self.waiting and len(self.waiting) == self.alive:
            self.running = self.world.dice.choice(sorted(self.waiting))
            self.baton.notify_all()


def claimer(world: World, name: str, holds: list[Hold]) -> Callable[[], None]:
    """Claims, and then renews, releases, marks or forgets about it, again and again."""
    storage = StepwiseStorage(world)

    def told(claim: Claim) -> None:
        holds.append(Hold(name, world.now, claim.expires_at))

    def let_go() -> None:
        for hold in holds:
            if hold.owner == name:
                hold.end = min(hold.end, world.now)

    def act() -> None:
        for _ in range(25):
            try:
                told(take_claim(storage, "val", owner=name, ttl_seconds=TTL))
                while world.dice.random() < 0.5:
                    told(renew_claim_of(storage, "val", name, ttl_seconds=TTL))
                way = world.dice.random()
                if way < 0.45:
                    let_go()
                if way < 0.4:
                    release_claim_of(storage, "val", name)
                elif way < 0.45:
                    mark(storage, "val", owner=name)
            except (ClaimRefusedError, RefusedError, StorageError):
                continue

    return act


def deleter(world: World) -> Callable[[], None]:
    """Announces a deletion, and withdraws it."""

    def act() -> None:
        for _ in range(3):
            world.turn()
            world.put(".snapshot_metadata.deleting", b"x")
            world.turn()
            world.files.pop(".snapshot_metadata.deleting", None)

    return act


@pytest.mark.parametrize("block", range(6))
def test_no_two_ever_hold_a_claim_at_the_same_time(block: int) -> None:
    held = 0
    for seed in range(block * 50, block * 50 + 50):
        world = World(random.Random(seed))
        world.put(".snapshot_metadata", b"{}")
        holds: list[Hold] = []
        Scheduler(world).run([*(claimer(world, name, holds) for name in "abcd"), deleter(world)])
        effective = sorted((hold for hold in holds if hold.start < hold.end), key=lambda hold: hold.start)
        held += len(effective)
        for index, first in enumerate(effective):
            for second in effective[index + 1 :]:
                assert second.owner == first.owner or second.start >= first.end, (seed, first, second)
    assert held > 150
