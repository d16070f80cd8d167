"""`Snapshot.save` beside torchsnapshot alone: blocked and wall time, requests, memory. Ratios of one run.

::

    python -m benchmarks.saving local     # 2 GB into a directory, in tensors of 50 MB and of 512 MB
    python -m benchmarks.saving gcs       # 200 tensors of 1 MB to a fake-gcs-server, 0 and 20 ms away
    python -m benchmarks.saving memory    # peak extra memory

Each side is measured in turns, in processes of their own, after a `sync`, so that one side does not pay for the other's
dirty pages.
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
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.measure import report

MB = 1_000_000
TOTAL_BYTES = 2_000 * MB


# -- one side, in a process of its own -------------------------------------------------------------------------------


def _state(count: int, size_bytes: int) -> dict[str, Any]:
    import torch
    import torchsnapshot

    torch.manual_seed(0)
    return {"m": torchsnapshot.StateDict(**{f"w{i}": torch.rand(size_bytes // 4) for i in range(count)})}


def _resident_bytes(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(name)


def measure_here(side: str, url: str, count: int, size_bytes: int) -> dict[str, float]:
    """Saves once for warmth (a small state), then once for the record."""
    import torchsnapshot

    from snapctl import SaveOptions, Snapshot

    def save(path: str, state: dict[str, Any]) -> Callable[[], Any]:
        if side.startswith("bare"):
            return torchsnapshot.Snapshot.async_take(f"{path}/1", state).wait
        options = SaveOptions(fsync="fsync" in side, checksums="crc" in side)
        pending = Snapshot(path, state, options=options).save(1)

        def wait() -> None:  # what wait() returns needs an installed package, which is not what is measured
            pending._over.wait()
            assert pending._error is None, pending._error

        return wait

    if side.startswith("bare") and url.startswith("gs://"):
        _point_torchsnapshot_at_the_emulator()
    save(f"{url}/warm", _state(2, 1000))()
    state = _state(count, size_bytes)
    if url.startswith("gs://"):  # the proxy counts from here
        from tests.support.servers import Controlled

        Controlled(os.environ["STORAGE_EMULATOR_HOST"]).reset()
    os.sync()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident_bytes("VmRSS")
    started = time.perf_counter()
    wait = save(f"{url}/run", state)
    blocked = time.perf_counter() - started
    wait()
    wall = time.perf_counter() - started
    peak = _resident_bytes("VmHWM") - before
    started = time.perf_counter()
    clones = [tensor.clone() for tensor in state["m"].values()]
    clone = time.perf_counter() - started
    del clones
    return {"blocked": blocked, "wall": wall, "peak": peak, "clone": clone}


def _point_torchsnapshot_at_the_emulator() -> None:
    """It knows only the public endpoint and real credentials."""
    import google.auth.credentials
    from torchsnapshot.storage_plugins import gcs

    host = os.environ["STORAGE_EMULATOR_HOST"]
    gcs.default = lambda **_: (google.auth.credentials.AnonymousCredentials(), None)
    plugin = gcs.GCSStoragePlugin
    for name in ("UPLOAD_URL_TEMPLATE", "DOWNLOAD_URL_TEMPLATE"):
        setattr(plugin, name, getattr(plugin, name).replace("https://www.googleapis.com", host))


def measure(side: str, url: str, count: int, size_bytes: int, env: Mapping[str, str] | None = None) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.saving", "here", side, url, str(count), str(size_bytes)]
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_turns(sides: list[str], rounds: int, one: Callable[[str], dict[str, float]]) -> dict[str, dict[str, float]]:
    """The medians of every side; the turns begin with another side each round."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            found[side].append(one(side))
    return {
        side: {key: statistics.median(item[key] for item in items) for key in items[0]} for side, items in found.items()
    }


# -- a local directory -----------------------------------------------------------------------------------------------


