"""Errors that cross from one process to another."""

from __future__ import annotations

import pickle

import pytest

from snapctl import errors
from snapctl.evaluation.claims import ClaimRefusedError

EXAMPLES = [
    errors.InvalidPathError("x", hint="h"),
    errors.EntryNotFoundError("x", candidates=("a", "b")),
    errors.ManifestError("x", kind="invalid"),
    errors.DamagedError("x", kind="hole", entry="0/m", blob="b"),
    errors.MissingExtraError("s3fs", extra="s3"),
    errors.WorkerSetupError("x", hint="h"),
    errors.StorageError("x", url="gs://b"),
    errors.BucketNotFoundError("x", url="gs://b"),
    errors.ShortReadError("x", expected_bytes=5, found_bytes=3, url="gs://b"),
    errors.WorkerError("x", is_final=True),
    errors.SaveError("x", ranks=(1, 2), unknown=True),
    errors.RestoreDamagedError("x", problems=("p",), ranks=(0,)),
    errors.DeadlineError("x", step=5, missing=("val",)),
    errors.CommandFailedError("x", returncode=-9),
    ClaimRefusedError("x", partition="val"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_arrives_with_all_that_it_says(error: errors.SnapctlError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.args, found.hint) == (type(error), str(error), error.args, error.hint)
    assert found.facts == error.facts
    assert vars(found) == vars(error)
