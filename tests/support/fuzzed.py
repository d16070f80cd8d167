"""The manifest parser, and show, verify and restore-weight, over mutations of small snapshots; in one process."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

from snapctl.checkpoints import read_manifest
from snapctl.errors import ManifestError
from snapctl.inspection import extra_state_values, group_layers, roll_up, summarize
from snapctl.manifest import parse_manifest
from snapctl.storage import open_storage
from tests.support.attacked import Done, run_commands
from tests.support.mutations import dump, mutate_bytes, mutate_document
from tests.support.random_snapshots import Snapshot, full_snapshot, random_snapshot
from tests.support.repository import DATA
from tests.support.snapshots import local_writer, metadata

SECONDS_FOR_EACH = 5.0


@dataclass
class Fuzzed:
    """What came of it."""

    mutations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0

    def note(self, outcome: str, seconds: float) -> None:
        self.mutations += 1
        self.outcomes[outcome] += 1
        self.longest_seconds = max(self.longest_seconds, seconds)


def real_manifests() -> list[bytes]:
    """Manifests that releases of torchsnapshot wrote, JSON and YAML, as far as they are small."""
    found = sorted(DATA.rglob(".snapshot_metadata"))
    return [data for path in found if len(data := path.read_bytes()) < 20_000]


def fuzz_parser(seed: int, count: int) -> Fuzzed:
    """Parses mutations, and does to what could be parsed all that is done without reading a blob."""
    seeds = [*real_manifests(), *(_manifest_of(random_snapshot(number)) for number in range(5))]
    documents = [yaml.safe_load(data) for data in seeds]
    result = Fuzzed()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        data = (
            mutate_bytes(rng.choice(seeds), rng)
            if rng.random() < 0.5
            else dump(mutate_document(rng.choice(documents), rng))
        )
        started = time.perf_counter()
        try:
            outcome = _look(data)
        except Exception as error:
            outcome = "bug"
            result.complaints.append(f"parser {seed} {number}: {type(error).__name__}: {error}: {data[:300]!r}")
        seconds = time.perf_counter() - started
        if seconds > SECONDS_FOR_EACH:
            result.complaints.append(f"parser {seed} {number}: {seconds:.1f} s")
        result.note(outcome, seconds)
    return result


def _look(data: bytes) -> str:
    try:
        manifest = parse_manifest(data)
    except ManifestError as error:
        str(error).encode("utf-8", "surrogatepass")
        return error.kind
    entries = manifest.logical_entries()
    summarize(manifest)
    extra_state_values(manifest)
    roll_up(manifest, 2)
    group_layers(entries)
    return "parsed"


def _manifest_of(snapshot: Snapshot) -> bytes:
    return metadata(snapshot.manifest, snapshot.world_size)


# -- commands --------------------------------------------------------------------------------------------------------

_FORMS: tuple[Callable[[str, str, str], list[str]], ...] = (
    lambda path, name, out: ["show", path, "--json", "--values"],
    lambda path, name, out: ["show", path, "--values"],
    lambda path, name, out: ["show", path, "--group"],
    lambda path, name, out: ["show", path, "--depth", "1", "--rank", "0"],
    lambda path, name, out: ["verify", path, "--json"],
    lambda path, name, out: ["verify", path, "--level", "structure"],
    lambda path, name, out: ["verify", path, "--level", "data", "--finite"],
    lambda path, name, out: ["verify", path, "--level", "data", "--json"],
    lambda path, name, out: ["restore-weight", path, "*", "--stats", "--json"],
    lambda path, name, out: ["restore-weight", "--stats", "--", path, name],
    lambda path, name, out: ["restore-weight", "-o", f"{out}/w.npy", "--force", "--", path, name],
    lambda path, name, out: ["restore-weight", "-o", f"{out}/w.safetensors", "--force", "--", path, name],
    lambda path, name, out: ["restore-weight", "-o", f"{out}/w.pt", "--rows", "0:1", "--force", "--", path, name],
    lambda path, name, out: ["restore-weight", path, "*", "-o", f"{out}/w.pt", "--force"],
)  # fmt: skip


def fuzz_commands(seed: int, count: int, directory: str) -> Fuzzed:
    """Runs a command over each mutation of a snapshot: of its manifest, a blob, its record or a marker."""
    work = pathlib.Path(directory)
    out = work / "out"
    out.mkdir(parents=True)
    os.chdir(out)
    snapshots = [full_snapshot(), full_snapshot(recorded=True), *(random_snapshot(number) for number in range(6))]
    result = Fuzzed()
    for number in range(count):
        if number % 500 == 0:  # another snapshot
            shutil.rmtree(work / "run", ignore_errors=True)
            rng = random.Random(f"{seed} snapshot {number}")
            snapshot = rng.choice(snapshots)
            snapshot.write(local_writer(work / "run"), "10")
            files = _files(work / "run/10", snapshot)
        rng = random.Random(f"{seed} {number}")
        changed = _change(work / "run/10", files, rng)
        name = _some_name(str(work / "run/10"), rng)
        (done,) = run_commands([rng.choice(_FORMS)(str(work / "run/10"), name, str(out))])
        result.note(f"{done.command[0]} {done.finished.code}", done.seconds)
        if complaint := _complaint(done, work):
            result.complaints.append(f"commands {seed} {number}: {complaint}: {done}")
        _restore(work / "run/10", files, changed)
    return result


def _files(checkpoint: pathlib.Path, snapshot: Snapshot) -> dict[str, bytes]:
    """What a mutation can hit: the manifest most of all."""
    held = {".snapshot_metadata": metadata(snapshot.manifest, snapshot.world_size), "evaled_by/val_DONE": b"{}"}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            held[path.relative_to(checkpoint).as_posix()] = path.read_bytes()
    return held


def _change(checkpoint: pathlib.Path, files: dict[str, bytes], rng: random.Random) -> str:
    name = ".snapshot_metadata" if rng.random() < 0.8 else rng.choice(list(files))
    data = files[name]
    if rng.random() < 0.6 and data[:1] == b"{":
        new = dump(mutate_document(json.loads(data), rng))
    else:
        new = mutate_bytes(data, rng)
    target = checkpoint / name
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(new)
    return name


def _restore(checkpoint: pathlib.Path, files: dict[str, bytes], name: str) -> None:
    (checkpoint / name).write_bytes(files[name])


def _some_name(path: str, rng: random.Random) -> str:
    try:
        entries = list(read_manifest(open_storage(path)).entries)
    except Exception:  # the command will say so, and how it does is what counts
        entries = []
    return rng.choice(entries or ["0/model/dense"])


def _complaint(done: Done, work: pathlib.Path) -> str:
    if done.complaint:
        return done.complaint
    if done.seconds > SECONDS_FOR_EACH:
        return "too long"
    if sorted(os.listdir(work)) != ["out", "run"] or "owned" in os.listdir(work / "out"):
        return "it wrote elsewhere"
    return ""
