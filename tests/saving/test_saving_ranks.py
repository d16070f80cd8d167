"""Saves by two and four ranks: what is stored once and what by each, and that no failure keeps anybody waiting."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import torch.distributed as dist  # noqa: E402

from snapctl import SaveOptions, Snapshot  # noqa: E402
from snapctl.checkpoints import find_checkpoints, open_save_dir  # noqa: E402
from snapctl.errors import NoSpaceError, SaveError, UnsavableError  # noqa: E402
from snapctl.save_record import SAVE_RECORD_PATH, parse_save_record  # noqa: E402
from snapctl.storage import LocalStorage  # noqa: E402
from tests.support.ranks import Outcome, die, run_ranks  # noqa: E402
from tests.support.servers import Bucket  # noqa: E402
from tests.support.stored import read_manifest, read_stored  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE = SaveOptions(patience_seconds=1)


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def state_of(rank: int, value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"m": torchsnapshot.StateDict(w=torch.full((100,), value + rank), **more)}


# -- what is stored --------------------------------------------------------------------------------------------------


def save_plain(rank: int, path: str) -> str:
    shared = {"r": torch.arange(10.0), "empty": torch.empty(0, 2), "obj": ("x", 1), "name": "run", "wall": rank * 1.5}
    shared["shape"] = torch.ones(3 + rank)
    snapshot = Snapshot(
        path, state_of(rank, **shared), replicated=["m/r", "m/empty", "m/o*", "m/na*", "m/wall", "m/shape"]
    )
    pending = snapshot.save(7)
    pending.wait()
    assert os.path.exists(os.path.join(path, "7/.snapshot_metadata"))  # wait() returns on no rank before the commit
    return pending.path


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_saves_its_own_and_what_is_replicated_is_saved_once(world_size: int, tmp_path: pathlib.Path) -> None:
    assert values(run_ranks(world_size, save_plain, str(tmp_path))) == [str(tmp_path / "7")] * world_size
    stored, manifest = read_stored(tmp_path / "7"), read_manifest(tmp_path / "7")
    for rank in range(world_size):
        assert stored[f"{rank}/m/w"].tolist() == [1.0 + rank] * 100
        assert float(manifest[f"{rank}/m/wall"]["readable"]) == rank * 1.5  # differs: kept for each rank
        assert stored[f"{rank}/m/shape"].shape == (3 + rank,)
    for name in ("r", "empty", "obj", "name"):
        assert [path for path in manifest if path.endswith(f"/m/{name}")] == [f"0/m/{name}"]
        assert manifest[f"0/m/{name}"]["replicated"] is True
    assert stored["0/m/r"].tolist() == list(range(10))
    assert stored["0/m/empty"].shape == (0, 2)
    (found,) = find_checkpoints(open_save_dir(str(tmp_path)))
    assert found.record is not None and len(found.record.ranks) == found.record.world_size == world_size
    record = parse_save_record((tmp_path / "7" / SAVE_RECORD_PATH).read_bytes(), with_blobs=True)
    blobs = {path.relative_to(tmp_path / "7").as_posix() for path in (tmp_path / "7").rglob("*") if path.is_file()}
    assert set(record.blobs or {}) == blobs - {".snapshot_metadata", SAVE_RECORD_PATH}
    assert sum(timings.size_bytes for timings in record.ranks) == sum(
        b.size_bytes for b in (record.blobs or {}).values()
    )


def bare_replicated(rank: int, path: str) -> None:
    state = {"m": torchsnapshot.StateDict(wall=rank * 1.5, shape=torch.ones(3 + rank))}
    torchsnapshot.Snapshot.take(path, state, replicated=["**"])


def test_torchsnapshot_alone_fails_when_replicated_values_differ(tmp_path: pathlib.Path) -> None:
    found = run_ranks(2, bare_replicated, str(tmp_path / "7"), until_error=True)
    assert all(outcome.error is not None for outcome in found)


def save_ddp(rank: int, path: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    Snapshot(path, {"net[0]/a": model, "net0": torchsnapshot.StateDict(x=torch.ones(1) * rank), "opt": optimizer}).save(
        1
    ).wait()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_a_ddp_module_is_replicated_and_nothing_else_is(tmp_path: pathlib.Path) -> None:
    weight, bias = values(run_ranks(2, save_ddp, str(tmp_path)))[1]
    stored = read_stored(tmp_path / "1")
    assert stored["0/net[0]%2Fa/module.weight"].flatten().tolist() == weight
    assert stored["0/net[0]%2Fa/module.bias"].tolist() == bias
    assert not any(path.startswith("1/net[0]") and "module" in path for path in stored)
    assert [stored[f"{rank}/net0/x"].item() for rank in (0, 1)] == [0, 1]  # "net[0]/**" as a glob would take it
    assert stored["1/opt/state/0/exp_avg"].shape == (3, 4)


def sharded(rank: int, world_size: int, rows: int, dtype: Any) -> Any:
    """A ShardedTensor of so many rows, the last rank without any."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    each = -(-rows // max(1, world_size - 1))
    start, end = min(rank * each, rows), min((rank + 1) * each, rows)
    local = (torch.arange(start * 3, end * 3, dtype=torch.float32).reshape(end - start, 3)).to(dtype)
    shard = Shard.from_tensor_and_offsets(local, [start, 0], rank)
    return init_from_local_shards([shard], rows, 3)


