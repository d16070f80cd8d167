"""Running the command line as its users do: in a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def unprivileged() -> list[str]:
    """What to put before a command so that permissions hold for it: root's power to pass over them is taken away."""
    if os.getuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


def snapctl(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    before: Sequence[str] = (),
    **options: Any,
) -> Finished:
    """``snapctl …`` with pipes for its streams; `before` is put in front of the command."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "snapctl", *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        **options,
    )
    return Finished(done.returncode, _text(done.stdout), _text(done.stderr))


def snapctl_here(
    *arguments: str, env: Mapping[str, str] | None = None, before: Sequence[str] = (), timeout: float = 60
) -> Finished:
    """``snapctl …`` in this process, which is faster; in one of its own where it must be."""
    if env or before:
        return snapctl(*arguments, env=env, before=before, timeout=timeout)
    from snapctl.cli.main import main

    streams = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, encoding="utf-8") as nothing, io.BytesIO() as out, io.BytesIO() as err:
        sys.stdin = nothing
        sys.stdout = io.TextIOWrapper(out, encoding="utf-8", errors="surrogateescape")
        sys.stderr = io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace")
        try:
            code = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            return Finished(code, _text(out.getvalue()), _text(err.getvalue()))
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
