"""One data folder through several deaths by kill -9: each start finds what more than one of them left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash_oracle import Oracle, Reference
from tests.support.examples import sample

DEATHS = {
    "both": [("registry.after_commit=kill@5", "job"), ("adapter.publish=kill-group", "job")],
    "api process": [
        ("corpus.after_rename=kill", "job"),
        ("import.after_rename=kill", "import"),
        ("registry.before_commit=kill@5", "job"),
    ],
    "engine process": [
        ("checkpoint.after_rename=kill-group@2", "job"),
        ("adapter.after_rename=kill-group", "job"),
        ("shutdown=kill-group", "stop"),
    ],
}
"""Rules of failpoints, and what is done until they kill."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deaths", sample(DEATHS, "both"))
def test_a_daemon_killed_again_and_again(
    model: Path, reference: Reference, tmp_path: Path, deaths: list[tuple[str, str]]
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    for rule, act in deaths:
        oracle.die_at(rule, act)
    oracle.settle()
