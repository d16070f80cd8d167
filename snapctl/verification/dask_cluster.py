"""A Dask cluster that exists already, as the executor that reads: ``verify --dask ADDRESS``.

Nothing is left behind on it: its futures are released, and no plugin is installed. `distributed` is imported here
alone, and only when a cluster is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from snapctl.errors import InvalidOptionError, MissingExtraError, WorkerError, WorkerSetupError
from snapctl.release import __version__
from snapctl.verification.remote_work import install_hint

CONNECT_SECONDS = 8.0
ANSWER_SECONDS = 10.0
"""A scheduler that is silent for so long is taken for dead."""
PATIENCE_SECONDS = 120.0
"""How long a cluster may be without any worker: one that starts them on demand takes a while."""
_KEY = "snapctl-verify"
_SHOWN = 5


class DaskExecutor(Executor):
    """Hands calls to the workers of a Dask cluster.

    Workers may come and go meanwhile. What was running on one that dies is done by another; what several have died over
    fails with a `WorkerError`; if the scheduler goes away, or no worker comes for long, that error is final.
    """

    def __init__(self, client: Any, address: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.address = address
        self._client = client
        self._inner = client.get_executor(pure=False)
        self._patience = patience_seconds
        self._had_workers_at = time.monotonic()
        self._lost: WorkerError | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls a function on some worker; no key or name on the cluster tells anything of its arguments."""
        future: Future[Any] = Future()
        try:
            theirs = self._inner.submit(function, *args, key=f"{_KEY}-{uuid.uuid4().hex}", **kwargs)
        except Exception as error:  # noqa: BLE001 - the client, if it has lost its scheduler: of several types
            future.set_exception(self._gone(error))
            return future
        theirs.add_done_callback(partial(self._hand_over, future))
        future.add_done_callback(lambda ours: theirs.cancel() if ours.cancelled() else None)
        return future

    def _hand_over(self, ours: Future[Any], theirs: Future[Any]) -> None:
        """Gives a result on, in a thread of the client."""
        if not ours.set_running_or_notify_cancel():
            return
        if theirs.cancelled():
            ours.set_exception(self._gone())
        elif (error := theirs.exception()) is not None:
            ours.set_exception(self._told(error))
        else:
            ours.set_result(theirs.result())

    def _told(self, error: BaseException) -> BaseException:
        from distributed import CancelledError
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker):
            return WorkerError(
                f"{self.address}: {error.allowed_failures + 1} workers died, each while it was reading this"
            )
        if isinstance(error, CancelledError):
            return self._gone(error)
        return error

    def _gone(self, error: BaseException | None = None) -> WorkerError:
        is_there = error is None and self._client.status == "running"
        what = "the work was cancelled on the cluster" if is_there else "the Dask scheduler has gone away"
        self._lost = WorkerError(f"{self.address}: {what}", is_final=True)
        return self._lost

    def capacity(self) -> int:
        """How many threads all workers have by now.

        Raises:
            WorkerError: the scheduler does not answer, or there has been no worker for long.
        """
        if self._lost is not None:
            raise self._lost
        threads: int = sum(self._ask("nthreads").values())
        now = time.monotonic()
        if threads:
            self._had_workers_at = now
        elif now - self._had_workers_at > self._patience:
            raise WorkerError(
                f"{self.address}: the cluster has had no worker for {self._patience:g} s",
                is_final=True,
                hint=f"dask worker {self.address}",
            )
        return threads

    def find_misfits(self) -> str:
        """Which of the workers have another snapctl, or none; empty if none of them can be found."""
        with contextlib.suppress(WorkerError):
            found = self._ask("run", pkgutil.resolve_name, "snapctl:__version__", on_error="return")
            misfits = [
                f"{worker} has {'none' if isinstance(version, BaseException) else version}"
                for worker, version in sorted(found.items())
                if version != __version__
            ]
            more = f", … ({len(misfits)} in all)" if len(misfits) > _SHOWN else ""
            return ", ".join(misfits[:_SHOWN]) + more
        return ""

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call to the scheduler, which may be dead."""
        try:
            call = {"nthreads": self._client.scheduler.ncores, "run": self._client._run}[method]
            found: dict[str, Any] = self._client.sync(call, *args, callback_timeout=ANSWER_SECONDS, **kwargs)
            return found
        except (OSError, RuntimeError, asyncio.TimeoutError, AttributeError) as error:
            raise self._gone(error) from error


@contextlib.contextmanager
def dask_cluster(address: str, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[DaskExecutor]:
    """The cluster behind the address of its scheduler, ``tcp://host:8786``.

    Certificates and the like come from Dask's own configuration. As long as it is used, Dask logs nothing.

    Raises:
        MissingExtraError: `distributed` is not installed.
        InvalidOptionError: not such an address.
        WorkerError: nobody answers there, or no Dask scheduler.
        WorkerSetupError: raised by what is inside of the block, with the workers named.
    """
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError("distributed", extra="dask") from error
    with _quiet():
        _find_scheduler(address)
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name=_KEY)
        try:
            executor = DaskExecutor(client, address, patience_seconds=patience_seconds)
            try:
                yield executor
            except WorkerSetupError as error:
                misfits = executor.find_misfits()
                if not misfits:
                    raise
                raise WorkerSetupError(
                    f"{address}: all workers need snapctl {__version__}, and {misfits}",
                    hint=install_hint(__version__),
                ) from error
        except Exception:
            _close(client)
            raise
        else:
            _close(client)
        # After a signal the process ends: the scheduler sees that, and cancels what is left.


def _find_scheduler(address: str) -> None:
    """Asks what is at an address. A `distributed.Client` would wait for ever for one who listens and is silent, and
    for twenty seconds over an address that is none."""
    from distributed import rpc
    from distributed.security import Security

    async def ask() -> dict[str, Any]:
        arguments = Security().get_connection_args("client")
        async with rpc(address, connection_args=arguments, timeout=CONNECT_SECONDS) as server:
            found: dict[str, Any] = await server.identity()
            return found

    try:
        found = asyncio.run(asyncio.wait_for(ask(), CONNECT_SECONDS))
    except (ValueError, TypeError) as error:
        raise InvalidOptionError(
            f"not the address of a Dask scheduler: {address!r}", hint="--dask tcp://HOST:8786"
        ) from error
    except (OSError, asyncio.TimeoutError, RuntimeError, MemoryError) as error:
        raise WorkerError(f"{address}: no Dask scheduler answers", is_final=True) from error
    if found.get("type") != "Scheduler":
        raise InvalidOptionError(f"{address}: is a Dask {str(found.get('type')).lower()}, not a scheduler")


def _close(client: Any) -> None:
    with contextlib.suppress(Exception):
        client.close(timeout=2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Dask's loggers say nothing: stderr is the command's own, and what they have to say is said by the errors."""
    import distributed  # noqa: F401 - makes them

    loggers = [
        logging.getLogger(name)
        for name in ["distributed", "tornado", *logging.Logger.manager.loggerDict]
        if name.partition(".")[0] in ("distributed", "tornado")
    ]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in before:
            logger.disabled = was_disabled
