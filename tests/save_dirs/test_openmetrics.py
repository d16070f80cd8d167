"""`list --format openmetrics`, read by Prometheus' own parsers, and the alert rules of the documentation."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from snapctl.checkpoints import Checkpoint
from snapctl.save_dirs import openmetrics
from snapctl.save_dirs.openmetrics import Metric, format_openmetrics
from snapctl.save_dirs.summaries import PartitionSummary, SaveDirSummary, Unreadable
from snapctl.save_record import BlobSum, RankTimings, RestoreTimings, SaveRecord, format_save_record
from tests.support.command import Finished, unprivileged
from tests.support.places import SaveDir
from tests.support.repository import DOCS, require_repository
from tests.support.snapshots import write_checkpoint

Snapctl = Callable[..., Finished]
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def page(name: str) -> str:
    """A file of the documentation; where only the tests were copied the test is skipped."""
    require_repository()
    return (DOCS / name).read_text()


METRICS = {value.name: value for value in vars(openmetrics).values() if isinstance(value, Metric)}
NOW = 1_796_055_873.25


def parse(text: str) -> tuple[Samples, dict[str, Any]]:
    """What both parsers of prometheus_client read: that of OpenMetrics, and the older one, which is what a node
    exporter's textfile collector speaks."""
    strict = pytest.importorskip("prometheus_client.openmetrics.parser")
    old = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in strict.text_string_to_metric_families(text)}
    samples: Samples = {}
    for family in families.values():
        for sample in family.samples:
            assert sample.timestamp is None, "the textfile collector refuses timestamps"
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    again = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in old.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert again.keys() == {(name, *labels) for name, found in samples.items() for labels in found}
    return samples, families


def write_run(place: SaveDir, run: str = "run") -> None:
    for step in (10, 20, 30):
        write_checkpoint(lambda path, data=b"": place.write(f"{run}/{path}", data), step)
    place.write(f"{run}/40/replicated/w", b"12345")
    place.write(f"{run}/20/PINNED")
    place.write(f"{run}/20/evaled_by/val_DONE")
    place.write(f"{run}/10/evaled_by/val_DONE")
    manifest = place.read(f"{run}/30/.snapshot_metadata")
    import google_crc32c

    record = SaveRecord(
        time.time() - 100,
        2,
        BlobSum(len(manifest), int(google_crc32c.value(manifest))),
        (RankTimings(0, 0.25, 4.0, 3000), RankTimings(1, 0.5, 2.0, 5000)),
        restored=RestoreTimings(1.75e9, 20, 4, 12.5, 7000),
    )
    place.write(f"{run}/30/.snapctl/save.json", format_save_record(record))


@pytest.mark.parametrize("recursive", [False, True])
def test_the_figures_of_a_run(recursive: bool, save_dir: SaveDir, snapctl_inside: Snapctl) -> None:
    write_run(save_dir)
    where = ["--recursive", save_dir.url] if recursive else [f"{save_dir.url}/run"]
    done = snapctl_inside("list", *where, "--format", "openmetrics")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.endswith("\n# EOF\n")
    samples, families = parse(done.stdout)
    of_run = ("save_dir", f"{save_dir.url}/run")
    plain = {name: found[(of_run,)] for name, found in samples.items() if (of_run,) in found}
    assert plain["snapctl_newest_checkpoint_step"] == 30
    assert 98 <= plain["snapctl_newest_checkpoint_age_seconds"] < 700
    assert abs(plain["snapctl_newest_checkpoint_timestamp_seconds"] - time.time() + 100) < 600
    assert plain["snapctl_last_save_blocked_seconds"] == 0.5
    assert plain["snapctl_last_save_durable_seconds"] == 4.0
    assert plain["snapctl_last_save_size_bytes"] == 8000
    assert plain["snapctl_last_save_bytes_per_second"] == 2000
    assert plain["snapctl_last_save_ranks"] == 2
    restored = {name: value for name, value in plain.items() if name.startswith("snapctl_last_restore_")}
    assert restored == {
        "snapctl_last_restore_duration_seconds": 12.5,
        "snapctl_last_restore_timestamp_seconds": 1.75e9,
        "snapctl_last_restore_step": 20,
        "snapctl_last_restore_size_bytes": 7000,
        "snapctl_last_restore_ranks": 4,
    }
    assert (plain["snapctl_pinned_checkpoints"], plain["snapctl_problems"]) == (1, 0)
    states = {labels[1][1]: value for labels, value in samples["snapctl_checkpoints"].items()}
    assert states == {"complete": 3, "incomplete": 1, "unreadable": 0}
    sizes = {labels[1][1]: value for labels, value in samples["snapctl_checkpoints_size_bytes"].items()}
    assert (sizes["incomplete"], sizes["complete"] > 100) == (5, True)
    val = (("partition", "val"), of_run)
    assert samples["snapctl_evaluated_checkpoints"][val] == 2
    assert samples["snapctl_newest_evaluated_step"][val] == 20
    assert samples["snapctl_save_dirs"] == {(("root", where[-1]),): 1}
    assert {family.type for family in families.values()} == {"gauge"}


