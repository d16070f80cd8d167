"""The output: whole or not at all, on disk and on standard output."""

from __future__ import annotations

import os
import pathlib
import pty
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.restore_weight.common import TABLE, left, load_npy, restore, write_simple
from tests.support.servers import Bucket, Controlled
from tests.support.shards import Builder
from tests.support.snapshots import metadata, tensor_entry


def test_an_existing_file_is_kept_unless_forced(run: str, builder: Builder, out: pathlib.Path) -> None:
    write_simple(builder)
    (out / "a.npy").write_bytes(b"keep")
    done = restore(run, "weight", "-o", str(out / "a.npy"))
    assert (done.code, done.stdout) == (6, "")
    assert done.stderr == f"error: {out}/a.npy: exists already\nhint: --force replaces it\n"
    assert (out / "a.npy").read_bytes() == b"keep"
    assert restore(run, "weight", "-o", str(out / "a.npy"), "--force").code == 0
    assert load_npy(out / "a.npy").size == 1 << 18


def test_a_missing_parent_a_directory_and_a_url_are_one_line(run: str, builder: Builder, out: pathlib.Path) -> None:
    write_simple(builder)
    (out / "d.pt").mkdir()
    (out / "file").write_text("")
    cases = ((out / "no/such/a.pt", 4), (out / "d.pt", 2), ("gs://b/x.npy", 2), (out / "d", 2))
    for path, code in (*cases, (out / "file/x.npy", 4), (out / ("x" * 300 + ".npy"), 4)):
        done = restore(run, "weight", "-o", str(path))
        assert (done.code, done.stdout) == (code, "")
        assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert left(out) == ["d.pt", "file"]
    assert "file/x.npy: Not a directory" in restore(run, "weight", "-o", str(out / "file/x.npy")).stderr


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_a_full_disk_leaves_the_old_file_and_no_litter(
    suffix: str, run: str, builder: Builder, out: pathlib.Path
) -> None:
    if suffix == "pt":
        pytest.importorskip("torch")
    write_simple(builder)
    (out / f"b.{suffix}").write_bytes(b"old")
    command = f"{sys.executable} -m snapctl restore-weight {run} weight --force -o {out}/b.{suffix}"
    script = f"ulimit -f 64; trap '' XFSZ; exec {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert f"error: {out}/b.{suffix}: File too large\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert (out / f"b.{suffix}").read_bytes() == b"old"
    assert left(out) == [f"b.{suffix}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_directory_that_may_not_be_written_to_is_one_line(run: str, builder: Builder, tmp_path: pathlib.Path) -> None:
    write_simple(builder)
    (tmp_path / "ro").mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)
    assert restore(run, "weight", "-o", str(tmp_path / "a.npy")).code == 0  # all that it imports is there now
    os.seteuid(65534)
    try:
        done = restore(run, "weight", "-o", str(tmp_path / "ro/a.npy"))
    finally:
        os.seteuid(0)
    assert (done.code, done.stdout) == (4, "")
    assert done.stderr == f"error: {tmp_path}/ro: permission denied\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_within_a_second_and_leaves_nothing(
    number: signal.Signals, minigcs: Controlled, out: pathlib.Path
) -> None:
    bucket = Bucket(minigcs.endpoint, "b")
    entries = {"0/m": {"type": "dict", "keys": ["t"]}, "0/m/t": tensor_entry("batched/x", [1 << 26])}
    bucket.write("10/.snapshot_metadata", metadata(entries))
    minigcs.seed("b", [("10/batched/x", 1 << 28)])
    minigcs.configure(latency=0.5)
    command = [sys.executable, "-m", "snapctl", "restore-weight", "gs://b/10", "m/t", "-o", str(out / "t.npy")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(400):
        if any("batched" in entry[1] and "alt=media" in entry[1] for entry in minigcs.stats(log=True)["log"]):
            break
        time.sleep(0.02)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(number)
    code = process.wait(10)
    assert code == 128 + number
    assert time.monotonic() - started < 5  # a second on a machine with nothing else to do
    assert left(out) == []
    assert b"Traceback" not in process.communicate()[1]


def test_standard_output_takes_a_file_with_a_format(run: str, builder: Builder, out: pathlib.Path) -> None:
    builder.dense("0/m/t", TABLE)
    builder.finish()
    for name in ("npy", "safetensors"):
        with open(out / f"t.{name}", "wb") as file:
            command = [sys.executable, "-m", "snapctl", "restore-weight", run, "m/t", "-o", "-", "--format", name]
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0
        assert done.stderr == "found 0/m/t: float32 [12, 4]\n"
    assert np.array_equal(load_npy(out / "t.npy"), TABLE)
    assert np.array_equal(load_file(out / "t.safetensors")["m/t"], TABLE)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_error(run: str, builder: Builder, unbuffered: str) -> None:
    write_simple(builder)
    process = subprocess.Popen(
        [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read1(10) == b"\x93NUMPY\x01\x00v\x00"  # type: ignore[attr-defined]
    process.stdout.close()
    assert process.stderr.read() == b"found 0/model/weight: float32 [262144]\n"
    assert process.wait() == 141


def test_a_short_write_loses_nothing_and_hides_nothing(run: str, builder: Builder, out: pathlib.Path) -> None:
    """Under PYTHONUNBUFFERED a write may end short, without an error: the next one has the reason."""
    write_simple(builder)
    with (out / "t.npy").open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19)),
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (4, "error: stdout: File too large")


def test_a_full_standard_output_is_an_error_of_the_storage(run: str, builder: Builder) -> None:
    write_simple(builder)
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1] == "error: stdout: No space left on device"


def test_binary_data_is_not_written_to_a_terminal(run: str, builder: Builder) -> None:
    write_simple(builder)
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "snapctl", "restore-weight", run, "weight", "-o", "-", "--format", "npy"]
    done = subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, text=True)
    os.close(secondary)
    os.close(primary)
    assert done.returncode == 2
    assert "binary data is not written to a terminal" in done.stderr


def test_progress_with_a_rate_goes_to_a_terminal_on_stderr_only(minigcs: Controlled, out: pathlib.Path) -> None:
    bucket = Bucket(minigcs.endpoint, "b")
    bucket.write("10/.snapshot_metadata", metadata({"0/t": tensor_entry("batched/x", [1 << 23])}))
    minigcs.seed("b", [("10/batched/x", 1 << 25)])
    minigcs.configure(latency=0.2)
    for more, expected in ((), True), (("--no-progress",), False):
        primary, secondary = pty.openpty()
        command = [sys.executable, "-m", "snapctl", *more, "restore-weight", "gs://b/10", "t", "--force"]
        done = subprocess.Popen(
            [*command, "-o", str(out / "t.npy")],
            stdout=subprocess.PIPE,
            stderr=secondary,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(secondary)
        text = b""
        while True:
            try:
                piece = os.read(primary, 4096)
            except OSError:
                break
            if not piece:
                break
            text += piece
        os.close(primary)
        assert done.wait() == 0
        assert (b"reading" in text and b"/s" in text) == expected
