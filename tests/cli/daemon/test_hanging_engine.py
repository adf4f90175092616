"""An engine that hangs is ended and started again; its request gets an error, its job goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import in_turns


def engine_pid(daemon: DaemonProcess) -> int:
    """Of the last engine."""
    daemon.logged("engine starts")
    return int([one for one in daemon.entries() if one["message"] == "engine starts"][-1]["engine_pid"])


def check_restarted(daemon: DaemonProcess, why: str, restarts: int) -> None:
    status, answer = daemon.call("POST", "/generate", {"prompt": "Today we", "max_tokens": 4})
    while status == 503:
        status, answer = daemon.call("POST", "/generate", {"prompt": "Today we", "max_tokens": 4})
    assert status == 200, answer
    assert daemon.call("GET", "/health")[1]["engine_restarts"] == restarts
    assert any(why in entry["message"] for entry in daemon.entries())


@pytest.mark.parametrize("when", in_turns(["starts", "works", "makes no progress"]))
def test_one_that_hangs_is_started_again(model: Path, tmp_path: Path, when: str) -> None:
    """Its process is stopped; or it runs, as with a device that never ends a step."""
    options = ("--log-format", "json", "--engine-timeout", "12")
    hangs = "generate.mid_stream=delay:600s@9"  # the ninth step of an engine: no check generates so much
    with DaemonProcess(model, tmp_path / "data", options=options, failpoints=hangs) as daemon:
        if when == "starts":
            os.kill(engine_pid(daemon), signal.SIGSTOP)
        daemon.wait_ready()
        daemon.logged("engine ready")
        if when == "starts":
            check_restarted(daemon, "while it started: its process did not run for 6 s", 1)
        elif when == "works":
            status, job = daemon.call("POST", "/finetune", job_request("adapter"))
            assert status == 202, job
            events = daemon.events("GET", f"/finetune/{job['id']}/events")
            next(one for one in events if one["type"] == "metrics")
            os.kill(engine_pid(daemon), signal.SIGSTOP)
            status, answer = daemon.call("POST", "/generate", {"prompt": "Today we"})
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert list(events)[-1]["state"] == "succeeded"
            check_restarted(daemon, "of service: its process did not run for 6 s", 1)
        else:
            body = {"prompt": "Today we", "max_tokens": 200, "ignore_eos": True, "stream": True}
            *_, last = daemon.events("POST", "/generate", body)
            assert last["error"]["code"] == "engine_unavailable"
            check_restarted(daemon, "it said nothing for 12 s, though it had work", 1)