def test_every_metric_is_named_as_openmetrics_wants_it() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"snapctl_[a-z_]+", metric.name)
        assert metric.name.endswith(f"_{metric.unit}") or not metric.unit
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created"))
        assert metric.help.endswith(".")


def summary(path: str, **changes: Any) -> SaveDirSummary:
    zero: dict[str, Any] = dict.fromkeys(("complete", "incomplete", "unreadable"), 0)
    given = {"path": path, "now": NOW, "counts": zero, "size_bytes": zero, "files": 0, "pinned": 0, "newest": None}
    return SaveDirSummary(**{**given, **changes})


def test_what_nobody_knows_is_left_out() -> None:
    newest = Checkpoint(3, "/r/3", "complete")
    text = format_openmetrics([summary("/r", newest=newest), summary("/q")], root="/", now=NOW, took_seconds=1.5)
    samples, _ = parse(text)
    assert samples["snapctl_newest_checkpoint_step"] == {(("save_dir", "/r"),): 3}
    assert "snapctl_newest_checkpoint_age_seconds" not in samples
    assert not [name for name in samples if name.startswith(("snapctl_last_save_", "snapctl_last_restore_"))]
    assert samples["snapctl_run_timestamp_seconds"] == {(("root", "/"),): NOW}


def test_any_name_survives_as_a_label() -> None:
    names = ['/a"b', "/a\\nb", "/a\nb", "/ä 🙂", "/\\", '/{x="y"} 1']
    marks = (PartitionSummary('val "1"\\', 1, 2),)
    text = format_openmetrics([summary(name, evaluations=marks) for name in names], root="/", now=NOW, took_seconds=0)
    samples, _ = parse(text)
    assert [dict(labels)["save_dir"] for labels in samples["snapctl_evaluated_checkpoints"]] == names
    assert {dict(labels)["partition"] for labels in samples["snapctl_evaluated_checkpoints"]} == {'val "1"\\'}


def test_a_name_that_is_no_text_is_shown_by_its_bytes() -> None:
    text = format_openmetrics([summary("/a\udcff")], root="/", now=NOW, took_seconds=0)
    samples, _ = parse(text)
    assert (("save_dir", "/a\\xff"),) in samples["snapctl_problems"]


def test_numbers_that_no_double_holds_do_not_spoil_the_text() -> None:
    ranks = (RankTimings(0, float("inf"), float("nan"), 10**30),)
    record = SaveRecord(NOW, 1, BlobSum(0, 0), ranks)
    newest = Checkpoint(10**400, "/r", "complete", created_at=NOW - 5, record=record)
    samples, _ = parse(format_openmetrics([summary("/r", newest=newest)], root="/", now=NOW, took_seconds=0))
    assert samples["snapctl_newest_checkpoint_step"][(("save_dir", "/r"),)] == float("inf")
    assert samples["snapctl_newest_checkpoint_age_seconds"][(("save_dir", "/r"),)] == 5


