"""What goes out: answers to stdout, everything else to stderr, in the form that the reader of each can use."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from snapctl.cli.tables import field_lines, plain, row_line, table_lines
from snapctl.cli.terminal import is_terminal, one_line, painted, printable, terminal_width, wants_color
from snapctl.errors import InvalidOptionError, NoSpaceError, RefusedError, SnapctlError, StorageError
from snapctl.markers import json_number
from snapctl.redaction import redact

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


class Output:
    """The two streams of one command."""

    def __init__(self, *, as_json: bool, progress: bool = True) -> None:
        self.as_json = as_json
        self.wants_progress = progress
        self.warnings: list[str] = []

    # -- stdout ------------------------------------------------------------------------------------------------

    def document(self, content: Mapping[str, Any]) -> None:
        """The one JSON document of ``--json``, or one of several, a line each; warnings so far go with it."""
        body = dict(content)
        if self.warnings or "warnings" in body:
            body["warnings"] = [*body.get("warnings", ()), *self.warnings]
        self.warnings = []
        self._write(_json(body) + "\n")

    def null(self) -> None:
        """The JSON document of an answer that is not there."""
        self._write("null\n")

    def line(self, text: str) -> None:
        """A line for people; characters that a terminal would act on are escaped."""
        self._write(printable(text) + "\n")

    def path(self, path: str, *, end: str = "\n") -> None:
        """A bare path for scripts: its very bytes, but on a terminal, where it is escaped; and one with a line break in
        it is escaped wherever lines are records (``--print0`` has the very bytes)."""
        if end == "\n" and ("\n" in path or is_terminal(sys.stdout)):
            self._write(printable(path) + end)
        else:
            self._write_bytes(os.fsencode(path + end))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table, row by row. In a pipe each row is one line; on a narrow terminal long values fold.

        Args:
            right: headers of the columns that are flush right.
        """
        room, color = terminal_width(sys.stdout), wants_color(sys.stdout)
        lines = table_lines(headers, rows, right=right, room=room, color=color)
        self._write("".join(f"{line}\n" for line in lines))

    def columns(self, cells: Sequence[str], rest: str, widths: Sequence[int]) -> None:
        """One row of a table that nobody sees as a whole: columns of fixed widths, flush right, and a last one that
        takes what room it needs. A cell that is too wide moves the others."""
        shown = [plain(cell) for cell in (*cells, rest)]
        flush = [True] * len(cells) + [False]
        self._write(row_line(shown, [*widths, 0], flush, color=wants_color(sys.stdout)) + "\n")

    def text(self, text: str) -> None:
        """A document of another kind, as it is."""
        self._write_bytes(text.encode())

    def fields(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        shown = [(name, plain(value)) for name, value in pairs]
        for line in field_lines(shown, terminal_width(sys.stdout), color=False):
            self._write(line + "\n")

    def flush(self) -> None:
        """Lets the reader have what has been written, before the command goes on."""
        if sys.stdout is not None:
            with stdout_errors():
                sys.stdout.flush()

    def sleep(self, seconds: float) -> None:
        """Sleeps; but raises `BrokenPipeError` when the reader of stdout goes away: nobody waits for an answer then."""
        until = time.monotonic() + seconds
        try:
            watched = select.poll()
            watched.register(sys.stdout.fileno(), 0)
        except (AttributeError, OSError, ValueError):  # closed, or replaced by something else
            time.sleep(seconds)
            return
        while (left := until - time.monotonic()) > 0:
            if any(event & select.POLLERR for _, event in watched.poll(math.ceil(min(left, 3600.0) * 1000))):
                raise BrokenPipeError

    def _write(self, text: str) -> None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._write_bytes(text.encode(encoding, "backslashreplace"))

    def _write_bytes(self, data: bytes) -> None:
        if sys.stdout is None:
            raise StorageError("stdout: is closed")
        with stdout_errors():
            sys.stdout.flush()
            sys.stdout.buffer.write(data)

    # -- stderr ------------------------------------------------------------------------------------------------

    def warn(self, message: str) -> None:
        """Something that the user should know though the answer stands. With ``--json`` it goes into the document."""
        if self.as_json:
            self.warnings.append(redact(message))
        else:
            self.flush()  # it comes after what it speaks of
            _tell("warning", "yellow", message)

    def note(self, message: str) -> None:
        """What is going on; not with ``--json``."""
        if not self.as_json:
            self.flush()
            write_stderr(one_line(message))

    def error(self, error: BaseException, exit_code: int, *, message: str | None = None) -> None:
        """The one error that ends the command."""
        text = message if message is not None else str(error)
        hint = error.hint if isinstance(error, SnapctlError) else None
        if self.as_json:
            body = error_json(error, exit_code, message=text)
            write_stderr(_json({"error": body, "warnings": self.warnings}))
            return
        with contextlib.suppress(BrokenPipeError, StorageError):  # `main` sees to that
            self.flush()
        _tell("error", "red", text)
        if hint:
            _tell("hint", "cyan", hint)

    def confirm(self, question: str) -> bool:
        """Asks on stderr; anything but a yes is a no.

        Raises:
            RefusedError: nobody can be asked: stdin is no terminal, or the answer is to be JSON.
        """
        if self.as_json or not is_terminal(sys.stdin):
            raise RefusedError("nobody can be asked", hint="--yes does it without asking, --dry-run only shows")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{one_line(question)} [y/N] ")
            sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):
            write_stderr("")  # the end of the input leaves the cursor behind the question
        return answer.strip().lower() in ("y", "yes")

    @contextlib.contextmanager
    def progress(
        self, description: str, total: int | None, *, unit: str = "bytes", only_if: bool = True
    ) -> Iterator[Callable[..., None]]:
        """A progress bar on stderr, if that is a terminal and nobody asked for silence.

        Args:
            total: how many bytes or items there will be; None if nobody knows.
            unit: ``bytes`` shows sizes and a rate, anything else counts; without a total, bytes excepted, only the
                time shows.
            only_if: False for what is known to be over at once.

        Returns:
            a function to call with how much is done by now and, if that has changed, how much there is in all.
        """
        if not only_if or not self.wants_progress or self.as_json or not is_terminal(sys.stderr):
            yield lambda done, total=None: None
            return
        from rich import progress
        from rich.console import Console

        middle: list[progress.ProgressColumn] = (
            [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
            if unit == "bytes"
            else [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
            if total is not None
            else [progress.TimeElapsedColumn()]
        )
        console = Console(stderr=True, no_color=not wants_color(sys.stderr), markup=False, emoji=False)
        columns = [progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *middle]
        with progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(printable(description), total=total)
            yield lambda done, total=total: bar.update(task, completed=done, total=total)


def error_json(error: BaseException, exit_code: int, *, message: str | None = None) -> dict[str, Any]:
    """The keys of an error, with the facts that it carries."""
    facts = dict(error.facts) if isinstance(error, SnapctlError) else {}
    hint = error.hint if isinstance(error, SnapctlError) else None
    text = message if message is not None else str(error)
    return {"type": type(error).__name__, "message": text, "exit_code": int(exit_code), "hint": hint, **facts}


class StdoutSink:
    """Standard output for bytes that are no text: a file that is written there."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise StorageError("stdout: is closed")
        if is_terminal(sys.stdout):
            raise InvalidOptionError("binary data is not written to a terminal", hint="redirect standard output")
        sys.stdout.flush()

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes all of it."""
        with stdout_errors():
            return sys.stdout.buffer.write(data)

    def flush(self) -> None:
        """`main` flushes at the end."""


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """A full disk behind stdout is an error of the storage; a reader that went away is left to `main`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NoSpaceError(f"stdout: {error.strerror or error}") from error
    except ValueError as error:  # closed
        raise StorageError(f"stdout: {error}") from error


def _tell(label: str, style: str, message: str) -> None:
    """A labelled line on stderr."""
    write_stderr(one_line(message), label=painted(f"{label}:", style, color=wants_color(sys.stderr)) + " ")


def write_stderr(line: str, *, label: str = "") -> None:
    """A line on stderr, without secrets. If that is gone there is nobody left to tell."""
    line = redact(line)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        text = line.encode(encoding, "backslashreplace").decode(encoding)
        sys.stderr.write(label + text + "\n")
        sys.stderr.flush()


def _json(content: Any) -> str:
    return json.dumps(content, default=_json_default, allow_nan=False, ensure_ascii=True)


def _json_default(value: object) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"not for JSON: {type(value).__name__}")


def json_value(value: object) -> Any:
    """Any value of a manifest for JSON: numbers that are not finite as strings, bytes in base64."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode()
    return value


def format_size(size_bytes: int | None) -> str:
    """``1.5 GiB``; ``-`` for what is not known."""
    if size_bytes is None:
        return "-"
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if size_bytes.bit_length() > 80:  # no storage holds it: what a manifest says, in a form that can be read
        return f"2^{size_bytes.bit_length() - 1} B"
    power = min((size_bytes.bit_length() - 1) // 10, len(_UNITS))
    return f"{size_bytes / 1024**power:.1f} {_UNITS[power - 1]}"


def format_number(value: float) -> str:
    """A metric for people: six significant digits."""
    return f"{value:.6g}" if math.isfinite(value) else str(json_number(value))
