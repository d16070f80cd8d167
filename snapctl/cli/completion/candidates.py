"""What the next word could be: names of commands and options, and what lies in the storage that the line names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from snapctl.cli.app import COMMANDS
from snapctl.cli.completion.situation import Situation
from snapctl.cli.options import parse_storage_options
from snapctl.cli.outline import Parameter
from snapctl.export import FORMATS

if TYPE_CHECKING:
    from snapctl.snapshots import OpenSnapshot

MAX_CHECKPOINTS = 50
"""Partitions and metrics are those of so many of the newest checkpoints."""
_STEPS = ("--step", "--keep-step", "--newer-than", "--at-least")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that would fit."""

    word: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What fits, and what the shell itself should look for besides."""

    candidates: tuple[Candidate, ...] = ()
    paths: Literal["", "files", "dirs"] = ""

    @property
    def is_open(self) -> bool:
        """Whether what is chosen now will be gone on with: no space belongs behind it."""
        return any(candidate.word.endswith(("/", "=", ":")) for candidate in self.candidates)


def find_answer(situation: Situation) -> Answer:
    """The candidates that begin with what is typed; raises whatever the storage raises."""
    parameter = situation.parameter
    if parameter is None:
        if situation.may_be_option and (situation.typed.startswith("-") or situation.command.name):
            return _fitting(situation, _options(situation))
        if not situation.command.name:
            return _fitting(situation, (Candidate(name, summary) for name, summary in COMMANDS.items()))
        return Answer()
    if parameter.choices:
        return _fitting(situation, (Candidate(choice) for choice in parameter.choices))
    paths = _paths_of(parameter)
    if paths:
        found = tuple(_remote_dirs(situation)) if "://" in situation.typed else ()
        return Answer(found, "" if "://" in situation.typed else paths)
    given = set(situation.given.get(parameter.key, ()))
    return _fitting(situation, (found for found in _values(situation, parameter) if found.word not in given))


def _fitting(situation: Situation, found: Iterable[Candidate]) -> Answer:
    return Answer(
        tuple(
            Candidate(situation.before + candidate.word, candidate.help)
            for candidate in found
            if candidate.word.startswith(situation.typed)
        )
    )


def _options(situation: Situation) -> Iterator[Candidate]:
    for option in situation.command.options:
        if option.repeatable or option.key not in situation.given:
            yield Candidate(option.names[0], option.help)


def _paths_of(parameter: Parameter) -> Literal["", "files", "dirs"]:
    name = parameter.metavar.removesuffix("...")
    if name in ("SAVE_DIR", "CHECKPOINT", "ROOT", "DIR"):
        return "dirs"
    return "files" if name.startswith("FILE") or name == "PATH" else ""


def _values(situation: Situation, parameter: Parameter) -> Iterable[Candidate]:
    if any(name in _STEPS for name in parameter.names):
        return _steps(situation)
    match parameter.metavar.removesuffix("..."):
        case "P" | "PARTITION":
            return _partitions(situation)
        case "[P/]METRIC:max|min":
            return _best_metrics(situation)
        case "[P/]NAME=VALUE":
            return _metric_names(situation)
        case "NAME" | "GLOB" | "PREFIX":
            return _entries(situation)
        case "R":
            return (Candidate(str(rank)) for rank in range(_open_snapshot(situation).manifest.world_size))
        case "FORMAT":
            return map(Candidate, FORMATS)
        case "DTYPE":
            return _dtypes()
        case _:
            return ()


# -- what lies in the storage ----------------------------------------------------------------------------------------


def _storage_options(situation: Situation) -> dict[str, object]:
    return parse_storage_options(situation.given.get("storage_option"))


def _path(situation: Situation) -> str | None:
    """The save directory, or checkpoint, that the line names; ``$RUN`` stands for what the environment says."""
    for key in ("save_dir", "save_dirs", "checkpoint"):
        if situation.given.get(key):
            return os.path.expandvars(situation.given[key][0])
    return None


def _step_names(situation: Situation, *, of_checkpoint: bool = False) -> tuple[str, list[str]]:
    """The URL of the save directory and its steps, the newest first.

    Args:
        of_checkpoint: where the line names a checkpoint, those of the save directory around it.
    """
    from snapctl.checkpoints import parse_step, step_names
    from snapctl.storage import open_storage

    path = _path(situation)
    if path is None:
        return "", []
    storage = open_storage(path, _storage_options(situation))
    parent = storage.parent() if of_checkpoint and parse_step(storage.name) is not None else None
    storage = storage if parent is None else parent
    return storage.url, list(reversed(step_names(storage.list_dir())))


def _steps(situation: Situation) -> Iterator[Candidate]:
    for name in _step_names(situation)[1]:
        yield Candidate(name)


def _partitions(situation: Situation) -> list[Candidate]:
    from snapctl.markers import MARKER_DIR, claim_of_path, partition_of_marker
    from snapctl.storage import open_storage

    url, names = _step_names(situation, of_checkpoint=True)
    if not names:
        return []
    found: set[str] = set()
    for entry in open_storage(url, _storage_options(situation)).scan(names[:MAX_CHECKPOINTS], (f"{MARKER_DIR}/",)):
        for file in entry.files:
            partition = partition_of_marker(file.path)
            claim = claim_of_path(file.path)
            found.update(name for name in (partition, claim and claim[0]) if name)
    return [Candidate(name) for name in sorted(found)]


def _metrics(situation: Situation) -> Mapping[str, set[str]]:
    """The names of metrics, by partition."""
    from snapctl.checkpoints import Place, find_checkpoints
    from snapctl.storage import open_storage

    url, names = _step_names(situation, of_checkpoint=True)
    found: dict[str, set[str]] = {}
    if names:
        place = Place(open_storage(url, _storage_options(situation)), "save_dir", tuple(reversed(names)))
        for checkpoint in find_checkpoints(place, names=names[:MAX_CHECKPOINTS]):
            for partition, values in checkpoint.metrics.items():
                found.setdefault(partition, set()).update(values)
    return found


def _best_metrics(situation: Situation) -> Iterator[Candidate]:
    for partition, names in sorted(_metrics(situation).items()):
        for name in sorted(names):
            yield Candidate(f"{partition}/{name}:max", "the highest")
            yield Candidate(f"{partition}/{name}:min", "the lowest")


def _metric_names(situation: Situation) -> list[Candidate]:
    wanted = situation.given.get("partitions", [])
    found = {
        f"{partition}/{name}=" if len(wanted) > 1 else f"{name}="
        for partition, names in _metrics(situation).items()
        if len(wanted) < 2 or partition in wanted
        for name in names
    }
    return [Candidate(name) for name in sorted(found)]


def _open_snapshot(situation: Situation) -> OpenSnapshot:
    from snapctl.errors import InvalidPathError
    from snapctl.snapshots import open_snapshot

    path, step = _path(situation), situation.given.get("step", [None])[-1]
    if path is None:
        raise InvalidPathError("the line names no checkpoint")
    return open_snapshot(path, None if step is None else int(step), _storage_options(situation))


def _entries(situation: Situation) -> list[Candidate]:
    """Logical paths, a part at a time as paths are completed: a model may have 100,000 of them."""
    from snapctl.manifest import CONTAINER_ENTRIES

    manifest = _open_snapshot(situation).manifest
    found: dict[str, str] = {}
    start = len(situation.typed)
    for entry in manifest.logical_entries():
        if entry.path.startswith(situation.typed) and not isinstance(entry.entries[0][1], CONTAINER_ENTRIES):
            cut = entry.path.find("/", start) + 1
            found.setdefault(
                entry.path[:cut] if cut else entry.path, "" if cut else _describe(entry.dtype, entry.shape)
            )
    return [Candidate(word, help) for word, help in sorted(found.items())]


def _describe(dtype: str | None, shape: Sequence[int] | None) -> str:
    return " ".join(filter(None, [dtype, "" if shape is None else str(list(shape))]))


def _dtypes() -> Iterator[Candidate]:
    from snapctl.manifest import DTYPE_SIZES

    names = (dtype.removeprefix("torch.") for dtype in DTYPE_SIZES)
    return (Candidate(name) for name in sorted(names) if not name.startswith("q"))  # nothing converts to quantized


def _remote_dirs(situation: Situation) -> Iterator[Candidate]:
    """The directories below the last slash of a URL."""
    from snapctl.storage import open_storage

    above, _, begun = situation.typed.rpartition("/")
    if above.endswith((":", "/")):
        return  # the name of a bucket
    for name in open_storage(above, _storage_options(situation)).list_dir().dirs:
        if name.startswith(begun) and (begun or not name.startswith(".")):
            yield Candidate(f"{situation.before}{above}/{name}/")
