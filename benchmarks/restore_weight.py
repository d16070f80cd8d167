"""How fast `restore-weight` is against what a user would do instead. Each figure is a ratio taken in one run.

    python -m benchmarks.restore_weight [slab] [dense] [sharded] [--directory DIR] [--rounds N]

``slab``: a 1 MiB tensor out of a 2 GiB slab on gs://: which bytes are asked for.
``dense``: a 2 GiB dense tensor in four chunks, local, to .safetensors: against ``cat`` of its blobs into a file on the
same disk (both durable), and against ``torchsnapshot.read_object`` and ``torch.save``; time and peak memory.
``sharded``: a 256 MiB table in 64 shards on gs:// at 30 ms a request, row-wise and column-wise: against one ranged read
of as many bytes with gcsfs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.measure import python, report, run
from tests.support.servers import Bucket, mini_gcs
from tests.support.snapshots import local_writer, metadata, tensor_entry

MIB = 1 << 20


def _snapctl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "snapctl", *arguments]


# -- slab ------------------------------------------------------------------------------------------------------------


def bench_slab(directory: pathlib.Path, rounds: int) -> None:
    start = 1500 * MIB
    entries = {
        "0/m": {"type": "dict", "keys": ["t", "rest"]},
        "0/m/t": tensor_entry("batched/slab", [512, 512], byte_range=[start, start + MIB]),
        "0/m/rest": tensor_entry("batched/slab", [start // 4], byte_range=[0, start]),
    }
    output = directory / "bench-slab.npy"
    with mini_gcs() as server:
        Bucket(server.endpoint, "bench").write("10/.snapshot_metadata", metadata(entries))
        server.seed("bench", [("10/batched/slab", 2048 * MIB)])
        server.reset()
        command = _snapctl("restore-weight", "gs://bench/10", "m/t", "--force", "-o", str(output))
        seconds, peak = run(command, {"STORAGE_EMULATOR_HOST": server.endpoint})
        log = server.stats(log=True)["log"]
    output.unlink()
    media = [(entry[3], entry[6]) for entry in log if "alt=media" in entry[1]]
    print(f"1 MiB out of a 2 GiB slab on gs://: {len(log)} requests, {seconds:.2f} s, {peak // MIB} MiB at most")
    for span, size in media:
        print(f"      content: {span or 'the manifest'}: {size} bytes")
    ranged = [size for span, size in media if span]
    report("ranged reads of content", len(ranged), 1, unit="")
    report("bytes of these against the tensor's", sum(ranged) / MIB, 1)


# -- dense -----------------------------------------------------------------------------------------------------------


def bench_dense(directory: pathlib.Path, rounds: int) -> None:
    root = directory / "bench-dense"
    blobs = _write_dense(root)
    outputs = {name: directory / f"bench-dense.{name}" for name in ("cat", "safetensors", "pt")}
    theirs = python(
        "import os, torch, torchsnapshot, warnings; warnings.simplefilter('ignore'); "
        f"t = torchsnapshot.Snapshot('{root}/10').read_object('0/m/t'); "
        f"f = open('{outputs['pt']}', 'wb'); torch.save(t, f); f.flush(); os.fsync(f.fileno())"
    )
    commands = {
        "cat": ["sh", "-c", f"cat {' '.join(map(str, blobs))} > {outputs['cat']} && sync {outputs['cat']}"],
        "snapctl": _snapctl("restore-weight", str(root), "m/t", "-o", str(outputs["safetensors"])),
        "torchsnapshot": theirs,
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            for path in outputs.values():
                path.unlink(missing_ok=True)
            os.sync()
            found[name].append(run(command))
    shutil.rmtree(root)
    for path in outputs.values():
        path.unlink(missing_ok=True)
    seconds = {name: [took for took, _ in runs[1:]] for name, runs in found.items()}
    peaks = {name: max(peak for _, peak in runs) for name, runs in found.items()}
    print(f"2 GiB dense, local, to .safetensors: median of {rounds} after one unmeasured round")
    for name in commands:
        print(f"      {name}: {statistics.median(seconds[name]):.2f} s, {peaks[name] // MIB} MiB at most")
    report("time against cat", _ratio(seconds["snapctl"], seconds["cat"]), 1.3)
    report("torchsnapshot's time against ours", _ratio(seconds["torchsnapshot"], seconds["snapctl"]), 4, at_least=True)
    report("peak memory against torchsnapshot's", peaks["snapctl"] / peaks["torchsnapshot"], 0.1)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds: what slows a round slows both of its sides."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _write_dense(root: pathlib.Path) -> list[pathlib.Path]:
    rows = 131072
    chunks = []
    for offset in range(0, 4 * rows, rows):
        location = f"0/m/t_{offset}_0"
        path = root / "10" / location
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for _ in range(512):
                file.write(os.urandom(MIB))
        chunks.append({"offsets": [offset, 0], "sizes": [rows, 1024], "tensor": tensor_entry(location, [rows, 1024])})
    tensor = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [4 * rows, 1024], "chunks": chunks}
    entries = {"0/m": {"type": "dict", "keys": ["t"]}, "0/m/t": {**tensor, "replicated": False}}
    local_writer(root)("10/.snapshot_metadata", metadata(entries))
    return [root / "10" / chunk["tensor"]["location"] for chunk in chunks]


# -- sharded ---------------------------------------------------------------------------------------------------------


def bench_sharded(directory: pathlib.Path, rounds: int) -> None:
    import gcsfs.core
    import numpy as np

    from snapctl import read_tensor
    from tests.support.shards import Builder, grid

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
        system = gcsfs.core.GCSFileSystem(token="anon", skip_instance_cache=True)
        calls: dict[str, Callable[[], object]] = {
            "one ranged read": lambda: system.cat_file("bench/whole", start=0, end=table.nbytes),
            "row-wise": lambda: read_tensor("gs://bench/1", "m/t"),
            "column-wise": lambda: read_tensor("gs://bench/2", "m/t"),
        }
        assert np.array_equal(read_tensor("gs://bench/1", "m/t"), table)
        assert np.array_equal(read_tensor("gs://bench/2", "m/t"), table)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
    print(f"256 MiB in 64 shards on gs:// at 30 ms a request: median of {rounds}")
    for name, took in seconds.items():
        print(f"      {name}: {statistics.median(took):.2f} s")
    report("row-wise against one ranged read", _ratio(seconds["row-wise"], seconds["one ranged read"]), 2)
    report("column-wise against one ranged read", _ratio(seconds["column-wise"], seconds["one ranged read"]), 4)


BENCHMARKS = {"slab": bench_slab, "dense": bench_dense, "sharded": bench_sharded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="{" + ",".join(BENCHMARKS) + "}")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if unknown := set(chosen.which) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    for name in chosen.which or BENCHMARKS:
        BENCHMARKS[name](chosen.directory, chosen.rounds)


if __name__ == "__main__":
    main()