def save_sharded(rank: int, path: str, dtype: str) -> None:
    world_size = dist.get_world_size()
    tensor = sharded(rank, world_size, 10, getattr(torch, dtype))
    Snapshot(path, {"m": torchsnapshot.StateDict(emb=tensor, only=rank)}).save(1).wait()


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (4, "bfloat16"), (4, "float8_e5m2")])
def test_a_sharded_tensor_with_a_shard_of_no_rows(world_size: int, dtype: str, tmp_path: pathlib.Path) -> None:
    values(run_ranks(world_size, save_sharded, str(tmp_path), dtype))
    manifest, stored = read_manifest(tmp_path / "1"), read_stored(tmp_path / "1")
    assert manifest[f"{world_size - 1}/m/emb"] == {"type": "ShardedTensor", "shards": []}
    expected = torch.arange(30.0).reshape(10, 3).to(getattr(torch, dtype))
    assert torch.equal(stored["0/m/emb"].view(torch.uint8), expected.view(torch.uint8))


def bare_sharded(rank: int, path: str) -> None:
    tensor = sharded(rank, 2, 10, torch.float32)
    torchsnapshot.Snapshot.take(path, {"m": torchsnapshot.StateDict(emb=tensor)})


def test_torchsnapshot_alone_cannot_save_a_shard_of_no_rows(tmp_path: pathlib.Path) -> None:
    found = run_ranks(2, bare_sharded, str(tmp_path / "1"), until_error=True)
    assert isinstance(found[1].error, ZeroDivisionError)
    assert found[0].error == "hangs" or found[0].error is not None  # the other one waits for it


def save_change(rank: int, path: str, batching: str) -> None:
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = batching
    original = LocalStorage.write_blob

    def slow(self: LocalStorage, *args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return original(self, *args, **options)

    LocalStorage.write_blob = slow  # type: ignore[method-assign]
    tensor = sharded(rank, 2, 10, torch.float32)
    replicated = torch.ones(20)
    state = {"m": torchsnapshot.StateDict(emb=tensor, r=replicated)}
    pending = Snapshot(path, state, replicated=["m/r"]).save(1)
    replicated.zero_()
    for shard in tensor.local_shards():
        shard.tensor.zero_()
    pending.wait()


@pytest.mark.parametrize("batching", ["0", "1"])
def test_what_changes_later_is_not_in_shards_either(batching: str, tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, save_change, str(tmp_path), batching))
    stored = read_stored(tmp_path / "1")
    assert stored["0/m/emb"].flatten().tolist() == list(range(30))
    assert stored["0/m/r"].tolist() == [1.0] * 20


