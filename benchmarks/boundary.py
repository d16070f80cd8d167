"""list, latest and show against what a user would use instead: python -m benchmarks.boundary [NAME…]"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from urllib.parse import parse_qsl, urlsplit

from benchmarks.measure import in_turns, python, report, run
from tests.support.servers import Bucket, mini_gcs
from tests.support.snapshots import metadata, tensor_entry

SNAPCTL = [sys.executable, "-m", "snapctl"]
TYPER_APP = "import typer\napp = typer.Typer()\n@app.command()\ndef main(path: str):\n    print(path)\napp()\n"
LOOP = """
import os, sys
def loop(root):
    for entry in os.scandir(root):
        if entry.name.isdecimal() and entry.is_dir():
            for inner in os.scandir(entry.path):
                if inner.name == ".snapshot_metadata":
                    inner.stat()
"""
SCAN_LOOP = LOOP + "loop(sys.argv[1])\n"
IN_PROCESS = (
    LOOP
    + """
import statistics, time
from snapctl.checkpoints import find_checkpoints, open_save_dir
def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
rounds = [
    (seconds(lambda: list(find_checkpoints(open_save_dir(sys.argv[1])))), seconds(lambda: loop(sys.argv[1])))
    for _ in range(9)
]
print(*(statistics.median(side) for side in zip(*rounds)))
"""
)
"""The same without the start of Python and of the command line, in turns in one process."""
GCS_LOOP = """
import sys, json
import gcsfs.core, fsspec.asyn, asyncio
fs = gcsfs.core.GCSFileSystem(token="anon", skip_instance_cache=True, use_listings_cache=False)
async def get(params):
    return await fs._call("GET", "b/{}/o", "bk", json_out=True, **params)
async def chain(requests):
    for params in requests:
        await get(params)
async def all(requests):
    first, rest = requests[:1], requests[1:]
    await chain(first)
    await asyncio.gather(*(chain(rest[n::16]) for n in range(16)))
fsspec.asyn.sync(fs.loop, all, json.loads(sys.argv[1]))
"""
"""The very listing requests of `list`, by gcsfs's core class, 16 at once, their answers decoded and dropped."""


def latest() -> bool:
    """`latest`, local, against a Typer app of one command and one argument."""
    with tempfile.TemporaryDirectory() as root:
        app = pathlib.Path(root, "app.py")
        app.write_text(TYPER_APP)
        step = pathlib.Path(root, "run", "10")
        step.mkdir(parents=True)
        (step / ".snapshot_metadata").write_bytes(metadata({}))
        ours, theirs = in_turns([*SNAPCTL, "latest", f"{root}/run"], [sys.executable, str(app), "x"], rounds=25)
        print(f"      latest {ours.seconds:.3f} s, a Typer app {theirs.seconds:.3f} s")
        return report("latest, local, against a Typer app", ours.seconds / theirs.seconds, 1.5)


def manifest() -> bool:
    """`show --depth 1` of 200,000 entries against json.load, and against torchsnapshot's own reader."""
    with tempfile.TemporaryDirectory() as root:
        entries = {"0/model": {"type": "dict", "keys": []}}
        for number in range(200_000):
            entries[f"0/model/layer{number}.weight"] = tensor_entry("0/model/w", [4])
        step = pathlib.Path(root, "10")
        step.mkdir()
        path = step / ".snapshot_metadata"
        path.write_bytes(metadata(entries))
        load = python(f"import json\njson.load(open({str(path)!r}))")
        ours, theirs = in_turns([*SNAPCTL, "show", root, "--depth", "1"], load, rounds=7)
        print(f"      show --depth 1 {ours.seconds:.2f} s, json.load {theirs.seconds:.2f} s")
        kept = report("show --depth 1 of 200,000 entries, against json.load", ours.seconds / theirs.seconds, 1.0)
        parse = (
            "import time, resource\n{imports}\ndata = open({path!r}, {mode!r}).read()\nbegan = time.perf_counter()\n"
            "kept = {call}\nprint(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        ours_parse = _parse_figures(
            parse.format(
                imports="from snapctl.manifest import parse_manifest", path=str(path), mode="rb",
                call="parse_manifest(data)",
            )
        )  # fmt: skip
        theirs_parse = _parse_figures(
            parse.format(
                imports="from torchsnapshot.manifest import SnapshotMetadata", path=str(path), mode="r",
                call="SnapshotMetadata.from_yaml(data)",
            )
        )  # fmt: skip
        print(f"      parse_manifest {ours_parse[0]:.2f} s, from_yaml {theirs_parse[0]:.2f} s")
        faster = theirs_parse[0] / ours_parse[0]
        kept &= report("parsing it, faster than from_yaml by", faster, 40, at_least=True)
        return kept & report("and in so much of its memory", ours_parse[1] / theirs_parse[1], 0.25)


