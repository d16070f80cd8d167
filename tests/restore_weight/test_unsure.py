"""When the newest checkpoint could not be looked at, an older one is read, and the exit code tells."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np

from tests.support.command import Finished
from tests.support.servers import Bucket, Controlled
from tests.support.snapshots import write_checkpoint

Snapctl = Callable[..., Finished]


def test_the_tensor_of_an_older_one_is_written_and_the_exit_code_is_5(
    proxied: tuple[Bucket, Controlled], tmp_path: pathlib.Path, snapctl_inside: Snapctl
) -> None:
    bucket, proxy = proxied
    for step in (10, 20):
        tensors = {"w": np.full(3, step, "f4")}
        write_checkpoint(lambda path, data=b"": bucket.write(f"run/{path}", data), step, tensors)
    body = json.dumps({"error": {"code": 403, "message": "no"}})
    proxy.configure(faults=[{"match": r"/o/run%2F20%2F", "status": 403, "body": body}])
    done = snapctl_inside("restore-weight", f"{bucket.url}/run", "w", "-o", str(tmp_path / "w.npy"))
    assert done.code == 5 and "passed over: " in done.stderr and "permission denied" in done.stderr
    assert np.load(tmp_path / "w.npy").tolist() == [10.0] * 3
