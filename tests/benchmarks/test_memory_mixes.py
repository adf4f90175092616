"""The benchmark's mixes are within the base's sizes; without a GPU it predicts what fake tensors take."""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import pytest

from benchmarks.memory.mixes import FULL, measure, random_mix
from benchmarks.memory.report import merged, summary
from tests.support.examples import on_days

TARGETS = ("q_proj", "v_proj", "down_proj")


def test_mixes_are_within_the_sizes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        mix = random_mix(rng, FULL, TARGETS)
        assert 1 <= len(mix.jobs) <= 4
        assert sum(mix.prompts) <= FULL.step
        assert len(mix.ranks) == len(mix.prompts)
        for job in mix.jobs:
            assert 0 < job.longest <= job.tokens <= FULL.micro_batch
            assert 0 < job.target_tokens < job.tokens


def test_the_summary_tells_the_worst() -> None:
    rows = [
        {"error": (-1) ** i * i / 1000, "error_of_mix": i / 500, "jobs": [[16, 1, 512, i % 2]], "waiting": 1}
        for i in range(100)
    ]
    found = summary(rows, 3)
    assert (found["mixes"], found["oom"], found["error.p99"], found["error.max"]) == (100, 3, 0.099, 0.099)
    assert (found["error.p50"], found["jobs"], found["jobs_recomputed"], found["jobs_waiting"]) == (0.05, 100, 50, 100)


def test_results_of_several_processes_are_one() -> None:
    rows = [{"error": i / 100, "error_of_mix": i / 50, "jobs": [], "waiting": 0} for i in range(4)]
    parts: list[dict[str, Any]] = [
        {"run": {"commit": "x"}, "summary": {"oom": 1}, "mixes": rows[:1]},
        {"run": {"commit": "x"}},
    ]
    parts[1] |= {"summary": {"oom": 2}, "mixes": rows[1:]}
    found = merged(parts)
    assert found["mixes"] == rows and found["summary"]["oom"] == 3 and found["summary"]["error.max"] == 0.03
    with pytest.raises(SystemExit, match="one commit"):
        merged([parts[0], {"run": {"commit": "y"}}])


@on_days(3)
def test_a_run_without_a_gpu() -> None:
    found = measure(Namespace(tiny=True, mixes=1, seconds=600.0, seed=0, own_layers=True, commit="x"))
    assert found["summary"]["oom"] == 0
    assert found["summary"]["error_of_mix.max"] < 0.03
    assert len(found["mixes"]) == 1