def _parse_figures(code: str) -> tuple[float, float]:
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), float(peak)


def gcs() -> bool:
    """`list` and `latest` of 1,000 checkpoints of 50 blobs on the small GCS at 30 ms a request."""
    kept = True
    with mini_gcs(30) as server:
        bucket = Bucket(server.endpoint, "bk")
        body = metadata({"0/m": {"type": "dict", "keys": []}})
        names = [(f"run/{step}/0/m/w{blob:02}", 1000) for step in range(1000) for blob in range(50)]
        server.seed(bucket.name, names)
        server.configure(latency=0)
        for step in range(1000):
            bucket.write(f"run/{step}/.snapshot_metadata", body)
        server.configure(latency=0.03)
        env = {"STORAGE_EMULATOR_HOST": server.endpoint}
        counts = {}
        for name, command in (
            ("list", ["list", "gs://bk/run"]),
            ("list --long", ["list", "--long", "gs://bk/run"]),
            ("latest", ["latest", "gs://bk/run"]),
        ):
            server.reset()
            seconds, _ = run([*SNAPCTL, *command], env)
            counts[name] = server.stats()["n"]
            print(f"      {name}: {seconds:.2f} s")
            kept &= report(f"{name}: requests", counts[name], 8 if name == "latest" else 80, unit="")
        server.reset()
        run([*SNAPCTL, "list", "gs://bk/run"], env)
        asked = [urlsplit(entry[1]) for entry in server.stats(log=True)["log"]]
        loop = [*python(GCS_LOOP), json.dumps([dict(parse_qsl(url.query)) for url in asked if url.path.endswith("/o")])]
        server.reset()
        run(loop, env)
        print(f"      the plain process makes {server.stats()['n']} requests")
        ours, theirs = in_turns([*SNAPCTL, "list", "gs://bk/run"], loop, rounds=7, env=env)
        print(f"      list {ours.seconds:.2f} s, as many requests by gcsfs {theirs.seconds:.2f} s")
        kept &= report("list, against as many requests", ours.seconds / theirs.seconds, 1.4)
    return kept


def local() -> bool:
    """`list` of 10,000 local checkpoints against a plain loop with the same system calls."""
    with tempfile.TemporaryDirectory() as root:
        for step in range(10_000):
            path = pathlib.Path(root, str(step))
            path.mkdir()
            (path / "0").mkdir()
            (path / ".snapshot_metadata").write_bytes(b"{}")
        loop = [*python(SCAN_LOOP), root]
        done = subprocess.run([*python(IN_PROCESS), root], capture_output=True, text=True, check=True)
        ours, plain = map(float, done.stdout.split())
        print(f"      find_checkpoints {ours:.3f} s, the loop {plain:.3f} s")
        kept = report("finding 10,000, against a plain loop", ours / plain, 1.3)
        quiet, loop_process = in_turns([*SNAPCTL, "list", "--quiet", root], loop, rounds=7)
        table, _ = in_turns([*SNAPCTL, "list", root], loop, rounds=7)
        print(
            f"      list -q {quiet.seconds:.2f} s, the loop {loop_process.seconds:.2f} s, table {table.seconds:.2f} s"
        )
        return kept & report("the table takes longer by", table.seconds - quiet.seconds, 0.5, unit=" s")


BENCHMARKS = {"latest": latest, "manifest": manifest, "gcs": gcs, "local": local}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(BENCHMARKS)
    results = [BENCHMARKS[name]() for name in chosen]
    print(json.dumps(dict(zip(chosen, results, strict=True))))
