"""What the examples of the documentation find when they run."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from snapctl.checksums import crc32c
from snapctl.save_record import SAVE_RECORD_PATH, BlobSum, RankTimings, SaveRecord, format_save_record
from tests.support.pages import ROOT, Stage
from tests.support.servers import Bucket
from tests.support.snapshots import Write, local_writer, write_checkpoint

SAMPLE = ROOT / "tests" / "data" / "torchrec-2ranks" / "100"
_HOUR = 3600.0


def _marker(metrics: Mapping[str, float]) -> bytes:
    return json.dumps({"finished_at": "2026-11-30T04:12:41.000Z", "metrics": metrics}).encode()


def _sample(write: Write, step: int, *, complete: bool = True, marks: Mapping[str, Mapping[str, float]] = {}) -> None:
    """The checkpoint that ships with the repository, under another step."""
    for path in sorted(SAMPLE.rglob("*"), reverse=True):
        name = path.relative_to(SAMPLE).as_posix()
        if path.is_file() and (complete or name != ".snapshot_metadata"):
            write(f"{step}/{name}", path.read_bytes())
    for partition, metrics in marks.items():
        write(f"{step}/evaled_by/{partition}_DONE", _marker(metrics))


def _record(write: Write, step: int) -> None:
    """What a save by snapctl records."""
    sums = {
        path.relative_to(SAMPLE).as_posix(): BlobSum(path.stat().st_size, crc32c(path.read_bytes()))
        for path in SAMPLE.rglob("*")
        if path.is_file()
    }
    manifest = sums.pop(".snapshot_metadata")
    ranks = (RankTimings(0, 0.05, 0.4, 3104), RankTimings(1, 0.05, 0.5, 3104))
    write(f"{step}/{SAVE_RECORD_PATH}", format_save_record(SaveRecord(time.time(), 2, manifest, ranks, sums)))


def _fill_run(write: Write) -> None:
    """An old step, an evaluated and pinned one, a newer one with checksums, and one that is being saved."""
    _sample(write, 500)
    _sample(write, 1000, marks={"val": {"auc": 0.791}, "test": {"auc": 0.788}})
    write("1000/PINNED", b"")
    _sample(write, 2000, marks={"val": {"auc": 0.834}})
    _record(write, 2000)
    _sample(write, 3000, complete=False)


def make_buckets(stage: Stage, endpoint: str) -> None:
    """gs://my-bucket/run1, which is $RUN; and gs://bucket, empty but for a table under pretrained/."""
    stage.env["STORAGE_EMULATOR_HOST"] = endpoint
    stage.env["RUN"] = "gs://my-bucket/run1"
    first, second = Bucket(endpoint, "my-bucket"), Bucket(endpoint, "bucket")
    _fill_run(lambda path, data=b"": first.write(f"run1/{path}", data))
    table = {"embedding_bags.users": np.ones((4, 2), "f4")}
    write_checkpoint(lambda path, data=b"": second.write(f"pretrained/{path}", data), 7, table)


def _make_runs(stage: Stage) -> pathlib.Path:
    runs = stage.directory / "runs"
    stage.roots["/runs"] = str(runs)
    return runs


def make_seven(stage: Stage, endpoint: str) -> None:
    """/runs/7 with the steps 100 and, soon, 200; nothing is marked."""
    runs = _make_runs(stage)
    _sample(local_writer(runs / "7"), 100)
    stage.env["RUN"] = str(runs / "7")


def make_growing(stage: Stage, endpoint: str) -> None:
    """/runs/7, into which step 200 is saved after a while."""
    make_seven(stage, endpoint)

    def save() -> None:
        time.sleep(1.5)
        _sample(local_writer(stage.directory / "runs" / "7"), 200)

    threading.Thread(target=save, daemon=True).start()


def make_alpha(stage: Stage, endpoint: str) -> None:
    """runs/alpha as it is about to be pruned: dead, pinned, scored, and one that is being saved."""
    root = stage.directory / "runs" / "alpha"
    write = local_writer(root)
    losses = {1000: 0.71, 2000: 0.55, 3000: 0.48, 4000: 0.43, 5000: 0.39, 6000: 0.41}
    now = time.time()

    def age(step: int, hours: float) -> None:
        for path in (root / str(step), *(root / str(step)).rglob("*")):
            os.utime(path, (now - hours * _HOUR, now - hours * _HOUR))

    write("500/0/model", bytes(24))
    age(500, 120.2)
    for number, (step, loss) in enumerate(losses.items()):
        _sample(write, step, marks={"val": {"loss": loss}})
        if step == 2000:
            write("2000/PINNED", json.dumps({"note": "paper, table 2"}).encode())
        age(step, 33 - 6 * number)
    write("7000/0/model", bytes(24))


def make_evaluators(stage: Stage, endpoint: str) -> None:
    """$RUN, finished and evaluated up to step 5000; and what the examples run on a checkpoint."""
    root = stage.directory / "run"
    write = local_writer(root)
    for step in (4000, 5000):
        _sample(write, step, marks={"val": {}, "test": {}} if step == 5000 else {})
    write("FINISHED", b"")
    for name in ("publish", "evaluate"):
        (stage.directory / name).write_text('#!/bin/sh\ntest -e "$1/.snapshot_metadata" && echo 0.5\n')
        (stage.directory / name).chmod(0o755)
    stage.env["RUN"] = str(root)


