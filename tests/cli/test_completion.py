"""Completion: what is offered at each place of a line, quickly and in silence, and the same in the real shells."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapctl.cli.completion.scripts import SCRIPTS
from snapctl.cli.completion.words import put_back, split_line
from snapctl.cli.outline import outline_all
from tests.support.command import Finished
from tests.support.repository import ROOT, require_repository
from tests.support.servers import Bucket
from tests.support.snapshots import local_writer, write_checkpoint
from tests.support.terminal import on_terminal

BREAKS = " \t\n\"'@><=;|&(:"
Run = Callable[..., Finished]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine fails no test, and the watchdog ends no process that runs the tests."""
    monkeypatch.setenv("SNAPCTL_COMPLETION_SECONDS", "60")


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 9, 10 and 100, markers of two partitions on two of them, and a name with a space in it."""
    root = tmp_path / "run"
    write = local_writer(root)
    tensors = {"emb.weight": np.zeros((4, 2), "f4"), "a b": np.zeros(1, "f4")}
    for step in ("9", "10", "100"):
        write_checkpoint(write, step, tensors)
    write("100/evaled_by/val_DONE", b'{"partition": "val", "finished_at": null, "metrics": {"auc": 0.8}}')
    write("10/evaled_by/test_DONE", b"")
    write("notes/readme", b"")
    return root


@pytest.fixture
def offered(snapctl_inside: Run) -> Callable[..., list[str]]:
    """The lines that the program answers a shell with, helps cut off."""

    def ask(*words: str) -> list[str]:
        done = snapctl_inside("__complete", "zsh", *words)
        assert (done.code, done.stderr) == (0, "")
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    return ask


# -- what is offered -------------------------------------------------------------------------------------------------


def test_commands_are_offered_first(offered: Callable[..., list[str]]) -> None:
    assert offered("l") == ["words", "list", "latest"]
    assert offered("--debug", "pi") == ["words", "pin"]
    assert offered("--de") == ["words", "--debug"]
    assert offered("no-such-command", "") == ["words"]


def test_options_are_those_of_the_command_that_are_not_given_yet(offered: Callable[..., list[str]]) -> None:
    assert offered("list", "/x", "--l") == ["words", "--long", "--limit"]
    assert offered("list", "/x", "-l", "--l") == ["words", "--limit"]
    assert offered("list", "/x", "--evaluated-by", "a", "--ev") == ["words", "--evaluated-by"]
    assert offered("list", "--", "--l") == ["dirs"]


def test_values_of_an_option_are_offered_in_all_its_spellings(
    offered: Callable[..., list[str]], run_dir: pathlib.Path
) -> None:
    assert offered("latest", "--print", "") == ["words", "path", "step"]
    assert offered("latest", "--print=s") == ["words", "--print=step"]
    assert offered("show", str(run_dir), "--step=1") == ["words", "--step=100", "--step=10"]
    assert offered("list", "-al", "--limit", "3", str(run_dir), "--not-evaluated-by", "") == ["words", "test", "val"]


def test_steps_come_newest_first(offered: Callable[..., list[str]], run_dir: pathlib.Path) -> None:
    assert offered("show", str(run_dir), "--step", "") == ["words", "100", "10", "9"]
    assert offered("prune", str(run_dir), "--keep-step", "9", "--keep-step", "") == ["words", "100", "10"]


def test_a_variable_stands_for_the_directory(
    offered: Callable[..., list[str]], run_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", str(run_dir))
    assert offered("show", "$RUN", "--step", "9") == ["words", "9"]


def test_partitions_are_those_of_the_whole_save_directory(
    offered: Callable[..., list[str]], run_dir: pathlib.Path
) -> None:
    assert offered("mark-eval", f"{run_dir}/9", "") == ["words", "test", "val"]
    assert offered("mark-eval", f"{run_dir}/9", "val", "") == ["words", "test"]
    assert offered("wait", str(run_dir), "--evaluated-by", "v") == ["words", "val"]


def test_metrics_are_offered_as_each_option_takes_them(
    offered: Callable[..., list[str]], run_dir: pathlib.Path
) -> None:
    assert offered("latest", str(run_dir), "--best", "") == ["words", "val/auc:max", "val/auc:min"]
    assert offered("prune", str(run_dir), "--keep-best", "val/auc:mi")[1:2] in ([], ["val/auc:min"])
    assert offered("mark-eval", f"{run_dir}/9", "val", "--metric", "") == ["nospace", "auc="]
    assert offered("mark-eval", f"{run_dir}/9", "val", "test", "--metric", "") == ["nospace", "val/auc="]


def test_entries_are_offered_a_part_at_a_time(offered: Callable[..., list[str]], run_dir: pathlib.Path) -> None:
    assert offered("restore-weight", str(run_dir), "") == ["nospace", "extra_state/", "model/"]
    assert offered("restore-weight", str(run_dir), "model/") == ["words", "model/a b", "model/emb.weight"]
    assert offered("restore-weight", str(run_dir), "model/a b", "model/") == ["words", "model/emb.weight"]
    assert offered("restore-weight", str(run_dir), "--step", "9", "model/e") == ["words", "model/emb.weight"]
    assert offered("show", str(run_dir), "--entries", "model/e") == ["words", "model/emb.weight"]


def test_paths_are_left_to_the_shell_but_for_remote_ones(
    offered: Callable[..., list[str]], run_dir: pathlib.Path
) -> None:
    assert offered("list", "") == offered("show", "/") == ["dirs"]
    assert offered("restore-weight", str(run_dir), "x", "-o", "") == ["files"]
    assert offered("list", f"file://{run_dir}/1") == ["nospace", f"file://{run_dir}/10/", f"file://{run_dir}/100/"]


def test_what_lies_in_a_bucket_is_offered(
    offered: Callable[..., list[str]], bucket: Bucket, run_dir: pathlib.Path
) -> None:
    bucket.upload(run_dir, "run")
    assert offered("list", f"{bucket.url}/") == ["nospace", f"{bucket.url}/run/"]
    assert offered("show", f"{bucket.url}/run", "--step", "") == ["words", "100", "10", "9"]
    assert offered("mark-eval", f"{bucket.url}/run/9", "") == ["words", "test", "val"]
    assert offered("restore-weight", f"{bucket.url}/run", "model/e") == ["words", "model/emb.weight"]
    assert offered("list", bucket.url[:-3]) == ["words"], "buckets are not listed"


def test_every_value_of_every_command_can_be_asked_for(
    offered: Callable[..., list[str]], run_dir: pathlib.Path
) -> None:
    for command in outline_all()[1:]:
        path = [] if command.name == "completion" else [str(run_dir)]
        assert offered(command.name, ""), command.name
        for option in command.options:
            if option.takes_value:
                assert offered(command.name, *path, option.names[0], "")[0] in ("words", "nospace", "files", "dirs")


def test_what_a_line_cannot_carry_is_not_offered(offered: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    for name in ("a\nb", "c\td", "ok"):
        write_checkpoint(local_writer(tmp_path / name), "1", {})
    assert offered("list", f"file://{tmp_path}/") == ["nospace", f"file://{tmp_path}/ok/"]


# -- in silence, and soon --------------------------------------------------------------------------------------------


@pytest.fixture
def dead_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("dead_server")
def test_a_storage_that_does_not_answer_is_given_up_in_silence(snapctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPCTL_COMPLETION_SECONDS")
    times = [time.monotonic()]
    snapctl("__complete", "zsh", "li")
    times.append(time.monotonic())
    done = snapctl("__complete", "zsh", "show", "gs://bucket/run", "--step", "")
    times.append(time.monotonic())
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    assert times[2] - times[1] < 4 + 4 * (times[1] - times[0]), "its own limit is 0.9 s, and the machine may be slow"


@pytest.mark.parametrize(
    "words",
    [
        ("show", "/no/such/place", "--step", ""),
        ("show", "gs://", "--step", ""),
        ("show", "--step", ""),
        ("restore-weight", "nowhere://x", ""),
        ("restore-weight", str(ROOT / "tests"), "x"),
        ("mark-eval", "\0", ""),
        ("show", "/tmp", "--storage-option", "key=@/no/such/file", "--step", ""),
        (),
    ],
)
def test_what_goes_wrong_is_nobodys_business(snapctl_inside: Run, words: tuple[str, ...]) -> None:
    done = snapctl_inside("__complete", "zsh", *words)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout in ("", "words\n")


# -- words as bash splits them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words", "last", "quote", "kept"),
    [
        ("snapctl ", ("snapctl",), "", "", ""),
        ("snapctl li", ("snapctl",), "li", "", ""),
        ("snapctl list a\\ b c", ("snapctl", "list", "a b"), "c", "", ""),
        ("snapctl list 'a b", ("snapctl", "list"), "a b", "'", ""),
        ('snapctl list "a:b', ("snapctl", "list"), "a:b", '"', ""),
        ("snapctl list gs://b/r", ("snapctl", "list"), "gs://b/r", "", "gs:"),
        ("snapctl latest --print=s", ("snapctl", "latest"), "--print=s", "", "--print="),
        ("snapctl list '' x", ("snapctl", "list", ""), "x", "", ""),
    ],
)
def test_a_line_is_split_like_the_shell_does(
    line: str, words: tuple[str, ...], last: str, quote: str, kept: str
) -> None:
    typed = split_line(line, BREAKS)
    assert (typed.words, typed.last, typed.quote, typed.kept) == (words, last, quote, kept)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1), st.sampled_from(["", "'", '"']))
@example("~x", "")
@example("a=~b", "")
@example("it's", "'")
def test_what_is_put_back_is_the_word_again_for_the_shell(word: str, quote: str) -> None:
    put = put_back(word, split_line(f"snapctl {quote}", BREAKS))
    done = subprocess.run(["bash", "-c", f"printf %s {quote}{put}{quote}"], capture_output=True, check=True)
    assert done.stdout.decode() == word


# -- the scripts, in the real shells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_scripts_in_the_repository_are_what_the_program_prints(snapctl_inside: Run, shell: str) -> None:
    require_repository()
    done = snapctl_inside("completion", shell)
    assert (ROOT / "completions" / SCRIPTS[shell][0]).read_text() == done.stdout
    assert snapctl_inside("completion", shell, "--json").json["script"] == done.stdout


@pytest.fixture
def scripts(tmp_path: pathlib.Path) -> pathlib.Path:
    """The scripts, as files."""
    directory = tmp_path / "completions"
    directory.mkdir()
    for name, text in SCRIPTS.values():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def launcher(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`snapctl` on the path."""
    program = tmp_path / "bin" / "snapctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m snapctl "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _start(shell: str, tmp_path: pathlib.Path, scripts: pathlib.Path) -> tuple[list[str], str]:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = shlex.quote(str(scripts / SCRIPTS[shell][0]))
    match shell:
        case "bash":
            quiet = "bind 'set enable-bracketed-paste off' 2>/dev/null"
            return [program, "--norc", "--noprofile", "-i"], f"{quiet}; source {script}"
        case "zsh":
            load = f"fpath=({shlex.quote(str(scripts))} $fpath); autoload -Uz compinit"
            return [program, "-f", "-i"], f"{load}; compinit -u -d {shlex.quote(str(tmp_path / 'dump'))}"
        case _:
            return [program, "--no-config", "-i"], f"source {script}"


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_tab_key_completes_in_the_real_shell(
    shell: str, tmp_path: pathlib.Path, run_dir: pathlib.Path, scripts: pathlib.Path
) -> None:
    command, load = _start(shell, tmp_path, scripts)
    lines = [
        ("snapctl resto", "restore-weight "),
        ("snapctl list --eval", "--evaluated-by "),
        ("snapctl show run --step 9", "--step 9 "),
        ("snapctl latest --print=st", "--print=step "),
        ("snapctl latest run --best val/auc:ma", "val/auc:max "),
        ("snapctl mark-eval run/9 v", "val "),
        ("snapctl restore-weight run mod", "run model/"),
        ("snapctl restore-weight run model/emb", "model/emb.weight "),
        ("snapctl restore-weight run model/a", r"model/a\\ b "),
        ('snapctl restore-weight run "model/a', '"model/a b" '),
        (f"snapctl list file://{run_dir.parent}/r", f"file://{run_dir.parent}/run/"),
        ("snapctl list ru", "list run/"),
    ]
    with on_terminal(
        command, columns=200, cwd=str(tmp_path), env={"TERM": "dumb" if shell == "bash" else "xterm"}
    ) as tty:
        tty.type(f"{load}; echo load''ed\n")
        tty.read_until(r"(?<!'')loaded")
        for line, completed in lines:
            tty.type(f"{line}\t")
            tty.read_until(completed if "\\\\" in completed else completed.replace(".", r"\."))
            tty.type("\x15")  # away with the line


@pytest.mark.usefixtures("launcher")
def test_fish_shows_helps_and_has_no_files_in_place_of_steps(
    tmp_path: pathlib.Path, run_dir: pathlib.Path, scripts: pathlib.Path
) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    script = scripts / "snapctl.fish"

    def complete(line: str) -> list[str]:
        command = [fish, "--no-config", "-c", f"source {script}; complete -C {shlex.quote(line)}"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.splitlines()

    assert complete("snapctl li") == ["list\tThe checkpoints of a save directory."]
    assert complete("snapctl show run --step ") == ["100", "10", "9"]
    assert complete("snapctl show nowhere --step ") == []
    assert complete("snapctl list ru") == ["run/"]
