"""The worked examples of the documentation, tried as they stand, as far as this machine can."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml

from snapctl.pruning.policy import make_policy, read_policy
from tests.support.repository import DOCS, require_repository
from tests.support.saves import LocalSaveDir, fill, steps_that_look_complete

require_repository()
AUTOMATION = (DOCS / "prune-automation.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> dict[str, str]:
    """A machine with two runs, a policy and a snapctl where the examples have them; their paths, by the example's."""
    for name in ("alpha", "beta"):
        fill(LocalSaveDir(tmp_path / "runs" / name), *range(0, 12000, 1000))
    policy = tmp_path / "prune.toml"
    policy.write_text('keep-last = 3\nkeep-every = 10000\nmax-delete = "90%"\n')
    launcher = tmp_path / "bin" / "snapctl"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m snapctl "$@"\n')
    launcher.chmod(0o755)
    return {
        "/usr/local/bin/snapctl": str(launcher),
        "/etc/snapctl/prune.toml": str(policy),
        "/runs/": f"{tmp_path}/runs/",
        "/var/log/": f"{tmp_path}/",
    }


def here(text: str, machine: dict[str, str]) -> str:
    for example, real in machine.items():
        text = text.replace(example, real)
    return text


def steps_of(tmp_path: pathlib.Path, name: str) -> list[int]:
    return steps_that_look_complete(LocalSaveDir(tmp_path / "runs" / name))


KEPT = [0, 9000, 10000, 11000]


def test_the_policies_are_policies(tmp_path: pathlib.Path) -> None:
    found = [*blocks(AUTOMATION, "toml"), *blocks((DOCS / "prune.md").read_text(), "toml")]
    config_map = next(iter(yaml.safe_load_all(blocks(AUTOMATION, "yaml")[0])))
    for text in [*found, config_map["data"]["prune.toml"]]:
        path = tmp_path / "prune.toml"
        path.write_text(text)
        assert make_policy(read_policy(str(path))).has_rules


def test_the_crontab_line_prunes_logs_and_tells_of_a_failure(tmp_path: pathlib.Path, machine: dict[str, str]) -> None:
    (text,) = blocks(AUTOMATION, "crontab")
    line = text.splitlines()[-1]
    assert "%" not in line, "it would end the command"
    command = here(line.split(maxsplit=5)[5], machine)
    bare = {"PATH": "/usr/bin:/bin", "HOME": "/", "SHELL": "/bin/sh", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(["/bin/sh", "-c", command], env=bare, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert steps_of(tmp_path, "alpha") == steps_of(tmp_path, "beta") == KEPT
    assert (tmp_path / "snapctl-prune.jsonl").read_text().count('"save_dir"') == 2
    (tmp_path / "prune.toml").write_text("keep-lst = 3\n")
    done = subprocess.run(["/bin/sh", "-c", command], env=bare, capture_output=True, text=True)
    assert done.stdout == "snapctl prune ended with 2\n"
    assert '"exit_code": 2' in done.stderr


def test_the_units_are_valid_and_start_what_prunes(tmp_path: pathlib.Path, machine: dict[str, str]) -> None:
    service, timer = blocks(AUTOMATION, "ini")
    (command,) = re.findall(r"^ExecStart=(.*)$", service, re.MULTILINE)
    done = subprocess.run(shlex.split(here(command, machine)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path, "alpha") == KEPT
    if shutil.which("systemd-analyze") is None:
        return
    for name, text in (("snapctl-prune.service", service), ("snapctl-prune.timer", timer)):
        (tmp_path / name).write_text(here(text, machine).replace("User=trainer\n", ""))
    units = [str(tmp_path / name) for name in ("snapctl-prune.service", "snapctl-prune.timer")]
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    complaints = [line for line in verified.stderr.splitlines() if "snapctl-prune" in line]
    assert complaints == []
    (calendar,) = re.findall(r"^OnCalendar=(.*)$", timer, re.MULTILINE)
    assert subprocess.run(["systemd-analyze", "calendar", calendar], capture_output=True).returncode == 0


def test_the_cronjob_runs_what_prunes_and_gives_up_only_where_trying_again_cannot_help(
    tmp_path: pathlib.Path, machine: dict[str, str]
) -> None:
    (text,) = [block for block in blocks(AUTOMATION, "yaml") if "kind: CronJob" in block]
    config, cron_job = yaml.safe_load_all(text)
    job = cron_job["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert pod["restartPolicy"] == "Never", "a pod failure policy asks for it"

    machine = {**machine, "gs://my-bucket/alpha": f"{tmp_path}/runs/alpha"}

    def run() -> int:
        arguments = [here(argument, machine) for argument in container["args"]]
        return subprocess.run([machine["/usr/local/bin/snapctl"], *arguments], capture_output=True).returncode

    assert run() == 0
    assert steps_of(tmp_path, "alpha") == KEPT
    (tmp_path / "prune.toml").write_text('keep-step = 1\nmax-delete = "0%"\n')
    assert run() in rule["onExitCodes"]["values"]


def test_the_workflow_plans_and_applies(tmp_path: pathlib.Path, machine: dict[str, str]) -> None:
    (text,) = [block for block in blocks(AUTOMATION, "yaml") if "jobs:" in block]
    workflow: dict[str, Any] = yaml.safe_load(text)
    env = {
        **os.environ,
        "PATH": f"{pathlib.Path(machine['/usr/local/bin/snapctl']).parent}:{os.environ['PATH']}",
        "SAVE_DIR": f"{tmp_path}/runs/alpha",
        "GITHUB_STEP_SUMMARY": f"{tmp_path}/summary",
    }

    def run(job: str) -> list[int]:
        codes = []
        for step in workflow["jobs"][job]["steps"]:
            if "run" in step and not step["run"].startswith("pip "):
                options = ["-eo", "pipefail"] if step.get("shell") == "bash" else ["-e"]
                command = ["bash", *options, "-c", step["run"]]
                codes.append(subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode)
        return codes

    (tmp_path / "prune.toml").write_text("keep-last = 6\n")
    assert run("plan") == [0]
    assert "would delete 6 checkpoints" in (tmp_path / "summary").read_text()
    assert len(steps_of(tmp_path, "alpha")) == 12
    assert run("apply") == [0]
    assert len(steps_of(tmp_path, "alpha")) == 6
    (tmp_path / "prune.toml").write_text("keep-step = 1\n")
    assert run("plan") == [6], "a guard fails the first job"
    assert workflow["jobs"]["apply"]["needs"] == "plan"


def test_every_option_is_in_the_documentation() -> None:
    done = subprocess.run([sys.executable, "-m", "snapctl", "prune", "--help"], capture_output=True, text=True)
    page = (DOCS / "prune.md").read_text()
    for option in set(re.findall(r"--[a-z][a-z-]+", done.stdout)) - {"--help"}:
        stem = option.removeprefix("--keep")
        assert option in page or f"`{stem}`" in page, option
