"""prune against what a user would use instead: python -m benchmarks.pruning [NAME…]"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.measure import report
from snapctl.checkpoints import Checkpoint
from snapctl.markers import Marker
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.protection import Clock, Subject
from snapctl.pruning.retention import plan_prune
from tests.support.servers import Bucket, Controlled, mini_gcs
from tests.support.snapshots import local_writer, metadata, tensor_entry

SNAPCTL = [sys.executable, "-m", "snapctl"]
OBJECTS = 50_000
CREATED = "2024-05-01T00:00:00.000Z"
BARE_BATCHES = """
import asyncio, json, sys, fsspec.asyn, gcsfs.core
names = json.load(open(sys.argv[1]))
fs = gcsfs.core.GCSFileSystem(token="anon", skip_instance_cache=True, use_listings_cache=False)
parts = [["bk/" + name for name in names[at : at + 100]] for at in range(0, len(names), 100)]
async def work():
    todo = iter(parts)
    async def some():
        for part in todo:
            await fs._rm_files(part)
    await asyncio.gather(*(some() for _ in range(16)))
fsspec.asyn.sync(fs.loop, work)
"""
"""gcsfs's own batches of 100, 16 at once, of names that are known: no listing, no conditions, no guards."""


def seed_large(server: Controlled) -> list[str]:
    """A checkpoint of 50,000 objects, and a newer one; returns the names of the first."""
    locations = [f"0/model/p{number:06d}" for number in range(OBJECTS - 1)]
    entries = {location: tensor_entry(location, [4], "uint8") for location in locations}
    bucket = Bucket(server.endpoint, "bk")
    server.seed("bk", [(f"run/100/{location}", 4) for location in locations], created=CREATED)
    bucket.write("run/100/.snapshot_metadata", metadata(entries))
    server.seed("bk", [("run/200/0/model/w", 4)], created=CREATED)
    bucket.write("run/200/.snapshot_metadata", metadata({"0/model/w": tensor_entry("0/model/w", [4], "uint8")}))
    return ["run/100/.snapshot_metadata", *(f"run/100/{location}" for location in locations)]


def benchmark_objects() -> bool:
    """50,000 objects at 30 ms a request."""
    rounds: list[tuple[float, float]] = []
    requests = 0
    with tempfile.TemporaryDirectory() as scratch:
        names_file = os.path.join(scratch, "names.json")
        for _ in range(5):
            sides = []
            for command in ("ours", "theirs"):
                with mini_gcs() as server:
                    names = seed_large(server)
                    pathlib.Path(names_file).write_text(json.dumps(names))
                    server.configure(latency=0.03)
                    server.reset()
                    ours = [*SNAPCTL, "prune", "gs://bk/run", "--keep-last", "1", "--yes"]
                    theirs = [sys.executable, "-c", BARE_BATCHES, names_file]
                    env = {**os.environ, "STORAGE_EMULATOR_HOST": server.endpoint}
                    began = time.perf_counter()
                    subprocess.run(ours if command == "ours" else theirs, env=env, check=True, capture_output=True)
                    sides.append(time.perf_counter() - began)
                    if command == "ours":
                        requests = max(requests, int(server.stats()["n"]))
            rounds.append((sides[0], sides[1]))
            print(f"      {sides[0]:.2f} s, bare batches {sides[1]:.2f} s")
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    kept = report("50,000 objects: requests", requests, 580, unit="")
    return report("50,000 objects: time by bare batches, both as whole processes", ratio, 1.5) and kept


