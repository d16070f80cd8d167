"""What ``torch.save`` wrote: judged whole or streamed, decoded and never executed."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from snapctl.verification import archive_checks, data_checks, data_plan
from snapctl.verification.archive_checks import check_held_archive, check_large_archive
from snapctl.verification.blob_uses import BlobUse
from snapctl.verification.targets import find_targets
from snapctl.verification.verdicts import CheckpointReport
from snapctl.verification.verifier import Thoroughness, verify
from tests.support.command import Finished
from tests.support.random_snapshots import archive
from tests.support.snapshots import local_writer, metadata, tensor_entry

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def use_of(dtype: str | None = "complex64", shape: tuple[int, ...] = (3,), obj_type: str | None = None) -> BlobUse:
    return BlobUse("0/m/x", "0/m/x", "0/m/x", 0, None, "torch_save", dtype, shape, obj_type)


def judged(data: bytes, use: BlobUse, *, large: bool, finite: bool = False) -> Any:
    if not large:
        return check_held_archive(memoryview(data), use, finite=finite)

    def blocks() -> Iterator[memoryview]:
        yield from (memoryview(data)[start : start + 100] for start in range(0, len(data), 100))

    return check_large_archive(io.BytesIO(data), blocks, use, finite=finite)


LARGE = pytest.mark.parametrize("large", [False, True])


@LARGE
@pytest.mark.parametrize("finite", [False, True])
def test_a_tensor_that_is_what_the_manifest_says_is_sound(large: bool, finite: bool) -> None:
    found = judged(saved(torch.ones(3, dtype=torch.complex64)), use_of(), large=large, finite=finite)
    assert (found.problems, found.crc_problems, found.unchecked) == ([], [], [])


@LARGE
@pytest.mark.parametrize(("dtype", "shape"), [("complex128", (3,)), ("complex64", (4,)), ("complex64", (3, 1))])
def test_another_dtype_or_shape_is_a_size_mismatch(large: bool, dtype: str, shape: tuple[int, ...]) -> None:
    found = judged(saved(torch.ones(3, dtype=torch.complex64)), use_of(dtype, shape), large=large)
    assert [problem.kind for problem in found.problems] == ["size-mismatch"]


@LARGE
def test_what_is_no_tensor_is_undecodable_where_one_should_be(large: bool) -> None:
    found = judged(saved([1, 2]), use_of(), large=large)
    assert [problem.kind for problem in found.problems] == ["undecodable"]
    assert "holds a list" in found.problems[0].detail


@LARGE
def test_flipped_bits_are_noticed_by_the_crc_of_the_member(large: bool) -> None:
    data = bytearray(saved(torch.arange(1000).to(torch.complex64)))
    data[4000] ^= 1
    found = judged(bytes(data), use_of(shape=(1000,)), large=large)
    assert [problem.kind for problem in found.crc_problems] == ["undecodable"]
    assert "data/0 has the CRC" in found.crc_problems[0].detail


@LARGE
def test_a_cut_archive_is_undecodable(large: bool) -> None:
    data = saved(torch.arange(1000).to(torch.complex64))
    for length in (len(data) - 1, len(data) // 2, 4, 1):
        found = judged(data[:length], use_of(shape=(1000,)), large=large)
        assert [problem.kind for problem in found.problems] == ["undecodable"]


@LARGE
def test_nothing_is_executed_and_what_would_need_it_is_unchecked(large: bool, tmp_path: pathlib.Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    for data in (saved({"x": Evil()}), archive({"data.pkl": pickle.dumps(Evil(), protocol=2), "version": b"3\n"})):
        found = judged(data, use_of(None, (), "evil.Evil"), large=large)
        assert found.problems == []
        assert [item.entry for item in found.unchecked] == ["0/m/x"]
        assert "mkdir" in found.unchecked[0].reason
    assert not (tmp_path / "owned").exists()


@LARGE
def test_the_old_format_of_torch_save_is_decoded(large: bool) -> None:
    data = saved(torch.ones(3, dtype=torch.complex64), _use_new_zipfile_serialization=False)
    assert judged(data, use_of(), large=large).problems == []
    assert len(judged(data[:-3], use_of(), large=large).problems) == 1


@LARGE
def test_not_finite_values_in_archives_are_counted(large: bool) -> None:
    value = {"a": [torch.tensor([1.0, float("nan")])], "b": (torch.tensor([float("inf")], dtype=torch.bfloat16),)}
    found = judged(saved(value), use_of(None, (), "dict"), large=large, finite=True)
    assert sum(count.nan for _, count in found.counts) == 1
    assert sum(count.infinite for _, count in found.counts) == 1
    assert sum(count.elements for _, count in found.counts) == 3


def verify_blob(root: pathlib.Path, data: bytes, entry: dict[str, Any], **how: Any) -> CheckpointReport:
    write = local_writer(root)
    write("10/0/m/x", data)
    write("10/.snapshot_metadata", metadata({"0/m": {"type": "dict", "keys": ["x"]}, "0/m/x": entry}))
    (report,) = verify(find_targets(str(root)), Thoroughness("data", **how))
    return report


def test_a_large_archive_goes_by_once_without_being_held(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plan, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(data_checks, "HELD_BYTES", 1 << 20)
    loaded: list[object] = []
    monkeypatch.setattr(archive_checks, "load_object", lambda *arguments, **_: loaded.append(arguments))
    count = 300_000
    data = saved(torch.ones(count, dtype=torch.complex64))
    entry = tensor_entry("0/m/x", [count], "complex64", serializer="torch_save")
    report = verify_blob(tmp_path, data, entry)
    assert (report.verdict, report.problems) == ("unverifiable", ())
    assert len(data) <= report.bytes_read <= len(data) + (3 << 19)  # and again its directory and its pickle
    assert loaded == []
    wrong = verify_blob(tmp_path, data, {**entry, "shape": [count + 1]})
    assert [problem.kind for problem in wrong.problems] == ["size-mismatch"]


def test_crcs_that_torch_was_told_not_to_write_mean_nothing_where_a_checksum_agrees(tmp_path: pathlib.Path) -> None:
    from snapctl.save_record import SaveRecord, format_save_record
    from tests.support.random_snapshots import summed

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(5000).to(torch.complex64))
    finally:
        torch.serialization.set_crc32_options(before)
    entry = tensor_entry("0/m/x", [5000], "complex64", serializer="torch_save")
    content = metadata({"0/m": {"type": "dict", "keys": ["x"]}, "0/m/x": entry})
    record = SaveRecord(1.7e9, 1, summed(content), blobs={"0/m/x": summed(data)})
    local_writer(tmp_path)("10/.snapctl/save.json", format_save_record(record))
    assert verify_blob(tmp_path, data, entry).verdict == "sound"
    assert verify_blob(tmp_path / "unrecorded", data, entry).verdict == "unverifiable"


def test_without_torch_an_archive_is_said_to_be_not_decoded(
    tmp_path: pathlib.Path, snapctl: Callable[..., Finished]
) -> None:
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')\n")
    data = saved(torch.ones(3, dtype=torch.complex64))
    entry = tensor_entry("0/m/x", [3], "complex64", serializer="torch_save")
    root = tmp_path / "run"
    verify_blob(root, data, entry)
    path = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    done = snapctl("verify", str(root), "--level", "data", env={"PYTHONPATH": path})
    assert done.code == 0
    assert "unchecked: 0/m/x: not decoded: torch is not installed" in done.stderr
    broken = bytearray(data)
    broken[data.index(b"FB") + 2 if b"FB" in data else 700] ^= 1
    (root / "10" / "0" / "m" / "x").write_bytes(data[:-1])
    done = snapctl("verify", str(root), "--level", "data", env={"PYTHONPATH": path})
    assert done.code == 1
    assert "undecodable" in done.stdout


def test_every_kind_of_entry_of_a_real_snapshot_is_sound(tmp_path: pathlib.Path) -> None:
    torchsnapshot = pytest.importorskip("torchsnapshot")
    state = {
        "float": torch.randn(5, 7),
        "half": torch.randn(4).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "complex": torch.randn(3, dtype=torch.complex64),
        "quantized": torch.quantize_per_channel(
            torch.randn(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3]), 0, torch.qint8
        ),
        "bool": torch.tensor([True, False]),
        "nested": {"list": [1, 2.5, "x", torch.ones(2)], "set": {1, 2}, 7: None},
        "a/b%c": torch.zeros(2, dtype=torch.int16),
    }
    torchsnapshot.Snapshot.take(str(tmp_path / "10"), {"m": torchsnapshot.StateDict(**state)})
    (report,) = verify(find_targets(str(tmp_path)), Thoroughness("data", finite=True))
    assert (report.verdict, report.problems, report.unchecked, report.warnings) == ("unverifiable", (), (), ())
