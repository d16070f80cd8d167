"""Train, save, be killed, resume: the loss goes on as if nothing had happened, on as many ranks or on others."""

from __future__ import annotations

import pathlib
import random
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchsnapshot = pytest.importorskip("torchsnapshot")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from snapctl import Snapshot, get_checkpoint  # noqa: E402
from snapctl.errors import SaveError  # noqa: E402
from tests.support.ranks import die, run_ranks  # noqa: E402
from tests.support.sharded import boxes_by_rank, sharded  # noqa: E402

pytestmark = pytest.mark.torch
BATCH, STEPS, ROWS = 8, 8, 13


def train_job(
    rank: int,
    directory: str,
    steps: int,
    with_noise: bool,
    kill_at: int = -1,
    kill_after: float = 0.0,
    save: bool = True,
) -> dict[int, tuple[float, float]]:
    """Trains from the newest checkpoint on, saving after each step; the loss of each step, and the table's sum.

    A dense model in DistributedDataParallel with AdamW, and a table sharded by rows. Every rank takes its part of the
    same batch, so that the loss depends on their number only by the order of summation.

    Args:
        with_noise: drop out at random, which depends on the generators of the ranks.
        kill_at: be killed in this step, while its save is under way.
    """
    world_size = dist.get_world_size()
    torch.manual_seed(100 + rank if with_noise else 5)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (number + 1) / 4)
    layers.train(with_noise)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    table = sharded(torch.zeros(ROWS, 2), boxes_by_rank("row", (ROWS, 2), world_size))
    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "lr": scheduler,
        "tables": torchsnapshot.StateDict(t=table),
    }
    if with_noise:
        state["rng"] = torchsnapshot.RNGState()
    snapshot = Snapshot(directory, state, replicated=("optim/**", "lr/**"))
    newest = get_checkpoint(directory, missing_ok=True)
    if newest:
        snapshot.restore(newest)
    losses = {}
    for step in range(snapshot.step, steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 6, generator=generator)
        targets = inputs.sum(1, keepdim=True).sin()
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        optimizer.zero_grad()
        loss = (model(inputs[mine]) - targets[mine]).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        for shard in table.local_shards():
            first = shard.metadata.shard_offsets[0]
            rows = torch.arange(first, first + shard.tensor.shape[0]).unsqueeze(1)
            shard.tensor.mul_(0.9).add_(rows * (step + 1))
        total = torch.stack([loss.detach(), sum((s.tensor.sum() for s in table.local_shards()), torch.zeros(()))])
        dist.all_reduce(total)
        losses[step] = (total[0].item() / world_size, total[1].item())
        snapshot.step, snapshot.walltime = step + 1, (step + 1) * 0.5
        if save:
            pending = snapshot.save(step + 1)
            if step == kill_at:
                time.sleep(kill_after)
                die()
            pending.wait()
    return losses


def run(world_size: int, *args: Any, killed: bool = False) -> dict[int, tuple[float, float]]:
    outcomes = run_ranks(world_size, train_job, *args, timeout=100)
    if killed:  # a rank that is not dead yet may see the others die in the middle of a save
        assert any(outcome.error == "killed" for outcome in outcomes), outcomes
        assert all(outcome.error == "killed" or isinstance(outcome.error, SaveError) for outcome in outcomes), outcomes
        return {}
    assert all(outcome.error is None for outcome in outcomes), outcomes
    return dict(outcomes[0].value)


@pytest.mark.parametrize("with_noise", [False, True])
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(with_noise: bool, tmp_path: pathlib.Path) -> None:
    whole = run(2, str(tmp_path / "whole"), STEPS, with_noise)
    run(2, str(tmp_path / "run"), STEPS, with_noise, 4, killed=True)
    resumed = run(2, str(tmp_path / "run"), STEPS, with_noise)
    assert min(resumed) in (4, 5)  # the save of the last step may or may not have become complete
    assert resumed == {step: whole[step] for step in resumed}


@pytest.mark.parametrize("world_size", [1, 4])
def test_it_goes_on_alike_on_another_number_of_ranks(world_size: int, tmp_path: pathlib.Path) -> None:
    whole = run(2, str(tmp_path / "whole"), STEPS, False, -1, 0.0, False)
    run(2, str(tmp_path / "run"), STEPS, False, 4, killed=True)
    resumed = run(world_size, str(tmp_path / "run"), STEPS, False)
    assert min(resumed) in (4, 5) and max(resumed) == STEPS - 1
    for step, (loss, total) in resumed.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-4) and total == pytest.approx(whole[step][1], rel=1e-6)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_again_and_again_on_changing_ranks_ends_where_it_would_have(
    tmp_path: pathlib.Path,
) -> None:
    steps, rng = 40, random.Random(6)
    whole = run(2, str(tmp_path / "whole"), steps, False, -1, 0.0, False)
    done: dict[int, tuple[float, float]] = {}
    kills = 0
    while True:
        newest = get_checkpoint(str(tmp_path / "run"), missing_ok=True) if (tmp_path / "run").exists() else ""
        start = int(newest.rpartition("/")[2]) if newest else 0
        if start >= steps - 4:
            break
        kill_at = start + rng.randrange(1, 4)
        run(rng.choice((1, 2, 4)), str(tmp_path / "run"), steps, False, kill_at, rng.random() * 0.03, killed=True)
        kills += 1
    done = run(2, str(tmp_path / "run"), steps, False)
    print(f"{kills} kills, last step {max(done)}: {done[max(done)]} and {whole[max(done)]} without")
    for step, (loss, total) in done.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-3) and total == pytest.approx(whole[step][1], rel=1e-5)
