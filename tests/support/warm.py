"""Loads what commands load late, so that a process forked after it is at its work at once: to be imported."""

from __future__ import annotations

import tempfile
import warnings

from tests.support.command import snapctl_here
from tests.support.snapshots import local_writer, write_checkpoint


def warm_up() -> None:
    """Runs the commands once, on the disk and without threads: a fork takes none along."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        for step in (1, 2):
            write_checkpoint(local_writer(directory), step)
        path = f"{directory}/2"
        for command in (
            ["mark-eval", path, "val", "--metric", "a=1"],
            ["mark-eval", path, "test", "--claim"],
            ["pin", path],
            ["list", directory, "--json"],
            ["latest", directory],
            ["restore-weight", path, "model/weight", "-o", f"{directory}/w.safetensors"],
            ["restore-weight", path, "model/weight", "-o", f"{directory}/w.pt"],
            ["prune", directory, "--keep-last", "1", "--yes", "--json"],
        ):
            snapctl_here(*command)


warm_up()
