"""Programs on a pseudo-terminal, as somebody who sits there would use them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])|[\r\x07\x08]")


def without_control(text: str) -> str:
    """What is left of a terminal's output without colours and cursor movements."""
    return _CONTROL.sub("", text)


class Terminal:
    """A running program, its keyboard and what it has shown so far."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def read_until(self, pattern: str, *, seconds: float = 90) -> str:
        """What was shown since the last call, up to the end of the pattern (matched without control sequences)."""
        deadline = time.monotonic() + seconds
        while True:
            shown = without_control(self._seen.decode("utf-8", "replace"))
            if re.search(pattern, shown):
                self._seen = b""
                return shown
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"no {pattern!r} in {shown!r}")

    def read_all(self, *, seconds: float = 20) -> str:
        """All that is shown until the program ends, control sequences and all."""
        deadline = time.monotonic() + seconds
        while self._read(max(0.0, deadline - time.monotonic())):
            pass
        seen, self._seen = self._seen, b""
        return seen.decode("utf-8", "replace")

    def _read(self, seconds: float) -> bool:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # its other end is closed
            return False
        self._seen += data
        return bool(data)


@contextlib.contextmanager
def on_terminal(
    command: Sequence[str], *, columns: int = 80, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> Iterator[Terminal]:
    """Runs a program on a terminal of its own; kills it at the end if it still runs."""
    child, descriptor = pty.fork()
    if child == 0:
        try:
            if cwd is not None:
                os.chdir(cwd)
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            os.execvpe(command[0], list(command), {**os.environ, "TERM": "xterm-256color", **(env or {})})
        finally:
            os._exit(127)
    try:
        yield Terminal(descriptor)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(descriptor)
