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


def snapctl_inside(*arguments: str) -> Finished:
    """The same in this process: for what needs neither signals nor real streams, at a tenth of the time."""
    from snapctl.cli.main import main

    out, err = io.BytesIO(), io.BytesIO()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.TextIOWrapper(out, "utf-8"), io.TextIOWrapper(err, "utf-8")
    try:
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        return Finished(code, _text(out.getvalue()), _text(err.getvalue()))
    finally:
        sys.stdout, sys.stderr = streams


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
