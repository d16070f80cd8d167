"""Restoring by several ranks: on as many as saved, on more and on fewer; what fails on one is told to all."""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

from snapctl import SaveOptions, Snapshot  # noqa: E402
from snapctl.errors import (  # noqa: E402
    CheckpointNotFoundError,
    RestoreDamagedError,
    RestoreError,
    RestoreRefusedError,
)
from snapctl.save_record import SAVE_RECORD_PATH, parse_save_record  # noqa: E402
from tests.support.ranks import Outcome, die, run_ranks  # noqa: E402
from tests.support.sharded import boxes_by_rank, holds, sharded, values_of  # noqa: E402
from tests.support.stored import raw  # noqa: E402

pytestmark = pytest.mark.torch
State = torchsnapshot.StateDict
WORLDS = (1, 2, 4)
TABLES = {"row": (13, 3), "column": (5, 9), "table": (6, 2), "few rows": (2, 4)}
REPLICATED = ("model/**", "optim/**")


class Capture(logging.Handler):
    """What a restore logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.fields: dict[str, Any] = {}
        logger = logging.getLogger("snapctl.restoring")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.fields = getattr(record, "snapctl", self.fields)


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def tables(world_size: int, *, empty: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seed, (how, shape) in enumerate(TABLES.items()):
        by_rank = boxes_by_rank(how if how in ("row", "column", "table") else "row", shape, world_size)
        by_rank = {rank: [box for box in boxes if 0 not in box[1]] for rank, boxes in by_rank.items()}
        found[how] = sharded(values_of(shape, seed), by_rank, empty=empty)
    return found


def training_state(world_size: int, *, empty: bool) -> dict[str, Any]:
    torch.manual_seed(7 if empty else 1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if not empty:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    deep = {"a": [{"tables": tables(world_size, empty=empty)}]}
    plain = {"n": 0 if empty else 5, "o": None if empty else (1, None), "deep": deep}
    return {"model": model, "optim": optimizer, "m": State(**plain)}


def save_job(rank: int, directory: str) -> None:
    world_size = dist.get_world_size()
    snapshot = Snapshot(directory, training_state(world_size, empty=False), replicated=REPLICATED)
    snapshot.step, snapshot.walltime = 12, 1.5
    snapshot.save(12).wait()


def restore_job(rank: int, directory: str) -> dict[str, Any]:
    world_size = dist.get_world_size()
    capture = Capture()
    state = training_state(world_size, empty=True)
    snapshot = Snapshot(directory, state, replicated=REPLICATED)
    snapshot.restore(f"{directory}/12")
    tables = state["m"]["deep"]["a"][0]["tables"]
    found = {how: holds(tables[how], values_of(shape, seed)) for seed, (how, shape) in enumerate(TABLES.items())}
    expected = training_state(world_size, empty=False)
    sums = [raw(tensor) for tensor in state["model"].state_dict().values()]
    assert sums == [raw(tensor) for tensor in expected["model"].state_dict().values()]
    assert str(state["optim"].state_dict()) == str(expected["optim"].state_dict())
    assert (state["m"]["n"], state["m"]["o"]) == (5, (1, None))
    assert (snapshot.step, snapshot.walltime) == (12, 1.5)
    return {"found": found, "fields": capture.fields, "lines": capture.lines}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The directory of a run that so many ranks saved."""
    made: dict[int, str] = {}

    def directory(world_size: int) -> str:
        if world_size not in made:
            path = made[world_size] = str(tmp_path_factory.mktemp(f"saved-by-{world_size}"))
            values(run_ranks(world_size, save_job, path))
        return made[world_size]

    return directory


@pytest.mark.parametrize("restored_by", WORLDS)
@pytest.mark.parametrize("saved_by", WORLDS)
def test_everything_comes_back_on_any_number_of_ranks(saved_by: int, restored_by: int, saved: Any) -> None:
    found = values(run_ranks(restored_by, restore_job, saved(saved_by)))
    assert all(all(one["found"].values()) for one in found), found
    fields = [one["fields"] for one in found]
    assert [item["rank"] for item in fields] == list(range(restored_by))
    if restored_by > 1:
        assert fields[0]["total_bytes"] == sum(item["bytes"] for item in fields)
    assert not any("left behind" in line for one in found for line in one["lines"])


