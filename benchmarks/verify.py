"""verify against what a user would do instead: python -m benchmarks.verify [NAME…]"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Process

import google_crc32c
import numpy as np

from benchmarks.measure import in_turns, python, report, run
from snapctl.save_record import BlobSum, SaveRecord, format_save_record
from tests.support.servers import Bucket, mini_gcs
from tests.support.snapshots import metadata, tensor_entry

SNAPCTL = [sys.executable, "-m", "snapctl"]
LOOP = """
import os, sys
import google_crc32c
for directory, _, names in os.walk(sys.argv[1]):
    for name in sorted(names):
        crc = 0
        with open(os.path.join(directory, name), "rb", buffering=0) as file:
            while data := file.read(4 << 20):
                crc = google_crc32c.extend(crc, data)
"""
"""Reads the files of a directory and takes their CRC32C."""


def _write_checkpoint(root: pathlib.Path, blobs: int, blob_bytes: int, *, in_slab: int) -> None:
    """A checkpoint of float32 tensors with a save record: a blob each, or so many in each slab."""
    step = root / "10"
    manifest: dict[str, object] = {}
    sums = {}
    rng = np.random.default_rng(0)
    data = rng.standard_normal(blob_bytes // 4, dtype=np.float32)
    for number in range(blobs):
        data[:2] = number
        location = f"batched/{number:08x}" if in_slab else f"0/model/w{number}"
        path = step / location
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.tobytes())
        sums[location] = BlobSum(data.nbytes, int(google_crc32c.value(data.view(np.uint8))))
        each = data.nbytes // max(in_slab, 1) // 4 * 4
        for part in range(in_slab or 1):
            span = [part * each, (part + 1) * each] if in_slab else None
            shape = [each // 4] if in_slab else [data.size]
            manifest[f"0/model/w{number}{f'_{part}' if in_slab else ''}"] = tensor_entry(
                location, shape, byte_range=span
            )
    keys = [path.removeprefix("0/model/") for path in manifest]
    content = metadata({"0/model": {"type": "dict", "keys": keys}, **manifest})
    (step / ".snapctl").mkdir()
    head = BlobSum(len(content), int(google_crc32c.value(content)))
    (step / ".snapctl" / "save.json").write_bytes(format_save_record(SaveRecord(time.time(), 1, head, blobs=sums)))
    (step / ".snapshot_metadata").write_bytes(content)


def data() -> bool:
    """`--level data` of 4 GB on a local disk, in the page cache, against a loop that reads and sums the same files."""
    kept = True
    for what, in_slab, finite in (
        ("64 MB blobs", 0, False),
        ("slabs of 64 tensors", 64, False),
        ("64 MB blobs, --finite", 0, True),
        ("slabs of 1,000 tensors", 1000, False),
    ):
        with tempfile.TemporaryDirectory() as root:
            writer = Process(
                target=_write_checkpoint, args=(pathlib.Path(root), 64, 64 << 20), kwargs={"in_slab": in_slab}
            )
            writer.start()  # a process of its own: a child's resident size begins with that of its parent
            writer.join()
            command = [*SNAPCTL, "verify", root, "--level", "data", *(["--finite"] if finite else [])]
            ours, theirs = in_turns(command, [*python(LOOP), root], rounds=5)
            print(f"      {what}: {ours.seconds:.2f} s, the loop {theirs.seconds:.2f} s, 4 GB")
            ratio = theirs.seconds / ours.seconds
            if in_slab < 1000:
                limit = 0.8 if not finite else 0.3
                kept &= report(f"verify --level data, throughput, {what}", ratio, limit, at_least=True)
            else:  # half of it is the manifest of 64,000 entries
                print(f"      verify --level data, throughput, {what}: {ratio:.2f}×")
            kept &= report(f"verify --level data, resident, {what}", ours.peak_bytes / 1e6, 300, unit=" MB")
    return kept


def remote() -> bool:
    """`--level size --all` of 1,000 checkpoints × 50 blobs at 30 ms a request."""
    with mini_gcs() as server, tempfile.TemporaryDirectory():
        bucket = Bucket(server.endpoint, "bk")
        steps = range(1000, 1_001_000, 1000)
        names = [f"0/model/w{number}" for number in range(50)]
        server.seed("bk", [(f"run/{step}/{name}", 400_000) for step in steps for name in names])
        entries = {name: tensor_entry(name, [1000, 100]) for name in names}
        keys = [name.removeprefix("0/model/") for name in names]
        content = metadata({"0/model": {"type": "dict", "keys": keys}, **entries})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda step: bucket.write(f"run/{step}/.snapshot_metadata", content), steps))
        server.configure(latency=0.03, faults=[])
        env = {**os.environ, "STORAGE_EMULATOR_HOST": server.endpoint}
        rounds = []
        for _ in range(3):
            server.reset()
            rounds.append(run([*SNAPCTL, "verify", "gs://bk/run", "--all"], env)[0])
        requests = server.stats()["n"]
        kept = report("verify --level size --all, 1,000 × 50 on GCS, requests", requests, 1080, unit="")
        return kept & report("verify --level size --all, 1,000 × 50 on GCS", sorted(rounds)[1], 3, unit=" s")


def structure() -> bool:
    """`--level structure` of 200,000 entries against json.load of the same manifest."""
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root, "10", ".snapshot_metadata")
        path.parent.mkdir()
        entries = {f"0/model/w{n}": tensor_entry(f"0/model/w{n}", [1000, 100]) for n in range(200_000)}
        keys = [name.removeprefix("0/model/") for name in entries]
        path.write_bytes(metadata({"0/model": {"type": "dict", "keys": keys}, **entries}))
        load = python(f"import json; json.load(open({str(path)!r}))")
        ours, theirs = in_turns([*SNAPCTL, "verify", root, "--level", "structure"], load, rounds=5)
        print(f"      structure of 200,000 entries {ours.seconds:.2f} s, json.load {theirs.seconds:.2f} s")
        return report("verify --level structure, 200,000 entries, against json.load", ours.seconds / theirs.seconds, 6)


BENCHMARKS = {"data": data, "remote": remote, "structure": structure}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(BENCHMARKS)
    results = [BENCHMARKS[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
