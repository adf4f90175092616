from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash_oracle import PROMPT, Reference, curve_of, digest, job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One job and one generation in peace."""
    root = tmp_path_factory.mktemp("reference")
    with DaemonProcess(model, root / "data") as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("adapter"))
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        _, generated = daemon.call("POST", "/generate", PROMPT)
        assert daemon.stop() == 0
    adapter = root / "data" / "adapters" / "adapter" / "1"
    return Reference(curve_of(events), digest(adapter), generated["choices"][0]["text"], adapter)
