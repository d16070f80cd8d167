"""Running a command for a checkpoint, as ``wait --exec`` does."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from snapctl.errors import CommandFailedError, InvalidOptionError

PLACEHOLDER = "{}"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


def parse_command(text: str) -> list[str]:
    """The words of a command, split like a shell's.

    Raises:
        InvalidOptionError: a quote is not closed, there is no word, or no such command.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidOptionError(f"--exec {text!r}: {str(error).lower()}") from error
    if not words:
        raise InvalidOptionError("--exec: the command is empty")
    if PLACEHOLDER not in words[0] and shutil.which(words[0]) is None:
        raise InvalidOptionError(f"--exec: no such command: {words[0]}")
    return words


def run_command(words: Sequence[str], *, path: str, step: int) -> None:
    """Runs a command for one checkpoint, and waits for it; ``{}`` in its words is the checkpoint's path.

    Its standard output goes to standard error, and its standard input is empty. It gets a process group of its own, to
    which signals are passed on. After SIGINT, SIGTERM, SIGHUP or SIGQUIT this process waits for its end, and then goes
    the same way; the second of them kills it.

    Raises:
        CommandFailedError: it ended with another code than 0, or could not be run.
    """
    command = [word.replace(PLACEHOLDER, path) for word in words]
    environment = {**os.environ, "SNAPCTL_STEP": str(step), "SNAPCTL_PATH": path}
    if sys.stderr is not None:
        sys.stderr.flush()
    with _Relay() as relay:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=environment, start_new_session=True
            )
        except OSError as error:
            message = f"{shlex.join(command)}: cannot be run: {error.strerror or error}"
            raise CommandFailedError(message, returncode=127) from error
        relay.attach(process)
        code = process.wait()
    if code:
        raise CommandFailedError(f"{shlex.join(command)}: {_how_it_ended(code)}", returncode=code)


def _how_it_ended(returncode: int) -> str:
    if returncode > 0:
        return f"ended with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


class _Relay:
    """Passes signals on to a process while it runs, and afterwards to what had handled them before."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Relay:
        with contextlib.suppress(ValueError):  # not in the main thread, to which signals go
            for number in _PASSED_ON:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        ending = [number for number in self._received if number in _ENDING]
        if ending:
            signal.raise_signal(ending[0])

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to pass on, with what has come already."""
        self._process = process
        for number in self._received:
            self._send(number)

    def _handle(self, number: int, frame: object) -> None:
        is_second = number in _ENDING and any(earlier in _ENDING for earlier in self._received)
        self._received.append(number)
        self._send(signal.SIGKILL if is_second else number)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
