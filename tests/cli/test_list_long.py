"""`list --long`: spacing, save times, and the small charts of a terminal."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapctl.cli.charts import ASCII_RAMP, BLOCKS, sparkline
from snapctl.save_record import BlobSum, RankTimings, SaveRecord, format_save_record
from tests.cli.test_cli_boundary import on_terminal
from tests.support.command import Finished
from tests.support.places import SaveDir
from tests.support.snapshots import metadata, write_checkpoint

Run = Callable[..., Finished]


def saved(place: SaveDir, step: int, at: float, **metrics: float) -> None:
    """A checkpoint of two ranks that snapctl saved, at a time, with metrics of `val`."""
    content = metadata({}, world_size=2)
    ranks = (RankTimings(0, 0.25, 3.5, 100), RankTimings(1, 0.5, 61.0, 100))
    record = SaveRecord(at, 2, BlobSum(len(content), google_crc32c.value(content)), ranks, {})
    place.write(f"{step}/.snapctl/save.json", format_save_record(record))
    place.write(f"{step}/.snapshot_metadata", content)
    if metrics:
        marker = {"partition": "val", "finished_at": "2026-11-30T12:00:00Z", "metrics": metrics}
        place.write(f"{step}/evaled_by/val_DONE", json.dumps(marker).encode())


@pytest.fixture
def run(save_dir: SaveDir) -> SaveDir:
    """Steps 10, 20 and 40, 90 s and 1 h apart; 40 was saved by somebody else; 30 is incomplete."""
    now = time.time()
    saved(save_dir, 10, now - 9000, auc=0.5, loss=2.0)
    saved(save_dir, 20, now - 8910, auc=0.75, loss=1.0)
    write_checkpoint(save_dir.write, 30, complete=False)
    saved(save_dir, 40, now - 5310, auc=1.0)
    return save_dir


def test_a_pipe_gets_spacing_and_save_times_and_no_chart(snapctl_inside: Run, run: SaveDir) -> None:
    done = snapctl_inside("list", run.url, "--long")
    assert (done.code, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["STEP", "STATE", "CREATED", "EVALUATED", "SIZE", "FILES", "SPACING", "SAVE", "METRICS"]
    start, end = header.index("SPACING"), header.index("METRICS")
    assert [row[start:end].split() for row in rows] == [
        ["-", "0.50s/1m1s"],
        ["+10", "1m30s", "0.50s/1m1s"],
        ["+20", "1h", "0.50s/1m1s"],
    ]
    assert not set(done.stdout) & set(BLOCKS)


def test_programs_get_numbers_and_null_without_long(snapctl_inside: Run, run: SaveDir) -> None:
    items = snapctl_inside("list", run.url, "--long", "--json").json["checkpoints"]
    assert [item["steps_since_previous"] for item in items] == [None, 10, 20]
    assert [item["seconds_since_previous"] for item in items[1:]] == pytest.approx([90, 3600], abs=0.01)
    assert [(item["save_blocked_seconds"], item["save_durable_seconds"]) for item in items] == [(0.5, 61.0)] * 3
    short = snapctl_inside("list", run.url, "--json").json["checkpoints"]
    assert (
        {item["steps_since_previous"] for item in short} == {None} == {item["save_durable_seconds"] for item in short}
    )


def test_spacing_is_that_of_the_run_whatever_is_shown(snapctl_inside: Run, run: SaveDir) -> None:
    items = snapctl_inside("list", run.url, "--long", "--json", "--limit", "1").json["checkpoints"]
    assert [item["steps_since_previous"] for item in items] == [20]
    every = snapctl_inside("list", run.url, "--long", "--json", "--all", "--reverse").json["checkpoints"]
    assert [item["steps_since_previous"] for item in every] == [20, None, 10, None]


def test_a_run_that_was_started_again_at_a_lower_step_goes_back_in_time(
    snapctl_inside: Run, tmp_path: pathlib.Path
) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    saved(place, 10, time.time() - 100)
    saved(place, 20, time.time() - 190)
    assert "+10 -1m30s" in snapctl_inside("list", str(tmp_path), "-l").stdout


def test_checkpoints_that_recorded_nothing_have_no_save_time(snapctl_inside: Run, tmp_path: pathlib.Path) -> None:
    place = SaveDir(str(tmp_path), root=tmp_path)
    for step in (10, 20):
        write_checkpoint(place.write, step)
    (item, _) = snapctl_inside("list", str(tmp_path), "-l", "--json").json["checkpoints"]
    assert item["save_blocked_seconds"] is None
    assert snapctl_inside("list", str(tmp_path), "-l").stdout.splitlines()[1].split()[-2:] == ["-", "-"]


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_terminal_gets_charts_that_fit(run: SaveDir, columns: int) -> None:
    code, text = on_terminal("list", run.url, "-l", columns=columns, env={"NO_COLOR": "1"})
    assert code == 0
    assert max(map(len, text.splitlines())) <= columns
    chart = text.split("\n\n")[-1].splitlines()
    assert chart[0].split() == ["BY", "STEP", "MIN", "MAX", "LAST", "10", "TO", "40"]
    assert chart[1].split() == ["val/auc", "0.5", "1", "1", "▁▅█"]
    assert chart[2].split() == ["val/loss", "1", "2", "1", "█▁"]
    assert [line.split()[0] for line in chart[3:]] == ["spacing", "blocked", "durable"]
    assert "SPACING" in text


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C"}])
def test_where_there_are_no_blocks_the_charts_are_ascii(run: SaveDir, env: dict[str, str]) -> None:
    code, text = on_terminal("list", run.url, "-l", "--no-progress", columns=120, env={"NO_COLOR": "1", **env})
    assert (code, text.isascii()) == (0, True)
    assert "_=#" in text


def test_a_narrow_terminal_and_a_short_list_have_no_charts(run: SaveDir) -> None:
    assert "BY STEP" not in on_terminal("list", run.url, "-l", columns=60)[1]
    assert "BY STEP" not in on_terminal("list", run.url, "-l", "--limit", "1", columns=120)[1]
    assert "BY STEP" not in on_terminal("list", run.url, columns=120)[1]


# -- sparklines ------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=200), st.integers(1, 80))
def test_a_sparkline_fits_and_shows_the_order_of_the_values(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    if len(values) <= width and any(value is not None for value in values):
        assert [character == " " for character in line] == [value is None for value in values]
        shown = [(value, BLOCKS.index(c)) for value, c in zip(values, line, strict=True) if value is not None]
        for value, height in shown:
            assert all(height <= other_height for other, other_height in shown if other > value)


def test_the_ends_of_the_ramp_are_the_least_and_the_greatest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 9, ASCII_RAMP) == "_=#"
    assert sparkline([3.0, 3.0], 9) == "▄▄"
    assert sparkline([-1e308, 1e308], 9) == "▁█"
    assert sparkline([0.0, 0.0, 4.0, 4.0], 2) == "▁█"
    assert sparkline([], 9) == ""
