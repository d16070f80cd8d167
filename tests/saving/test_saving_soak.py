"""Training that is killed at random moments: what looks complete is what was saved, byte for byte.

A few rounds run with the other tests; all of them with ``-m soak``.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchsnapshot")

from snapctl.checkpoints import find_checkpoints, open_save_dir  # noqa: E402
from snapctl.checksums import crc32c  # noqa: E402
from snapctl.save_record import SAVE_RECORD_PATH, parse_save_record  # noqa: E402
from tests.support.ranks import _CONTEXT  # noqa: E402
from tests.support.stored import read_stored  # noqa: E402
from tests.support.trainer import digest, train  # noqa: E402

pytestmark = pytest.mark.torch


def check(save_dir: pathlib.Path, log: pathlib.Path, world_size: int) -> tuple[int, int]:
    """How many checkpoints are complete and how many are not; all complete ones are what the log says."""
    notes: dict[tuple[int, int], Any] = {}
    for rank in range(world_size):
        for line in pathlib.Path(f"{log}.{rank}").read_text().splitlines():
            if line.endswith("}"):  # the last one may be cut
                note = json.loads(line)
                notes[rank, note["stamp"]] = note
    states = {found.step: found for found in find_checkpoints(open_save_dir(str(save_dir)))}
    for step, found in states.items():
        if found.state != "complete":
            assert found.state == "incomplete"
            continue
        assert found.record is not None and not found.warnings
        path = save_dir / str(step)
        stored = read_stored(path)
        stamps = set()
        for rank in range(world_size):
            stamp = stored[f"{rank}/run/stamp"].item()
            stamps.add(stamp)
            note = notes[rank, stamp]
            tensors = {
                key.partition("/")[2]: value
                for key, value in stored.items()
                if key.startswith(f"{rank}/") and isinstance(value, torch.Tensor)
            }
            assert note["step"] == step
            assert digest(tensors) == note["digest"], f"step {step}, rank {rank}"
            assert stored[f"{rank}/extra_state/step"] == str(step)
        assert len(stamps) == 1, f"step {step} is made of several saves: {stamps}"
        record = parse_save_record((path / SAVE_RECORD_PATH).read_bytes(), with_blobs=True)
        for location, blob in (record.blobs or {}).items():
            data = (path / location).read_bytes()
            assert (len(data), crc32c(data)) == (blob.size_bytes, blob.crc32c)
    complete = sum(found.state == "complete" for found in states.values())
    return complete, len(states) - complete


def kill_one_process(save_dir: pathlib.Path, log: pathlib.Path, attempt: int, delay: float, batching: bool) -> None:
    process = _CONTEXT.Process(target=_train_quietly, args=(str(save_dir), str(log), attempt, batching))
    process.start()
    first = pathlib.Path(f"{log}.0")
    size = first.stat().st_size if first.exists() else 0
    while not first.exists() or first.stat().st_size == size:  # it is about to save for the first time
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()


def _train_quietly(save_dir: str, log: str, attempt: int, batching: bool) -> None:
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = "0" if batching else "1"
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    train(0, save_dir, log, attempt)


def kill_one_rank(save_dir: pathlib.Path, log: pathlib.Path, attempt: int, delay: float, victim: int) -> float:
    """Under torchrun; how long the job goes on after one of its ranks was killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.trainer", str(save_dir), str(log), str(attempt)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert job.stdout is not None
    seen = 0
    for line in job.stdout:
        seen += line.startswith("saving ")
        if seen == 2:
            break
    time.sleep(delay)
    (pid,) = (pid for pid in _ranks_of(job.pid) if _environment(pid).get("RANK") == str(victim))
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    job.stdout.read()
    job.wait(timeout=90)
    return time.monotonic() - started


def _ranks_of(pid: int) -> list[int]:
    found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _environment(pid: int) -> dict[str, str]:
    raw = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def soak_single(root: pathlib.Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    totals = [0, 0]
    for attempt in range(1, rounds + 1):
        delay = chance.choice([0, chance.uniform(0, 0.05), chance.uniform(0, 0.8)])
        kill_one_process(root / "run", root / "log", attempt, delay, chance.random() < 0.5)
        complete, incomplete = check(root / "run", root / "log", 1) if (root / "run").exists() else (0, 0)
        totals[0] += complete
        totals[1] += incomplete
    print(f"\n{rounds} kills of one process: {totals[0]} checkpoints looked complete and were, {totals[1]} did not")
    assert totals[0] > rounds and totals[1] > 0


def soak_torchrun(root: pathlib.Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    totals = [0, 0]
    longest = 0.0
    for attempt in range(1, rounds + 1):
        longest = max(longest, kill_one_rank(root / "run", root / "log", attempt, chance.uniform(0, 0.6), attempt % 2))
        complete, incomplete = check(root / "run", root / "log", 2)
        totals[0] += complete
        totals[1] += incomplete
    print(
        f"\n{rounds} kills of one of two ranks: {totals[0]} checkpoints looked complete and were, {totals[1]} did not; "
        f"the job ended at most {longest:.1f} s later"
    )
    assert totals[0] > 0


def test_a_few_kills_of_one_process(tmp_path: pathlib.Path) -> None:
    soak_single(tmp_path, 4, seed=1)


def test_a_kill_of_one_of_two_ranks(tmp_path: pathlib.Path) -> None:
    soak_torchrun(tmp_path, 1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_one_process_is_killed_a_hundred_times(tmp_path: pathlib.Path) -> None:
    soak_single(tmp_path, 100, seed=int(os.environ.get("SNAPCTL_SOAK_SEED", "0")))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_one_of_two_ranks_under_torchrun_is_killed_fifty_times(tmp_path: pathlib.Path) -> None:
    soak_torchrun(tmp_path, 50, seed=int(os.environ.get("SNAPCTL_SOAK_SEED", "0")))
