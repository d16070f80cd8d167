"""Six evaluators on 200 checkpoints and three partitions, while they are being saved, and evaluators are killed."""

from __future__ import annotations

import collections
import itertools
import pathlib
import random
import subprocess
import sys
import time

import pytest

from snapctl.markers import claim_of_path, parse_claim
from snapctl.storage import open_storage
from tests.support.places import SaveDir
from tests.support.repository import SUPPORT
from tests.support.snapshots import write_checkpoint

EVALUATOR = SUPPORT / "evaluator.py"
PARTITIONS = ["val", "test", "train"]
STEPS = 200
TTL = 3.0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_every_checkpoint_and_partition_is_evaluated_once_though_evaluators_die(
    save_dir: SaveDir, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    log = tmp_path / "evaluated.log"
    log.touch()
    command = [sys.executable, str(EVALUATOR), save_dir.url, str(log), str(TTL), *PARTITIONS]
    crew = [subprocess.Popen(command) for _ in range(6)]
    dice = random.Random(0)
    killed = 0
    try:
        for step in range(STEPS):
            write_checkpoint(save_dir.write, step * 10)
            time.sleep(0.3)
            if step % 6 == 5:
                victim = dice.randrange(len(crew))
                crew[victim].kill()
                crew[victim].wait()
                killed += 1
                crew[victim] = subprocess.Popen(command)
        pathlib.Path(f"{log}.finished").touch()
        assert [worker.wait(timeout=900) for worker in crew] == [0] * 6
    finally:
        for worker in crew:
            worker.kill()
            worker.wait()
    again, taken_over = check_log(save_dir, log)
    with capsys.disabled():
        print(
            f"\n{save_dir.url}: {STEPS} checkpoints, {len(PARTITIONS)} partitions, {killed} evaluators killed: "
            f"{STEPS * len(PARTITIONS)} evaluated, {taken_over} after a takeover, {again} of them twice, in "
            f"{time.monotonic() - started:.0f} s"
        )


def check_log(save_dir: SaveDir, log: pathlib.Path) -> tuple[int, int]:
    """How many were evaluated more than once, and how many claims were taken over.

    Fails if one was evaluated twice though the earlier holder had not overrun its time.
    """
    numbers = collections.defaultdict(list)
    for line in log.read_text().splitlines():
        _, path, partition, number = line.split()
        numbers[path, partition].append(int(number))
    again = taken_over = 0
    for step in range(STEPS):
        path = f"{save_dir.url}/{step * 10}"
        storage = open_storage(path)
        files = {file.path: file for file in storage.list_dir("evaled_by").files}
        for partition in PARTITIONS:
            assert f"evaled_by/{partition}_DONE" in files
            held = sorted(numbers[path, partition])
            assert held, (path, partition)
            claims = {
                named[1]: parse_claim(partition, named[1], storage.read(name), file.modified_at)
                for name, file in files.items()
                if (named := claim_of_path(name)) and named[0] == partition
            }
            taken_over += len(claims) > 1
            for earlier, later in itertools.pairwise(held):
                again += 1
                assert claims[later].created_at >= claims[earlier].expires_at, (path, partition, held)
    return again, taken_over
