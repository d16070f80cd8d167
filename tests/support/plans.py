"""Checkpoints as values, for what is pure: what is known about them, without any storage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from snapctl.checkpoints import Checkpoint
from snapctl.markers import DELETING_NAME, Claim, Marker, Pin
from snapctl.pruning.contents import Contents, digest
from snapctl.pruning.policy import PolicyTerms, make_policy
from snapctl.pruning.protection import Clock, Subject
from snapctl.pruning.retention import Plan, plan_prune
from snapctl.storage import FileInfo
from tests.support.repository import GOLDEN

NOW = 1_800_000_000.0
"""2027-01-15 08:00 UTC, a Friday."""
HOUR, DAY = 3600.0, 86400.0
CLOCK = Clock(NOW)


def file(path: str, *, at: float = NOW - 30 * DAY, size: int = 10, **more: Any) -> FileInfo:
    return FileInfo(path, size, at, f"v-{path}-{at}", **more)


def contents(*files: FileInfo) -> Contents:
    return digest(files)


def complete(
    step: int,
    at: float | None = NOW - 30 * DAY,
    *,
    metrics: Mapping[str, float] | None = None,
    marked: Iterable[str] = (),
    pin: bool = False,
    claims: Iterable[Claim] = (),
    link: bool = False,
    deleting_at: float | None = None,
    blobs_at: float | None = None,
    **more: Any,
) -> Subject:
    """A complete checkpoint that has been looked at; `at` None: nobody knows when it was written."""
    markers = {partition: Marker(partition) for partition in marked}
    if metrics is not None:
        markers["val"] = Marker("val", metrics=dict(metrics))
    written = at if at is not None else NOW - 30 * DAY
    manifest = file(".snapshot_metadata", at=written)
    checkpoint = Checkpoint(
        step=step,
        path=f"/run/{step}",
        state="complete",
        created_at=at,
        manifest=manifest,
        deleting=None if deleting_at is None else file(DELETING_NAME, at=deleting_at),
        pin=Pin() if pin else None,
        markers=tuple(markers[name] for name in sorted(markers)),
        claims=tuple(claims),
        is_link=link,
    )
    blobs = blobs_at if blobs_at is not None else written - 1
    facts = {"manifest_state": "parsed", "passes": True, "contents": contents(manifest, file("0/w", at=blobs)), **more}
    return Subject(step, checkpoint, **facts)


def incomplete(step: int, *files: FileInfo, deleting_at: float | None = None, **more: Any) -> Subject:
    """A checkpoint without a manifest."""
    announced = None if deleting_at is None else file(DELETING_NAME, at=deleting_at)
    there = (*files, announced) if announced is not None else files
    empty = next((item for item in files if item.path == ".snapshot_metadata"), None)
    checkpoint = Checkpoint(
        step=step, path=f"/run/{step}", state="incomplete", deleting=announced, manifest=empty, is_link=False
    )
    return Subject(step, checkpoint, **{"contents": contents(*there), **more})


def plan_of(subjects: Iterable[Subject], *, clock: Clock = CLOCK, **terms: Any) -> Plan:
    """The plan of a policy whose terms are given as `PolicyTerms` takes them."""
    return plan_prune(subjects, make_policy(PolicyTerms(**terms)), save_dir="/run", clock=clock)


def deleted(plan: Plan) -> list[int]:
    return [row.step for row in plan.deletions]


def kept(plan: Plan) -> list[int]:
    return [row.step for row in plan.rows if row.action == "keep"]


def reasons(plan: Plan, step: int) -> str:
    (row,) = [row for row in plan.rows if row.step == step]
    return "; ".join(row.reasons)


def render(plan: Plan) -> str:
    """A plan as the golden files have it."""
    lines = [f"{row.step:>6}  {row.action:<6}  {'; '.join(row.reasons)}" for row in plan.rows]
    lines += [f"warning: {message}" for message in plan.warnings]
    lines += [f"refused: {message}" for message in plan.refusals]
    return "\n".join(lines) + "\n"


def check_golden(name: str, text: str) -> None:
    """Compares with a golden file; with ``UPDATE_GOLDEN=1`` writes it anew, to be read before it is committed."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
