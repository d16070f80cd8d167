"""Every command × every way in which a storage fails, from each of its requests on: the right exit code, one line,
nothing lost, nothing half done; and when the storage is well again, the next run does what is left.

Patience is shortened here; what it is, and how long it takes, is measured in test_fault_times_soak.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
import re

import pytest

from tests.faults.scene import (
    COMMANDS,
    FAULTS,
    STEPS,
    Command,
    Scene,
    Stored,
    arguments_of,
    positions,
)
from tests.support.command import Finished, snapctl_here
from tests.support.results import add_facts

EVERY_POSITION = bool(os.environ.get("SNAPCTL_EVERY_FAULT"))


pytestmark = pytest.mark.usefixtures("hasty")


def without_times(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d[ T][\d:.]{8,}", "TIME", text)


class Stage:
    """One command on a scene: how it ends and what it leaves when nothing fails, and runs with faults beside it."""

    def __init__(self, scene: Scene, command: Command, tmp: pathlib.Path) -> None:
        self.scene, self.command, self.tmp = scene, command, tmp
        self.before = scene.listed()
        scene.fail(None)
        self.clean = self.run()
        self.requests = scene.settle()
        self.after = scene.listed()
        self.written = self.output()
        assert self.clean.code == command.exit_code, self.clean
        self.reset()

    def run(self) -> Finished:
        return snapctl_here(*arguments_of(self.command, self.scene, self.tmp))

    def output(self) -> bytes | None:
        path = self.tmp / self.command.output
        return path.read_bytes() if self.command.output and path.exists() else None

    def reset(self) -> None:
        self.scene.reset(before=self.before)
        self.before = self.scene.listed()
        for path in self.tmp.iterdir():
            path.unlink()

    def check_said(self, done: Finished, what: str) -> None:
        """At most one error, in a line, and no traceback; nothing on stdout that was not the answer."""
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        no_answers = {2, 70, 141} if what.startswith("404") else {1, 2, 70, 141}
        assert done.code not in no_answers or done.code == self.command.exit_code, (what, done)
        assert "Traceback" not in done.stderr and len(errors) <= 1, (what, done)
        assert all(line.startswith(("error: ", "hint: ", "warning: ")) or self.is_note(line) for line in lines), (
            what,
            done,
        )
        assert bool(errors) == (done.code in (3, 4, 6, 124)) or done.code == 1, (what, done)

    def is_note(self, line: str) -> bool:
        return not line.startswith((" ", "During", "The above")) and len(line) < 300

    def check_kept(self, what: str) -> None:
        """Nothing is lost but what was to go, nothing is there but what was to come, and nothing is half done."""
        now = self.scene.listed()
        gone = {name for name in self.before if name not in now}
        changed = {name for name in self.before.keys() & now.keys() if now[name] != self.before[name]}
        new = {name.removeprefix("run/") for name in now.keys() - self.before.keys()}
        may_go = {f"run/{name}" for name in self.command.removed}
        may_go |= {name for name in gone for step in self.command.deletes if name.startswith(f"run/{step}/")}
        assert gone <= may_go, (what, gone - may_go)
        assert not changed, (what, changed)
        allowed = [*self.command.created, *(f"{step}/.snapshot_metadata.deleting" for step in self.command.deletes)]
        strange = {name for name in new if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)}
        assert not strange, (what, strange)
        self.check_whole(what, now)
        debris = {path.name for path in self.tmp.iterdir()} - {self.command.output}
        assert not debris, (what, debris)
        assert self.output() in (None, self.written), what

    def check_whole(self, what: str, now: dict[str, Stored]) -> None:
        """Whatever looks complete has all of its blobs."""
        if all(name in now for name in self.before):
            return
        for step in STEPS:
            blobs = {name for name in self.scene.original if name.startswith(f"run/{step}/0/")}
            if f"run/{step}/.snapshot_metadata" in now:
                assert blobs <= now.keys(), (what, step, "looks complete, and is not")

    def check_done(self, done: Finished, what: str) -> None:
        """It did what it does when nothing fails."""
        assert done.code == self.command.exit_code, (what, done)
        left = self.scene.listed().keys() ^ self.after.keys()
        if "but for the announcement" in done.stderr:  # which the next prune takes away
            left -= {f"run/{step}/.snapshot_metadata.deleting" for step in self.command.deletes}
        assert not left, (what, done)
        assert self.output() == self.written, what
        assert without_times(done.stdout) == without_times(self.clean.stdout), (what, done)

    def let_an_hour_pass(self) -> None:
        """A deletion that was announced, and could neither begin nor be taken back, keeps others away for so long."""
        now = self.scene.listed()
        for step in self.command.deletes:
            deleting = f"run/{step}/.snapshot_metadata.deleting"
            if deleting in now and f"run/{step}/.snapshot_metadata" in now:
                self.scene.bucket.delete(deleting)

    def finish(self, what: str) -> None:
        """The storage is well again: the next run does what is left."""
        self.scene.fail(None)
        self.let_an_hour_pass()
        done = self.run()
        assert done.code in (self.command.exit_code, self.command.again), (what, done)
        assert self.scene.listed().keys() == self.after.keys(), (what, done)
        self.reset()


@pytest.fixture
def stage_of(scene: Scene, tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(scene, request.param, tmp_path)


each_command = pytest.mark.parametrize("stage_of", COMMANDS, ids=[c.name for c in COMMANDS], indirect=True)


@each_command
def test_a_storage_that_always_fails_ends_it_with_the_code_of_that(stage_of: Stage) -> None:
    stage = stage_of
    for fault in FAULTS:
        stage.scene.fail(fault)
        done = stage.run()
        stage.scene.settle()
        assert done.code == fault.exit_code, (fault.name, done)
        assert done.stdout == "", (fault.name, done)
        stage.check_said(done, fault.name)
        stage.check_kept(fault.name)
        assert stage.scene.listed() == stage.before, (fault.name, "nothing is done where nothing can be known")
        add_facts("faults", cells=1)


@each_command
def test_a_passing_failure_of_any_request_is_not_noticed(stage_of: Stage) -> None:
    stage = stage_of
    for fault in (fault for fault in FAULTS if fault.passes):
        for position in positions(stage.requests, fault, every=EVERY_POSITION):
            what = f"{fault.name} at request {position} of {stage.requests}"
            stage.scene.fail(fault, skip=position, count=1)
            done = stage.run()
            stage.scene.settle()
            stage.check_said(done, what)
            stage.check_kept(what)
            stage.check_done(done, what)
            if stage.command.changes:
                stage.reset()
            add_facts("faults", once=1)


@each_command
def test_a_storage_that_fails_from_any_request_on_leaves_nothing_half_done(stage_of: Stage) -> None:
    stage = stage_of
    for fault in FAULTS:
        for position in positions(stage.requests, fault, every=EVERY_POSITION):
            what = f"{fault.name} from request {position} of {stage.requests} on"
            stage.scene.fail(fault, skip=position)
            done = stage.run()
            stage.scene.settle()
            stage.check_said(done, what)
            stage.check_kept(what)
            if done.code == 0 and fault.name not in ("404", "412"):
                stage.check_done(done, what)
            if stage.command.changes:
                stage.finish(what)
            add_facts("faults", from_then_on=1)
