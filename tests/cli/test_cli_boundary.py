"""What every command does at its edges: streams, signals, terminals, locales, usage errors, JSON."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from snapctl.cli.exit_codes import ExitCode, worst
from snapctl.cli.main import main
from snapctl.cli.options import parse_duration, parse_storage_options
from snapctl.cli.output import format_size
from snapctl.cli.tables import chop
from snapctl.cli.terminal import cell_width, printable
from snapctl.errors import InvalidOptionError
from tests.support.command import Finished
from tests.support.snapshots import local_writer, metadata, tensor_entry, write_checkpoint

Snapctl = Callable[..., Finished]
COMMAND = [sys.executable, "-m", "snapctl"]


@pytest.fixture
def many(tmp_path: pathlib.Path) -> pathlib.Path:
    """3,000 complete checkpoints."""
    write = local_writer(tmp_path / "run")
    for step in range(3000):
        write(f"{step}/.snapshot_metadata", metadata({}))
    return tmp_path / "run"


def on_terminal(*arguments: str, columns: int = 100, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command with a pseudo-terminal for all its streams."""
    leader, follower = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **(env or {})}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    output = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(leader)
    return process.wait(), output.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["list", "-q"], ["latest"]])
def test_a_reader_that_goes_away_ends_it_quietly(many: pathlib.Path, arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*COMMAND, *arguments, str(many)], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_head_takes_what_it_wants(many: pathlib.Path) -> None:
    listing = subprocess.Popen([*COMMAND, "list", str(many)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    head = subprocess.run(["head", "-1"], stdin=listing.stdout, capture_output=True)
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    assert listing.wait() in (0, 141)
    assert listing.stderr.read() == b""
    listing.stderr.close()
    assert head.stdout.startswith(b"STEP")


@pytest.mark.parametrize("arguments", [["list", "{}"], ["latest", "{}"], ["list", "{}", "--json"], ["--help"]])
def test_a_full_disk_behind_stdout_is_said(many: pathlib.Path, arguments: list[str]) -> None:
    command = [*COMMAND, *(argument.format(many) for argument in arguments)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1 and "No space left on device" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["list", "-q"]])
def test_a_short_write_to_stdout_is_said(
    many: pathlib.Path, tmp_path: pathlib.Path, arguments: list[str], unbuffered: str
) -> None:
    """Under PYTHONUNBUFFERED the stream below `sys.stdout` may write less than all, without an error."""
    with (tmp_path / "out").open("wb") as file:
        done = subprocess.run(
            [*COMMAND, *arguments, str(many)],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_345, 12_345)),
        )
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1 and "stdout: File too large" in done.stderr


