"""How fast `restore-weight` is against what a user would do instead. Each figure is a ratio taken in one run.

    python benchmarks/restore_weight.py slab | dense | sharded [--directory DIR] [--rounds N]

``slab``: a 1 MiB tensor out of a 2 GiB slab on gs://: requests and bytes.
``dense``: a 2 GiB dense tensor of four chunks, local, to .safetensors: against ``cat`` of its blobs and fsync, and
against ``torchsnapshot.read_object`` and ``torch.save``; time and peak memory of the whole processes.
``sharded``: a 256 MiB table in 64 shards on gs:// at 30 ms a request, row-wise and column-wise: against one ranged read
of as many bytes through gcsfs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.support.servers import Bucket, mini_gcs
from tests.support.shards import Builder, grid
from tests.support.snapshots import local_writer, metadata, tensor_entry

MIB = 1 << 20


def _run(command: list[str]) -> tuple[float, int]:
    """Seconds and peak memory in MiB of a process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)[:200]}")
    return time.perf_counter() - started, usage.ru_maxrss // 1024


def _snapctl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "snapctl", *arguments]


# -- slab ------------------------------------------------------------------------------------------------------------


def bench_slab(directory: pathlib.Path, rounds: int) -> None:
    slab_bytes, start = 2048 * MIB, 1500 * MIB
    entries = {
        "0/m": {"type": "dict", "keys": ["t", "rest"]},
        "0/m/t": tensor_entry("batched/slab", [512, 512], byte_range=[start, start + MIB]),
        "0/m/rest": tensor_entry("batched/slab", [start // 4], byte_range=[0, start]),
    }
    with mini_gcs() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
        Bucket(server.endpoint, "bench").write("10/.snapshot_metadata", metadata(entries))
        server.seed("bench", [("10/batched/slab", slab_bytes)])
        server.reset()
        output = directory / "bench-slab.npy"
        seconds, peak = _run(_snapctl("restore-weight", "gs://bench/10", "m/t", "--force", "-o", str(output)))
        assert output.stat().st_size == MIB + 128
        output.unlink()
        log = server.stats(log=True)["log"]
    media = [(entry[3], entry[6]) for entry in log if "alt=media" in entry[1]]
    print(f"1 MiB out of a 2 GiB slab on gs://: {len(log)} requests, {seconds:.2f} s, {peak} MiB at most")
    for span, size in media:
        print(f"  content: {span or 'the whole manifest'}: {size} bytes")


# -- dense -----------------------------------------------------------------------------------------------------------


def bench_dense(directory: pathlib.Path, rounds: int) -> None:
    root = directory / "bench-dense"
    blobs = _write_dense(root)
    out = {name: directory / f"bench-{name}" for name in ("cat", "snapctl.safetensors", "torchsnapshot.pt")}
    script = (
        "import sys, torch, torchsnapshot; "
        "t = torchsnapshot.Snapshot(sys.argv[1]).read_object('0/m/t'); "
        "f = open(sys.argv[2], 'wb'); torch.save(t, f); f.flush(); import os; os.fsync(f.fileno())"
    )
    commands = {
        "cat": ["sh", "-c", f"cat {' '.join(map(str, blobs))} > {out['cat']} && sync {out['cat']}"],
        "snapctl": _snapctl("restore-weight", str(root), "m/t", "--force", "-o", str(out["snapctl.safetensors"])),
        "torchsnapshot": [sys.executable, "-W", "ignore", "-c", script, f"{root}/10", str(out["torchsnapshot.pt"])],
    }
    found = _compare(commands, rounds, clean=list(out.values()))
    shutil.rmtree(root)
    _report("2 GiB dense, local", found)


def _write_dense(root: pathlib.Path) -> list[pathlib.Path]:
    write = local_writer(root)
    rng = np.random.default_rng(0)
    boxes = grid((524288, 1024), (4, 1))
    chunks = []
    for offsets, sizes in boxes:
        location = f"0/m/t_{offsets[0]}_0"
        write(f"10/{location}", rng.bytes(512 * MIB))
        chunks.append({"offsets": list(offsets), "sizes": list(sizes), "tensor": tensor_entry(location, list(sizes))})
    entry = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [524288, 1024], "chunks": chunks}
    write(
        "10/.snapshot_metadata",
        metadata({"0/m": {"type": "dict", "keys": ["t"]}, "0/m/t": {**entry, "replicated": False}}),
    )
    return [root / "10" / chunk["tensor"]["location"] for chunk in chunks]


def _compare(
    commands: dict[str, list[str]], rounds: int, *, clean: list[pathlib.Path]
) -> dict[str, list[tuple[float, int]]]:
    """Every command once in each round, the disk at rest before each."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            for path in clean:
                path.unlink(missing_ok=True)
            os.sync()
            found[name].append(_run(command))
    for path in clean:
        path.unlink(missing_ok=True)
    return found


def _report(title: str, found: dict[str, list[tuple[float, int]]]) -> None:
    print(f"{title}: median of {len(found['snapctl'])}")
    ours = found["snapctl"]
    for name, runs in found.items():
        seconds = statistics.median(run[0] for run in runs)
        ratio = statistics.median(run[0] / own[0] for run, own in zip(runs, ours, strict=True))
        peak = max(run[1] for run in runs)
        print(f"  {name:14} {seconds:6.2f} s  {peak:5d} MiB   takes {ratio:.2f} times as long as snapctl")


# -- sharded ---------------------------------------------------------------------------------------------------------


def bench_sharded(directory: pathlib.Path, rounds: int) -> None:
    import gcsfs.core

    from snapctl import read_tensor

    table = np.random.default_rng(0).integers(0, 1 << 30, (1 << 17, 512), dtype=np.int32)
    with mini_gcs() as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint
        bucket = Bucket(server.endpoint, "bench")
        bucket.write("whole", table.tobytes())
        for step, cuts in ((1, (64, 1)), (2, (1, 64))):
            builder = Builder(bucket.write, step)
            builder.sharded("m/t", table, {rank: [box] for rank, box in enumerate(grid(table.shape, cuts))})
            builder.finish(64)
        server.configure(latency=0.03)

        def baseline() -> bytes:
            system = gcsfs.core.GCSFileSystem(token="anon", skip_instance_cache=True)
            return bytes(system.cat_file("bench/whole", start=0, end=table.nbytes))

        calls: dict[str, Callable[[], object]] = {
            "one ranged read": baseline,
            "row-wise": lambda: read_tensor("gs://bench/1", "m/t"),
            "column-wise": lambda: read_tensor("gs://bench/2", "m/t"),
        }
        assert np.array_equal(read_tensor("gs://bench/1", "m/t"), table)
        assert np.array_equal(read_tensor("gs://bench/2", "m/t"), table)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
    print(f"256 MiB in 64 shards on gs:// at 30 ms a request: median of {rounds}")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times["one ranged read"], strict=True))
        print(f"  {name:16} {statistics.median(seconds):6.2f} s   {ratio:.2f} times one ranged read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["slab", "dense", "sharded"])
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    {"slab": bench_slab, "dense": bench_dense, "sharded": bench_sharded}[chosen.which](chosen.directory, chosen.rounds)


if __name__ == "__main__":
    main()
