"""Runs several command lines in one process: ``python -m tests.support.several``, each a JSON list on a line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

from tests.support.command import Finished, snapctl_here


def run_several(
    commands: Sequence[Sequence[str]], *, before: Sequence[str] = (), timeout: float = 300
) -> list[Finished]:
    """Each command's end; `before` is put in front of the process, to take permissions away from it."""
    lines = "".join(json.dumps(list(command)) + "\n" for command in commands)
    done = subprocess.run(
        [*before, sys.executable, "-m", "tests.support.several"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return [Finished(**json.loads(line)) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(snapctl_here(*json.loads(line)))))
