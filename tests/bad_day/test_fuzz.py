"""Mutated manifests, blobs, records and markers: some hundreds here, 100,000 with ``-m soak``."""

from __future__ import annotations

import os
import pathlib
from collections import Counter

import pytest

from tests.support.fuzzed import Fuzzed, fuzz_commands, fuzz_parser
from tests.support.isolated import Isolated, run_isolated
from tests.support.results import record_facts, record_row

MUTATIONS = int(os.environ.get("SNAPCTL_SOAK_MUTATIONS", "100000"))
SEED = int(os.environ.get("SNAPCTL_SOAK_SEED", "0"))
MEMORY = 1 << 30
"""Address space beyond what is loaded: the snapshots have some kilobytes."""


def checked(done: Isolated) -> Fuzzed:
    assert not done.error, done.error
    found: Fuzzed = done.value
    assert not found.complaints, f"{len(found.complaints)}:\n" + "\n".join(found.complaints[:20])
    return found


def test_hundreds_of_mutations_of_manifests_are_parsed_or_refused() -> None:
    found = checked(run_isolated(fuzz_parser, 1, 600, memory_bytes=MEMORY, seconds=100))
    assert found.outcomes["parsed"] > 30 and found.outcomes["invalid"] > 30 and found.outcomes["unparsable"] > 30


def test_hundreds_of_mutations_come_to_an_ordinary_end(tmp_path: pathlib.Path) -> None:
    found = checked(run_isolated(fuzz_commands, 1, 400, str(tmp_path), memory_bytes=MEMORY, seconds=100))
    assert {"show 0", "show 1", "verify 0", "verify 1", "restore-weight 0"} <= found.outcomes.keys()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_a_hundred_thousand_mutations(tmp_path: pathlib.Path) -> None:
    parsed, ran, peak = Fuzzed(), Fuzzed(), 0
    for part in range(20):
        done = run_isolated(fuzz_parser, SEED + 100 + part, MUTATIONS // 25, memory_bytes=MEMORY, seconds=900)
        _add(parsed, checked(done))
        peak = max(peak, done.grown_bytes)
        directory = tmp_path / f"part{part}"
        arguments = (SEED + 200 + part, MUTATIONS // 100, str(directory))
        done = run_isolated(fuzz_commands, *arguments, memory_bytes=MEMORY, seconds=900)
        _add(ran, checked(done))
        peak = max(peak, done.grown_bytes)
    print(f"\nparser: {parsed}\ncommands: {ran}\n{peak / 2**20:.0f} MiB")
    by_command: dict[str, Counter[int]] = {}
    for outcome, count in ran.outcomes.items():
        command, _, code = outcome.rpartition(" ")
        by_command.setdefault(command, Counter())[int(code)] += count
    told = ", ".join(f"{outcome}: {count:,}" for outcome, count in parsed.outcomes.most_common())
    record_row("fuzzing", "outcomes", what="the manifest parser", mutations=parsed.mutations, came_to=told)
    for command, codes in sorted(by_command.items()):
        told = ", ".join(f"exit {code}: {count:,}" for code, count in sorted(codes.items()))
        record_row("fuzzing", "outcomes", what=f"`{command}`", mutations=codes.total(), came_to=told)
    record_facts(
        "fuzzing",
        mutations=parsed.mutations + ran.mutations,
        longest_ms=round(max(parsed.longest_seconds, ran.longest_seconds) * 1000),
        peak_mib=round(peak / 2**20),
    )


def _add(total: Fuzzed, part: Fuzzed) -> None:
    total.mutations += part.mutations
    total.outcomes += part.outcomes
    total.longest_seconds = max(total.longest_seconds, part.longest_seconds)