def save_again(rank: int, path: str) -> list[float]:
    """The second save of a step is slow on rank 1: rank 0 must wait for it all the same."""
    snapshot = Snapshot(path, state_of(rank))
    snapshot.save(1).wait()
    snapshot.state["m"]["w"].add_(10)
    original = LocalStorage.write_blob

    def slow(self: LocalStorage, *args: Any, **options: Any) -> Any:
        if rank == 1:
            time.sleep(0.5)
        return original(self, *args, **options)

    LocalStorage.write_blob = slow  # type: ignore[method-assign]
    started = time.monotonic()
    pending = snapshot.save(1)
    pending.wait()
    waited = time.monotonic() - started
    pending._released.wait(30)  # this process is killed at its end, and old blobs go after the commit
    return [waited, read_stored(os.path.join(path, "1"))["1/m/w"][0].item()]


def test_saving_again_into_a_step_waits_for_the_slowest_rank_again(tmp_path: pathlib.Path) -> None:
    for waited, value in values(run_ranks(2, save_again, str(tmp_path))):
        assert waited >= 0.5 and value == 12
    assert {path.name for path in (tmp_path / "1").iterdir()} == {".snapshot_metadata", ".snapctl", "batched"}
    assert len(list((tmp_path / "1/batched").iterdir())) == 2


def save_to_paths(rank: int, paths: list[str]) -> str:
    pending = Snapshot(paths[rank], state_of(rank)).save(1)
    pending.wait()
    return pending.path


def test_all_ranks_save_where_rank_0_saves(tmp_path: pathlib.Path) -> None:
    paths = [str(tmp_path / "12-00-01"), str(tmp_path / "12-00-02")]
    assert values(run_ranks(2, save_to_paths, paths)) == [f"{paths[0]}/1"] * 2
    assert read_stored(f"{paths[0]}/1")["1/m/w"][0] == 2
    assert not os.path.exists(paths[1])


def save_to_bucket(rank: int, url: str) -> None:
    Snapshot(url, state_of(rank, r=torch.ones(7)), replicated=["m/r"]).save(5).wait()


def test_two_ranks_save_into_a_bucket(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, save_to_bucket, f"{bucket.url}/run"))
    for name in bucket.names("run/5/"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bucket.read(name))
    stored = read_stored(tmp_path / "run/5")
    assert [stored[f"{rank}/m/w"][0].item() for rank in (0, 1)] == [1, 2]


# -- failures --------------------------------------------------------------------------------------------------------


