"""A real Dask cluster on this machine: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from tests.support.repository import ROOT

MAIN = "from distributed.cli.{module} import main; main()"
_SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    "DASK_DISTRIBUTED__COMM__RETRY__COUNT": "0",
}


class Cluster:
    """A scheduler, and the workers that a test wants.

    Attributes:
        address: of the scheduler.
        workers: the processes by name.
        logs: a file for each process, with all that it says.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.logs = directory
        self.logs.mkdir(parents=True, exist_ok=True)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        told = directory / "scheduler.json"
        options = [
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--dashboard-address",
            "127.0.0.1:0",
            "--scheduler-file",
            str(told),
        ]
        self.scheduler = self._start("scheduler", MAIN.format(module="dask_scheduler"), options)
        self.address: str = _wait_for_file(told, self.scheduler)

    def add_worker(
        self, name: str, *, env: Mapping[str, str] | None = None, before: str = ""
    ) -> subprocess.Popen[bytes]:
        """One more worker process, of one thread.

        Args:
            before: Python code that the process runs first.
        """
        options = [self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--name", name]
        options += ["--local-directory", str(self.logs), "--death-timeout", "20"]
        self.workers[name] = self._start(name, before + MAIN.format(module="dask_worker"), options, env)
        return self.workers[name]

    def wait_for_workers(self, count: int) -> None:
        """Until so many have reported to the scheduler."""
        for _ in range(1200):
            if self.log("scheduler").count("Register worker") >= count:
                return
            time.sleep(0.05)
        raise RuntimeError(f"not {count} workers: {self.log('scheduler')}")

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def all_logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _start(
        self, name: str, code: str, options: list[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, **_SETTINGS, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
        with open(self.logs / f"{name}.log", "wb") as log:
            command = [sys.executable, "-c", code, *options]
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process


@contextlib.contextmanager
def dask_processes(
    directory: pathlib.Path, workers: int = 0, *, env: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster with so many workers, which have all reported."""
    cluster = Cluster(directory)
    try:
        for number in range(workers):
            cluster.add_worker(f"worker{number}", env=env)
        cluster.wait_for_workers(workers)
        yield cluster
    finally:
        cluster.close()


def _wait_for_file(path: pathlib.Path, process: subprocess.Popen[bytes]) -> str:
    for _ in range(1200):
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text())["address"])
        if process.poll() is not None:
            raise RuntimeError(f"the scheduler ended with {process.returncode}")
        time.sleep(0.05)
    raise RuntimeError("no scheduler")
