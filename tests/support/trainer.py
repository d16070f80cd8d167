"""A small training script: an embedding table, a dense part and Adam, saved every few steps, for ever.

``python -m tests.support.trainer SAVE_DIR LOG ATTEMPT``, alone or under torchrun. Before each save it notes in the log
what is about to be saved; whoever kills it can compare.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

STEPS = (3, 6, 9, 12)
"""It saves into these again and again."""


def digest(tensors: Mapping[str, Any]) -> str:
    """A hash of tensors by name, of their dtypes, shapes and bytes."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + plain)
    return total.hexdigest()


def tensors_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a nested state with their paths, as a manifest names them."""
    import torch

    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}/{path}", tensor) for path, tensor in tensors_of(value))
        elif isinstance(value, list):
            numbered = {str(index): item for index, item in enumerate(value)}
            yield from ((f"{key}/{path}", tensor) for path, tensor in tensors_of(numbered))


def train(rank: int, save_dir: str, log: str, attempt: int, world_size: int = 1) -> None:
    """Trains until it is killed."""
    import torch
    import torchsnapshot

    from snapctl import Snapshot

    torch.manual_seed(attempt * 100 + rank)
    table = torch.nn.Embedding(2_000, 64)
    dense = torch.nn.Linear(64, 33, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam([*table.parameters(), *dense.parameters()], lr=0.1)
    stamp = torch.zeros(1, dtype=torch.int64)
    state = {"table": table, "dense": dense, "optimizer": optimizer, "run": torchsnapshot.StateDict(stamp=stamp)}
    snapshot = Snapshot(save_dir, state)
    with open(f"{log}.{rank}", "a") as notes:
        for counter in range(10_000_000):
            for _ in range(3):
                optimizer.zero_grad()
                loss = dense(table(torch.randint(2_000, (32,))).to(torch.bfloat16)).square().sum()
                loss.backward()
                optimizer.step()
            step = STEPS[counter % len(STEPS)]
            stamp.fill_(attempt * 1_000_000 + counter)
            whole = {name: part.state_dict() for name, part in state.items() if name != "extra_state"}
            note = {"stamp": stamp.item(), "step": step, "digest": digest(dict(tensors_of(whole)))}
            notes.write(json.dumps(note) + "\n")
            notes.flush()
            snapshot.step = step
            pending = snapshot.save(step)
            if counter == 0:
                print(f"saving {rank}", flush=True)
            if counter % 3 == 0:
                pending.wait()


if __name__ == "__main__":
    local_rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    train(local_rank, sys.argv[1], sys.argv[2], int(sys.argv[3]), ranks)
