"""Restoring, against what there is to use instead. Run: ``python -m benchmarks.restore`` (needs 10 GB of disk).

Each side runs in processes of its own, in turns; the time is that of the restore alone, without imports and without
making the state.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import report

MB = 1 << 20


# -- what runs in the processes --------------------------------------------------------------------------------------


def state_of(names: Sequence[str], tensors: int, elements: int, fill: float) -> dict[str, Any]:
    import torch
    import torchsnapshot

    return {
        name: torchsnapshot.StateDict(**{f"w{i}": torch.full((elements,), fill + i) for i in range(tensors)})
        for name in names
    }


def count_bytes(remote: bool) -> Callable[[], int]:
    """Tells how much this process has read: by any system call; from a bucket: what snapctl's storage was asked for."""
    if not remote:
        return lambda: int(pathlib.Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
    from snapctl.storage.gcs import GcsStorage

    counted = [0]
    range_of, whole_of = GcsStorage.read_range, GcsStorage.read

    def read_range(self: Any, path: str, start: int, end: int, **options: Any) -> bytes:
        counted[0] += end - start
        return range_of(self, path, start, end, **options)

    def read(self: Any, path: str, **options: Any) -> bytes:
        data = whole_of(self, path, **options)
        counted[0] += len(data)
        return data

    GcsStorage.read_range, GcsStorage.read = read_range, read  # type: ignore[method-assign]
    return lambda: counted[0]


def entry_point(root: pathlib.Path) -> None:
    """Makes the plugin visible to torchsnapshot in the processes to come, also where snapctl is not installed."""
    metadata = root / "entry/snapctl_for_benchmarks-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: snapctl-for-benchmarks\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[storage_plugins]\nsnapctl = snapctl.saving.plugin:open_plugin\n")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(metadata.parent), os.environ.get("PYTHONPATH", "")))


def side(kind: str, checkpoint: str, names: Sequence[str], tensors: int, elements: int) -> None:
    """One measured restore; prints its seconds and bytes."""
    import torch
    import torchsnapshot

    from snapctl import SaveOptions, Snapshot
    from snapctl.saving.plugin import plugin_url

    state = state_of(names, tensors, elements, 0.0)
    remote = "://" in checkpoint
    ours = Snapshot(checkpoint.rpartition("/")[0], dict(state), options=SaveOptions(checksums=kind != "unchecked"))
    theirs = torchsnapshot.Snapshot(plugin_url(checkpoint) if remote else checkpoint)
    torch.set_num_threads(2)
    bytes_so_far = count_bytes(remote)
    before, began = bytes_so_far(), time.perf_counter()
    if kind in ("ours", "unchecked"):
        ours.restore(checkpoint)
    elif kind == "torchsnapshot":
        theirs.restore(state)
    else:
        read_files(checkpoint, state)
    seconds = time.perf_counter() - began
    for name in names:
        for i in range(tensors):
            tensor = state[name][f"w{i}"]
            assert tensor[0] == 1.0 + i and tensor[-1] == 1.0 + i, (name, i)
    print(json.dumps({"seconds": seconds, "bytes": bytes_so_far() - before}))


def read_files(checkpoint: str, state: dict[str, Any]) -> None:
    """The same files into the same memory, one after the other."""
    manifest = json.loads((pathlib.Path(checkpoint) / ".snapshot_metadata").read_text())["manifest"]
    for path, entry in manifest.items():
        _, name, *key = path.split("/")
        if name not in state or not key:
            continue
        memory = memoryview(state[name][key[0]].numpy()).cast("B")
        for part in entry.get("chunks") or [{"offsets": [0], "tensor": entry}]:
            with open(pathlib.Path(checkpoint) / part["tensor"]["location"], "rb", buffering=0) as file:
                start = part["offsets"][0] * 4
                length = part["tensor"]["shape"][0] * 4
                done = 0
                while done < length:
                    done += file.readinto(memory[start + done : start + length])


# -- the comparisons -------------------------------------------------------------------------------------------------


