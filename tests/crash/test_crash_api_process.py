"""kill -9 at each failpoint of the API process: a job's corpus, an import, the registry, the answer."""

from __future__ import annotations

from pathlib import Path

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference


def test_a_daemon_killed_at_each_failpoint_of_the_api_process(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    for step in FILE_STEPS:
        oracle.die_at(f"corpus.{step}=kill", "job")
        oracle.die_at(f"import.{step}=kill", "import")
    oracle.die_at("api.before_reply=kill", "job")
    for hit in (1, 5):  # acceptance, and somewhere on the way
        oracle.die_at(f"registry.before_commit=kill@{hit}", "job")
        oracle.die_at(f"registry.after_commit=kill@{hit}", "job")
    oracle.settle()
