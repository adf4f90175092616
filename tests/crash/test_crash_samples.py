"""kill -9 of the whole daemon while samples of a job are being generated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.crash_oracle import STEPS, Reference, curve_of, digest, job_request
from tests.support.daemon_process import DaemonProcess, Died, Json
from tests.support.examples import on_days

SAMPLING = {"sample_prompts": ["The quick", "The line"], "sample_steps": 2, "sample_max_tokens": 8}


@on_days(0)
def test_samples_of_a_killed_daemon_are_made_once(model: Path, reference: Reference, tmp_path: Path) -> None:
    """At step 2, before which there is no checkpoint, and at step 4."""
    data = tmp_path / "data"
    body = job_request("adapter")
    body["training"] |= SAMPLING
    job: Json | None = None
    for hit in (3, 14):
        with DaemonProcess(model, data, failpoints=f"generate.mid_stream=kill-group@{hit}") as daemon:
            daemon.wait_ready()
            job = job or daemon.call("POST", "/finetune", body)[1]
            with pytest.raises(Died):
                list(daemon.events("GET", f"/finetune/{job['id']}/events"))
    assert job is not None
    with DaemonProcess(model, data) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        _, job = daemon.call("GET", f"/finetune/{job['id']}")
        asked = {"prompt": "The quick", "temperature": 0, "max_tokens": 8, "adapter": "adapter@1"}
        _, generated = daemon.call("POST", "/generate", asked)
        assert daemon.stop() == 0
    assert events[-1]["state"] == "succeeded", events[-1]
    found = Counter((e["sample"]["step"], e["sample"]["prompt"]) for e in events if e["type"] == "sample")
    assert found == {(step, prompt): 1 for step in range(2, STEPS + 1, 2) for prompt in (0, 1)}
    assert job["samples"][0]["text"] == generated["choices"][0]["text"]
    assert curve_of(events) == reference.curve
    assert digest(data / "adapters" / "adapter" / "1") == reference.digest