def test_a_closed_stdout_is_said(many: pathlib.Path) -> None:
    script = f'exec "$@" "{many}" >&-'
    done = subprocess.run(["sh", "-c", script, "sh", *COMMAND, "latest"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (4, "error: stdout: is closed\n")


def test_a_closed_stderr_harms_nobody(many: pathlib.Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" "{many}" 2>&-', "sh", *COMMAND, "latest"], stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{many}/2999\n")


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_within_a_second_though_the_storage_is_silent(number: signal.Signals, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*COMMAND, "latest", "gs://bk/run"],
            env={**os.environ, "STORAGE_EMULATOR_HOST": endpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        listener.settimeout(30)
        connection, _ = listener.accept()  # now it waits for an answer
        process.send_signal(number)
        began = time.monotonic()
        stdout, stderr = process.communicate(timeout=10)
        connection.close()
    assert (process.returncode, stdout, stderr) == (code, b"", b"")
    assert time.monotonic() - began < 5  # a second, and not the twelve of a silent server; the machine may be busy


# -- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_gets_colour_unless_it_is_not_wanted(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    write_checkpoint(local_writer(tmp_path), 10)
    assert "\x1b[" in on_terminal("list", str(tmp_path))[1]
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        assert "\x1b" not in on_terminal("list", str(tmp_path), env=env)[1], env
    assert "\x1b" not in snapctl("list", str(tmp_path)).stdout
    assert "\x1b[" in snapctl("list", str(tmp_path), env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b" not in snapctl("list", str(tmp_path), env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_on_a_narrow_terminal_values_fold_and_are_whole(tmp_path: pathlib.Path, columns: int) -> None:
    partition = "a-partition-with-a-name-that-is-rather-long-for-any-terminal-of-forty-columns"
    write_checkpoint(local_writer(tmp_path), 1234567, markers=[partition])
    code, output = on_terminal("list", "--long", str(tmp_path), columns=columns, env={"NO_COLOR": "1"})
    assert code == 0
    assert all(len(line) <= columns for line in output.splitlines())
    rejoined = "".join(part for line in output.splitlines() for part in line.split("  ")).replace(" ", "")
    letters = iter(rejoined)
    assert all(letter in letters for letter in partition), "every character is there, in order"


def test_in_a_pipe_each_record_is_one_whole_line(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    partition = "p" * 150
    write_checkpoint(local_writer(tmp_path), 10, markers=[partition, "q"])
    header, row = snapctl("list", str(tmp_path), env={"COLUMNS": "40"}).stdout.splitlines()
    assert header.split() == ["STEP", "STATE", "CREATED", "EVALUATED"]
    assert row.endswith(f"  {partition}, q")


# -- locales and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}]
)
def test_every_locale_gets_the_very_path(tmp_path: pathlib.Path, env: dict[str, str]) -> None:
    name = os.fsdecode(b"r\xc3\xbcn-\xf0\x9f\x99\x82-\xff[red]:smile:")
    write_checkpoint(local_writer(tmp_path / name), 10)
    target = os.fsencode(tmp_path / name)
    done = subprocess.run([*COMMAND, "latest", target], env={**os.environ, **env}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == target + b"/10\n"
    done = subprocess.run([*COMMAND, "show", target], env={**os.environ, **env}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"[red]:smile:" in done.stdout and b"\xff" not in done.stdout.replace(b"\xff\xff", b"")
    done = subprocess.run([*COMMAND, "latest", "--json", target], env={**os.environ, **env}, capture_output=True)
    assert os.fsencode(json.loads(done.stdout)["path"]) == target + b"/10"


NASTY = [
    "[bold]x[/bold]",
    "a[/b",
    ":smile:",
    "esc\x1b[31mred",
    "tab\tand\nline",
    "rtl\u202eevil",
    "bell\x07",
    "c1\x9b31m",
]


def test_names_are_shown_literally_and_harmlessly(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    entries = {f"0/m/{name}".replace("[/", "[%2F"): tensor_entry("0/m/w", [1]) for name in NASTY}
    local_writer(tmp_path)("10/.snapshot_metadata", metadata(entries))
    shown = snapctl("show", str(tmp_path)).stdout
    for name in (
        "m/[bold]x[%2Fbold]",
        "m/a[%2Fb",
        "m/:smile:",
        "esc\\x1b[31mred",
        "tab\\tand\\nline",
        "rtl\\u202eevil",
    ):
        assert name in shown
    assert not any(character in shown for character in "\x1b\x07\x9b\u202e\t")
    code, terminal = on_terminal("show", str(tmp_path), env={"NO_COLOR": "1"}, columns=200)
    assert code == 0 and not any(character in terminal for character in "\x1b\x07\x9b\u202e\t")
    paths = [entry["path"] for entry in snapctl("show", str(tmp_path), "--json").json["entries"]]
    assert "m/esc\x1b[31mred" in paths, "JSON has the very names"


def test_errors_about_nasty_names_are_one_harmless_line(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    for name in [*NASTY, "two\nlines"]:
        done = snapctl("list", f"{tmp_path}/{name}")
        assert done.code == 3 and done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert not any(character in done.stderr for character in "\x1b\x07\x9b\u202e\t")


def test_bare_paths_of_a_directory_with_a_line_break(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    run = tmp_path / "two\nlines"
    for step in (10, 20):
        write_checkpoint(local_writer(run), step)
    assert snapctl("list", "--print0", str(run)).stdout.split("\0") == [f"{run}/10", f"{run}/20", ""]
    assert len(snapctl("list", "--quiet", str(run)).stdout.splitlines()) == 2
    assert len(snapctl("latest", str(run)).stdout.splitlines()) == 1
    assert snapctl("latest", "--print0", str(run)).stdout == f"{run}/20\0"


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command"),
        (["nix"], "No such command 'nix'"),
        (["list"], "Missing argument 'SAVE_DIR'"),
        (["list", "x", "--nix"], "No such option"),
        (["list", "x", "--limit", "0"], "Invalid value for '--limit'"),
        (["list", "x", "--limit", "ten"], "Invalid value for '--limit'"),
        (["latest", "x", "--print", "name"], "Invalid value for '--print'"),
        (["latest", "x", "--max-age", "0s"], "--max-age must be more than zero"),
        (["latest", "x", "--max-age", "0"], "--max-age takes a duration"),
        (["latest", "x", "--max-age", "90"], "--max-age takes a duration"),
        (["latest", "x", "--best", "auc"], "[PARTITION/]METRIC:max"),
        (["show", "x", "--step", "-1"], "Invalid value for '--step'"),
        (["show", "x", "--step", "010"], "Invalid value for '--step'"),
        (["show", "x", "--step", "1_0"], "Invalid value for '--step'"),
        (["show", "x", "--step", "٢"], "Invalid value for '--step'"),
        (["show", "x", "--depth", "1", "--values"], "--depth goes with none of"),
        (["latest", "x", "--max-age", "9" * 400 + "s"], "--max-age takes a duration"),
        (["latest", "gs:///run"], "names no bucket"),
        (["latest", "my_fs://x"], "unknown scheme 'my_fs'"),
        (["latest", "generic://x"], "generic://x: "),
        (["latest", "http://user:hunter2@127.0.0.1:1/x"], "a URL with a password in it"),
        (["latest", "gs://b/x", "--storage-option", "asynchronous=true"], "'asynchronous' is not for users to set"),
        (["latest", "gs://b/x", "--storage-option", "loop=5"], "'loop' is not for users to set"),
        (["latest", "gs://b/x", "--storage-option", "endpoint_url=5"], "endpoint_url takes a URL"),
        (["list", "nope://x"], "unknown scheme 'nope'"),
        (["list", ""], "not a path"),
        (["list", "x", "--storage-option", "token"], "--storage-option takes KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(arguments: list[str], says: str, snapctl: Snapctl) -> None:
    done = snapctl(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and says in done.stderr
    assert "╭" not in done.stderr and len(done.stderr.splitlines()) <= 2
    if not arguments:
        return
    done = snapctl(*arguments, "--json")
    assert (done.code, done.stdout) == (2, "")
    assert done.error["exit_code"] == 2 and says in done.error["message"]


def test_help_and_version(snapctl: Snapctl) -> None:
    for arguments in (["--help"], ["-h"], ["list", "--help"], ["latest", "-h"], ["show", "--help"]):
        done = snapctl(*arguments)
        assert done.code == 0 and done.stdout.startswith("Usage: snapctl") and done.stderr == ""
    version = snapctl("--version")
    assert version.code == 0 and version.stdout.startswith("snapctl 0.")


def test_debug_shows_a_plain_traceback_without_values(tmp_path: pathlib.Path, snapctl: Snapctl) -> None:
    plain = snapctl("list", f"{tmp_path}/nix")
    assert len(plain.stderr.splitlines()) == 1
    for arguments in (["--debug", "list", f"{tmp_path}/nix"], ["list", f"{tmp_path}/nix", "--debug"]):
        done = snapctl(*arguments)
        assert done.code == 3 and "Traceback (most recent call last)" in done.stderr
        assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


def test_a_bug_is_70_with_a_traceback_and_no_values_of_variables(tmp_path: pathlib.Path) -> None:
    script = """
import sys
import snapctl.cli.list_cmd as list_cmd
def broken(context, save_dir, secret_token="s3cr3t" + "-value"):
    local_secret = secret_token
    return 1 / 0
list_cmd.open_save_dir = lambda *arguments: broken(*arguments[:1], None)
from snapctl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run([sys.executable, "-c", script, "list", "x"], capture_output=True, text=True)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr and "s3cr3t-value" not in done.stderr
    done = subprocess.run([sys.executable, "-c", script, "list", "x", "--json"], capture_output=True, text=True)
    assert done.returncode == 70 and json.loads(done.stderr)["error"]["exit_code"] == 70


def test_a_value_called_json_behind_a_double_dash_is_a_value(snapctl: Snapctl) -> None:
    done = snapctl("list", "--", "--json")
    assert done.code == 3 and done.stderr.startswith("error: ")


# -- the small parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 5], 5),
        ([5, 1], 1),
        ([1, 6], 6),
        ([6, 4], 4),
        ([4, 70], 70),
        ([70, 130], 130),
        ([0, 1, 5], 1),
    ],
)
def test_of_several_codes_the_contract_names_the_one_that_goes_out(codes: list[int], expected: int) -> None:
    assert worst(*map(ExitCode, codes)) == expected
    assert worst(*map(ExitCode, reversed(codes))) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("15m", 900), ("2h", 7200), ("1d12h", 129600), ("1w", 604800), ("1w1d1h1m1s", 694861), ("07s", 7)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text, name="--x") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1s", "1.5h", "90", "5x", "1h1d", "h", "1 h", "٣s", "999999999w"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidOptionError):
        parse_duration(text, name="--x")


def test_zero_is_a_duration_where_it_means_something() -> None:
    assert parse_duration("0", name="--x", zero_ok=True) == 0


def test_storage_options_are_typed_and_read_from_files_and_variables(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    monkeypatch.setenv("MY_TOKEN", "from-env")
    pairs = ["a=true", "b=5", 'c={"x": 1}', "d=text", "e=1.5", f"f=@{tmp_path}/token", "g=$MY_TOKEN", "h=a=b", "i="]
    assert parse_storage_options(pairs) == {
        "a": True, "b": 5, "c": {"x": 1}, "d": "text", "e": 1.5, "f": "s3cret", "g": "from-env", "h": "a=b", "i": "",
    }  # fmt: skip
    assert parse_storage_options(["requester_pays=12345"]) == {"requester_pays": "12345"}
    assert parse_storage_options(["requester_pays=true"]) == {"requester_pays": True}
    for pair in ("novalue", "=x", "k=@/no/such/file", "k=$NO_SUCH_VARIABLE"):
        with pytest.raises(InvalidOptionError):
            parse_storage_options([pair])


def test_sizes_and_widths_for_people() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1 << 30: "1.0 GiB", 5 << 40: "5.0 TiB"}
    assert {size: format_size(size) for size in sizes} == sizes
    assert format_size(None) == "-"
    assert (cell_width("ab"), cell_width("日本"), cell_width("ü")) == (2, 4, 1)
    assert chop("abcdef", 4) == ["abcd", "ef"]
    assert printable("plain ü 日") == "plain ü 日"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_comes_in_a_finalizer_is_not_lost(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints an exception that comes up there, and goes on."""

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.001)

    def work(*_: object) -> int:
        Dying()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            time.sleep(0.001)
        return 0

    monkeypatch.setattr("snapctl.cli.main._run_command", work)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    hook = sys.unraisablehook
    assert main(["list"]) == code
    assert capsys.readouterr() == ("", "")
    assert {each: signal.getsignal(each) for each in before} == before and sys.unraisablehook is hook


def test_a_signal_that_comes_when_all_is_done_is_no_traceback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the handlers that stood before are put back."""
    real, calls = signal.signal, 0

    def late(number: int, handler: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # two were set; the first is put back
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return real(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(signal, "signal", late)
    try:
        assert main(["list", str(tmp_path), "--quiet"]) == 143
    finally:
        for number, handler in before.items():
            real(number, handler)
