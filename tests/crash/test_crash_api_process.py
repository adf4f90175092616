"""kill -9 at each failpoint of the API process: a job's corpus, an import, the registry, the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference

DEATHS = {
    "corpus": [(f"corpus.{step}=kill", "job") for step in FILE_STEPS],
    "import": [(f"import.{step}=kill", "import") for step in FILE_STEPS],
    "registry": [  # at acceptance, and somewhere on the way
        ("api.before_reply=kill", "job"),
        *((f"registry.{when}_commit=kill@{hit}", "job") for hit in (1, 5) for when in ("before", "after")),
    ],
}


@pytest.mark.timeout(1200)  # a slow machine starts each daemon in many seconds
@pytest.mark.parametrize("where", DEATHS)
def test_a_daemon_killed_at_each_failpoint_of_the_api_process(
    model: Path, reference: Reference, tmp_path: Path, where: str
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    for rule, act in DEATHS[where]:
        oracle.die_at(rule, act)
    oracle.settle()