def row_job(rank: int, directory: str) -> tuple[int, int]:
    capture = Capture()
    shape = (4096, 16)
    table = sharded(values_of(shape), boxes_by_rank("row", shape, dist.get_world_size()), empty=True)
    if not pathlib.Path(directory, "1").exists() and dist.get_world_size() == 4:
        table = sharded(values_of(shape), boxes_by_rank("row", shape, 4))
        Snapshot(directory, {"m": State(t=table)}).save(1).wait()
        return 0, 0
    Snapshot(directory, {"m": State(t=table)}).restore(f"{directory}/1")
    assert holds(table, values_of(shape))
    return capture.fields["bytes"], capture.fields["bytes_read"]


def test_resharding_by_rows_reads_the_needed_bytes_and_no_others(tmp_path: pathlib.Path) -> None:
    values(run_ranks(4, row_job, str(tmp_path)))
    assert values(run_ranks(2, row_job, str(tmp_path))) == [(4096 * 16 * 4 // 2,) * 2] * 2
    assert values(run_ranks(1, row_job, str(tmp_path))) == [(4096 * 16 * 4,) * 2]


# -- snapshots that others wrote -------------------------------------------------------------------------------------


def torchrec_job(rank: int, checkpoint: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Restores the tables, sharded in another way than they were saved, and puts them together on rank 0."""
    world_size = dist.get_world_size()
    state: dict[str, Any] = {}
    hows = {"t_cw": "row", "t_rw": "column", "t_tw": "row"}
    for path, facts in expected.items():
        name = path.partition("model/")[2]
        how = next((how for table, how in hows.items() if table in name), None)
        empty = torch.zeros(facts["shape"])
        state[name] = empty if how is None else sharded(empty, boxes_by_rank(how, facts["shape"], world_size))
    snapshot = Snapshot("/nowhere", {"model": State(**state)}, replicated=("model/over.*",))
    snapshot.restore(checkpoint)
    hashes = {}
    for path, facts in expected.items():
        name = path.partition("model/")[2]
        whole = state[name]
        if not isinstance(whole, torch.Tensor) or hasattr(whole, "local_shards"):
            out = torch.zeros(facts["shape"]) if rank == 0 else None
            whole.gather(0, out)
            whole = out
        if rank == 0 or "over" in name:
            hashes[path] = hashlib.sha256(raw(whole)).hexdigest()
    return {"hashes": hashes, "step": snapshot.step, "walltime": snapshot.walltime}


@pytest.mark.parametrize("world_size", WORLDS)
def test_torchrec_tables_come_back_on_any_number_of_ranks(world_size: int, data: Callable[[str], pathlib.Path]) -> None:
    root = data("torchrec-2ranks")
    expected = json.loads((root / "expected.json").read_text())
    found = values(run_ranks(world_size, torchrec_job, str(root / "100"), expected))
    assert found[0]["hashes"] == {path: facts["sha256"] for path, facts in expected.items()}
    assert all(one["hashes"][path] == expected[path]["sha256"] for one in found for path in one["hashes"])
    assert all((one["step"], one["walltime"]) == (100, 12.5) for one in found)


def dtensor_job(rank: int, checkpoint: str) -> list[str]:
    world_size = dist.get_world_size()
    hashes = []
    shapes: list[tuple[tuple[int, ...], list[Any]]] = [
        ((world_size,), [Shard(0)]), ((world_size,), [Shard(1)]), ((world_size,), [Replicate()])
    ]  # fmt: skip
    if world_size == 4:
        shapes += [((2, 2), [Shard(1), Shard(0)]), ((2, 2), [Replicate(), Shard(1)]), ((2, 2), [Shard(0), Shard(0)])]
    for mesh_shape, placements in shapes:
        mesh = init_device_mesh("cpu", mesh_shape)
        state = State(w=distribute_tensor(torch.zeros(10, 7), mesh, placements))
        Snapshot("/nowhere", {"m": state}).restore(checkpoint)
        hashes.append(hashlib.sha256(raw(state["w"].full_tensor())).hexdigest())
    return hashes


@pytest.mark.parametrize("world_size", WORLDS)
def test_dtensors_come_back_on_any_mesh(world_size: int, data: Callable[[str], pathlib.Path]) -> None:
    root = data("dtensor-4ranks")
    expected = json.loads((root / "expected.json").read_text())["m/w"]["sha256"]
    for hashes in values(run_ranks(world_size, dtensor_job, str(root / "1"))):
        assert set(hashes) == {expected} and len(hashes) == (6 if world_size == 4 else 3)


def strided_job(rank: int, directory: str) -> Any:
    """FSDP2 over tensor parallelism, whose placements are strided; and a DTensor whose local parts are no boxes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 7, bias=False))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Snapshot(directory, {"m": model}, replicated=("m/**",)).save(1).wait()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    Snapshot(directory, {"m": model}, replicated=("m/**",)).restore(f"{directory}/1")
    found = [torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in model.state_dict().items()]
    partial = DTensor.from_local(torch.zeros(8, 6), init_device_mesh("cpu", (4,)), [Partial()])
    try:
        state = {"m": State(**{"0.weight": partial})}
        Snapshot(directory, state, replicated=("m/**",)).restore(f"{directory}/1")
    except RestoreError as error:
        return [*found, str(error)]
    return found


def test_fsdp_over_tensor_parallelism_and_a_placement_that_cannot_be(tmp_path: pathlib.Path) -> None:
    for *equal, text in values(run_ranks(4, strided_job, str(tmp_path))):
        assert equal == [True, True]
        assert "m/0.weight: cannot be restored into a DTensor with the placement Partial" in text


def bare_take_job(rank: int, directory: str) -> None:
    state = {"m": State(n=3, own=torch.full((2,), float(rank)), rep=torch.ones(4), o=(1,), mine=rank)}
    state["m"]["t"] = sharded(values_of((9, 2)), boxes_by_rank("row", (9, 2), dist.get_world_size()))
    torchsnapshot.Snapshot.take(f"{directory}/1", state, replicated=["m/rep"])


def own_job(rank: int, directory: str, replicated: tuple[str, ...], with_mine: bool) -> dict[str, Any]:
    capture = Capture()
    state = State(n=0, own=torch.full((2,), -1.0), rep=torch.zeros(4), o=None)
    if with_mine:
        state["mine"] = None
    state["t"] = sharded(values_of((9, 2)), boxes_by_rank("column", (9, 2), dist.get_world_size()), empty=True)
    try:
        Snapshot(directory, {"m": state}, replicated=replicated).restore(f"{directory}/1")
    except RestoreError as error:
        return {"error": str(error), "hint": error.hint, "ranks": error.ranks, "rep": state["rep"].sum().item()}
    assert (state["n"], state["o"], state["rep"].sum()) == (3, (1,), 4) and holds(state["t"], values_of((9, 2)))
    return {"own": state["own"].tolist(), "lines": capture.lines, "mine": state.get("mine")}


def test_what_each_rank_saved_for_itself_goes_to_new_ranks_only_where_it_is_named(tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, bare_take_job, str(tmp_path)))
    found = values(run_ranks(2, own_job, str(tmp_path), (), True))
    assert [one["own"] for one in found] == [[0, 0], [1, 1]] and [one["mine"] for one in found] == [0, 1]
    found = values(run_ranks(4, own_job, str(tmp_path), (), True))
    for one in found:  # on every rank, also on those that have theirs
        assert "m/own: each of the ranks 0 to 1 saved its own tensor, and rank 2 has none" in one["error"]
        assert "m/mine: each of the ranks 0 to 1 saved a value of its own, and rank 3 has none" in one["error"]
        assert "replicated=" in one["hint"] and one["ranks"] == (2, 3) and one["rep"] == 0
    found = values(run_ranks(4, own_job, str(tmp_path), ("m/own",), False))
    assert [one["own"] for one in found] == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_what_ranks_that_are_gone_had_is_named_in_a_warning(tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, bare_take_job, str(tmp_path)))
    (one,) = values(run_ranks(1, own_job, str(tmp_path), (), True))
    (line,) = [line for line in one["lines"] if "left behind" in line]
    assert line.endswith("what rank 1 saved for themselves is left behind: m/mine, m/own")
    (one,) = values(run_ranks(1, own_job, str(tmp_path), ("m/own", "m/mine"), True))
    assert not any("left behind" in line for line in one["lines"])


