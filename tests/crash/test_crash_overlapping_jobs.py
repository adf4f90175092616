"""kill -9 while a job waits for an earlier one of its adapter: after the restart it continues from what that one
publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess, Died
from tests.support.examples import in_turns

DEATHS = {
    "before the earlier job's end is committed": "adapter.publish=kill-group",
    # Both jobs, a start, six steps, two checkpoints, the end.
    "after it": "registry.after_commit=kill-group@12",
}


@pytest.mark.parametrize("rule", in_turns(DEATHS, days=2))
def test_a_waiting_job_outlives_the_daemon(model: Path, tmp_path: Path, rule: str) -> None:
    data = tmp_path / "data"
    slowly = "finetune.mid_step=delay:0.5s"  # the second job comes before the first one ends
    with DaemonProcess(model, data, failpoints=f"{slowly};{rule}") as daemon:
        daemon.wait_ready()
        request = job_request("poet")
        _, first = daemon.call("POST", "/finetune", request)
        del request["lora"]
        _, second = daemon.call("POST", "/finetune", request | {"continue_from": "poet"})
        assert first["id"] in second["waiting"]
        with pytest.raises(Died):
            for _ in daemon.events("GET", f"/finetune/{second['id']}/events"):
                pass
        assert daemon.wait() == -9
    with DaemonProcess(model, data) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{second['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert "continues from poet@1" in [event["message"] for event in events]
        _, done = daemon.call("GET", f"/finetune/{second['id']}")
        assert (done["result"], done["continue_from"], done["waiting"]) == ("poet@2", "poet@1", None)
        assert daemon.stop() == 0
