"""list --recursive over a large bucket against the fastest flat listing: python -m benchmarks.save_dirs [NAME…]"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import google_crc32c

from benchmarks.measure import in_turns, python, report, run
from snapctl.save_record import BlobSum, RankTimings, SaveRecord, format_save_record
from tests.support.servers import Bucket, Controlled, mini_gcs
from tests.support.snapshots import metadata, primitive

LIST = [sys.executable, "-m", "snapctl", "list", "--recursive"]
FLAT = """
import asyncio, sys
from urllib.parse import urlencode
import aiohttp, msgspec

class Item(msgspec.Struct, gc=False):
    name: str
    size: str

class Page(msgspec.Struct):
    items: list[Item] = []
    prefixes: list[str] = []
    nextPageToken: str = ""

endpoint, bucket, jobs = sys.argv[1], sys.argv[2], int(sys.argv[3])
decode = msgspec.json.Decoder(Page).decode

async def main():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=jobs)) as session:
        async def pages(prefix, **extra):
            query = {"prefix": prefix, "fields": "nextPageToken,prefixes,items(name,size)", **extra}
            while True:
                async with session.get(f"{endpoint}/storage/v1/b/{bucket}/o?{urlencode(query)}") as answer:
                    page = decode(await answer.read())
                yield page
                if not page.nextPageToken:
                    return
                query["pageToken"] = page.nextPageToken

        todo = iter([prefix async for page in pages("", delimiter="/") for prefix in page.prefixes])
        totals = [0, 0]

        async def work():
            for prefix in todo:
                async for page in pages(prefix):
                    totals[0] += len(page.items)
                    totals[1] += sum(int(item.size) for item in page.items)

        await asyncio.gather(*(work() for _ in range(jobs)))
        print(*totals)

asyncio.run(main())
"""
"""Names and sizes of all objects, a listing for each run and so many at a time; adds them up and keeps nothing."""


def seed(server: Controlled, runs: int, checkpoints: int, objects: int) -> int:
    """Runs of checkpoints of so many objects each, the manifest one of them; half of them evaluated; the newest of each
    run with a save record. Returns how many objects there are."""
    bucket = Bucket(server.endpoint, "bk")
    blobs = [".snapshot_metadata", *(f"0/model/layers.{number}.weight" for number in range(objects - 1))]
    for run_number in range(runs):
        names = [
            (f"run-{run_number:03}/{step}/{name}", 400_000 if name.startswith("0/") else 0 if "/" in name else 9000)
            for step in range(0, checkpoints * 1000, 1000)
            for name in [*blobs, *(["evaled_by/val_DONE"] if step % 2000 else [])]
        ]
        server.seed("bk", names)
    manifest = metadata(
        {"0/extra_state": {"type": "dict", "keys": ["step"]}, "0/extra_state/step": primitive("int", "1")}
    )
    head = BlobSum(len(manifest), int(google_crc32c.value(manifest)))
    record = format_save_record(SaveRecord(time.time(), 1, head, (RankTimings(0, 0.1, 2.0, 10**9),)))
    newest = [f"run-{number:03}/{(checkpoints - 1) * 1000}" for number in range(runs)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: bucket.write(f"{path}/.snapshot_metadata", manifest), newest))
        list(pool.map(lambda path: bucket.write(f"{path}/.snapctl/save.json", record), newest))
    return runs * checkpoints * objects + runs * checkpoints // 2 + runs


def _measure(server: Controlled, what: str, objects: int, *, limit: float = 1.3) -> bool:
    server.configure(latency=0.03, faults=[])
    env = {**os.environ, "STORAGE_EMULATOR_HOST": server.endpoint}
    flats = {jobs: [*python(FLAT), server.endpoint, "bk", str(jobs)] for jobs in (16, 32, 64)}
    best = min(flats, key=lambda jobs: run(flats[jobs], env)[0])
    with_credentials = [*python("import gcsfs.core\n" + FLAT), server.endpoint, "bk", str(best)]
    ours, theirs = in_turns([*LIST, "gs://bk"], flats[best], rounds=3, env=env)
    again, authorized = in_turns([*LIST, "gs://bk"], with_credentials, rounds=3, env=env)
    print(f"      {what}: {ours.seconds:.2f} s, the flat listing ({best} at a time) {theirs.seconds:.2f} s")
    print(f"      again: {again.seconds:.2f} s, with gcsfs imported for its credentials {authorized.seconds:.2f} s")
    server.reset()
    run([*LIST, "gs://bk", "--json"], env)
    per_thousand = server.stats()["n"] / objects * 1000
    kept = report(f"list --recursive, {what}, against the fastest flat listing", ours.seconds / theirs.seconds, limit)
    kept &= report("  the same, against one that could log in", again.seconds / authorized.seconds, limit)
    kept &= report("  requests for each 1,000 objects, records included", per_thousand, 2, unit="")
    return kept & report("  resident", ours.peak_bytes / 1e6, 300, unit=" MB")


def fleet() -> bool:
    """100 runs × 100 checkpoints × 50 objects, half of them evaluated, at 30 ms a request."""
    with mini_gcs() as server:
        return _measure(server, "100 runs × 100 checkpoints × 50 objects", seed(server, 100, 100, 50))


def one_run() -> bool:
    """A single run with as many objects as ten of these: nothing to cut at but its checkpoints."""
    with mini_gcs() as server:
        return _measure(server, "1 run × 1,000 checkpoints × 50 objects", seed(server, 1, 1000, 50), limit=1.0)


def first_line() -> bool:
    """How long until the first line is there, of the time of all."""
    import subprocess

    with mini_gcs() as server:
        seed(server, 100, 50, 50)
        server.configure(latency=0.03, faults=[])
        env = {**os.environ, "STORAGE_EMULATOR_HOST": server.endpoint}
        began = time.perf_counter()
        with subprocess.Popen([*LIST, "gs://bk", "--json"], stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            json.loads(process.stdout.readline())
            first = time.perf_counter() - began
            process.stdout.read()
        whole = time.perf_counter() - began
        print(f"      the first line after {first:.2f} s of {whole:.2f} s")
        return report("list --recursive: the first line, of the time of all", first / whole, 0.7)


BENCHMARKS = {"fleet": fleet, "one-run": one_run, "first-line": first_line}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(BENCHMARKS)
    results = [BENCHMARKS[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
