from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.crash_oracle import KEY, STEPS, Oracle, Reference, Restarted, curve_of, digest
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def restarted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    """A daemon on a data folder that was open to others: all tests without a mark share it, since each start takes
    seconds."""
    data = tmp_path_factory.mktemp("reference") / "data"
    data.mkdir(mode=0o755)
    oracle = Oracle(model, data, Reference({}, "", "", data, data / "adapters" / "adapter" / "1", ()))
    with DaemonProcess(
        model, data, failpoints=f"finetune.mid_step=kill@{STEPS + 5}", environ={"COSERVE_API_KEY": KEY}
    ) as daemon:
        daemon.wait_ready()
        before = oracle.follow(daemon, oracle.submit(daemon, "adapter"))
        assert before[-1]["state"] == "succeeded", before[-1]
        text = oracle.stream(daemon)
        status, tokenized = daemon.call("POST", "/tokenize", {"prompt": "the cat sat " * 10_000})
        assert status == 200, tokenized
        processes = [Path(f"/proc/{pid}") for pid in descendants(daemon.process.pid)]
        children = tuple((each / "environ").read_bytes() + (each / "cmdline").read_bytes() for each in processes)
        everyone = [psutil.Process(pid) for pid in (daemon.process.pid, *descendants(daemon.process.pid))]
        sockets = [found for each in everyone for found in each.net_connections("inet")]
        listening = tuple(
            found.laddr.port for found in sockets if found.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        )
        assert daemon.url.endswith(f":{listening[0]}")
        restarts = [daemon.call("GET", "/health")[1]["engine_restarts"]]
        events = oracle.follow(daemon, oracle.submit(daemon, "again"))
        restarts.append(daemon.call("GET", "/health")[1]["engine_restarts"])
        after = oracle.stream(daemon)
        assert daemon.stop() == 0
    adapter = oracle.reference.adapter
    oracle.reference = Reference(curve_of(before), digest(adapter), text, data, adapter, children, listening)
    return Restarted(oracle, restarts, events, after)


@pytest.fixture(scope="session")
def reference(restarted: Restarted) -> Reference:
    return restarted.oracle.reference


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found
