"""kill -9 at each failpoint of the API process: a job's corpus, an import, the registry, the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference

DEATHS = {
    **{f"corpus.{step}=kill": "job" for step in FILE_STEPS},
    **{f"import.{step}=kill": "import" for step in FILE_STEPS},
    "api.before_reply=kill": "job",
    # at acceptance, and somewhere on the way
    **{f"registry.{when}_commit=kill@{hit}": "job" for hit in (1, 5) for when in ("before", "after")},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", DEATHS)
def test_a_daemon_killed_at_a_failpoint_of_the_api_process(
    model: Path, reference: Reference, tmp_path: Path, rule: str
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    oracle.die_at(rule, DEATHS[rule])
    oracle.settle()
