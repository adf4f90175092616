"""kill -9 of the whole daemon at each failpoint of the engine process: checkpoints, adapters, steps, streams, the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import STEPS, Oracle, Reference, curve_of, digest

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


def test_an_engine_that_is_killed_goes_on_from_the_last_checkpoint(model: Path, tmp_path: Path) -> None:
    """In the fifth of a job's six steps; after the restart the daemon ends it and serves as if nothing had happened.

    Its reference is an equal job that ended before on the same engine, and a text from then.
    """
    data = tmp_path / "data"
    oracle = Oracle(model, data, Reference({}, "", "", data, tmp_path, ()))
    with oracle.start(f"finetune.mid_step=kill@{STEPS + 5}") as daemon:
        daemon.wait_ready()
        text = oracle.stream(daemon)
        before = oracle.follow(daemon, oracle.submit(daemon, "before"))
        assert before[-1]["state"] == "succeeded", before[-1]
        assert daemon.call("GET", "/health")[1]["engine_restarts"] == 0
        events = oracle.follow(daemon, oracle.submit(daemon, "adapter"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert daemon.call("GET", "/health")[1]["engine_restarts"] == 1
        assert oracle.stream(daemon) == text
        assert daemon.stop() == 0
    assert curve_of(events) == curve_of(before)
    assert len(curve_of(events)) == STEPS
    first = data / "adapters" / "before" / "1"
    oracle.reference = Reference(curve_of(before), digest(first), text, data, first, ())
    oracle.check_dead()
    oracle.check_tidy()


@pytest.mark.slow
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
        assert health["status"] == "ready"
        assert health["engine_restarts"] == 3  # the stream, and steps 4 and 6 of the job
        assert daemon.stop() == 0
    assert curve_of(events) == reference.curve
    oracle.check_dead()
    oracle.check_tidy()
