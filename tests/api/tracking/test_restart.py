"""kill -9 of the whole daemon while it trains: the curve goes on after the restart, each step once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.crash_oracle import STEPS, job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.event_files import read_curve
from tests.support.examples import on_days
from tests.support.model_folder import make_model_folder

pytest.importorskip("tensorboardX")


@on_days(5)
def test_a_killed_daemon_leaves_a_curve_that_goes_on(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    options = ("--tracker", "tensorboard")
    slowly = "finetune.mid_step=delay:3s"
    with DaemonProcess(model, tmp_path / "data", failpoints=slowly, options=options) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("poet"))
        folder = tmp_path / "data" / "tracking" / "tensorboard" / f"poet@1-{job['id']}"
        for _ in range(600):
            if before := read_curve(folder):
                break
            time.sleep(0.1)
        assert daemon.end() == -9
    with DaemonProcess(model, tmp_path / "data", options=options) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert daemon.stop() == 0
    curve = read_curve(folder)
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))
    assert 0 < len(before) < STEPS
    assert before == curve[: len(before)]
    told = {event["metrics"]["step"]: event["metrics"]["loss"] for event in events if event["metrics"]}
    assert dict(curve) == pytest.approx(told)
