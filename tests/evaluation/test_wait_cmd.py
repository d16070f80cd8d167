"""``snapctl wait``: exit codes, the two streams, signals, and commands that it runs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.command import Finished
from tests.support.places import SaveDir
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import local_writer, metadata, write_checkpoint

Run = Callable[..., Finished]


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 10 and 20 complete, 30 incomplete."""
    root = tmp_path / "run"
    write = local_writer(root)
    write_checkpoint(write, 10)
    write_checkpoint(write, 20, markers=("val",))
    write_checkpoint(write, 30, complete=False)
    return root


@contextlib.contextmanager
def running(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """``snapctl wait …`` that goes on while the test acts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snapctl", "wait", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    give_up_at = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


# -- one checkpoint --------------------------------------------------------------------------------------------------


def test_what_fits_is_printed_at_once_and_nothing_else(snapctl_inside: Run, save_dir: SaveDir) -> None:
    for step in (10, 20):
        write_checkpoint(save_dir.write, step)
    for arguments in (("--at-least", "20"), ("--newer-than", "10"), ("--step", "20"), ("--at-least", "5")):
        done = snapctl_inside("wait", save_dir.url, *arguments)
        assert (done.code, done.stdout, done.stderr) == (0, f"{save_dir.url}/20\n", "")


def test_the_json_is_that_of_latest_with_the_time_waited(snapctl_inside: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 20, markers=("val",))
    found = snapctl_inside("wait", save_dir.url, "--step", "20", "--evaluated-by", "val", "--json")
    assert (found.code, found.stderr) == (0, "")
    latest = snapctl_inside("latest", save_dir.url, "--json").json
    assert found.json == {**latest, "waited_seconds": found.json["waited_seconds"]}
    assert 0 <= found.json["waited_seconds"] < 5


def test_nothing_in_time_is_124_and_says_what(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    done = snapctl_inside("wait", str(run_dir), "--timeout", "0")
    assert (done.code, done.stdout) == (124, "")
    assert done.stderr.splitlines()[-1] == f"error: {run_dir}: a new checkpoint did not come within 0s"
    missing = snapctl_inside("wait", f"{run_dir}/none", "--timeout", "0", "--json")
    assert (missing.code, missing.stdout, missing.error["exit_code"]) == (124, "", 124)
    assert missing.error["type"] == "DeadlineError"


def test_it_ends_at_the_timeout_and_says_on_stderr_that_it_waits(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    started = time.monotonic()
    done = snapctl_inside("wait", str(tmp_path), "--timeout", "1s", "--interval", "10s")
    assert 1 <= time.monotonic() - started < 6  # and not the ten of the interval
    assert (done.code, done.stdout) == (124, "")
    assert done.stderr.splitlines() == [
        f"{tmp_path}: waiting for a new checkpoint, for 1s at most",
        f"error: {tmp_path}: a new checkpoint did not come within 1s",
    ]


def test_missing_evaluators_are_named(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "20/evaled_by/test_DONE").mkdir()
    partitions = ("--evaluated-by", "val", "--evaluated-by", "test", "--evaluated-by", "train")
    done = snapctl_inside("wait", str(run_dir), "--step", "20", *partitions, "--timeout", "0")
    assert done.code == 124
    assert "not evaluated by test, train within 0s (but by val)" in done.stderr
    answer = snapctl_inside("wait", str(run_dir), "--step", "20", *partitions, "--timeout", "0", "--json")
    assert {key: answer.error[key] for key in ("type", "step", "done", "missing")} == {
        "type": "EvaluationTimeoutError",
        "step": 20,
        "done": ["val"],
        "missing": ["test", "train"],
    }


def test_a_single_look_never_says_that_a_step_will_not_come(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    assert snapctl_inside("wait", str(run_dir), "--step", "15", "--timeout", "0").code == 124
    done = snapctl_inside("wait", str(run_dir), "--step", "15", "--timeout", "1s", "--interval", "5s")
    assert (done.code, done.stdout) == (3, "")
    assert "no step 15, and step 20 has been saved since" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--newer-than", "1", "--step", "2"),
        ("--at-least", "1", "--newer-than", "2"),
        ("--step", "-1"),
        ("--step", "x"),
        ("--timeout", "5"),
        ("--timeout", "-1s"),
        ("--timeout", "soon"),
        ("--interval", "0"),
        ("--interval", "0s"),
        ("--interval", "none"),
        ("--stop-if", "x"),
        ("--follow", "--step", "3"),
        ("--keep-going",),
        ("--evaluated-by", "a/b"),
        ("--not-evaluated-by", ""),
        ("--exec", ""),
        ("--exec", "echo 'unclosed"),
        ("--exec", "no-such-command-here {}"),
        ("--fail-if", "/"),
        ("--fail-if", "gs://bucket"),
        ("--fail-if", "xyz://bucket/file"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_at_once(
    snapctl_inside: Run, run_dir: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    done = snapctl_inside("wait", str(run_dir), *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_checkpoint_is_not_a_save_directory(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    done = snapctl_inside("wait", f"{run_dir}/20")
    assert (done.code, done.stdout) == (2, "")
    assert f"hint: its save directory is {run_dir}" in done.stderr


def test_a_missing_bucket_is_3_at_once(snapctl_inside: Run, bucket: Bucket) -> None:
    done = snapctl_inside("wait", "gs://no-such-bucket-here/run")
    assert (done.code, done.stdout) == (3, "")
    assert "no such bucket" in done.stderr


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_4_at_once(
    snapctl_inside: Run, proxied: tuple[Bucket, Controlled], status: int
) -> None:
    bucket, proxy = proxied
    write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), 10)
    proxy.configure(faults=[{"match": ".", "status": status, "body": "{}"}])
    started = time.monotonic()
    done = snapctl_inside("wait", f"{bucket.url}/run", "--json")
    assert (done.code, done.stdout, done.error["exit_code"]) == (4, "", 4)
    assert time.monotonic() - started < 5


def test_an_outage_at_the_deadline_is_4(
    snapctl_inside: Run, proxied: tuple[Bucket, Controlled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapctl.storage.gcs.client.MAX_ATTEMPTS", 1)
    bucket, proxy = proxied
    proxy.configure(faults=[{"match": ".", "status": 503, "body": "{}"}])
    done = snapctl_inside("wait", f"{bucket.url}/run", "--timeout", "1s", "--interval", "1s")
    assert (done.code, done.stdout) == (4, "")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1


def test_the_file_of_a_failure_is_1(snapctl_inside: Run, save_dir: SaveDir) -> None:
    write_checkpoint(save_dir.write, 10)
    save_dir.write("FAILED", b"")
    failed = f"{save_dir.url}/FAILED"
    done = snapctl_inside("wait", save_dir.url, "--fail-if", failed)
    assert (done.code, done.stdout) == (1, "")
    assert failed in done.stderr
    assert snapctl_inside("wait", save_dir.url, "--fail-if", failed, "--at-least", "10").code == 0


def test_a_checkpoint_and_its_mark_from_another_process_are_seen_in_a_bucket(bucket: Bucket) -> None:
    write = lambda path, data=b"": bucket.write(f"run/{path}", data)  # noqa: E731
    write_checkpoint(write, 20)
    with running(f"{bucket.url}/run", "--evaluated-by", "val", "--interval", "1s", "--timeout", "30s") as process:
        assert process.stderr is not None
        assert "waiting for a new checkpoint" in process.stderr.readline()
        write_checkpoint(write, 30)
        assert f"{bucket.url}/run/30: waiting for evaluation by val" in process.stderr.readline()
        write("30/evaled_by/val_DONE", b"")
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, f"{bucket.url}/run/30\n", "")


def test_a_hiccup_of_the_service_is_survived_and_said_once(proxied: tuple[Bucket, Controlled]) -> None:
    bucket, proxy = proxied
    write = lambda path, data=b"": bucket.write(f"run/{path}", data)  # noqa: E731
    write_checkpoint(write, 10)
    with running(f"{bucket.url}/run", "--interval", "1s", "--timeout", "60s") as process:
        assert process.stderr is not None
        process.stderr.readline()
        proxy.configure(faults=[{"match": ".", "drop": True}])
        write_checkpoint(write, 20)
        assert process.stderr.readline().startswith("warning: ")
        proxy.configure(faults=[])
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out, err) == (0, f"{bucket.url}/run/20\n", "")


# -- following -------------------------------------------------------------------------------------------------------


def test_a_follower_prints_what_is_there_oldest_first_and_ends_with_the_file(
    snapctl_inside: Run, save_dir: SaveDir
) -> None:
    for step in (9, 10, 100):
        write_checkpoint(save_dir.write, step)
        time.sleep(0.01)
    save_dir.write("DONE", b"")
    stop = ("--stop-if", f"{save_dir.url}/DONE")
    done = snapctl_inside("wait", save_dir.url, "--follow", "--at-least", "10", *stop)
    assert (done.code, done.stdout, done.stderr) == (0, f"{save_dir.url}/10\n{save_dir.url}/100\n", "")
    none = snapctl_inside("wait", save_dir.url, "--follow", *stop)
    assert (none.code, none.stdout) == (0, "")


def test_a_follower_in_json_prints_a_document_a_line(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "20/evaled_by/val_DONE").write_bytes(b"garbage")
    done = snapctl_inside("wait", str(run_dir), "--follow", "--at-least", "0", "--timeout", "0", "--json")
    assert done.code == 124
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert [document["step"] for document in documents] == [10, 20]
    assert all(document["save_dir"] == str(run_dir) for document in documents)
    assert all(document["waited_seconds"] >= 0 for document in documents)
    assert ["warnings" in document for document in documents] == [False, True]
    assert done.error["exit_code"] == 124


def test_a_follower_prints_each_at_once_and_without_waiting_for_the_next(run_dir: pathlib.Path) -> None:
    with running(str(run_dir), "--follow", "--interval", "1s", "--timeout", "60s") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "following, for a new checkpoint, for 1m at most" in process.stderr.readline()
        write_checkpoint(local_writer(run_dir), 30)
        assert process.stdout.readline() == f"{run_dir}/30\n"
        write_checkpoint(local_writer(run_dir), 5)
        assert process.stdout.readline() == f"{run_dir}/5\n"
        assert process.poll() is None


def test_a_follower_whose_reader_went_away_ends_without_the_next_checkpoint(run_dir: pathlib.Path) -> None:
    with running(str(run_dir), "--follow", "--at-least", "0", "--interval", "60s", "--timeout", "none") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stderr.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 141
        assert process.stderr.read() == ""


# -- commands --------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """A command of words for --exec."""
    return f'{sys.executable} -c "{code}"'


def test_a_command_is_run_for_each_without_a_shell(snapctl: Run, run_dir: pathlib.Path) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['SNAPCTL_STEP'], os.environ['SNAPCTL_PATH'])"
    done = snapctl(
        "wait",
        str(run_dir),
        "--follow",
        "--at-least",
        "0",
        "--timeout",
        "0",
        "--exec",
        python(show) + " at={} '$HOME *' ;",
    )
    assert done.code == 124
    assert done.stdout == f"{run_dir}/10\n{run_dir}/20\n"
    assert done.stderr.splitlines()[:2] == [
        f"['at={run_dir}/{step}', '$HOME *', ';'] {step} {run_dir}/{step}" for step in (10, 20)
    ]


def test_a_command_that_fails_ends_it_with_5_and_its_code_is_named(snapctl: Run, run_dir: pathlib.Path) -> None:
    arguments = ("wait", str(run_dir), "--follow", "--at-least", "0", "--timeout", "0", "--exec", python("exit(7)"))
    done = snapctl(*arguments)
    assert (done.code, done.stdout) == (5, f"{run_dir}/10\n")
    assert "ended with code 7" in done.stderr
    going_on = snapctl(*arguments, "--keep-going", "--json")
    assert going_on.code == 5
    assert [json.loads(line)["step"] for line in going_on.stdout.splitlines()] == [10, 20]
    assert going_on.error["message"].startswith("2 of the commands failed; the first: ")
    assert going_on.error["returncode"] == 7


def test_a_command_that_fails_for_one_is_5_though_the_follower_was_stopped(snapctl: Run, run_dir: pathlib.Path) -> None:
    (run_dir / "DONE").touch()
    done = snapctl(
        "wait",
        str(run_dir),
        *("--follow", "--at-least", "0", "--stop-if", f"{run_dir}/DONE", "--keep-going"),
        *("--exec", python("import os; exit(os.environ['SNAPCTL_STEP'] == '10')")),
    )
    assert (done.code, done.stdout) == (5, f"{run_dir}/10\n{run_dir}/20\n")


def test_without_following_the_command_is_run_once(snapctl: Run, run_dir: pathlib.Path) -> None:
    for code, expected in ((0, 0), (3, 5)):
        done = snapctl("wait", str(run_dir), "--at-least", "0", "--exec", python(f"exit({code})"))
        assert (done.code, done.stdout) == (expected, f"{run_dir}/20\n")


def test_a_command_that_is_killed_or_cannot_be_run_has_failed(snapctl: Run, run_dir: pathlib.Path) -> None:
    killed = python("import os; os.kill(os.getpid(), 9)")
    done = snapctl("wait", str(run_dir), "--at-least", "0", "--exec", killed)
    assert (done.code, "was killed by SIGKILL" in done.stderr) == (5, True)
    done = snapctl("wait", str(run_dir), "--at-least", "0", "--exec", "{}/none")
    assert (done.code, "cannot be run: No such file or directory" in done.stderr) == (5, True)


def test_a_command_reads_nothing_from_the_terminal(run_dir: pathlib.Path) -> None:
    command = python("import sys; print(len(sys.stdin.read()))")
    done = subprocess.run(
        [sys.executable, "-m", "snapctl", "wait", str(run_dir), "--at-least", "0", "--exec", command],
        input=b"for the next command of the script",
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"0\n")


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_within_a_second(run_dir: pathlib.Path, number: int, code: int) -> None:
    with running(str(run_dir), "--timeout", "none", "--interval", "1h") as process:
        assert process.stderr is not None
        process.stderr.readline()
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=10) == code
        assert time.monotonic() - started < 5  # a second on a machine with nothing else to do
        assert process.stderr.read() == ""


COMMAND = """
import pathlib, signal, sys, time
base = pathlib.Path(sys.argv[1])
def note(number, frame):
    with open(base / "signals", "a") as file:
        file.write(f"{number} ")
    if number in (signal.SIGTERM, signal.SIGINT) and sys.argv[2] != "stubborn":
        time.sleep(0.3)  # the last words take a while
        (base / "ended").touch()
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
(base / "ready").touch()
while True:
    time.sleep(60)
"""


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Callable[[str], str]:
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    return lambda manner: f"{sys.executable} {script} {tmp_path} {manner} {{}}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_passed_on_and_the_command_may_end_in_peace(
    run_dir: pathlib.Path, tmp_path: pathlib.Path, command: Callable[[str], str], number: int, code: int
) -> None:
    with running(str(run_dir), "--at-least", "0", "--exec", command("peaceful")) as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGUSR1)
        wait_until((tmp_path / "signals").exists)
        process.send_signal(number)
        assert process.wait(timeout=20) == code
        assert (tmp_path / "ended").exists()
        assert (tmp_path / "signals").read_text().split() == [str(int(signal.SIGUSR1)), str(int(number))]


def test_the_second_signal_kills_a_command_that_does_not_listen(
    run_dir: pathlib.Path, tmp_path: pathlib.Path, command: Callable[[str], str]
) -> None:
    with running(str(run_dir), "--at-least", "0", "--exec", command("stubborn")) as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGTERM)
        wait_until((tmp_path / "signals").exists)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143


def test_a_signal_of_the_terminal_reaches_the_command_once(
    run_dir: pathlib.Path, tmp_path: pathlib.Path, command: Callable[[str], str]
) -> None:
    with running(str(run_dir), "--at-least", "0", "--exec", command("peaceful"), start_new_session=True) as process:
        wait_until((tmp_path / "ready").exists)
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does to the foreground
        assert process.wait(timeout=20) == 130
        assert (tmp_path / "signals").read_text().split() == [str(int(signal.SIGINT))]


def test_half_a_manifest_at_the_moment_of_a_look_is_not_printed(run_dir: pathlib.Path) -> None:
    whole = metadata({f"0/model/{number}": {"type": "list"} for number in range(20_000)})
    manifest = run_dir / "40" / ".snapshot_metadata"
    manifest.parent.mkdir()

    def write_slowly() -> None:
        with open(manifest, "wb", buffering=0) as file:
            for start in range(0, len(whole), len(whole) // 12):
                file.write(whole[start : start + len(whole) // 12])
                time.sleep(0.2)

    with running(str(run_dir), "--interval", "1s", "--timeout", "30s") as process:
        assert process.stderr is not None
        process.stderr.readline()
        writer = threading.Thread(target=write_slowly)
        writer.start()
        out, _ = process.communicate(timeout=30)
        size = manifest.stat().st_size
        writer.join()
    assert (process.returncode, out) == (0, f"{run_dir}/40\n")
    assert size == len(whole)


@pytest.mark.parametrize(
    "arguments", [("wait", "{}", "--at-least", "0"), ("mark-eval", "{}/10", "val", "--claim"), ("pin", "{}/10")]
)
def test_these_commands_load_nothing_that_they_do_not_need(run_dir: pathlib.Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom snapctl.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\nsys.exit(code)"
    )
    words = [argument.format(run_dir) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "gcsfs", "fsspec", "rich", "numpy", "yaml", "pydantic", "torchsnapshot"}
