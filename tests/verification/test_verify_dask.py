"""`verify` on a real Dask cluster: the same answers, whatever happens to the workers, and nothing is left there."""

from __future__ import annotations

import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest

from snapctl.errors import WorkerError, WorkerSetupError
from snapctl.release import __version__
from snapctl.verification.data_plan import Sample
from snapctl.verification.targets import find_targets
from snapctl.verification.verdicts import CheckpointReport
from snapctl.verification.verifier import Progress, Thoroughness, verify
from tests.support.command import Finished
from tests.support.dask_cluster import Cluster, dask_processes
from tests.support.random_snapshots import full_snapshot
from tests.support.repository import DOCS, ROOT, require_repository
from tests.support.servers import Bucket, Controlled, fault_proxy
from tests.support.snapshots import local_writer, write_checkpoint

distributed = pytest.importorskip("distributed")
Run = Callable[..., Finished]
DATA = ("--all", "--level", "data")
WITHOUT_SNAPCTL = "import sys; sys.modules['snapctl'] = None\n"
SECRET = "project-hunter2"


@pytest.fixture(scope="module")
def gcs(gcs_endpoint: str) -> Iterator[Controlled]:
    """Through which the workers of the shared cluster see gs://; may be slowed down."""
    with fault_proxy(gcs_endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, gcs: Controlled) -> Iterator[Cluster]:
    """Two workers; for tests that harm none of them."""
    env = {"STORAGE_EMULATOR_HOST": gcs.endpoint}
    with dask_processes(tmp_path_factory.mktemp("cluster"), 2, env=env) as found:
        yield found


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """10 is sound, 20 has a flipped byte, 30 a NaN and no recorded checksums, 40 has lost a blob."""
    root = tmp_path / "run"
    write = local_writer(root)
    flipped, lost = full_snapshot(recorded=True), full_snapshot(recorded=True)
    flipped.blobs["0/model/dense"] = bytes(48)
    del lost.blobs["0/model/object"]
    full_snapshot(recorded=True).write(write, "10")
    flipped.write(write, "20")
    snapshot = full_snapshot()
    snapshot.blobs["0/model/dense"] = b"\0\0\xc0\x7f" + snapshot.blobs["0/model/dense"][4:]
    snapshot.write(write, "30")
    lost.write(write, "40")
    return root


