"""Commands and saves that are killed in the middle: what they begin with, what must hold after, how it goes on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from snapctl import read_tensor
from snapctl.markers import parse_claim, parse_marker, parse_pin
from tests.support.command import Finished, snapctl_here
from tests.support.isolated import start_with
from tests.support.places import SaveDir
from tests.support.snapshots import write_checkpoint

BUSY_SECONDS = 1.5
"""A command that was told to end has ended after a second, and this machine may be busy."""


# -- processes that die ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """How a process ended that was killed."""

    code: int
    """Negative: the signal."""
    stderr: str
    seconds: float
    """From the signal to the end."""


def run_main(ready: Any, arguments: Sequence[str], streams: str) -> None:
    """The console script, as a process of its own runs it; its streams go into files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{streams}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["snapctl", *arguments]
    from snapctl.cli.main import run

    ready.send(True)
    run()


def run_save(ready: Any, save_dir: str, step: int, stamp: int, streams: str) -> None:
    """A save of a few tensors that are all filled with one number."""
    import torch
    import torchsnapshot

    from snapctl import Snapshot

    os.dup2(os.open(f"{streams}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    tensors = {
        f"t{n}": torch.full((size,), stamp, dtype=torch.int32) for n, size in enumerate((8, 200_000, 50, 90_000))
    }
    snapshot = Snapshot(save_dir, {"model": torchsnapshot.StateDict(**tensors)})
    snapshot.step = step
    ready.send(True)
    snapshot.save(step).wait()


class Doomed:
    """A process that will be killed."""

    def __init__(self, function: Callable[..., None], *args: Any, streams: pathlib.Path) -> None:
        self._streams = streams
        self.process, self._ready = start_with(function, *args, str(streams))
        if not self._ready.poll(30):
            raise TimeoutError("it did not start")
        with contextlib.suppress(EOFError):
            self._ready.recv()

    def finish(self) -> Death:
        """Undisturbed."""
        began = time.perf_counter()
        self.process.join(60)
        return self._ended(began)

    def die(self, after: float, number: signal.Signals) -> Death:
        """Killed so many seconds later, unless it has ended by then."""
        self.process.join(after)
        began = time.perf_counter()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        self.process.join(60)
        return self._ended(began)

    def _ended(self, began: float) -> Death:
        seconds = time.perf_counter() - began
        self._ready.close()
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError("it did not end")
        errors = pathlib.Path(f"{self._streams}.err")
        text = errors.read_text("utf-8", "replace") if errors.exists() else ""
        return Death(self.process.exitcode, text, seconds)


# -- what is done ----------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """One command over a save directory, and what must hold before and after its death."""

    save_dir: SaveDir
    work: pathlib.Path
    """A directory of this machine for outputs."""
    rng: random.Random
    arguments: list[str] = field(default_factory=list)
    after_a_normal_end: frozenset[int] = frozenset({0})
    """Exit codes of an undisturbed run."""

    @property
    def url(self) -> str:
        return self.save_dir.url

    def prepare(self) -> None:
        """Makes what the command finds."""
        raise NotImplementedError

    def start(self, streams: pathlib.Path) -> Doomed:
        return Doomed(run_main, self.arguments, streams=streams)

    def check(self) -> str:
        """Fails if something looks whole that is not, or is lost that was whole; says where the process died."""
        raise NotImplementedError

    def go_on(self, streams: pathlib.Path) -> None:
        """Runs it once more, to the end; fails if that fails or litter stays."""
        done = self.run_again(streams)
        assert done.code in self.after_a_normal_end, (self.arguments, done)
        self.check()
        litter = [name for name in self.save_dir.names() if "snapctl-tmp" in name]
        assert not litter, litter

    def run_again(self, streams: pathlib.Path) -> Finished | Death:
        return snapctl_here(*self.arguments)

    def clear(self) -> None:
        if self.save_dir.root is not None:
            shutil.rmtree(self.save_dir.root)
            self.save_dir.root.mkdir()
        else:
            for name in self.save_dir.names():
                self.save_dir.delete(name)


class Marking(Scene):
    """mark-eval and pin, in all their forms, on a checkpoint that has a marker and a claim already."""

    FORMS = (
        ["mark-eval", "{}/10", "val", "--metric", "loss=0.5"],
        ["mark-eval", "{}/10", "old", "--metric", "acc=0.75"],
        ["mark-eval", "{}/10", "val", "test", "--metric", "val/a=1", "--metric", "test/a=2"],
        ["mark-eval", "{}/10", "val", "--claim", "--owner", "me"],
        ["mark-eval", "{}/10", "held", "--renew", "--owner", "holder"],
        ["mark-eval", "{}/10", "held", "--release", "--owner", "holder"],
        ["mark-eval", "{}/10", "held", "--owner", "holder"],
        ["pin", "{}/10", "--note", "mine"],
    )

    def prepare(self) -> None:
        if not self.save_dir.names():
            write_checkpoint(self.save_dir.write, 10)
        for name in self.save_dir.names("10/evaled_by"):
            self.save_dir.delete(name)
        if "10/PINNED" in self.save_dir.names():
            self.save_dir.delete("10/PINNED")
        self.save_dir.write("10/evaled_by/old_DONE", b'{"partition": "old", "metrics": {"loss": 0.25}}')
        self.save_dir.write("10/evaled_by/held_CLAIM.1", b'{"owner": "holder", "nonce": "n", "ttl": 7200}')
        form = self.rng.choice(self.FORMS)
        self.arguments = [part.format(self.url) for part in form]
        # what was done, and not said, is refused when it is asked for again
        self.after_a_normal_end = frozenset({0, 6}) if {"--claim", "--release"} & set(form) else frozenset({0})

    def check(self) -> str:
        held = self.save_dir.names("10")
        for name in held:
            base = name.rpartition("/")[2]
            data = self.save_dir.read(name)
            if base.endswith("_DONE"):
                assert parse_marker(base[:-5], data).problem is None, (name, data)
            elif "_CLAIM." in base and "snapctl-tmp" not in base:
                assert parse_claim("held", 1, data, 1.0).owner in ("holder", "me"), (name, data)
            elif base == "PINNED":
                assert parse_pin(data).note == "mine", data
        old = parse_marker("old", self.save_dir.read("10/evaled_by/old_DONE"))
        assert old.metrics["loss"] == 0.25, "a marker that was there lost its metrics"
        assert "10/.snapshot_metadata" in held and "10/0/model/weight" in held
        assert "10/evaled_by/held_CLAIM.1" in held
        begun = {"10/evaled_by/val_DONE", "10/evaled_by/val_CLAIM.1", "10/evaled_by/held_CLAIM.2", "10/PINNED"}
        return "written" if begun & set(held) or "acc" in old.metrics else "not yet written"


class Restoring(Scene):
    """restore-weight into a file that is there or not."""

    FORMS = (
        ["-o", "{}/new.safetensors"],
        ["-o", "{}/old.npy", "--force"],
        ["-o", "{}/new.pt"],
        ["--into", "{}/state.pt", "--as", "weight"],
    )
    _reference: bytes = b""

    def prepare(self) -> None:
        import torch

        if not self.save_dir.names():
            tensors = {"weight": np.arange(500_000, dtype="f4").reshape(1000, 500)}
            write_checkpoint(self.save_dir.write, 10, tensors)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        (self.work / "old.npy").write_bytes(b"old")
        torch.save({"weight": torch.zeros(1000, 500), "other": torch.ones(3)}, self.work / "state.pt")
        form = [part.format(self.work) for part in self.rng.choice(self.FORMS)]
        self.output = pathlib.Path(form[1])
        self.before = self.output.read_bytes() if self.output.exists() else None
        self.arguments = ["restore-weight", f"{self.url}/10", "model/weight", *form]
        self.after_a_normal_end = frozenset({0, 6}) if self.before is None else frozenset({0})

    def check(self) -> str:
        found = self.output.read_bytes() if self.output.exists() else None
        if found == self.before:
            return "not yet written"
        assert found is not None, "a file that was there is gone"
        self._check_whole()
        return "written"

    def _check_whole(self) -> None:
        wanted = np.arange(500_000, dtype="f4").reshape(1000, 500)
        if self.output.suffix == ".npy":
            weight = np.load(self.output)
        elif self.output.suffix == ".safetensors":
            from safetensors.numpy import load_file

            (weight,) = load_file(self.output).values()
        else:
            import torch

            state = torch.load(self.output, weights_only=True)
            if self.output.name == "state.pt":
                assert state.keys() == {"weight", "other"}
            weight = (state["weight"] if isinstance(state, dict) else state).numpy()
        assert np.array_equal(weight, wanted)

    def go_on(self, streams: pathlib.Path) -> None:
        super().go_on(streams)
        self._check_whole()
        left = {path.name for path in self.work.iterdir()} - {"old.npy", "state.pt", self.output.name}
        assert not left, left


class Pruning(Scene):
    """prune of five checkpoints but the newest."""

    STEPS = (100, 200, 300, 400)
    NEWEST = 1000

    def prepare(self) -> None:
        self.clear()
        for step in self.STEPS:
            tensors = {f"t{number}": np.full(8, step, "i4") for number in range(4)}
            write_checkpoint(self.save_dir.write, step, tensors, markers=("val",))
        write_checkpoint(self.save_dir.write, self.NEWEST)
        self.arguments = ["prune", self.url, "--keep-last", "1", "--order", "step", "--yes"]

    def check(self) -> str:
        names = set(self.save_dir.names())
        steps = {int(name.partition("/")[0]) for name in names if not name.endswith("/")}
        whole = {step for step in steps if f"{step}/.snapshot_metadata" in names}
        for step in whole - {self.NEWEST}:
            blobs = {f"{step}/0/model/t{number}" for number in range(4)}
            assert blobs <= names, f"step {step} looks complete, and is not"
        assert self.NEWEST in whole and f"{self.NEWEST}/0/model/weight" in names
        if steps - whole:
            return "half deleted"
        if any(name.endswith(".deleting") for name in names):
            return "announced"
        return {len(self.STEPS): "before the first", 0: "after the last"}.get(len(whole) - 1, "between two")

    def go_on(self, streams: pathlib.Path) -> None:
        super().go_on(streams)
        # what was only announced goes an hour later
        names = self.save_dir.names()
        announced = [name for name in names if name.endswith(".deleting")]
        empty = [name for name in names if name.endswith("/")]
        for name in empty:
            assert self.save_dir.root is not None
            os.utime(self.save_dir.root / name, (0, time.time() - 2 * 3600))
        for name in announced:
            assert name.replace(".deleting", "") in names, "half deleted, and nobody went on"
            self.save_dir.delete(name)
        if announced or empty:
            super().go_on(streams)
        left = [name for name in self.save_dir.names() if not name.startswith(f"{self.NEWEST}/")]
        assert not left, left


class Saving(Scene):
    """The library's save into a step that holds nothing, a whole checkpoint, or what an earlier death left."""

    stamp = 0

    def prepare(self) -> None:
        if "5/.snapshot_metadata" not in self.save_dir.names("5"):
            write_checkpoint(self.save_dir.write, 5)
        if self.rng.random() < 0.3:
            for name in self.save_dir.names("10"):
                self.save_dir.delete(name)
        type(self).stamp += 1

    def start(self, streams: pathlib.Path) -> Doomed:
        return Doomed(run_save, self.url, 10, self.stamp, streams=streams)

    def run_again(self, streams: pathlib.Path) -> Finished | Death:
        return self.start(streams).finish()

    def check(self) -> str:
        assert {"5/.snapshot_metadata", "5/0/model/weight"} <= set(self.save_dir.names("5"))
        names = self.save_dir.names("10")
        if "10/.snapshot_metadata" not in names:
            return "incomplete" if names else "before the first file"
        values = {int(value) for n in range(4) for value in np.unique(read_tensor(f"{self.url}/10", f"model/t{n}"))}
        assert len(values) == 1, f"made of several saves: {values}"
        return "complete, the new one" if values == {self.stamp} else "complete, the one before"

    def go_on(self, streams: pathlib.Path) -> None:
        super().go_on(streams)
        assert self.check() == "complete, the new one"
        done = snapctl_here("verify", f"{self.url}/10", "--level", "data", "--json")
        assert done.code == 0 and done.json["checkpoints"][0]["warnings"] == [], (done.stdout, done.stderr)


SCENES: dict[str, type[Scene]] = {
    "mark-eval, pin": Marking,
    "prune": Pruning,
    "restore-weight": Restoring,
    "save": Saving,
}


# -- again and again -------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of many deaths."""

    kills: int = 0
    """While it was at work."""
    moments: Counter[str] = field(default_factory=Counter)
    longest_seconds: float = 0.0
    """From the signal to the end."""


def kill_again_and_again(scene: Scene, number: signal.Signals, rounds: int) -> Tally:
    """Prepares, starts, kills at a random moment, checks, lets the next run go on; until so many died at work."""
    streams = scene.work.with_name(scene.work.name + "-streams")
    scene.prepare()
    first = scene.start(streams).finish()
    usual = first.seconds
    assert first.code in scene.after_a_normal_end, first
    tally = Tally()
    tries = rounds * 4 + 20
    for _ in range(tries):
        scene.prepare()
        death = scene.start(streams).die(usual * scene.rng.uniform(0.0, 1.05), number)
        moment = scene.check()
        assert "Traceback" not in death.stderr, death.stderr
        at_work = death.code not in scene.after_a_normal_end
        if at_work:
            assert death.code in (-number, 143), death
            tally.kills += 1
            tally.moments[moment] += 1
            tally.longest_seconds = max(tally.longest_seconds, death.seconds)
        usual *= 1.02 if at_work else 0.85  # aim better: the machine is faster or slower than it was
        scene.go_on(streams)
        if tally.kills == rounds:
            return tally
    raise AssertionError(f"only {tally.kills} of {tries} died at work")
