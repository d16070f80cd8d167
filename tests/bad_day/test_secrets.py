"""No token, key, signed URL or password is ever shown: by no command, whatever goes wrong, and not to `ps`."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from snapctl.errors import SnapctlError, StorageError
from snapctl.redaction import redact, remember_secrets
from snapctl.storage import open_storage
from tests.faults.conftest import hasty, proxy, scene
from tests.faults.scene import COMMANDS, Command, Scene, arguments_of
from tests.support.command import Finished, snapctl_here

__all__ = ["hasty", "proxy", "scene"]

CANARY = "canary-" + "0123456789abcdef" * 3 + "+=="
PARTS = (CANARY, "0123456789abcdef0123456789abcdef")
"""Nor is the middle of it shown."""
ECHO = json.dumps({"error": {"code": 500, "message": "what is {echo}"}})
HTML_ECHO = "<html><body>{echo}</body></html>"
Snapctl = Callable[..., Finished]

pytestmark = pytest.mark.usefixtures("hasty")


def check_hidden(done: Finished, what: object) -> None:
    for part in PARTS:
        assert part not in done.stdout + done.stderr, what


def echoes() -> Iterator[tuple[str, dict[str, object]]]:
    """A server that tells back what it was sent, in every way in which an answer becomes an error."""
    for status in (400, 401, 403, 404, 412, 500, 502):
        yield f"{status}", {"status": status, "body": ECHO}
    yield "HTML", {"status": 200, "body": HTML_ECHO, "headers": {"Content-Type": "text/html"}}
    yield "text", {"status": 500, "body": "{echo}", "headers": {"Content-Type": "text/plain"}}
    yield "dropped", {"drop": True}


@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_a_token_is_never_shown_even_by_a_server_that_echoes_it(
    scene: Scene, command: Command, tmp_path: pathlib.Path
) -> None:
    arguments = [*arguments_of(command, scene, tmp_path), "--storage-option", f"token={CANARY}"]
    scene.fail(None)
    done = snapctl_here(*arguments)
    assert done.code == command.exit_code
    check_hidden(done, "when all is well")
    for name, fault in echoes():
        scene.proxy.configure(faults=[{"match": "storage/v1", **fault}])
        for more in (["--debug"], ["--json"] if name == "403" else []):
            done = snapctl_here(*arguments, *more)
            assert done.code != 0, (name, more, done)
            check_hidden(done, (name, more, done))
            assert "--debug" not in more or "Traceback" in done.stderr


@pytest.mark.parametrize("where", ["file", "variable", "fsspec"])
def test_a_token_may_come_from_a_file_or_the_environment(
    scene: Scene, where: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{CANARY}\n")
    monkeypatch.setenv("MY_TOKEN", CANARY)
    options = {
        "file": ["--storage-option", f"token=@{tmp_path}/token"],
        "variable": ["--storage-option", "token=$MY_TOKEN"],
    }
    scene.proxy.configure(faults=[{"match": "storage/v1", "status": 403, "body": ECHO}])
    if where == "fsspec":
        import fsspec.config

        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": CANARY})
    done = snapctl_here("--debug", "latest", scene.run, *options.get(where, []))
    assert done.code == 4 and "Authorization: Bearer …" in done.stderr, "it was sent"
    check_hidden(done, done)


def test_what_comes_from_a_file_or_the_environment_is_not_in_the_list_of_processes(
    scene: Scene, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "token").write_text(CANARY)
    command = [sys.executable, "-m", "snapctl", "wait", f"{scene.run}/none", "--timeout", "5s"]
    for option in (f"token=@{tmp_path}/token", "token=$MY_TOKEN"):
        environment = {**os.environ, "MY_TOKEN": CANARY}
        process = subprocess.Popen(
            [*command, "--storage-option", option], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stderr is not None and b"waiting for" in process.stderr.readline()
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    assert CANARY.encode() not in path.read_bytes(), path
                except OSError:  # it has ended
                    continue
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "arguments",
    [
        ["latest", "run", f"--token={CANARY}"],
        ["latest", "run", f"--storage-options=token={CANARY}"],
        ["show", "run", f"token={CANARY}"],
        ["show", "run", "--storage-option", "--json", f"token={CANARY}"],
        ["latest", f"sftp://me:{'0123456789abcdef' * 3}@host/run"],
        ["latest", f"simplecache::sftp://me:{'0123456789abcdef' * 3}@host/run"],
        ["latest", f"nosuch://me:{'0123456789abcdef' * 3}@host/run"],
        ["show", "run", f"sftp://me:{'0123456789abcdef' * 3}@host/run"],
        ["list", f"https://storage.googleapis.com/b/run?X-Goog-Signature={'0123456789abcdef' * 3}"],
        ["wait", "run", "--timeout", "0", "--fail-if", f"s3://b/f?X-Amz-Signature={'0123456789abcdef' * 3}"],
        ["latest", "memory://run", "--storage-option", f"token={CANARY}", "--storage-option", "loop=1"],
        ["latest", "gs://b/run", "--storage-option", json.dumps({"private_key": CANARY})],
        ["latest", "gs://b/run", "--storage-option", "token=" + json.dumps({"private_key": CANARY})],
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"], ["--debug"]])
def test_mistakes_on_the_command_line_show_no_secret(arguments: list[str], more: list[str]) -> None:
    done = snapctl_here(*arguments, *more)
    assert done.code not in (0, 70) and done.stderr
    check_hidden(done, done)


def test_a_bug_shows_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    from snapctl.cli import list_cmd

    def broken(path: str, options: dict[str, str]) -> None:
        raise KeyError(f"{options['token']} is not a token")

    monkeypatch.setattr(list_cmd, "open_save_dir", broken)
    for more in ([], ["--json"], ["--debug"]):
        done = snapctl_here("list", str(tmp_path), "--storage-option", f"token={CANARY}", *more)
        assert done.code == 70 and "is not a token" in done.stderr, done
        check_hidden(done, done)


def test_the_library_and_its_log_show_no_secret(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="snapctl")
    options = {"token": CANARY, "endpoint_url": scene.proxy.endpoint}
    scene.proxy.configure(faults=[{"match": "storage/v1", "status": 500, "body": ECHO}])
    with pytest.raises(StorageError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        open_storage(scene.run, options).list_dir()
    assert CANARY not in str(caught.value) + caplog.text and "Bearer …" in str(caught.value)


@pytest.mark.torch
def test_a_save_that_fails_shows_no_secret(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    torchsnapshot = pytest.importorskip("torchsnapshot")
    from snapctl import Snapshot

    scene.proxy.configure(faults=[{"match": "storage/v1", "status": 403, "body": ECHO}])
    state = {"model": torchsnapshot.StateDict(w=torch.ones(3))}
    snapshot = Snapshot(scene.run, state, storage_options={"token": CANARY})
    with pytest.raises(SnapctlError) as saving:
        snapshot.save(40).wait()
    with pytest.raises(SnapctlError) as restoring:
        snapshot.restore(f"{scene.run}/30")
    assert CANARY not in f"{saving.value}{restoring.value}{caplog.text}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def-123, next", "Authorization: Bearer …, next"),
        ("token ya29.a0AfH6SM_x-y was refused", "token … was refused"),
        ("https://me:pa@ss@host/x", "https://me:…@host/x"),
        ("https://h/o?a=1&X-Goog-Signature=abc&b=2", "https://h/o?a=1&X-Goog-Signature=…&b=2"),
        ("https://h/upload?upload_id=ABPtc", "https://h/upload?upload_id=…"),
        ("-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----\nrest", "…\nrest"),
        ('{"client_secret": "abc", "n": 1}', '{"client_secret": "…", "n": 1}'),
        ("gs://bucket/run/10: not found", "gs://bucket/run/10: not found"),
        ("--storage-option token=FILE.json", "--storage-option token=FILE.json"),
        ("step 10: auc=0.5, 12:30:00 me@host", "step 10: auc=0.5, 12:30:00 me@host"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_secret_is_known_by_its_name_at_any_depth_and_in_any_form() -> None:
    key = "-----first line of it-----\nsecond line, long enough\n"
    remember_secrets({"token": {"private_key": key, "client_email": "sa-of-mine@x"}, "project": "my-project-7"})
    shown = redact(f"{key!r} {json.dumps(key)} second line, long enough sa-of-mine@x my-project-7")
    assert "second line" not in shown and "sa-of-mine@x my-project-7" in shown


def test_redacting_costs_little() -> None:
    began = time.process_time()
    for number in range(10_000):
        StorageError(f"gs://bucket/run/{number}/0/model/layer.weight: the server answers 503: Service Unavailable")
    assert time.process_time() - began < 5