# -- other kinds of tensors on the two sides --------------------------------------------------------------------------


def fsdp_job(rank: int, directory: str, phase: str) -> list[Any]:
    """An optimizer over DTensors that has made no step gets state that is sharded as its parameters are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if phase == "save":
        by_rank = boxes_by_rank("row", (8, 2), dist.get_world_size())
        entries = {0: {"exp_avg": sharded(values_of((8, 2)), by_rank), "step": torch.tensor(3.0)}}
        groups = torch.optim.Adam([torch.zeros(8, 2)]).state_dict()["param_groups"]
        Snapshot(directory, {"optim": State(state=entries, param_groups=groups)}).save(1).wait()
        return []
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 2), mesh, [Shard(1)]))
    optimizer = torch.optim.Adam([weight])
    Snapshot(directory, {"optim": optimizer}, replicated=("optim/**",)).restore(f"{directory}/1")
    state = optimizer.state[weight]
    assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == (Shard(1),)
    return [torch.equal(state["exp_avg"].full_tensor(), values_of((8, 2))), state["step"].item()]


def test_a_fresh_optimizer_gets_state_that_is_sharded_like_its_parameters(tmp_path: pathlib.Path) -> None:
    values(run_ranks(4, fsdp_job, str(tmp_path), "save"))
    assert values(run_ranks(2, fsdp_job, str(tmp_path), "restore")) == [[True, 3.0]] * 2


# -- failures --------------------------------------------------------------------------------------------------------


def failing_job(rank: int, checkpoint: str, how: str, patience: float = 20.0) -> dict[str, Any]:
    """Restores a state of which something goes wrong on one rank only; how it ended."""
    world_size = dist.get_world_size()
    state = training_state(world_size, empty=True)
    before = state["model"].weight.detach().clone()
    if how == "missing key" and rank == 1:
        state["m"]["more"] = 1
    if how == "other name" and rank == 1:
        state["z"] = State(x=1)
    if how == "load" and rank == 1:
        state["m"].load_state_dict = lambda found: [][0]
    if how == "state_dict" and rank == 1:
        state["m"].state_dict = lambda: [][0]
    if how == "dies" and rank == 1:
        state["m"].state_dict = die
    if how == "save instead" and rank == 1:
        try:
            Snapshot("/nowhere", state, options=SaveOptions(patience_seconds=patience)).save(1)
        except Exception as error:
            return {"error": str(error)}
    started = time.monotonic()
    try:
        Snapshot("/nowhere", state, replicated=REPLICATED, options=SaveOptions(patience_seconds=patience)).restore(
            checkpoint
        )
    except Exception as error:
        touched = not torch.equal(state["model"].weight, before)
        facts = dict(error.facts) if isinstance(error, RestoreError) else {}
        return {"type": type(error), "error": str(error), "touched": touched, "facts": facts,
                "seconds": time.monotonic() - started}  # fmt: skip
    return {"type": None}


@pytest.mark.parametrize("how", ["missing key", "other name", "state_dict"])
def test_what_does_not_fit_on_one_rank_is_an_error_on_every_rank(how: str, saved: Any) -> None:
    found = values(run_ranks(2, failing_job, f"{saved(2)}/12", how))
    assert [one["type"] for one in found] == [RestoreError] * 2
    expected = {"missing key": "m/more", "other name": "z/x", "state_dict": "IndexError"}[how]
    assert all(expected in one["error"] and "(rank 1)" in one["error"] for one in found)
    assert [one["touched"] for one in found] == [False] * 2


def test_a_load_that_fails_on_one_rank_is_an_error_on_every_rank(saved: Any) -> None:
    found = values(run_ranks(2, failing_job, f"{saved(2)}/12", "load"))
    assert [one["type"] for one in found] == [RestoreError] * 2
    assert all("IndexError" in one["error"] for one in found)
    assert all(one["facts"]["loaded"] == ["extra_state"] + ["m"] * (rank == 0) for rank, one in enumerate(found))
    assert found[1]["facts"]["incomplete"] == ["m"]


@pytest.mark.parametrize("how", ["short", "missing", "changed", "hole"])
def test_damage_that_only_one_rank_meets_is_an_error_on_every_rank(
    how: str, saved: Any, tmp_path: pathlib.Path
) -> None:
    import shutil

    shutil.copytree(saved(2), tmp_path / "run")
    checkpoint = tmp_path / "run/12"
    manifest = json.loads((checkpoint / ".snapshot_metadata").read_text())
    entry = manifest["manifest"]["1/m/deep/a/0/tables/row"]
    victim = checkpoint / entry["shards"][0]["tensor"]["location"]
    if how == "short":
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size - 1)
    elif how == "missing":
        victim.unlink()
    elif how == "changed":
        data = bytearray(victim.read_bytes())
        data[entry["shards"][0]["tensor"]["byte_range"][0]] ^= 1
        victim.write_bytes(data)
    else:
        entry["shards"] = []
        (checkpoint / ".snapshot_metadata").write_text(json.dumps(manifest))
    found = values(run_ranks(2, failing_job, str(checkpoint), ""))
    if how == "hole":  # what is missing at the end looks like a smaller table
        assert [one["type"] for one in found] == [RestoreError] * 2
        assert all("has the shape [6, 3] in the checkpoint and [13, 3] in the state" in one["error"] for one in found)
        return
    assert [one["type"] for one in found] == [RestoreDamagedError] * 2, found
    for one in found:
        kind = {"short": "short-blob", "missing": "missing-blob", "changed": "checksum"}[how]
        assert one["facts"]["kind"] == kind and one["facts"]["blob"] in one["error"]
        assert one["facts"]["entry"].startswith(("1/m/", "0/"))
        assert how == "changed" or not one["touched"]


def test_a_rank_that_dies_ends_the_restore_on_the_others(saved: Any) -> None:
    found = run_ranks(2, failing_job, f"{saved(2)}/12", "dies", 1.5)
    assert found[1].error == "killed"
    assert found[0].value["type"] is RestoreError and "rank 1 gave no sign of life" in found[0].value["error"]
    assert found[0].value["seconds"] < 10


def test_a_rank_that_saves_meanwhile_is_named(saved: Any) -> None:
    found = values(run_ranks(2, failing_job, f"{saved(2)}/12", "save instead", 3.0))
    assert "rank 1 saves step 1 while rank 0 is about to restore" in found[0]["error"]


def test_a_checkpoint_that_is_not_there_is_the_same_error_on_every_rank(saved: Any) -> None:
    found = values(run_ranks(2, failing_job, f"{saved(2)}/13", ""))
    assert issubclass(found[0]["type"], FileNotFoundError)
    assert "13" in found[0]["error"] and "13" in found[1]["error"]


def pickle_job(rank: int, directory: str, phase: str) -> Any:
    import datetime

    state = State(x=torch.full((2,), float(rank)))
    if rank == 1:
        state["date"] = datetime.date(2026, 1, 1)
    if phase == "save":
        Snapshot(directory, {"m": state}).save(1).wait()
        return None
    state["x"].zero_()
    try:
        Snapshot(directory, {"m": state}).restore(f"{directory}/1")
    except RestoreRefusedError as error:
        return str(error), state["x"].sum().item()
    return None


def test_an_object_of_one_rank_that_is_refused_is_refused_on_every_rank(tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, pickle_job, str(tmp_path), "save"))
    for text, total in values(run_ranks(2, pickle_job, str(tmp_path), "restore")):
        assert "1/m/date: an object of datetime.date" in text and "(rank 1)" in text and total == 0


def different_paths_job(rank: int, directory: str) -> Any:
    state = State(n=0)
    Snapshot(directory, {"m": State(n=5)}, replicated=("m/n",)).save(1).wait()
    Snapshot(directory, {"m": state}).restore(f"{directory}/1" if rank == 0 else f"{directory}/no such checkpoint")
    return state["n"]


def test_the_checkpoint_of_rank_0_is_restored_everywhere(tmp_path: pathlib.Path) -> None:
    assert values(run_ranks(2, different_paths_job, str(tmp_path))) == [5, 5]


def test_a_missing_checkpoint_is_a_checkpoint_not_found_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/0").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        Snapshot(tmp_path, {}).restore(tmp_path / "1")


def restore_and_save(rank: int, directory: str) -> None:
    snapshot = Snapshot(directory, {"m": State(w=torch.zeros(8))}, replicated=("**",))
    snapshot.restore(f"{directory}/1")
    snapshot.save(2).wait()


def test_the_next_save_records_how_the_restore_went_on_all_ranks(tmp_path: pathlib.Path) -> None:
    Snapshot(tmp_path, {"m": State(w=torch.ones(8))}).save(1).wait()
    values(run_ranks(2, restore_and_save, str(tmp_path)))
    restored = parse_save_record((tmp_path / "2" / SAVE_RECORD_PATH).read_bytes()).restored
    assert restored is not None
    assert (restored.step, restored.world_size, restored.size_bytes) == (1, 2, 2 * 32)