@pytest.fixture
def slow(gcs: Controlled, gcs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket with 24 sound checkpoints below ``run``, in which each request of a worker takes a while."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_endpoint)
    bucket = Bucket(gcs_endpoint, f"slow-{time.time_ns()}")
    for step in range(24):
        full_snapshot(recorded=True).write(lambda path, data: bucket.write(f"run/{path}", data), str(step))
    gcs.configure(latency=0.1)
    gcs.reset()
    yield bucket
    gcs.configure(latency=0)


def verdicts(done: Finished) -> list[tuple[int, str]]:
    return [(report["step"], report["verdict"]) for report in done.json["checkpoints"]]


def wait_for_reads(gcs: Controlled, count: int) -> None:
    for _ in range(3000):
        if gcs.stats()["n"] >= count:
            return
        time.sleep(0.02)
    raise RuntimeError("no worker reads")


class Command:
    """``snapctl verify …`` while it runs."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "snapctl", "verify", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self) -> Finished:
        stdout, stderr = self.process.communicate(timeout=60)
        return Finished(self.process.returncode, stdout.decode(), stderr.decode())


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--finite"], ["--finite", "--json"], ["--sample", "2/3"], ["--jobs", "1"]])
def test_it_says_what_it_says_without_a_cluster(
    snapctl_inside: Run, cluster: Cluster, run_dir: pathlib.Path, options: list[str]
) -> None:
    here = snapctl_inside("verify", str(run_dir), *DATA, *options)
    there = snapctl_inside("verify", str(run_dir), *DATA, *options, "--dask", cluster.address)
    assert there == here
    assert there.code == 1


def test_it_says_the_same_on_gcs(snapctl_inside: Run, cluster: Cluster, bucket: Bucket, gcs: Controlled) -> None:
    damaged = full_snapshot(recorded=True)
    damaged.blobs["sharded/model/DTensor_2"] = bytes(12)
    for step, snapshot in (("10", full_snapshot(recorded=True)), ("20", damaged), ("30", full_snapshot())):
        snapshot.write(lambda path, data, step=step: bucket.write(f"run/{path}", data), step)  # type: ignore[misc]
    gcs.reset()
    here = snapctl_inside("verify", f"{bucket.url}/run", *DATA, "--finite", "--json")
    assert gcs.stats()["n"] == 0
    there = snapctl_inside("verify", f"{bucket.url}/run", *DATA, "--finite", "--json", "--dask", cluster.address)
    assert there == here
    assert verdicts(there) == [(10, "sound"), (20, "damaged"), (30, "unverifiable")]
    assert gcs.stats()["n"] >= 3 * 17 - 1, "the workers have read the blobs"


def test_several_save_directories_share_the_cluster(
    snapctl_inside: Run, cluster: Cluster, tmp_path: pathlib.Path, run_dir: pathlib.Path
) -> None:
    full_snapshot(recorded=True).write(local_writer(tmp_path / "other"), "7")
    arguments = ("verify", str(run_dir), str(tmp_path / "other"), *DATA, "--json")
    here, there = snapctl_inside(*arguments), snapctl_inside(*arguments, "--dask", cluster.address)
    assert there == here
    assert (there.code, len(there.stdout.splitlines())) == (1, 2)


def test_the_executor_of_a_client_can_be_handed_over(cluster: Cluster, run_dir: pathlib.Path) -> None:
    how = Thoroughness("data", finite=True)

    def judge(**options: object) -> list[CheckpointReport]:
        found = verify(find_targets(str(run_dir), every=True, level="data"), how, **options)  # type: ignore[arg-type]
        return sorted(found, key=lambda report: report.step or 0)

    with distributed.Client(cluster.address, set_as_default=False) as client:
        assert judge(executor=client.get_executor()) == judge()


def test_progress_grows_to_the_end(cluster: Cluster, slow: Bucket) -> None:
    from snapctl.verification.dask_cluster import dask_cluster

    seen: list[Progress] = []
    targets = find_targets(f"{slow.url}/run", steps=range(6), level="data")
    with dask_cluster(cluster.address) as executor:
        found = list(
            verify(
                targets,
                Thoroughness("data", sample=Sample(1, 1)),
                executor=executor,
                capacity=executor.capacity,
                on_progress=lambda progress: seen.append(copy(progress)),
            )
        )
    read = [progress.read_bytes for progress in seen]
    assert read == sorted(read) and len(set(read)) > 3
    assert (seen[-1].done, seen[-1].read_bytes) == (6, sum(report.bytes_read for report in found))


def test_nothing_is_left_on_the_cluster(snapctl_inside: Run, cluster: Cluster, run_dir: pathlib.Path) -> None:
    snapctl_inside("verify", str(run_dir), *DATA, "--dask", cluster.address)
    with distributed.Client(cluster.address, set_as_default=False) as client:
        count = client.run_on_scheduler(
            lambda dask_scheduler: (len(dask_scheduler.tasks), list(dask_scheduler.clients))
        )
    assert count[0] == 0
    assert not [name for name in count[1] if "snapctl" in name]


def test_the_example_of_verify_md_runs(snapctl_inside: Run, cluster: Cluster, run_dir: pathlib.Path) -> None:
    require_repository()
    page = (DOCS / "verify.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("$ snapctl verify") and "--dask" in line]
    places = {"gs://my-bucket/run1": str(run_dir / "10"), "tcp://scheduler:8786": cluster.address}
    done = snapctl_inside(*[places.get(word, word) for word in line.split()[2:]])
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[:3] == ["10", "sound", "data"]


# -- what travels ----------------------------------------------------------------------------------------------------


def test_storage_options_reach_the_workers_and_are_shown_nowhere(
    cluster: Cluster, gcs_endpoint: str, tmp_path: pathlib.Path
) -> None:
    with fault_proxy(gcs_endpoint) as proxy:
        bucket = Bucket(gcs_endpoint, f"options-{time.time_ns()}")
        for step in range(12):
            write_checkpoint(lambda path, data: bucket.write(f"run/{path}", data), step)
        proxy.configure(faults=[{"match": "run%2F5%2F0%2Fmodel", "status": 403}], latency=0.2)
        options = [f"endpoint_url={proxy.endpoint}", "token=anon", f"requester_pays={SECRET}"]
        arguments = [word for option in options for word in ("--storage-option", option)]
        command = Command(f"{bucket.url}/run", *DATA, "--json", "--dask", cluster.address, *arguments)
        shown = [*_spied(cluster, command.process)]
        done = command.finish()
        reads = [line[1] for line in proxy.stats(log=True)["log"] if "alt=media" in line[1] and "weight" in line[1]]
    assert done.code == 5 and dict(verdicts(done)) == {
        step: None if step == 5 else "unverifiable" for step in range(12)
    }
    assert len(reads) == 12 and all(f"userProject={SECRET}" in read for read in reads), "read with these options"
    assert any("snapctl-verify-" in text for text in shown), "something was seen"
    for text in [*shown, cluster.all_logs(), done.stdout, done.stderr]:
        assert SECRET not in text


def _spied(cluster: Cluster, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What anybody who is on the cluster is shown while a command runs: tasks, their states, the event log."""

    def look(dask_scheduler: object) -> str:
        tasks = dask_scheduler.tasks.values()  # type: ignore[attr-defined]
        told = [
            (task.key, repr(task), repr(task.run_spec), str(task.annotations), str(task._to_dict_no_nest()))
            for task in tasks
        ]
        return str(told) + str(dask_scheduler.get_events())  # type: ignore[attr-defined]

    with distributed.Client(cluster.address, set_as_default=False) as client:
        while process.poll() is None:
            yield client.run_on_scheduler(look)
            yield str(client.processing()) + str(client.call_stack())
            time.sleep(0.05)
        yield str(client.get_task_stream())


def test_a_path_that_the_workers_do_not_see_is_not_called_damage(
    snapctl_inside: Run, tmp_path: pathlib.Path, run_dir: pathlib.Path
) -> None:
    """As if this machine had a disk that the workers lack."""
    hidden = (
        "import os; real = os.open\n"
        "def here(path, *rest, **more):\n"
        "    if str(path).endswith('weight'): raise FileNotFoundError(2, 'No such file or directory', path)\n"
        "    return real(path, *rest, **more)\n"
        "os.open = here\n"
    )
    root = tmp_path / "elsewhere"
    write_checkpoint(local_writer(root), 10)
    with dask_processes(tmp_path / "cluster") as found:
        found.add_worker("blind", before=hidden)
        found.wait_for_workers(1)
        done = snapctl_inside("verify", str(root), *DATA, "--json", "--dask", found.address)
    assert done.code == 4
    assert done.json["checkpoints"][0]["verdict"] is None
    assert f"not found on the worker {socket.gethostname()}:" in done.json["checkpoints"][0]["error"]


# -- workers that die, and come --------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_and_one_that_comes_change_nothing(
    tmp_path: pathlib.Path, slow: Bucket, gcs: Controlled
) -> None:
    env = {"STORAGE_EMULATOR_HOST": gcs.endpoint}
    with dask_processes(tmp_path, 2, env=env) as found:
        third = found.add_worker("late", env=env, before="import time; time.sleep(1)\n")
        del third
        command = Command(f"{slow.url}/run", *DATA, "--json", "--dask", found.address)
        wait_for_reads(gcs, 20)
        found.workers["worker0"].kill()
        done = command.finish()
        log = found.log("scheduler")
    assert (done.code, done.stderr) == (0, "")
    assert verdicts(done) == [(step, "sound") for step in range(24)]
    assert log.count("Register worker") == 3 and log.count("Remove worker") >= 1


