"""kill -9 of the engine process alone: the API process starts it again."""

from __future__ import annotations

from tests.support.crash_oracle import STEPS, Restarted, curve_of


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
