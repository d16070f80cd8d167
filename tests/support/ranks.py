"""Jobs of several ranks: real processes under ``torch.distributed`` (gloo), which may fail, hang or be killed."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.servers import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
# A server that has imported torch once, and forks: a rank starts in 20 ms instead of 3 s.
_CONTEXT.set_forkserver_preload(
    ["torch", "torchsnapshot", "snapctl.training", "snapctl.storage.gcs", "tests.support.ranks", "tests.support.warm"]
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: BaseException | str | None = None
    """The exception that the function raised; text where it cannot be pickled; ``killed`` for a dead process."""
    seconds: float = 0.0
    """Of the function alone."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    store: str = "rank0",
    until_error: bool = False,
    on_start: Callable[[list[Any]], None] | None = None,
) -> list[Outcome]:
    """Calls ``function(rank, *args)`` on every rank, in processes of their own with a process group.

    Args:
        function: of a module, not a closure.
        store: where the store lives: ``rank0``, as with ``init_method="env://"``, or ``outside``, as with torchrun.
        until_error: when one rank has failed, the others are only given half a second more.
        on_start: called with the processes when they run.
    """
    port = free_port()
    host = None
    if store == "outside":
        import torch.distributed as dist

        host = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    name = (function.__module__, function.__qualname__)
    environment = {key: value for key, value in os.environ.items() if key.startswith(("STORAGE_", "TORCHSNAPSHOT_"))}
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(rank, world_size, port, store, sender, name, args, environment))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        if on_start is not None:
            on_start(processes)
        return _collect([receiver for receiver, _ in pipes], timeout, until_error=until_error)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del host


def _collect(
    receivers: list[multiprocessing.connection.Connection], timeout: float, *, until_error: bool
) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    end = time.monotonic() + timeout
    while len(found) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in found]
        ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = receivers.index(receiver)  # type: ignore[arg-type]
            try:
                found[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                found[rank] = Outcome(error="killed")
            if until_error and found[rank].error is not None:
                end = min(end, time.monotonic() + 0.5)
    return [found.get(rank, Outcome(error="hangs")) for rank in range(len(receivers))]


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    store: str,
    sender: multiprocessing.connection.Connection,
    name: tuple[str, str],
    args: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    client = dist.TCPStore("127.0.0.1", port, world_size, store == "rank0" and rank == 0, timeout)
    dist.init_process_group("gloo", store=client, rank=rank, world_size=world_size, timeout=timeout)
    function: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        function = getattr(function, part)
    started = time.monotonic()
    try:
        outcome = Outcome(function(rank, *args), None, time.monotonic() - started)
    except BaseException as error:
        traceback.print_exc()
        outcome = Outcome(None, error, time.monotonic() - started)
    try:
        sender.send(outcome)
    except Exception:
        sender.send(Outcome(None, repr(outcome.error or outcome.value), outcome.seconds))
    sender.close()
    if store == "rank0" and rank == 0:  # the others may still need the store; when all have reported, this is killed
        time.sleep(60)


def die() -> None:
    """Ends this process as a machine failure would."""
    os.kill(os.getpid(), signal.SIGKILL)
