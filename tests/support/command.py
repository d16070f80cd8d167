"""Running the command line as its users do: in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finished:
    """How a command ended, with its two streams apart."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one document on stdout (strict: no NaN, nothing else)."""
        return _strict_json(self.stdout)

    @property
    def error(self) -> Any:
        """The error of the one document on stderr."""
        return _strict_json(self.stderr)["error"]


def _strict_json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def snapctl(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60, **options: Any) -> Finished:
    """``snapctl …`` with pipes for its streams."""
    done = subprocess.run(
        [sys.executable, "-m", "snapctl", *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        **options,
    )
    return Finished(done.returncode, _text(done.stdout), _text(done.stderr))


def snapctl_here(*arguments: str) -> Finished:
    """``snapctl …`` in this process: for tests of many command lines, where a process each would take minutes."""
    from snapctl.cli.main import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        code = main(arguments)
    stdout, stderr = (_bytes_of(stream) for stream in streams)
    return Finished(code, _text(stdout), _text(stderr))


def _bytes_of(stream: io.TextIOWrapper) -> bytes:
    stream.flush()
    return stream.buffer.getvalue()  # type: ignore[attr-defined,no-any-return]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