def test_what_workers_die_over_again_and_again_could_not_be_checked(tmp_path: pathlib.Path) -> None:
    """A blob whose reading kills the process, as if it had run out of memory; the cluster allows two deaths for it."""
    deadly = (
        "import os, snapctl.verification.data_checks as there\n"
        "check = there.check_part\n"
        "def die(source, part):\n"
        "    if source._url.endswith('/5'): os._exit(9)\n"
        "    return check(source, part)\n"
        "there.check_part = die\n"
    )
    for step in range(8):
        write_checkpoint(local_writer(tmp_path / "run"), step)
    with dask_processes(tmp_path / "cluster") as found:
        for number in range(2):
            found.add_worker(f"deadly{number}", before=deadly)
        found.wait_for_workers(2)
        command = Command(str(tmp_path / "run"), *DATA, "--json", "--dask", found.address)
        for name in ("deadly0", "deadly1"):
            assert found.workers[name].wait(60) == 9
        found.add_worker("good")
        done = command.finish()
    found_verdicts = dict(verdicts(done))
    assert done.code == 5 and found_verdicts[5] is None
    assert "2 workers died, each while it was reading this" in done.json["checkpoints"][5]["error"]
    assert list(found_verdicts.values()).count("unverifiable") > 3, "but for what they held at the same time"