def local(rounds: int) -> bool:
    kept = True
    sides = ["bare", "ours", "ours crc", "ours fsync", "ours crc fsync"]
    for size_bytes in (50 * MB, 512 * MB):
        count = TOTAL_BYTES // size_bytes

        def one(side: str, size_bytes: int = size_bytes, count: int = count) -> dict[str, float]:
            directory = tempfile.mkdtemp(prefix="snapctl-bench-")
            try:
                return measure(side, directory, count, size_bytes)
            finally:
                shutil.rmtree(directory)
                os.sync()

        found = in_turns(sides, rounds, one)
        print(f"\n{count} tensors of {size_bytes // MB} MB, medians of {rounds} rounds:")
        for side, item in found.items():
            print(f"  {side:15} blocked {item['blocked']:.2f} s, wall {item['wall']:.2f} s")
        bare, ours = found["bare"], found["ours"]
        copy = bare["clone"] if size_bytes > 128 * MB else 0.0  # torchsnapshot copies none of these: it is no snapshot
        what = "bare torchsnapshot and one clone of the state" if copy else "bare torchsnapshot"
        print(f"  one clone of the state: {bare['clone']:.2f} s")
        kept &= report(f"blocked, against {what}", ours["blocked"] / (bare["blocked"] + copy), 1.1)
        kept &= report(f"wall, against {what}", ours["wall"] / (bare["wall"] + copy), 1.1)
        for side in sides[2:]:
            print(f"      {side}: {found[side]['wall'] / ours['wall']:.2f}× the wall time without")
    return kept


# -- Google Cloud Storage --------------------------------------------------------------------------------------------


@contextmanager
def _bucket(latency_ms: float) -> Iterator[tuple[Any, Any]]:
    from tests.support.servers import Bucket, fake_gcs_server, fault_proxy

    with fake_gcs_server() as endpoint, fault_proxy(endpoint, latency_ms) as proxy:
        yield Bucket(endpoint, f"bench-{uuid.uuid4().hex[:8]}"), proxy


def gcs(rounds: int) -> bool:
    kept = True
    for latency_ms in (0, 20):
        for batching in ("off", "on"):

            def one(side: str, batching: str = batching, latency_ms: float = latency_ms) -> dict[str, float]:
                with _bucket(latency_ms) as (bucket, proxy):
                    env = {"TORCHSNAPSHOT_DISABLE_BATCHING": "1" if batching == "off" else "0"}
                    env["STORAGE_EMULATOR_HOST"] = proxy.endpoint
                    found = measure(side, bucket.url, 200, MB, env)
                    return {**found, "requests": proxy.stats()["n"]}

            found = in_turns(["bare", "ours crc fsync"], rounds, one)
            bare, ours = found["bare"], found["ours crc fsync"]
            print(f"\n200 tensors of 1 MB, batching {batching}, {latency_ms} ms a request, medians of {rounds} rounds:")
            for side, item in found.items():
                print(f"  {side:15} wall {item['wall']:.2f} s, {item['requests']:.0f} requests")
            limit = 0.6 if batching == "off" else 1.0
            kept &= report("wall, against torchsnapshot's own plugin", ours["wall"] / bare["wall"], limit)
            if batching == "off":
                kept &= report("requests, against its", ours["requests"] / bare["requests"], 0.51)
    return kept


# -- memory ----------------------------------------------------------------------------------------------------------


def memory() -> bool:
    print("\npeak extra memory of saving 2 GB:")
    for size_bytes in (50 * MB, 512 * MB):
        for side in ("bare", "ours crc fsync"):
            directory = tempfile.mkdtemp(prefix="snapctl-bench-")
            try:
                found = measure(side, directory, TOTAL_BYTES // size_bytes, size_bytes)
            finally:
                shutil.rmtree(directory)
            print(f"  tensors of {size_bytes // MB} MB, {side}: {found['peak'] / TOTAL_BYTES:.2f}× the state")
    return True


def main() -> int:
    if sys.argv[1:2] == ["here"]:
        side, url, count, size_bytes = sys.argv[2:]
        print(json.dumps(measure_here(side, url, int(count), int(size_bytes))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["local", "gcs", "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    work = {"local": lambda: local(arguments.rounds), "gcs": lambda: gcs(arguments.rounds), "memory": memory}
    return 0 if work[arguments.what]() else 1


if __name__ == "__main__":
    sys.exit(main())
