"""`verify --dask` with two workers against `--jobs 1`, on the data of one machine: python -m benchmarks.cluster

The checkpoints share their blobs (hard links), which stay in the page cache: what is measured is reading, summing and
counting, and what a cluster adds to it. Both sides are whole commands, their start included; a second figure leaves the
start out, which is the time of the same command over next to nothing.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import tempfile

from benchmarks.measure import report, run
from benchmarks.verify import SNAPCTL, _write_checkpoint
from tests.support.dask_cluster import dask_processes

BLOBS = 32
BLOB_BYTES = 64 << 20
STEPS = 64
ROUNDS = 2


def _link_checkpoints(root: pathlib.Path) -> None:
    """As many checkpoints as wanted, of the same files."""
    first = root / "10"
    for number in range(1, STEPS):
        step = root / str(10 * (number + 1))
        for path in sorted(first.rglob("*")):
            if path.is_dir():
                (step / path.relative_to(first)).mkdir(parents=True, exist_ok=True)
            else:
                (step / path.relative_to(first)).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, step / path.relative_to(first))


def main() -> bool:
    kept = True
    with tempfile.TemporaryDirectory() as directory:
        root, small = pathlib.Path(directory, "run"), pathlib.Path(directory, "small")
        _write_checkpoint(root, BLOBS, BLOB_BYTES, in_slab=0)
        _write_checkpoint(small, 1, 4000, in_slab=0)
        _link_checkpoints(root)
        with dask_processes(pathlib.Path(directory, "cluster"), 2) as cluster:
            for what, options in (("CRC32C", []), ("CRC32C and --finite", ["--finite"])):
                command = [*SNAPCTL, "verify", "--all", "--level", "data", *options]
                sides = {"alone": ["--jobs", "1"], "cluster": ["--dask", cluster.address]}
                seconds: dict[str, list[float]] = {name: [] for name in sides}
                starts: dict[str, list[float]] = {name: [] for name in sides}
                for round_number in range(ROUNDS + 1):
                    for name, more in sides.items():
                        whole, start = run([*command, str(root), *more])[0], run([*command, str(small), *more])[0]
                        if round_number:
                            seconds[name].append(whole)
                            starts[name].append(start)
                whole_of = {name: statistics.median(found) for name, found in seconds.items()}
                work_of = {name: whole_of[name] - statistics.median(starts[name]) for name in sides}
                size = STEPS * BLOBS * BLOB_BYTES / 1e9
                told = ", ".join(
                    f"{name} {whole_of[name]:.2f} s ({work_of[name]:.2f} s without its start)" for name in sides
                )
                print(f"      {what}, {size:.0f} GB: {told}", flush=True)
                kept &= report(
                    f"{what}, two workers against --jobs 1", whole_of["alone"] / whole_of["cluster"], 1.6, at_least=True
                )
                report(
                    f"{what}, without the start of either", work_of["alone"] / work_of["cluster"], 1.6, at_least=True
                )
    return kept


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