def test_a_cluster_that_loses_all_workers_is_given_up(tmp_path: pathlib.Path, slow: Bucket, gcs: Controlled) -> None:
    from snapctl.verification.dask_cluster import dask_cluster

    with dask_processes(tmp_path, 1, env={"STORAGE_EMULATOR_HOST": gcs.endpoint}) as found:
        targets = find_targets(f"{slow.url}/run", every=True, level="data")
        with dask_cluster(found.address, patience_seconds=1) as executor:
            reports = verify(targets, Thoroughness("data"), executor=executor, capacity=executor.capacity)
            first = next(reports)
            found.workers["worker0"].kill()
            rest = list(reports)
    assert first.verdict == "sound"
    assert len(rest) == 23
    assert isinstance(rest[-1].error, WorkerError) and "has had no worker for 1 s" in rest[-1].error.message


def test_a_scheduler_that_dies_ends_it_with_what_is_known(
    tmp_path: pathlib.Path, slow: Bucket, gcs: Controlled
) -> None:
    with dask_processes(tmp_path, 2, env={"STORAGE_EMULATOR_HOST": gcs.endpoint}) as found:
        command = Command(f"{slow.url}/run", *DATA, "--json", "--dask", found.address)
        wait_for_reads(gcs, 40)
        found.scheduler.kill()
        began = time.monotonic()
        done = command.finish()
    assert time.monotonic() - began < 15
    assert done.code in (4, 5)  # 4 if not one was done
    failed = [report for report in done.json["checkpoints"] if report["verdict"] is None]
    assert failed and all("the Dask scheduler has gone away" in report["error"] for report in failed)
    assert done.stderr == "" or done.error["exit_code"] == 4


def test_work_that_somebody_cancels_on_the_cluster_is_not_waited_for(
    cluster: Cluster, slow: Bucket, gcs: Controlled
) -> None:
    command = Command(f"{slow.url}/run", *DATA, "--json", "--dask", cluster.address)
    wait_for_reads(gcs, 20)
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.run_on_scheduler(_cancel_all)
    done = command.finish()
    assert done.code in (4, 5)
    assert "was cancelled on the cluster" in done.stdout


async def _cancel_all(dask_scheduler: object) -> None:
    for name, state in dask_scheduler.clients.items():  # type: ignore[attr-defined]
        keys = [task.key for task in state.wants_what if "snapctl" in str(task.key)]
        if keys:
            dask_scheduler.report({"op": "cancelled-keys", "keys": keys}, client=name)  # type: ignore[attr-defined]
            dask_scheduler.client_releases_keys(keys=keys, client=name, stimulus_id="test")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_within_a_second_and_its_work_too(
    cluster: Cluster, slow: Bucket, gcs: Controlled, number: int, code: int
) -> None:
    command = Command(f"{slow.url}/run", *DATA, "--dask", cluster.address)
    wait_for_reads(gcs, 20)
    command.process.send_signal(number)
    began = time.monotonic()
    done = command.finish()
    assert time.monotonic() - began < 10  # a second on a machine that does nothing else
    assert (done.code, done.stdout, done.stderr) == (code, "", "")
    with distributed.Client(cluster.address, set_as_default=False) as client:
        for _ in range(200):
            if client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0:
                return
            time.sleep(0.05)
    raise AssertionError("its tasks are still there")


# -- workers of another kind -----------------------------------------------------------------------------------------


def test_a_worker_without_snapctl_is_named_and_lives_on(
    snapctl_inside: Run, tmp_path: pathlib.Path, run_dir: pathlib.Path
) -> None:
    with dask_processes(tmp_path / "cluster", 1) as found:
        bare = found.add_worker("bare", before=WITHOUT_SNAPCTL)
        found.wait_for_workers(2)
        done = [
            snapctl_inside("verify", str(run_dir), *DATA, "--dask", found.address, *more) for more in ([], ["--json"])
        ]
        assert bare.poll() is None
    assert [(each.code, each.stdout) for each in done] == [(6, "")] * 2
    error, hint = done[0].stderr.splitlines()
    assert error.startswith(f"error: {found.address}: all workers need snapctl {__version__}, and tcp://127.0.0.1:")
    assert error.endswith(" has none") and hint == f"hint: pip install 'snapctl=={__version__}' on every worker"
    assert (done[1].error["type"], done[1].error["exit_code"]) == ("WorkerSetupError", 6)


