"""Which permissions each command needs on GCS, told from the requests that it makes; and docs/gcs.md says the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.command import Finished
from tests.support.repository import ROOT, require_repository
from tests.support.servers import Bucket, Controlled

require_repository()
SAMPLE = ROOT / "tests" / "data" / "torchrec-2ranks" / "100"
LIST, GET, CREATE, DELETE, UPDATE, BUCKET = (
    "objects.list",
    "objects.get",
    "objects.create",
    "objects.delete",
    "objects.update",
    "buckets.get",
)


def permissions_of(log: Sequence[Sequence[object]], *, overwrites: bool) -> set[str]:
    """What GCS asks for these requests, as its reference of the JSON API's methods says.

    Args:
        overwrites: there are objects that an unconditional write may have replaced, which is to delete them, too.
    """
    found: set[str] = set()
    for method, raw_path, *_ in log:
        parts = urlsplit(str(raw_path))
        if parts.path.startswith("/batch/"):
            found.add(DELETE)  # nothing else is sent in batches
            continue
        query = parse_qs(parts.query)
        match = re.fullmatch(r"(?:/download|/upload)?/storage/v1/b/[^/]+(/o(?:/(.+))?)?", parts.path)
        assert match is not None, raw_path
        objects, name = match.groups()
        if objects is None:
            found.add(BUCKET)
        elif method == "GET":
            found.add(GET if name else LIST)
        elif method == "DELETE":
            found.add(DELETE)
        elif method == "PATCH":
            found.add(UPDATE)
        else:
            assert method == "POST" and parts.path.startswith("/upload/"), (method, raw_path)
            found.add(CREATE)
            if query.get("ifGenerationMatch") != ["0"] and overwrites:
                found.add(DELETE)
    return found


COMMANDS: dict[str, Sequence[Sequence[str]]] = {
    "list": [("list", "{run}", "--all", "--long")],
    "latest": [("latest", "{run}", "--best", "val/auc:max"), ("latest", "{run}", "--verified")],
    "show": [("show", "{run}", "--step", "10")],
    "verify": [("verify", "{run}", "--all", "--level", "data")],
    "restore-weight": [("restore-weight", "{run}", "t_rw.weight", "--stats")],
    "wait": [("wait", "{run}", "--at-least", "1", "--evaluated-by", "val", "--timeout", "0")],
    "mark-eval --check": [("mark-eval", "{run}/10", "val", "--check")],
    "mark-eval": [("mark-eval", "{run}/10", "test", "--metric", "auc=1")],
    "mark-eval, again": [("mark-eval", "{run}/10", "val", "--metric", "auc=1")],
    "mark-eval --claim, --renew, --release": [
        ("mark-eval", "{run}/10", "test", "--claim", "--owner", "me"),
        ("mark-eval", "{run}/10", "test", "--renew", "--owner", "me"),
        ("mark-eval", "{run}/10", "test", "--release", "--owner", "me"),
    ],
    "mark-eval --remove": [("mark-eval", "{run}/10", "val", "--remove")],
    "pin": [("pin", "{run}/10")],
    "pin --remove": [("pin", "{run}/10"), ("pin", "{run}/10", "--remove")],
    "prune --dry-run": [("prune", "{run}", "--keep-last", "1", "--dry-run")],
    "prune": [("prune", "{run}", "--keep-last", "1", "--yes")],
}


def documented() -> dict[str, set[str]]:
    """The table of docs/gcs.md: commands, each with the permissions whose column has a cross."""
    text = (ROOT / "docs" / "gcs.md").read_text()
    (table,) = re.findall(r"^\| command \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    found: dict[str, set[str]] = {}
    for line in table.splitlines():
        commands, *crosses = [cell.strip() for cell in line.strip("|").split("|")]
        columns = (LIST, GET, CREATE, DELETE, BUCKET)
        needed = {column for column, cross in zip(columns, crosses, strict=True) if cross}
        found.update(dict.fromkeys(re.findall(r"`([^`]+)`", commands), needed))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_needs_what_the_page_says(
    name: str, proxied: tuple[Bucket, Controlled], snapctl_inside: Callable[..., Finished]
) -> None:
    bucket, proxy = proxied
    fill(bucket)
    proxy.reset()
    for arguments in COMMANDS[name]:
        done = snapctl_inside(*(argument.format(run=f"{bucket.url}/run") for argument in arguments))
        assert done.code == 0, done
    assert permissions_of(proxy.stats(log=True)["log"], overwrites=True) == documented()[name]


def fill(bucket: Bucket) -> None:
    """Two checkpoints, the newer one evaluated; manifests come last, as a save writes them."""
    for step in (9, 10):
        bucket.upload(SAMPLE / "batched", f"run/{step}/batched")
        bucket.write(f"run/{step}/.snapshot_metadata", (SAMPLE / ".snapshot_metadata").read_bytes())
    bucket.write("run/10/evaled_by/val_DONE", b'{"metrics": {"auc": 0.5}}')


@pytest.mark.torch
@pytest.mark.parametrize("name", ["Snapshot.save", "Snapshot.save, again", "Snapshot.restore"])
def test_training_needs_what_the_page_says(name: str, proxied: tuple[Bucket, Controlled]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchsnapshot")
    from snapctl import Snapshot
    from snapctl.saving import exiting

    def save() -> None:
        snapshot.save(1).wait()
        while exiting.unfinished():  # it tidies up
            time.sleep(0.01)

    bucket, proxy = proxied
    snapshot = Snapshot(f"{bucket.url}/run", {"model": torch.nn.Linear(3, 2)})
    save()
    if name != "Snapshot.save":
        proxy.reset()
    if name == "Snapshot.save, again":
        save()
    if name == "Snapshot.restore":
        snapshot.restore(f"{bucket.url}/run/1")
    log = proxy.stats(log=True)["log"]
    if name == "Snapshot.save":  # what becomes of its announcement is not its success: see below
        log = [line for line in log if not (line[0] == "DELETE" and "save.0.json" in line[1])]
    assert permissions_of(log, overwrites=name != "Snapshot.save") == documented()[name]


@pytest.mark.torch
def test_a_save_that_may_not_delete_is_complete_and_leaves_its_announcement(
    proxied: tuple[Bucket, Controlled],
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchsnapshot")
    from snapctl import Snapshot
    from snapctl.saving import exiting

    bucket, proxy = proxied
    proxy.configure(faults=[{"match": "/o/", "method": "DELETE", "status": 403, "body": "no", "n": 99}])
    Snapshot(f"{bucket.url}/run", {"model": torch.nn.Linear(3, 2)}).save(1).wait()
    while exiting.unfinished():
        time.sleep(0.01)
    assert {"run/1/.snapshot_metadata", "run/1/.snapctl/save.json", "run/1/.snapctl/save.0.json"} <= set(
        bucket.names("run/")
    )


def test_the_roles_in_the_page_grant_what_they_are_said_to() -> None:
    text = (ROOT / "docs" / "gcs.md").read_text()
    assert set(documented()) == {*COMMANDS, "Snapshot.save", "Snapshot.save, again", "Snapshot.restore"}
    created = dict(re.findall(r"roles create (\w+) .*?--permissions=(\S+)", text, re.DOTALL))
    table = documented()
    for role, commands in (
        ("snapctlReader", ["list", "latest", "show", "verify", "restore-weight", "wait", "prune --dry-run"]),
        ("snapctlEvaluator", ["mark-eval", "mark-eval --claim, --renew, --release", "mark-eval --check"]),
        ("snapctlTrainer", ["Snapshot.save", "Snapshot.restore"]),
        ("snapctlPruner", ["prune"]),
    ):
        needed = set().union(*(table[command] for command in commands))
        assert {f"storage.{permission}" for permission in needed} == set(created[role].split(",")), role
