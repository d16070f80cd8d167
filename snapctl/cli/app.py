"""The Typer app. Only the command that is called is imported: the others would cost each call their start-up time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from snapctl import __version__

COMMANDS = {
    "list": "The checkpoints of a save directory.",
    "latest": "The path of the newest complete checkpoint.",
    "show": "What is in a checkpoint.",
    "verify": "Whether checkpoints are whole, and would restore.",
    "restore-weight": "Read tensors out of a checkpoint into a file.",
    "wait": "Wait for a checkpoint, and for its evaluation.",
    "mark-eval": "Mark partitions as evaluated, or claim one for evaluation.",
    "pin": "Protect a checkpoint from prune.",
    "prune": "Delete checkpoints that no rule keeps.",
    "completion": "Print the completion script of a shell.",
}
"""Name and summary of each command; its function is ``command`` in ``<name>_cmd.py``."""


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The app, with the one command that the arguments call; without one, their names and summaries."""
    app = typer.Typer(
        name="snapctl",
        help="Find, inspect, verify, prune and restore torchsnapshot checkpoints, locally and on GCS.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if called == name:
            module = importlib.import_module(f"snapctl.cli.{name.replace('-', '_')}_cmd")
            app.command(name, help=module.__doc__, short_help=summary)(_carrying_errors(module.command))
        elif called not in COMMANDS:
            app.command(name, help=summary)(_only_named)
    return app


def _only_named() -> int:
    """In place of a command that is listed and not called."""
    raise AssertionError("a command that was not loaded has been called")


class CarriedError(BaseException):
    """An exception of a command on its way to `main`, past Typer, which has exit codes of its own for some."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _carrying_errors(command: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> int:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, TyperException):
            raise
        except BaseException as error:
            raise CarriedError(error) from error

    return call


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snapctl {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress bars.")] = False,
) -> None:
    """`main` has read and removed --debug and --no-progress; they stand here for --help."""
