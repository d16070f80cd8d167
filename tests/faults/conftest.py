"""A filled save directory in a bucket, a proxy before it that fails as it is told, and a client without patience."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from snapctl.storage.gcs import client
from tests.faults.scene import Scene
from tests.support.servers import Bucket, Controlled, fault_proxy


@pytest.fixture(scope="module")
def proxy(gcs_endpoint: str) -> Iterator[Controlled]:
    with fault_proxy(gcs_endpoint) as proxy:
        yield proxy


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience with the storage is some hundredths of what it is; the proportions are the same."""
    monkeypatch.setattr(client, "READ_SECONDS", 0.2)
    monkeypatch.setattr(client, "BATCH_SECONDS", 0.25)
    monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.25)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.15)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.002)


@pytest.fixture
def scene(gcs_endpoint: str, proxy: Controlled, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
    found = Scene(Bucket(gcs_endpoint, f"bucket-{uuid.uuid4().hex[:12]}"), proxy)
    found.fill()
    found.fail(None)
    yield found
    found.fail(None)
    found.settle()
