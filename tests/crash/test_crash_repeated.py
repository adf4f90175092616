"""One data folder through several deaths by kill -9, at failpoints of the API process and of the engine process: each
start finds what more than one of them left."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference
from tests.support.examples import in_turns

ONCE = [
    ("registry.before_commit=kill@1", "job"),
    ("registry.after_commit=kill@1", "job"),
    ("registry.before_commit=kill@5", "job"),
    ("registry.after_commit=kill@5", "job"),
    ("api.before_reply=kill", "job"),
    ("generate.mid_stream=kill-group@3", "stream"),
    ("finetune.mid_step=kill-group@3", "job"),
    ("adapter.publish=kill-group", "job"),
    ("remove.before_rename=kill-group", "end"),
    ("remove.after_rename=kill-group", "end"),
    ("shutdown=kill-group", "stop"),
]
"""Rules of failpoints, and what is done until they kill."""
DEATHS = {
    f"{step} {half}": [
        (f"corpus.{step}=kill", "job"),
        (f"checkpoint.{step}=kill-group@2", "job"),
        (f"import.{step}=kill", "import"),
        (f"adapter.{step}=kill-group", "job"),
        *ONCE[number :: len(FILE_STEPS)],
    ][half::2]
    for number, step in enumerate(FILE_STEPS)
    for half in (0, 1)
}


@pytest.mark.parametrize("deaths", in_turns(DEATHS, days=len(DEATHS)))
def test_a_daemon_killed_again_and_again(
    model: Path, reference: Reference, tmp_path: Path, deaths: list[tuple[str, str]]
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    for rule, act in deaths:
        oracle.die_at(rule, act)
    oracle.settle()