class Trouble:
    """Something in the state of one rank that goes wrong while it is staged."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def state_dict(self) -> dict[str, Any]:
        self._act()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def oom() -> None:
    raise MemoryError("no memory")


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def save_with_trouble(rank: int, path: str, where: str, bad_rank: int) -> None:
    """A good save of step 1, and one of step 2 in which one rank fails."""
    snapshot = Snapshot(path, state_of(rank), options=PATIENCE)
    snapshot.save(1).wait()
    bad = rank == bad_rank
    acts = {"raises": oom, "dies": die, "freezes": freeze}
    if where == "absent" and bad:
        time.sleep(3)
        return
    snapshot.state["t"] = Trouble(acts[where] if where in acts and bad else lambda: None)
    original = LocalStorage.write_blob

    def write(self: LocalStorage, *args: Any, **options: Any) -> Any:
        if where == "full" and bad:
            raise NoSpaceError("/x: no space left on device")
        if where == "dies later" and bad:
            time.sleep(0.3)
            die()
        if not bad and where != "dies later":
            time.sleep(0.3)
        return original(self, *args, **options)

    LocalStorage.write_blob = write  # type: ignore[method-assign]
    if where == "commit" and bad:
        LocalStorage.write = lambda *args, **options: oom()  # type: ignore[method-assign]
    snapshot.save(2).wait()


SILENT = "rank {} gave no sign of life for 1 s"
ABSENT = "rank {} did not come to save step 2 within 1 s"
GONE = "the store of the ranks is gone"


@pytest.mark.parametrize(
    ("where", "bad_rank", "store", "message"),
    [
        ("raises", 0, "outside", "rank {}: MemoryError: no memory"),
        ("raises", 1, "rank0", "rank {}: MemoryError: no memory"),
        ("full", 0, "rank0", "rank {}: NoSpaceError: /x: no space left on device"),
        ("full", 1, "outside", "rank {}: NoSpaceError: /x: no space left on device"),
        ("dies", 0, "outside", SILENT),
        ("dies", 0, "rank0", GONE),  # it takes the store with it
        ("dies", 1, "rank0", SILENT),
        ("dies later", 0, "outside", SILENT),
        ("dies later", 0, "rank0", GONE),
        ("dies later", 1, "outside", SILENT),
        ("absent", 0, "outside", ABSENT),
        ("absent", 1, "rank0", ABSENT),
    ],
)
def test_one_failing_rank_ends_the_save_on_all_and_is_named(
    where: str, bad_rank: int, store: str, message: str, tmp_path: pathlib.Path
) -> None:
    world_size = 3
    found = run_ranks(world_size, save_with_trouble, str(tmp_path), where, bad_rank, store=store, timeout=20)
    # Whoever has reported its part and hears no more of rank 0 cannot know whether that has committed.
    unknown = where == "dies later" and bad_rank == 0
    for rank, outcome in enumerate(found):
        if rank == bad_rank and where not in ("raises", "full"):
            continue
        assert isinstance(outcome.error, SaveError), (rank, outcome)
        assert f"step 2 {'may not have been' if unknown else 'was not'} saved: " in str(outcome.error)
        assert message.format(bad_rank) in str(outcome.error)
        assert outcome.error.unknown is unknown
        assert message == GONE or outcome.error.ranks == (bad_rank,)
        assert outcome.seconds < 10
    check_only_step_1(tmp_path, world_size, cleaned=where in ("raises", "full", "absent"))


def check_only_step_1(root: pathlib.Path, world_size: int, *, cleaned: bool) -> None:
    states = {found.step: found.state for found in find_checkpoints(open_save_dir(str(root)))}
    assert states.pop(1) == "complete"
    assert set(states.values()) <= {"incomplete"}
    if cleaned:
        assert [path for path in (root / "2").rglob("*") if path.is_file()] == []
    assert [read_stored(root / "1")[f"{rank}/m/w"][0].item() for rank in range(world_size)] == [
        1.0 + rank for rank in range(world_size)
    ]


def test_a_commit_that_fails_on_rank_0_fails_everywhere(tmp_path: pathlib.Path) -> None:
    found = run_ranks(2, save_with_trouble, str(tmp_path), "commit", 0)
    assert [str(outcome.error) for outcome in found] == ["step 2 was not saved: rank 0: MemoryError: no memory"] * 2
    check_only_step_1(tmp_path, 2, cleaned=True)


def test_a_frozen_rank_is_not_waited_for_and_harms_nothing_when_it_goes_on(tmp_path: pathlib.Path) -> None:
    processes: list[Any] = []

    def on_start(started: list[Any]) -> None:
        processes.extend(started)

    import threading

    def thaw() -> None:
        time.sleep(5)
        os.kill(processes[1].pid, signal.SIGCONT)

    thread = threading.Thread(target=thaw)
    thread.start()
    found = run_ranks(2, save_with_trouble, str(tmp_path), "freezes", 1, store="outside", on_start=on_start, timeout=20)
    thread.join()
    assert "rank 1 gave no sign of life" in str(found[0].error) and found[0].seconds < 4.5
    assert "rank 1 gave no sign of life" in str(found[1].error)
    check_only_step_1(tmp_path, 2, cleaned=True)


def refuse(rank: int, path: str) -> tuple[str, bool]:
    bad = {1: {"a": torch.empty(1, device="meta")}, 2: {"b": torch.eye(2).to_sparse()}}.get(rank, {})
    try:
        Snapshot(path, state_of(rank, c=torch.eye(2).to_sparse(), **bad)).save(1)
    except UnsavableError as error:
        return str(error), os.path.exists(path)
    return "", True


def test_what_any_rank_cannot_save_is_refused_on_all_with_the_same_words(tmp_path: pathlib.Path) -> None:
    texts = values(run_ranks(3, refuse, str(tmp_path / "run")))
    assert len(set(texts)) == 1
    text, exists = texts[0]
    assert not exists
    assert "m/a (rank 1): a tensor on the meta device" in text and "m/b (rank 2): a tensor of layout sparse_coo" in text
    assert "m/c: a tensor of layout sparse_coo" in text


def fail_then_save(rank: int, path: str) -> list[str]:
    """After every kind of failed save the next one works."""
    told: list[str] = []
    snapshot = Snapshot(path, state_of(rank), options=SaveOptions(patience_seconds=4))  # both ranks do come, later
    if rank == 0:  # the others do not come
        told.append(_try(snapshot, 1))
    dist.barrier()
    snapshot.state["t"] = Trouble(oom if rank == 1 else lambda: None)
    told.append(_try(snapshot, 2))
    del snapshot.state["t"]
    told.append(_try(snapshot, 3 + rank))
    told.append(_try(snapshot, 2))
    return told


def _try(snapshot: Snapshot, step: int) -> str:
    try:
        snapshot.save(step).wait()
    except SaveError as error:
        return str(error)
    return "saved"


def test_a_save_that_failed_does_not_disturb_the_next(tmp_path: pathlib.Path) -> None:
    first, second = values(run_ranks(2, fail_then_save, str(tmp_path)))
    assert "rank 1 did not come" in first.pop(0)
    assert "rank 1: MemoryError" in first[0] and "rank 1: MemoryError" in second[0]
    assert "rank 1 saves step 4 while rank 0 saves step 3" in first[1]
    assert "rank 1 saves step 4 while rank 0 saves step 3" in second[1]
    assert first[2] == second[2] == "saved"


def slow_rank(rank: int, path: str) -> None:
    if rank == 1:
        original = LocalStorage.write_blob

        def slow(self: LocalStorage, *args: Any, **options: Any) -> Any:
            time.sleep(2.5)
            return original(self, *args, **options)

        LocalStorage.write_blob = slow  # type: ignore[method-assign]
    Snapshot(path, state_of(rank), options=SaveOptions(patience_seconds=1)).save(1).wait()


def test_a_rank_with_slow_storage_is_waited_for_longer_than_the_patience(tmp_path: pathlib.Path) -> None:
    values(run_ranks(2, slow_rank, str(tmp_path)))


def exit_at_once(rank: int, path: str) -> None:
    """Rank 0, which holds the store, ends right after its save: the others still hear that it was committed."""
    pending = Snapshot(path, state_of(rank)).save(1)
    if rank == 0:
        return
    time.sleep(0.5)
    pending.wait()


def test_the_others_hear_of_the_commit_before_rank_0_may_end(tmp_path: pathlib.Path) -> None:
    values(run_ranks(3, exit_at_once, str(tmp_path)))
    assert (tmp_path / "1/.snapshot_metadata").exists()


def lose_the_store_after_the_commit(rank: int, path: str) -> str:
    from snapctl.ranks import StoreRanks

    original = StoreRanks.share

    def share(self: StoreRanks, value: Any) -> Any:
        if rank == 0 and os.path.exists(os.path.join(path, "1/.snapshot_metadata")):
            raise SaveError("the store of the ranks is gone")
        return original(self, value)

    StoreRanks.share = share  # type: ignore[method-assign]
    return _try(Snapshot(path, state_of(rank), options=PATIENCE), 1)


def test_a_checkpoint_that_was_committed_stands_whatever_happens_to_the_other_ranks(tmp_path: pathlib.Path) -> None:
    first, second = values(run_ranks(2, lose_the_store_after_the_commit, str(tmp_path), store="outside"))
    assert first == "saved"
    assert "step 1 may not have been saved: rank 0 gave no sign of life" in second
    assert [read_stored(tmp_path / "1")[f"{rank}/m/w"][0].item() for rank in (0, 1)] == [1, 2]


def separate_disks(rank: int, paths: list[str]) -> str:
    original = LocalStorage.child
    LocalStorage.child = lambda self, name: original(LocalStorage(paths[rank]), name)  # type: ignore[method-assign]
    return _try(Snapshot(paths[0], state_of(rank)), 1)


def test_disks_that_are_not_shared_are_noticed_before_the_commit(tmp_path: pathlib.Path) -> None:
    paths = [str(tmp_path / "host0"), str(tmp_path / "host1")]
    for told in values(run_ranks(2, separate_disks, paths)):
        assert "step 1 was not saved: rank 1 wrote batched/" in told and "which for rank 0 is not there" in told
    assert not (tmp_path / "host0/1/.snapshot_metadata").exists()
