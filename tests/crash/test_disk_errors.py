"""A disk that is full, or fails, at each step: the daemon lives, says so, loses nothing, and goes on when it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.state.failpoints import FILE_STEPS
from tests.support.crash_oracle import Oracle, Reference, job_request

ANSWERS = [(507, "storage_full"), (500, "storage_failed")]


def rules(point: str) -> str:
    """Each step fails with ENOSPC at its first hit and with EIO at its second: two failures a step, then none."""
    return ";".join(f"{point}.{step}=ENOSPC@1;{point}.{step}=EIO@2" for step in FILE_STEPS)


@pytest.mark.slow
def test_every_failure_is_said_and_the_next_good_request_succeeds(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    oracle = Oracle(model, tmp_path / "data", reference)
    armed = [  # the first commit of all makes the tables
        rules("corpus"),
        rules("import"),
        "adapter.temp_write=ENOSPC@1;adapter.before_rename=EIO@1",
        "registry.before_commit=ENOSPC@2;registry.before_commit=EIO@3",
    ]
    with oracle.start(";".join(armed)) as daemon:
        daemon.wait_ready()

        for expected in ANSWERS * (len(FILE_STEPS) + 1):  # the corpus's steps, then the commit
            status, body = daemon.call("POST", "/finetune", job_request("refused"))
            assert (status, body["error"]["code"]) == expected
        assert daemon.call("GET", "/finetune")[1]["data"] == []

        for expected in ANSWERS * len(FILE_STEPS):
            status, body = oracle.bring_in(daemon)
            assert (status, body["error"]["code"]) == expected

        assert oracle.bring_in(daemon)[0] in (200, 201)
        events = oracle.follow(daemon, oracle.submit(daemon, "adapter"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert [event["message"] for event in events if event["level"] == "warning"] == [
            "waiting for space: the disk is full"
        ], "the adapter could not be written twice, and then could"
        assert oracle.stream(daemon) == reference.text
        _, health = daemon.call("GET", "/health")
        assert (health["status"], health["engine_restarts"]) == ("ready", 0)
        assert daemon.stop() == 0
    oracle.check_dead()
    oracle.check_tidy()
