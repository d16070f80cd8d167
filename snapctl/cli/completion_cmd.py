"""Print the script that completes snapctl's command lines in a shell: names of commands and options, and the steps,
entries, partitions and metrics that lie in the storage.

bash: snapctl completion bash > ~/.local/share/bash-completion/completions/snapctl

zsh: snapctl completion zsh > a directory of $fpath, as _snapctl

fish: snapctl completion fish > ~/.config/fish/completions/snapctl.fish
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from snapctl.cli.completion.scripts import SCRIPTS
from snapctl.cli.exit_codes import ExitCode
from snapctl.cli.options import JsonOption
from snapctl.cli.output import Output


class Shell(str, Enum):
    """Whose completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def command(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: JsonOption = False,
) -> int:
    out: Output = context.obj
    name, script = SCRIPTS[shell.value]
    if as_json:
        out.document({"shell": shell.value, "file": name, "script": script})
    else:
        out.text(script)
    return ExitCode.OK
