"""kill -9 of the whole daemon at each failpoint of the engine process: checkpoints, adapters, steps, streams, the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference, curve_of

OTHERS = [
    ("adapter.publish=kill-group", "job"),
    ("finetune.mid_step=kill-group@3", "job"),
    ("remove.before_rename=kill-group", "job"),
    ("remove.after_rename=kill-group", "job"),
    ("generate.mid_stream=kill-group@3", "stream"),
    ("shutdown=kill-group", "stop"),
]
DEATHS = {
    "checkpoint": [(f"checkpoint.{step}=kill-group@2", "job") for step in FILE_STEPS],
    "adapter": [(f"adapter.{step}=kill-group", "job") for step in FILE_STEPS],
    "others": OTHERS,
}


@pytest.mark.timeout(1200)  # a slow machine starts each daemon in many seconds
@pytest.mark.parametrize("where", DEATHS)
def test_a_daemon_killed_at_each_failpoint_of_the_engine_process(
    model: Path, reference: Reference, tmp_path: Path, where: str
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    for rule, act in DEATHS[where]:
        oracle.die_at(rule, act)
    oracle.settle()


def test_an_engine_that_dies_is_started_again(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Its request gets a clear error; its job goes on from the last checkpoint; the API process never left."""
    oracle = Oracle(model, tmp_path / "data", reference)
    with oracle.start("generate.mid_stream=kill@4;finetune.mid_step=kill@4") as daemon:
        daemon.wait_ready()
        *chunks, last = daemon.events("POST", "/generate", {"prompt": "The", "max_tokens": 64, "stream": True})
        assert chunks
        assert last["error"]["code"] in ("engine_crashed", "engine_unavailable")
        events = oracle.follow(daemon, oracle.submit(daemon, "adapter"))
        assert events[-1]["state"] == "succeeded", events[-1]
        _, health = daemon.call("GET", "/health")
        assert health["status"] == "ok"
        assert health["engine_restarts"] == 3  # the stream, and steps 4 and 6 of the job
        assert daemon.stop() == 0
    assert curve_of(events) == reference.curve
    oracle.check_dead()
    oracle.check_tidy()