def benchmark_interrupt() -> bool:
    """How long Ctrl-C takes in the middle of 50,000 objects, and what the server gets after it."""
    slowest, late = 0.0, 0
    for _ in range(3):
        with mini_gcs() as server:
            seed_large(server)
            server.configure(latency=0.03)
            server.reset()
            env = {**os.environ, "STORAGE_EMULATOR_HOST": server.endpoint}
            command = [*SNAPCTL, "prune", "gs://bk/run", "--keep-last", "1", "--yes"]
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not any("/batch/" in line[1] for line in server.stats(log=True)["log"]):
                time.sleep(0.02)
            began = time.perf_counter()
            process.send_signal(signal.SIGINT)
            code = process.wait()
            slowest = max(slowest, time.perf_counter() - began)
            assert code == 130, code
            after = int(server.stats()["n"])
            time.sleep(1.0)
            late = max(late, int(server.stats()["n"]) - after)
    kept = report("interrupt: until it has ended", slowest, 1.0, unit=" s")
    return report("interrupt: requests that begin after it has ended", late, 16, unit="") and kept


def benchmark_local() -> bool:
    """100 checkpoints of 500 files against rm -rf."""
    rounds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as scratch:
        for number in range(9):
            sides: dict[str, float] = {}
            order = ["ours", "theirs"] if number % 2 else ["theirs", "ours"]
            for side in order:
                root = pathlib.Path(scratch) / "run"
                _write_many(root)
                subprocess.run(["sync", "-f", str(root)], check=True)
                going = [str(root / str(step)) for step in range(100)]
                command = [*SNAPCTL, "prune", str(root), "--keep-last", "1", "--yes"]
                command = command if side == "ours" else ["rm", "-rf", *going]
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                sides[side] = time.perf_counter() - began
                assert sorted(os.listdir(root)) == ["100"], sorted(os.listdir(root))
                shutil.rmtree(root)
            rounds.append((sides["ours"], sides["theirs"]))
            print(f"      {sides['ours']:.2f} s, rm -rf {sides['theirs']:.2f} s")
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    return report("100 checkpoints of 500 files: time by rm -rf, both as whole processes", ratio, 1.3)


def _write_many(root: pathlib.Path) -> None:
    write = local_writer(root)
    locations = [f"0/model/p{number:04d}" for number in range(499)]
    manifest = metadata({location: tensor_entry(location, [100], "uint8") for location in locations})
    for step in range(101):
        for location in locations if step < 100 else ():
            write(f"{step}/{location}", b"x" * 100)
        write(f"{step}/.snapshot_metadata", manifest)


def benchmark_planning() -> bool:
    """100,000 checkpoints with all rules."""
    rng = random.Random(9)
    subjects = [
        Subject(
            step,
            Checkpoint(
                step=step,
                path=f"/run/{step}",
                state="complete",
                created_at=1.7e9 + step * 40.0,
                markers=(Marker("val", metrics={"loss": rng.random()}),) if step % 3 else (),
            ),
            manifest_state="parsed",
        )
        for step in range(0, 1_000_000, 10)
    ]
    rng.shuffle(subjects)
    terms = PolicyTerms(
        keep_last=(50,),
        keep_every=("1000", "250:100000"),
        keep_within=("7d",),
        keep_hourly=(1000,),
        keep_daily=(1000,),
        keep_weekly=(1000,),
        keep_monthly=(1000,),
        keep_yearly=(10,),
        keep_best=("val/loss:min:100", "val/loss:max:100"),
        keep_step=(500, 7770),
        keep_unevaluated=("val",),
        keep_unscored=True,
        max_delete="90%",
    )
    policy = make_policy(terms)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        plan = plan_prune(subjects, policy, save_dir="/run", clock=Clock(1.8e9))
        seconds.append(time.perf_counter() - began)
    assert len(plan.rows) == 100_000 and plan.deletions
    return report("planning 100,000 checkpoints with all rules", statistics.median(seconds), 1.0, unit=" s")


BENCHMARKS: dict[str, Callable[[], bool]] = {
    "objects": benchmark_objects,
    "interrupt": benchmark_interrupt,
    "local": benchmark_local,
    "planning": benchmark_planning,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(BENCHMARKS)
    results = [BENCHMARKS[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
