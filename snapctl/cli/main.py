"""`main`: the one owner of exit codes, signals and the last words of a command."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer

from snapctl.cli.completion import REQUEST
from snapctl.cli.exit_codes import ExitCode, code_of
from snapctl.cli.output import Output, stdout_errors, write_stderr
from snapctl.cli.terminal import one_line
from snapctl.errors import SnapctlError, StorageError
from snapctl.redaction import redact, remember_arguments

_GLOBAL_FLAGS = ("--debug", "--no-progress")
_AGAIN_SECONDS = 0.01
_SIGNALS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class SignalReceivedError(BaseException):
    """The process was told to end; unwinds the command like `KeyboardInterrupt`."""

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run() -> NoReturn:
    """The console script.

    After a signal the process ends at once: threads that still wait for the network must not keep it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # before and after `main` there is nothing to unwind, or to say
    _buffer_stdout()
    code = main(sys.argv[1:])
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.CLOSED_PIPE):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _buffer_stdout() -> None:
    """Under ``PYTHONUNBUFFERED`` the stream below `sys.stdout` is raw, and drops what a short write left."""
    stdout = sys.stdout
    raw = getattr(stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), stdout.encoding, stdout.errors, line_buffering=stdout.isatty()
        )


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; never raises."""
    if arguments and arguments[0] == REQUEST:
        from snapctl.cli.completion.answering import answer

        return answer(arguments[1:])
    if not sys.warnoptions:  # what libraries have to say to developers is nothing for stderr
        warnings.simplefilter("ignore")
    remember_arguments(arguments)
    options, literal = _split_at_double_dash(arguments)
    debug = "--debug" in options
    out = Output(as_json="--json" in options, progress="--no-progress" not in options)
    remaining = [argument for argument in options if argument not in _GLOBAL_FLAGS] + literal
    try:
        with _signal_handlers():
            try:
                code = _run_command(remaining, out)
                _flush_stdout()
            except SignalReceivedError as error:
                code = error.exit_code
            except KeyboardInterrupt:
                code = ExitCode.INTERRUPTED
            except BrokenPipeError:
                code = ExitCode.CLOSED_PIPE
            except BaseException as error:  # noqa: BLE001 - the end of the line for all of them
                code = _report(error, out, debug=debug)
            if code == ExitCode.CLOSED_PIPE:
                _abandon_stdout()
    except SignalReceivedError as error:  # it came when all was done, or nothing begun
        code = error.exit_code
    return int(code)


def _split_at_double_dash(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut:]


def _run_command(arguments: list[str], out: Output) -> int:
    from snapctl.cli.app import CarriedError, build_app

    try:
        result = build_app(arguments)(args=arguments, prog_name="snapctl", standalone_mode=False, obj=out)
    except CarriedError as carried:
        raise carried.error from carried.error.__cause__
    except SystemExit as error:  # Typer could not write the help: nobody reads it
        raise BrokenPipeError from error
    return int(result) if isinstance(result, int) else ExitCode.OK


def _flush_stdout() -> None:
    if sys.stdout is not None:
        with stdout_errors():
            sys.stdout.flush()


def _report(error: BaseException, out: Output, *, debug: bool) -> ExitCode:
    """Says what went wrong, in one line or one document, and with which code that ends."""
    code, message = _judge(error)
    if debug or (code == ExitCode.BUG and not out.as_json):
        _show_traceback(error)
    out.error(error, code, message=message)
    try:
        _flush_stdout()
    except (StorageError, BrokenPipeError):
        _abandon_stdout()
    return code


def _judge(error: BaseException) -> tuple[ExitCode, str]:
    if isinstance(error, SnapctlError):
        return code_of(error), error.message
    if isinstance(error, OSError):
        return ExitCode.STORAGE, f"{error.filename or 'I/O'}: {error.strerror or error}"
    usage = _usage_message(error)
    if usage is not None:
        return ExitCode.USAGE, usage
    if isinstance(error, typer.Abort):
        return ExitCode.REFUSED, "the answer was no, or there was nobody to ask"
    if isinstance(error, MemoryError):
        return ExitCode.STORAGE, "out of memory"
    return ExitCode.BUG, f"this is a bug in snapctl: {type(error).__name__}: {error}"


def _usage_message(error: BaseException) -> str | None:
    """The text of one of Typer's own complaints about the command line, or None."""
    from typer.exceptions import TyperException

    if not isinstance(error, TyperException):
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return "no command: see snapctl --help"
    return one_line(error.format_message()).rstrip(".")


def _show_traceback(error: BaseException) -> None:
    """Plain, and without the values of local variables, which may be secrets."""
    import traceback

    for line in redact("".join(traceback.format_exception(error))).splitlines():
        write_stderr(line)


def _abandon_stdout() -> None:
    """What is still buffered for a reader that is gone, or a full disk, must not raise when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """SIGINT and SIGTERM unwind the command; a second one ends it at once. What was ignored stays ignored.

    Python drops an exception that comes up in a finalizer, and goes on: then it is raised anew a moment later.
    """

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SignalReceivedError(_SIGNALS[signal.Signals(number)])

    def raise_again(number: int, frame: object) -> None:
        raise SignalReceivedError(dropped[-1])

    def notice(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, SignalReceivedError):
            hook(unraisable)
            return
        dropped.append(unraisable.exc_value.exit_code)
        before.setdefault(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        signal.signal(signal.SIGALRM, raise_again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    dropped: list[ExitCode] = []
    before: dict[signal.Signals, Any] = {}
    hook, sys.unraisablehook = sys.unraisablehook, notice
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread: somebody embeds us
        pass
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if dropped:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