def run_side(kind: str, checkpoint: str, names: Sequence[str], tensors: int, elements: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.restore", "--side", kind, checkpoint, ",".join(names)]
    done = subprocess.run([*command, str(tensors), str(elements)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_turns(kinds: Sequence[str], rounds: int, *args: Any) -> dict[str, dict[str, float]]:
    """Medians of several kinds of restore, in turns, after one unmeasured round."""
    held: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind in kinds:
            found = run_side(kind, *args)
            if number:
                held[kind].append(found)
    return {
        kind: {key: statistics.median(item[key] for item in found) for key in ("seconds", "bytes")}
        for kind, found in held.items()
    }


def three_objects(checkpoint: str, where: str, tensors: int, elements: int, rounds: int) -> bool:
    """A state of three objects: torchsnapshot reads all of the checkpoint for each."""
    names = ("a", "b", "c")
    found = in_turns(("ours", "torchsnapshot"), rounds, checkpoint, names, tensors, elements)
    ours, theirs = found["ours"], found["torchsnapshot"]
    size = 3 * tensors * elements * 4
    print(f"three objects, {size / MB:.0f} MB, {where}: {ours['seconds']:.2f} s and {ours['bytes'] / MB:.0f} MB read, "
          f"torchsnapshot {theirs['seconds']:.2f} s and {theirs['bytes'] / MB:.0f} MB")  # fmt: skip
    kept = report(f"time of restoring three objects, {where}", ours["seconds"] / theirs["seconds"], 0.5)
    return report(f"bytes of it, {where}", ours["bytes"] / theirs["bytes"], 0.34) and kept


def dense(root: pathlib.Path, rounds: int) -> bool:
    """2 GB of dense tensors against reading the same files into memory that is there already."""
    from snapctl import Snapshot

    tensors, elements = 16, 32 * MB  # 16 × 128 MB
    state = state_of(("a",), tensors, elements, 1.0)
    Snapshot(root / "dense", state).save(1).wait()
    del state
    args = (str(root / "dense/1"), ("a",), tensors, elements)
    found = in_turns(("ours", "unchecked", "files"), rounds, *args)
    files = found["files"]["seconds"]
    print(f"2 GB dense, local: files alone {files:.2f} s ({2048 / files:.0f} MB/s), with checksums "
          f"{found['ours']['seconds']:.2f} s, without {found['unchecked']['seconds']:.2f} s")  # fmt: skip
    kept = report("2 GB dense against reading the files, with checksums", found["ours"]["seconds"] / files, 1.2)
    ratio = found["unchecked"]["seconds"] / files
    return report("2 GB dense against reading the files, without checksums", ratio, 1.2) and kept


def resharding(root: pathlib.Path) -> bool:
    """From 4 ranks to 2, row-wise: bytes read against bytes needed."""
    from tests.support.ranks import run_ranks

    job = _job
    for world_size in (4, 2):
        outcomes = run_ranks(world_size, job, str(root / "reshard"), timeout=120)
        if any(outcome.error is not None for outcome in outcomes):
            raise RuntimeError(str(outcomes))
    needed = sum(outcome.value[0] for outcome in outcomes)
    read = sum(outcome.value[1] for outcome in outcomes)
    print(f"resharding 4 to 2 ranks, row-wise: {needed} bytes needed, {read} read")
    return report("bytes read of those needed, 4 to 2 ranks", read / needed, 1.0)


def _job(rank: int, directory: str) -> tuple[int, int]:
    from tests.restoring.test_restoring_ranks import row_job

    return row_job(rank, directory)


def three_locally(root: pathlib.Path, rounds: int) -> bool:
    import torchsnapshot

    state = state_of(("a", "b", "c"), 4, 16 * MB, 1.0)  # 3 × 4 × 64 MB
    torchsnapshot.Snapshot.take(str(root / "three/1"), state)
    return three_objects(str(root / "three/1"), "local", 4, 16 * MB, rounds)


def three_remotely(rounds: int) -> bool:
    """torchsnapshot's own GCS plugin knows no emulator: it reads through snapctl's storage, too."""
    from snapctl import Snapshot
    from tests.support.servers import Bucket, fake_gcs_server

    with fake_gcs_server() as endpoint:
        os.environ["STORAGE_EMULATOR_HOST"] = endpoint
        bucket = Bucket(endpoint, "bench")
        Snapshot(f"{bucket.url}/run", state_of(("a", "b", "c"), 8, 2 * MB, 1.0)).save(1).wait()  # 3 × 8 × 8 MB
        return three_objects(f"{bucket.url}/run/1", "fake-gcs-server", 8, 2 * MB, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", nargs=5, metavar=("KIND", "CHECKPOINT", "NAMES", "TENSORS", "ELEMENTS"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    options = parser.parse_args()
    if options.side:
        kind, checkpoint, names, tensors, elements = options.side
        side(kind, checkpoint, names.split(","), int(tensors), int(elements))
        return 0
    root = pathlib.Path(tempfile.mkdtemp(prefix="snapctl-restore-", dir=options.directory))
    entry_point(root)
    try:
        kept = [
            three_locally(root, options.rounds),
            three_remotely(options.rounds),
            dense(root, options.rounds),
            resharding(root),
        ]
    finally:
        shutil.rmtree(root)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
