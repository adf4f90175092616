"""kill -9 of the whole daemon at each failpoint of the engine process: checkpoints, adapters, steps, streams, the
end."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import STEPS, Oracle, Reference, Restarted, curve_of

DEATHS = {
    **{f"checkpoint.{step}=kill-group@2": "job" for step in FILE_STEPS},
    **{f"adapter.{step}=kill-group": "job" for step in FILE_STEPS},
    "adapter.publish=kill-group": "job",
    "finetune.mid_step=kill-group@3": "job",
    "remove.before_rename=kill-group": "end",
    "remove.after_rename=kill-group": "end",
    "generate.mid_stream=kill-group@3": "stream",
    "shutdown=kill-group": "stop",
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", DEATHS)
def test_a_daemon_killed_at_a_failpoint_of_the_engine_process(
    model: Path, reference: Reference, tmp_path: Path, rule: str
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    oracle.die_at(rule, DEATHS[rule])
    oracle.settle()


def test_an_engine_that_is_killed_goes_on_from_the_last_checkpoint(restarted: Restarted) -> None:
    """The daemon starts it again, ends the job and serves as if nothing had happened."""
    oracle, reference = restarted.oracle, restarted.oracle.reference
    assert restarted.restarts == [0, 1]
    assert restarted.events[-1]["state"] == "succeeded", restarted.events[-1]
    assert curve_of(restarted.events) == reference.curve
    assert len(reference.curve) == STEPS
    assert restarted.text == reference.text
    oracle.check_dead()
    oracle.check_tidy()


@pytest.mark.slow
def test_an_engine_that_dies_is_started_again(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Its request gets a clear error; its job goes on from the last checkpoint; the API process never left."""
    oracle = Oracle(model, tmp_path / "data", reference)
    # Before it dies, a disk has a second to write the checkpoint of two steps ago.
    with oracle.start("generate.mid_stream=kill@4;finetune.mid_step=delay:1s@4;finetune.mid_step=kill@4") as daemon:
        daemon.wait_ready()
        *chunks, last = daemon.events("POST", "/generate", {"prompt": "The", "max_tokens": 64, "stream": True})
        assert chunks
        assert last["error"]["code"] == "engine_unavailable"
        events = oracle.follow(daemon, oracle.submit(daemon, "adapter"))
        assert events[-1]["state"] == "succeeded", events[-1]
        _, health = daemon.call("GET", "/health")
        assert health["status"] == "ready"
        # The stream, and steps 4 and 6 of the job; more if the disk was slower.
        assert health["engine_restarts"] >= 3
        assert daemon.stop() == 0
    assert curve_of(events) == reference.curve
    oracle.check_dead()
    oracle.check_tidy()
