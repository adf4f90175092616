from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crash_oracle import KEY, PROMPT, Reference, curve_of, digest, job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One job, one long text and one generation in peace, on a data folder that was open to others."""
    data = tmp_path_factory.mktemp("reference") / "data"
    data.mkdir(mode=0o755)
    with DaemonProcess(model, data, environ={"COSERVE_API_KEY": KEY}) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("adapter"))
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        _, generated = daemon.call("POST", "/generate", PROMPT)
        status, tokenized = daemon.call("POST", "/tokenize", {"prompt": "the cat sat " * 10_000})
        assert status == 200, tokenized
        processes = [Path(f"/proc/{pid}") for pid in descendants(daemon.process.pid)]
        children = tuple((each / "environ").read_bytes() + (each / "cmdline").read_bytes() for each in processes)
        assert daemon.stop() == 0
    adapter = data / "adapters" / "adapter" / "1"
    return Reference(curve_of(events), digest(adapter), generated["choices"][0]["text"], data, adapter, children)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found
