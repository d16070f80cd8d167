"""Wait for a checkpoint: a new one, or one that fits; and, with --evaluated-by, until it has been evaluated.

Prints its path. Ends with 124 when the time is up. --follow goes on, and prints each checkpoint as it becomes complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from snapctl.checkpoints import Checkpoint
from snapctl.cli.checkpoint_json import brief_json
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import (
    JsonOption,
    SaveDirArgument,
    StorageOptions,
    parse_duration,
    parse_storage_options,
)
from snapctl.cli.output import Output
from snapctl.errors import CommandFailedError, DeadlineError, InvalidOptionError
from snapctl.evaluation.execution import parse_command, run_command
from snapctl.evaluation.waiting import FailureFile, Pace, Wanted, follow_checkpoints, wait_for_checkpoint, watch_file
from snapctl.storage import open_storage


def command(
    context: typer.Context,
    save_dir: SaveDirArgument,
    newer_than: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="The newest, if its step is above this one.")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The newest, if its step is N or above.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this very step.")] = None,
    evaluated_by: Annotated[
        list[str] | None,
        typer.Option("--evaluated-by", metavar="P", help="And until partition P has marked it. Repeatable."),
    ] = None,
    not_evaluated_by: Annotated[
        list[str] | None,
        typer.Option("--not-evaluated-by", metavar="P", help="One that P has not marked yet. Repeatable."),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="For how long; 0: look once; none.")] = "30m",
    interval: Annotated[str, typer.Option(metavar="DURATION", help="How often to look.")] = "30s",
    fail_if: Annotated[str | None, typer.Option(metavar="PATH", help="End with 1 once this file exists.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print each one as it becomes complete.")] = False,
    stop_if: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --follow: end with 0 once this file exists.")
    ] = None,
    exec_: Annotated[
        str | None,
        typer.Option("--exec", metavar="'CMD {}'", help="Run for each; {} is its path. Without a shell."),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on when the command of --exec fails.")] = False,
    storage_option: StorageOptions = None,
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    if stop_if is not None and not follow:
        raise InvalidOptionError("--stop-if goes with --follow")
    if keep_going and exec_ is None:
        raise InvalidOptionError("--keep-going goes with --exec")
    if follow and step is not None:
        raise InvalidOptionError("--step does not go with --follow")
    options = parse_storage_options(storage_option)
    wanted = Wanted(newer_than, at_least, step, tuple(evaluated_by or ()), tuple(not_evaluated_by or ()))
    pace = Pace(
        None if timeout == "none" else parse_duration(timeout, name="--timeout", zero_ok=True),
        parse_duration(interval, name="--interval"),
        sleep=out.sleep,
        warn=out.warn,
        note=out.note,
    )
    words = None if exec_ is None else parse_command(exec_)
    failure_file = None if fail_if is None else FailureFile(fail_if, watch_file(fail_if, options))
    stop = None if stop_if is None else watch_file(stop_if, options)
    storage = open_storage(save_dir, options)
    answer = _Answer(out, words, keep_going=keep_going)
    if not follow:
        answer.hand_out(wait_for_checkpoint(storage, wanted, pace, fail_if=failure_file))
        return answer.end()
    try:
        for found in follow_checkpoints(storage, wanted, pace, fail_if=failure_file, stop_if=stop):
            answer.hand_out(found, save_dir=storage.url)
    except DeadlineError:
        if not answer.failures:
            raise
    return answer.end()


class _Answer:
    """Hands checkpoints out: prints them, and runs the command for each."""

    def __init__(self, out: Output, words: Sequence[str] | None, *, keep_going: bool) -> None:
        self.failures: list[CommandFailedError] = []
        self._out = out
        self._words = words
        self._keep_going = keep_going
        self._waiting_since = time.monotonic()

    def hand_out(self, found: Checkpoint, **facts: str) -> None:
        if self._out.as_json:
            waited = round(time.monotonic() - self._waiting_since, 3)
            self._out.document({**facts, **brief_json(found), "waited_seconds": waited})
        else:
            self._out.path(found.path)
        self._out.flush()
        if self._words is not None and found.step is not None:
            try:
                run_command(self._words, path=found.path, step=found.step)
            except CommandFailedError as error:
                if not self._keep_going:
                    raise
                self._out.warn(error.message)
                self.failures.append(error)
        self._waiting_since = time.monotonic()

    def end(self) -> ExitCode:
        """Ends well, or with what has failed on the way."""
        if self.failures:
            first = self.failures[0]
            message = f"{len(self.failures)} of the commands failed; the first: {first.message}"
            raise CommandFailedError(message, returncode=first.returncode)
        return ExitCode.OK