def test_a_worker_with_another_version_decodes_nothing_and_is_named(
    snapctl_inside: Run, tmp_path: pathlib.Path, run_dir: pathlib.Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(ROOT / "snapctl", old / "snapctl", ignore=shutil.ignore_patterns("__pycache__"))
    (old / "snapctl" / "release.py").write_text('__version__ = "0.0.9"\n')
    with dask_processes(tmp_path / "cluster") as found:
        found.add_worker("old", before=f"import sys; sys.path.insert(0, {str(old)!r})\n")
        found.wait_for_workers(1)
        done = snapctl_inside("verify", str(run_dir), *DATA, "--dask", found.address)
    assert (done.code, done.stdout) == (6, "")
    assert done.stderr.splitlines()[0].endswith(" has 0.0.9")


def test_one_that_comes_later_is_noticed_too(tmp_path: pathlib.Path, slow: Bucket, gcs: Controlled) -> None:
    with dask_processes(tmp_path, 1, env={"STORAGE_EMULATOR_HOST": gcs.endpoint}) as found:
        command = Command(f"{slow.url}/run", *DATA, "--dask", found.address)
        wait_for_reads(gcs, 4)
        found.add_worker("bare", before=WITHOUT_SNAPCTL)
        done = command.finish()
    assert (done.code, done.stdout) == (6, "")
    assert "has none" in done.stderr


# -- schedulers that are none ----------------------------------------------------------------------------------------


def test_who_does_not_answer_is_one_line_after_a_bounded_time(
    snapctl: Run, run_dir: pathlib.Path, gcs_endpoint: str
) -> None:
    """Nobody is there, one listens and is silent, one talks of something else."""
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        ports = [dead.getsockname()[1], silent.getsockname()[1], int(gcs_endpoint.rpartition(":")[2])]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        with ThreadPoolExecutor(3) as pool:
            done = list(pool.map(lambda address: snapctl("verify", str(run_dir), *DATA, "--dask", address), addresses))
    assert [(each.code, each.stdout) for each in done] == [(4, "")] * 3
    assert [each.stderr for each in done] == [f"error: {address}: no Dask scheduler answers\n" for address in addresses]
    assert time.monotonic() - began < 30


def test_a_worker_is_no_scheduler(snapctl_inside: Run, cluster: Cluster, run_dir: pathlib.Path) -> None:
    with distributed.Client(cluster.address, set_as_default=False) as client:
        address = next(iter(client.nthreads()))
    done = snapctl_inside("verify", str(run_dir), *DATA, "--dask", address, "--json")
    assert (done.code, done.stdout) == (2, "")
    assert done.error["message"] == f"{address}: is a Dask worker, not a scheduler"


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "tcp://127.0.0.1", "foo://127.0.0.1:8786", "tcp://127.0.0.1:http"]
)
def test_what_is_no_address_is_a_wrong_command_line(snapctl_inside: Run, run_dir: pathlib.Path, address: str) -> None:
    done = snapctl_inside("verify", str(run_dir), *DATA, "--dask", address)
    assert (done.code, done.stdout) == (2, "")
    assert "not the address of a Dask scheduler" in done.stderr


def test_a_cluster_has_no_meaning_where_no_data_is_read(snapctl_inside: Run, run_dir: pathlib.Path) -> None:
    done = snapctl_inside("verify", str(run_dir), "--dask", "tcp://127.0.0.1:8786")
    assert (done.code, done.stdout) == (2, "")
    assert "--dask has no meaning" in done.stderr


def test_without_distributed_the_extra_is_named(run_dir: pathlib.Path) -> None:
    code = "import sys; sys.modules['distributed'] = None; from snapctl.cli.main import run; run()"
    command = [sys.executable, "-c", code, "verify", str(run_dir), *DATA, "--dask", "tcp://127.0.0.1:8786"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "error: distributed is not installed\nhint: pip install 'snapctl[dask]'\n"


def test_an_error_in_the_setup_of_a_worker_comes_back_whole() -> None:
    import pickle

    error = WorkerSetupError("a fact", hint="what to do")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), found.message, found.hint) == (WorkerSetupError, "a fact", "what to do")
