"""What waiting costs, and how soon it tells; each figure beside what a user would do without snapctl.

usage: python -m benchmarks.waiting [latency] [follower] [memory] [requests] [claims]
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks.measure import report
from snapctl.evaluation.claims import take_claim
from snapctl.evaluation.waiting import Pace, Wanted, follow_checkpoints
from snapctl.evaluation.watching import Watch
from snapctl.storage import open_storage
from tests.support.servers import Bucket, fake_gcs_server, fault_proxy, mini_gcs
from tests.support.snapshots import Write, local_writer, metadata, write_checkpoint

ROUNDS = 100
INTERVAL = 0.5
CHECKPOINTS = 1000
SECONDS = 60


@contextlib.contextmanager
def bucket_on(endpoint: str, name: str) -> Iterator[Bucket]:
    os.environ["STORAGE_EMULATOR_HOST"] = endpoint
    try:
        yield Bucket(endpoint, name)
    finally:
        del os.environ["STORAGE_EMULATOR_HOST"]


def make_checkpoints(root: str, count: int) -> None:
    write = local_writer(root)
    for step in range(count):
        write_checkpoint(write, step * 100)


def report_latency(where: str, url: str, write: Write) -> None:
    """From when the manifest is there in full until the follower hands the checkpoint out."""
    completed: dict[int, float] = {}
    looks: list[float] = []

    def save() -> None:
        for number in range(ROUNDS):
            time.sleep(random.uniform(0.1, 2 * INTERVAL))
            step = 1_000_000 + number
            write(f"{step}/0/model/weight", b"x" * 24)
            write(f"{step}/.snapshot_metadata", metadata({}))
            completed[step] = time.monotonic()

    watch = Watch(open_storage(url))
    for _ in range(20):
        started = time.monotonic()
        watch.look()
        looks.append(time.monotonic() - started)
    saver = threading.Thread(target=save, daemon=True)
    saver.start()
    delays = []
    for found in follow_checkpoints(open_storage(url), Wanted(), Pace(None, INTERVAL)):
        handed_out = time.monotonic()
        while found.step not in completed:  # handed out before the writer's call has even returned
            time.sleep(0.0001)
        delays.append(max(0.0, handed_out - completed[found.step or 0]))
        if len(delays) == ROUNDS:
            break
    saver.join()
    print(
        f"{where}: {ROUNDS} rounds, interval {INTERVAL} s, a look {statistics.median(looks) * 1000:.1f} ms (longest "
        f"{max(looks) * 1000:.1f}): reported after {statistics.median(delays):.3f} s (longest {max(delays):.3f})"
    )
    report(f"longest delay against interval and look, {where}", max(delays) / (INTERVAL + max(looks)), 1)


def latency() -> None:
    with tempfile.TemporaryDirectory() as root:
        make_checkpoints(root, 100)
        report_latency("local", root, local_writer(root))
    with fake_gcs_server() as endpoint, bucket_on(endpoint, "latency") as bucket:
        write = lambda path, data=b"": bucket.write(f"run/{path}", data)  # noqa: E731
        for step in range(100):
            write_checkpoint(write, step)
        report_latency("fake-gcs-server", f"{bucket.url}/run", write)


def cpu_of(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def follower() -> None:
    """CPU of a follower with an interval of a second, beside a shell that lists the manifests every second."""
    with tempfile.TemporaryDirectory() as root:
        make_checkpoints(root, CHECKPOINTS)
        wait = [sys.executable, "-m", "snapctl", "wait", root, "--follow", "--interval", "1s", "--timeout"]
        start = cpu_of([*wait, "0"])
        ours = cpu_of([*wait, f"{SECONDS}s"]) - start
        loop = f"for _ in $(seq {SECONDS}); do ls -d {root}/*/.snapshot_metadata > /dev/null; sleep 1; done"
        theirs = cpu_of(["sh", "-c", loop])
        print(f"{CHECKPOINTS} local checkpoints, a look a second, {SECONDS} s; start-up ({start:.2f} s) apart")
        report("a follower, of a core", 100 * ours / SECONDS, 2, unit=" %")
        report("against a shell loop over ls -d", ours / theirs, 1)


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory() -> None:
    """Resident memory of a follower after 1,000 and after 10,000 looks."""
    with tempfile.TemporaryDirectory() as root:
        make_checkpoints(root, CHECKPOINTS)
        sizes = []
        looks = 0

        def sleep(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if looks in (1000, 10_000):
                sizes.append(resident_bytes())

        pace = Pace(9_999, 1, clock=lambda: float(looks), sleep=sleep)
        with contextlib.suppress(TimeoutError):
            for _ in follow_checkpoints(open_storage(root), Wanted(), pace):
                pass
        print(f"{CHECKPOINTS} local checkpoints: {sizes[0] / 2**20:.1f} MiB after 1,000 looks")
        report(f"memory after {looks} looks against that", sizes[-1] / sizes[0], 1.01)


def requests() -> None:
    """Requests of one look at 10,000 steps, beside ls and exists."""
    with mini_gcs() as server, bucket_on(server.endpoint, "many"):
        steps = 10_000
        server.seed("many", [(f"run/{s}/{inner}", 1) for s in range(steps) for inner in (".snapshot_metadata", "0/w")])
        watch = Watch(open_storage("gs://many/run"))
        counts = []
        for _ in range(2):
            server.reset()
            watch.look()
            counts.append(server.stats()["n"])
        import gcsfs.core

        naive = gcsfs.core.GCSFileSystem(token="anon", use_listings_cache=False, skip_instance_cache=True)
        server.reset()
        names = naive.ls("many/run", detail=False)
        for name in names[:200]:
            naive.exists(f"{name}/.snapshot_metadata")
        listed = len(names) // 1000
        exists = (server.stats()["n"] - listed) * len(names) // 200
        report(f"requests of the first look at {steps} steps", counts[0], 130, unit="")
        report("requests of each later one", counts[1], 130, unit="")
        report("against ls and exists for each (counted over 200)", counts[1] / (listed + exists), 0.1)


def claims() -> None:
    """A claim on a fresh partition, beside the touch of a marker that older jobs do."""
    with tempfile.TemporaryDirectory() as root:
        write_checkpoint(local_writer(root), 10)
        storage = open_storage(f"{root}/10")
        ours = seconds_each(lambda number: take_claim(storage, f"p{number}"), 200)
        os.makedirs(f"{root}/10/touched")

        def touch(number: int) -> None:
            with open(f"{root}/10/touched/p{number}", "wb") as file:
                os.fsync(file.fileno())

        theirs = seconds_each(touch, 200)
        print(f"a claim, local: {ours * 1000:.2f} ms = {ours / theirs:.1f} × a file made and fsynced")
    with fake_gcs_server() as upstream, fault_proxy(upstream) as proxy, bucket_on(proxy.endpoint, "claims") as bucket:
        write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
        storage = open_storage(f"{bucket.url}/run/10")
        take_claim(storage, "first")
        proxy.reset()
        take_claim(storage, "second")
        print(f"a claim, fake-gcs-server: {proxy.stats()['n']} requests")


def seconds_each(act: Callable[[int], object], count: int) -> float:
    times = []
    for number in range(count):
        started = time.perf_counter()
        act(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["latency", "follower", "memory", "requests", "claims"]
    for part in (latency, follower, memory, requests, claims):
        if part.__name__ in wanted:
            part()