def test_no_save_directory_is_a_text_too(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    done = snapctl_inside("list", "--recursive", str(tmp_path), "--format", "openmetrics")
    assert done.code == 0
    samples, _ = parse(done.stdout)
    assert samples["snapctl_save_dirs"] == {(("root", str(tmp_path)),): 0}


def test_what_may_not_be_entered_counts_and_ends_with_5(tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    write_run(SaveDir("", root=tmp_path))
    (tmp_path / "secret").mkdir(mode=0)
    done = snapctl_inside("list", "--recursive", str(tmp_path), "--format", "openmetrics", before=unprivileged())
    assert done.code == 5
    samples, _ = parse(done.stdout)
    assert samples["snapctl_unreadable_dirs"] == {(("root", str(tmp_path)),): 1}
    assert "secret" in done.stderr
    text = format_openmetrics([Unreadable("/x", "no")], root="/", now=NOW, took_seconds=0)
    assert parse(text)[0]["snapctl_unreadable_dirs"] == {(("root", "/"),): 1}


@pytest.mark.parametrize("other", ["--json", "--quiet", "--print0", "--long"])
def test_other_forms_do_not_go_with_it(other: str, tmp_path: pathlib.Path, snapctl_inside: Snapctl) -> None:
    done = snapctl_inside("list", str(tmp_path), "--format", "openmetrics", other)
    assert (done.code, done.stdout) == (2, "")


def test_the_line_for_cron_publishes_all_or_nothing(tmp_path: pathlib.Path) -> None:
    (line,) = re.findall(r"^\*/5 \* \* \* \* (.*)$", page("monitoring.md"), re.MULTILINE)
    write_run(SaveDir("", root=tmp_path / "runs"))
    target = tmp_path / "snapctl.prom"
    line = line.replace("/usr/local/bin/snapctl", f"{sys.executable} -m snapctl").replace("\\%", "%")
    line = line.replace("/var/lib/node_exporter", str(tmp_path)).replace("/runs", str(tmp_path / "runs"), 1)
    subprocess.run(line, shell=True, check=True, executable="/bin/sh")
    assert parse(target.read_text())[0]["snapctl_save_dirs"] == {(("root", str(tmp_path / "runs")),): 1}
    before = target.read_text()
    assert subprocess.run(line.replace("/runs", "/nowhere", 1), shell=True, capture_output=True).returncode == 3
    assert target.read_text() == before


# -- alert rules -----------------------------------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(page("snapctl-alerts.yml"))
    assert set(document) == {"groups"}
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_alert_rules_have_the_form_that_prometheus_wants() -> None:
    document = yaml.safe_load(page("snapctl-alerts.yml"))
    for group in document["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 6
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["expr"].count("{") == rule["expr"].count("}")


def test_alert_rules_are_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for rule in rules():
        parser.parse(rule["expr"])
    with pytest.raises(ValueError, match=r"\w"):
        parser.parse("sum(snapctl_checkpoints")


def test_alert_rules_ask_only_for_metrics_and_labels_that_there_are() -> None:
    for rule in rules():
        named = set(re.findall(r"\bsnapctl_[a-z_]+", rule["expr"]))
        assert named or "node_textfile" in rule["expr"]
        assert named <= METRICS.keys(), rule["alert"]
        used = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        assert set(used) <= {"save_dir", "partition", "root", "instance", "file"}
        for metric, labels in re.findall(r"(snapctl_[a-z_]+)\{([^}]*)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)\s*[=!~]+", labels)) <= {"save_dir", "partition", "state"}, metric


def test_the_documentation_names_every_metric_and_no_other() -> None:
    text = page("monitoring.md")
    assert set(re.findall(r"\bsnapctl_[a-z_]+", text)) == METRICS.keys()
