"""Every command, and the library, over one snapshot, in this process: what each of them did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapctl.errors import SnapctlError
from tests.support.command import Finished, snapctl_here

ALLOWED_CODES = {0, 1, 2, 3, 4, 5, 6, 124}
_ACTED_UPON = {
    chr(code) for code in [*range(32), 127, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
}
_ACTED_UPON -= {"\n"}


@dataclass(frozen=True)
class Done:
    """One command line, or one call of the library."""

    command: tuple[str, ...]
    finished: Finished
    seconds: float
    """Of the processors: the machine may have other things to do."""

    @property
    def complaint(self) -> str:
        """What nobody may ever see; empty if all is well."""
        found = self.finished
        both = found.stdout + found.stderr
        if found.code not in ALLOWED_CODES:
            return f"exit code {found.code}"
        if "Traceback" in both:
            return "a traceback"
        if "out of memory" in both:
            return "more memory than there is"
        is_json = "--json" in self.command
        if self.command[0] == "library":
            return ""
        for stream in (found.stdout, found.stderr):
            acted = sorted(set(stream) & _ACTED_UPON)
            if acted and not (self.command[0] == "restore-weight" and "-" in self.command):
                return f"characters that a terminal acts on: {acted}"
            if is_json and stream:
                try:
                    json.loads(stream, parse_constant=_refuse)
                except ValueError as error:
                    return f"not JSON: {error}"
        return ""

    def __str__(self) -> str:
        found = self.finished
        return (
            f"snapctl {' '.join(self.command)}: {self.complaint} ({found.code}, {self.seconds:.1f} s)\n"
            f"{found.stdout[:500]}\n{found.stderr[-1500:]}"
        )


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def reading_commands(save_dir: str, step: int, output: str) -> list[list[str]]:
    """Command lines that only read the save directory."""
    path = f"{save_dir}/{step}"
    return [
        ["list", save_dir, "--all", "--long"],
        ["list", save_dir, "--json", "--long"],
        ["latest", save_dir],
        ["latest", save_dir, "--verified", "--json"],
        ["latest", save_dir, "--best", "m:max"],
        ["show", path],
        ["show", path, "--json", "--values"],
        ["show", path, "--values"],
        ["show", path, "--group"],
        ["show", path, "--depth", "2", "--json"],
        ["show", path, "--entries", "*x*", "--rank", "0"],
        ["verify", path, "--level", "structure"],
        ["verify", path, "--json"],
        ["verify", path, "--level", "data", "--finite"],
        ["verify", path, "--level", "data", "--json", "--sample", "1/2"],
        ["verify", save_dir, "--all"],
        ["mark-eval", path, "val", "--check"],
        ["wait", save_dir, "--step", str(step), "--timeout", "0"],
        ["wait", save_dir, "--at-least", "0", "--timeout", "0", "--json"],
        ["prune", save_dir, "--keep-last", "1", "--dry-run"],
        ["prune", save_dir, "--keep-best", "m:max:1", "--keep-daily", "3", "--verified", "--dry-run", "--json"],
        ["prune", save_dir, "--keep-every", "1000", "--incomplete-older-than", "1h", "--dry-run"],
        ["restore-weight", path, "*", "--stats"],
        ["restore-weight", path, "*", "--stats", "--json"],
        ["restore-weight", path, "*", "-o", f"{output}/w.safetensors", "--force"],
        ["restore-weight", path, "*", "-o", f"{output}/w.pt", "--force"],
        ["restore-weight", path, "m/x", "-o", f"{output}/w.npy", "--rows", "0:1", "--force"],
        ["restore-weight", path, "0/a", "-o", "-", "--format", "npy"],
    ]


def names_to_restore(save_dir: str, step: int) -> list[str]:
    """The tensors one by one: one that is refused hides the others."""
    from snapctl.checkpoints import read_manifest
    from snapctl.storage import open_storage

    try:
        manifest = read_manifest(open_storage(f"{save_dir}/{step}"))
    except SnapctlError:
        return []
    return [path for path, entry in manifest.entries.items() if entry.type_name not in ("dict", "list")][:20]


def writing_commands(save_dir: str, step: int) -> list[list[str]]:
    """Command lines that write into the save directory, or delete from it."""
    path = f"{save_dir}/{step}"
    return [
        ["mark-eval", path, "val", "--metric", "m=1"],
        ["mark-eval", path, "test", "--claim"],
        ["mark-eval", path, "val", "--remove", "--json"],
        ["pin", path, "--note", "x"],
        ["pin", path, "--remove"],
        ["prune", save_dir, "--keep-step", "10", "--incomplete-older-than", "1h", "--yes", "--json"],
    ]


def run_commands(commands: Sequence[Sequence[str]]) -> list[Done]:
    """One after the other, in this process."""
    found = []
    for command in commands:
        started = time.process_time()
        try:
            finished = snapctl_here(*command)
        except BaseException as error:  # `main` never raises; whatever does is a complaint
            finished = Finished(-1, "", f"Traceback: {type(error).__name__}: {error}")
        found.append(Done(tuple(command), finished, time.process_time() - started))
    return found


def attack_commands(save_dir: str, step: int, output: str) -> list[Done]:
    """All commands over one checkpoint; those that delete last."""
    commands = reading_commands(save_dir, step, output)
    path = f"{save_dir}/{step}"
    for number, name in enumerate(names_to_restore(save_dir, step)):
        how = (["--stats"], ["-o", f"{output}/one.pt", "--force"], ["-o", f"{output}/one.npy", "--force"])[number % 3]
        commands.append(["restore-weight", *how, "--", path, name])
    return run_commands([*commands, *writing_commands(save_dir, step)])


def attack_library(save_dir: str, step: int) -> list[Done]:
    """Restore, load and read through the library, one after the other."""
    import torch
    import torchsnapshot

    from snapctl import Snapshot, read_tensor
    from snapctl.dcp import StorageReader

    path = f"{save_dir}/{step}"
    names = names_to_restore(save_dir, step)
    keys = [name.rpartition("/")[2] for name in names]

    def restore(content: Any) -> None:
        state = {"m": torchsnapshot.StateDict(**{key: content() for key in keys})}
        Snapshot(save_dir, state).restore(path)

    calls: dict[str, Any] = {
        "restore into tensors": lambda: restore(lambda: torch.zeros(6, dtype=torch.uint8)),
        "restore into values": lambda: restore(lambda: 0),
        "restore of nothing": lambda: Snapshot(save_dir, {}).restore(path),
        "dcp": lambda: StorageReader(path).empty_state_dict(),
        "get_torch_snapshot": lambda: Snapshot.get_torch_snapshot(path),
    }
    for name in names:
        calls[f"load {name[:50]}"] = lambda name=name: Snapshot.load_snapshot_to_weight(path, name, torch.zeros(2))
        calls[f"read {name[:50]}"] = lambda name=name: read_tensor(path, name)
    found = []
    for what, call in calls.items():
        started = time.process_time()
        try:
            call()
            finished = Finished(0, "", "")
        except SnapctlError as error:
            finished = Finished(1, "", f"{type(error).__name__}: {error}".replace("\n", " "))
        except BaseException as error:
            import traceback

            finished = Finished(70, "", "".join(traceback.format_exception(error)))
        found.append(Done(("library", what), finished, time.process_time() - started))
    return found


def attack(save_dir: str, step: int, output: str, library: bool) -> list[Done]:
    """What `run_isolated` calls."""
    os.chdir(output)
    return [*(attack_library(save_dir, step) if library else []), *attack_commands(save_dir, step, output)]