_TRAIN = """
import torch, snapctl
model = torch.nn.Linear({inputs}, {outputs})
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
snapshot = snapctl.Snapshot({path!r}, {{"model": model, "optimizer": optimizer}})
for step in {steps}:
    snapshot.step = step
    snapshot.save(step).wait()
"""


def make_trained(stage: Stage, endpoint: str) -> None:
    """/runs/8, saved by snapctl itself and evaluated; needs torch."""
    root = _make_runs(stage) / "8"
    stage.env["RUN"] = str(root)
    _run(stage, _TRAIN.format(inputs=8, outputs=1, path=str(root), steps=(50, 100)))
    for step, losses in ((50, (0.0227416, 0.0225316)), (100, (4.86117e-05, 4.75101e-05))):
        for partition, loss in zip(("test", "val"), losses, strict=True):
            local_writer(root)(f"{step}/evaled_by/{partition}_DONE", _marker({"loss": loss}))


def make_converted(stage: Stage, endpoint: str) -> None:
    """run/100 and gs://bucket/run/100, saved by snapctl from the model of the prelude ``training``; needs torch."""
    make_buckets(stage, endpoint)
    programs = [_TRAIN.format(inputs=3, outputs=2, path=path, steps=(100,)) for path in ("run", "gs://bucket/run")]
    _run(stage, "".join(programs))


def make_torchsnapshot(stage: Stage, endpoint: str) -> None:
    """old/1000 as bare torchsnapshot writes it, of the model of the prelude ``training``; needs torch."""
    make_buckets(stage, endpoint)
    _run(
        stage,
        "import torch, torchsnapshot\n"
        "model = torch.nn.Linear(3, 2)\n"
        "extra = torchsnapshot.StateDict(step=1000, walltime=12.5)\n"
        "torchsnapshot.Snapshot.take('old/1000', {'model': model, 'extra_state': extra})\n",
    )


def _run(stage: Stage, program: str) -> None:
    code, said = stage.run_python(program)
    assert code == 0, said


def make_fleet(stage: Stage, endpoint: str) -> None:
    """runs/alpha and runs/teams/vision/v2, and a policy; the same below /runs."""
    runs = stage.directory / "runs"
    stage.roots.update({"/data/runs": str(runs), "/runs": str(runs)})
    now = time.time()
    for name, steps, age in (("alpha", (1000, 2000, 3000), 724), ("teams/vision/v2", (500, 1000), 7260)):
        write = local_writer(runs / name)
        for step in steps:
            write_checkpoint(write, step, markers=["val"] if step == 2000 else [])
        if name == "alpha":
            write("4000/0/model", bytes(24))
        for path in (runs / name).rglob("*"):
            os.utime(path, (now - age, now - age))
    (stage.directory / "prune.toml").write_text("keep-last = 1\n")


def make_compared(stage: Stage, endpoint: str) -> None:
    """/runs/9 with the steps 1000 and 2000: a table has grown, and one part of the head has become another."""
    write = local_writer(_make_runs(stage) / "9")
    for step, users, head in ((1000, 1000, "bias"), (2000, 1200, "scale")):
        layers = {f"layers.{n}.weight": np.full((4, 4), step if n != 3 else 1, "f4") for n in range(12)}
        tensors = {"users.weight": np.zeros((users, 16), "f4"), **layers, f"head.{head}": np.zeros(2, "f4")}
        write_checkpoint(write, step, tensors)
        files = {
            path.relative_to(stage.directory / "runs" / "9" / str(step)).as_posix(): path.read_bytes()
            for path in (stage.directory / "runs" / "9" / str(step)).rglob("*")
            if path.is_file()
        }
        sums = {name: BlobSum(len(data), crc32c(data)) for name, data in files.items()}
        manifest = sums.pop(".snapshot_metadata")
        write(f"{step}/{SAVE_RECORD_PATH}", format_save_record(SaveRecord(time.time(), 1, manifest, (), sums)))


WORLDS: Mapping[str, Callable[[Stage, str], None]] = {
    "buckets": make_buckets,
    "seven": make_seven,
    "growing": make_growing,
    "alpha": make_alpha,
    "compared": make_compared,
    "evaluators": make_evaluators,
    "fleet": make_fleet,
    "trained": make_trained,
    "converted": make_converted,
    "torchsnapshot": make_torchsnapshot,
}
"""By name; each is given the stage and the endpoint of a fresh fake-gcs-server."""


def prepare(stage: Stage) -> None:
    """What is there in every world: the snapshots that ship with the repository."""
    shutil.copytree(ROOT / "tests" / "data", stage.directory / "tests" / "data")


PRELUDES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "training": (
        "import torch\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train_one_step():\n"
        "    optimizer.zero_grad(); model(torch.ones(1, 3)).sum().backward(); optimizer.step()\n",
        {"10_000": "3", "10_001": "3", "% 1000": "% 2"},
    ),
    "users": (
        "import types, torch\n"
        "from snapctl import Snapshot\n"
        "model = types.SimpleNamespace(users=torch.nn.Embedding(4, 2))\n",
        {},
    ),
    "checkpoint": ("path = '/runs/7/100'\n", {}),
    "run": (
        "import os, snapctl\nrun = os.environ['RUN']\n",
        {"seconds_to_sleep=30, timeout=1800": "0.1, timeout=0.5"},
    ),
}
"""What a piece of a program takes for granted, and what is made smaller in it."""
