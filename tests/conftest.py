"""Fixtures: real snapshots, a real fake-gcs-server, and the command line."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.support.command import Finished, snapctl_here
from tests.support.command import snapctl as run_snapctl
from tests.support.places import SaveDir
from tests.support.repository import DATA
from tests.support.servers import Bucket, Controlled, fake_gcs_server, fault_proxy, mini_gcs

# On a busy machine an example may take its time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_ELSEWHERE_NOT_SET = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


def pytest_configure() -> None:
    """Whoever runs the tests in the background of a script has SIGINT ignored, and so would all that they start."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own settings reaches a test."""
    for name in list(os.environ):
        if name.startswith(("FSSPEC_", "GOOGLE_", "GCSFS_")) or name in _ELSEWHERE_NOT_SET:
            monkeypatch.delenv(name)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)


@pytest.fixture
def snapctl() -> Callable[..., Finished]:
    return run_snapctl


@pytest.fixture
def snapctl_inside() -> Callable[..., Finished]:
    return snapctl_here


@pytest.fixture
def data(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """``data("torchrec-2ranks")``: a copy of a real save directory that the test may change."""

    def copy(name: str) -> pathlib.Path:
        target = tmp_path / name
        shutil.copytree(DATA / name, target)
        return target

    return copy


@pytest.fixture
def entry_point(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of pyproject.toml can be found, also where the package is not installed."""
    project = DATA.parents[1] / "pyproject.toml"
    if not project.exists():  # the wheel is tested, which has them
        return
    wanted = tomllib.loads(project.read_text())["project"]["entry-points"]
    (group,) = wanted
    if {point.name for point in importlib.metadata.entry_points(group=group)} >= wanted[group].keys():
        return
    metadata = tmp_path_factory.mktemp("installed") / "snapctl_for_tests-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: snapctl-for-tests\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in wanted[group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(str(metadata.parent))


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[str]:
    with fake_gcs_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(gcs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A fresh bucket on the fake-gcs-server, to which this test's gs:// leads."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_endpoint)
    return Bucket(gcs_endpoint, f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture(params=["local", "gs"])
def save_dir(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> SaveDir:
    """An empty save directory, on this machine and in a bucket."""
    if request.param == "local":
        root = tmp_path / "run"
        root.mkdir()
        return SaveDir(str(root), root=root)
    bucket = request.getfixturevalue("bucket")
    return SaveDir(f"{bucket.url}/run", bucket=bucket)


@pytest.fixture
def proxied(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bucket, Controlled]]:
    """A fresh bucket behind a proxy that counts and injects faults; the bucket object itself goes past it."""
    with fault_proxy(bucket.endpoint) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        yield bucket, proxy


@pytest.fixture
def minigcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controlled]:
    """The small GCS with documented listing semantics and conditions."""
    with mini_gcs() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server
